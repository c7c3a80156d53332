"""The config of a ControlNet, which its file doesn't have: sizes from the shapes of its weights, the rest from the
model that it is for.

A ControlNet is made of half of its model's denoiser and computes as that does (`ControlNetModel.from_unet` of diffusers
copies the same entries). So what no shape tells, such as the number of heads, is the denoiser's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layout import Shapes, count

Config = Mapping[str, Any]

# What diffusers' `from_unet` takes over and no shape tells.
_FROM_UNET = (
    "flip_sin_to_cos",
    "freq_shift",
    "only_cross_attention",
    "downsample_padding",
    "mid_block_scale_factor",
    "act_fn",
    "norm_num_groups",
    "norm_eps",
    "attention_head_dim",
    "num_attention_heads",
    "upcast_attention",
    "resnet_time_scale_shift",
    "addition_time_embed_dim",
    "class_embed_type",
    "num_class_embeds",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
)
# What the width of its text says about the model a ControlNet is for, in words.
_READS = {768: "Stable Diffusion 1.5", 1024: "Stable Diffusion 2", 2048: "SDXL"}
_UNION_HEADS = 8  # ControlNetUnionModel's default, which the published ones have


def config_of(class_name: str, shapes: Shapes, denoiser: Config) -> dict[str, Any]:
    """The config of a ControlNet of this class. shapes: of its weights, by the library's names. denoiser: the model's
    config."""
    if class_name == "FluxControlNetModel":
        return _flux(shapes, denoiser)
    config = _unet(shapes, denoiser)
    if class_name == "ControlNetUnionModel":
        types, width = shapes["task_embedding"]
        config |= {
            "num_control_type": types,
            "num_trans_channel": width,
            "num_trans_head": _UNION_HEADS,
            "num_trans_layer": count(shapes, "transformer_layes."),
            "num_proj_channel": shapes["spatial_ch_projs.weight"][0],
        }
        del config["mid_block_type"]
    return config


def unlike(config: Config, denoiser: Config) -> str | None:
    """How a ControlNet shows that it is for another model than that of this denoiser, in words; None if it doesn't."""
    wide, here = config.get("cross_attention_dim"), denoiser.get("cross_attention_dim")
    if wide != here:
        return f"it reads text that is {wide} wide{_kind(wide)}, and this model's is {here} wide{_kind(here)}"
    for name in ("block_out_channels", "projection_class_embeddings_input_dim"):
        if name in config and _plain(config[name]) != _plain(denoiser.get(name)):
            return f"its {name} are {_plain(config[name])}, and this model's {_plain(denoiser.get(name))}"
    for name in ("in_channels", "joint_attention_dim", "pooled_projection_dim", "attention_head_dim"):
        if "joint_attention_dim" in config and config[name] != denoiser.get(name):
            return f"its {name} is {config[name]}, and this model's {denoiser.get(name)}"
    if "axes_dims_rope" in config and _inner(config) != _inner(denoiser):
        return f"it is {_inner(config)} wide, and this model {_inner(denoiser)}"
    return None


def _unet(shapes: Shapes, unet: Config) -> dict[str, Any]:
    levels = range(count(shapes, "down_blocks."))
    attentions = [f"down_blocks.{level}.attentions.0" for level in levels]
    attends = [f"{name}.norm.weight" in shapes for name in attentions]
    depths = [
        count(shapes, f"{name}.transformer_blocks.") if there else 1
        for name, there in zip(attentions, attends, strict=True)
    ]
    middle = "mid_block.attentions.0"
    if f"{middle}.norm.weight" in shapes:
        depths[-1] = count(shapes, f"{middle}.transformer_blocks.")
    texts = [shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight")]
    inwards = [shape for name, shape in shapes.items() if name.endswith("attentions.0.proj_in.weight")]
    seen = "controlnet_cond_embedding"
    halvings = [f"{seen}.blocks.{number}.weight" for number in range(1, count(shapes, f"{seen}.blocks."), 2)]
    added = shapes.get("add_embedding.linear_1.weight")
    return {
        **{name: unet[name] for name in _FROM_UNET if name in unet},
        "in_channels": shapes["conv_in.weight"][1],
        "block_out_channels": [shapes[f"down_blocks.{level}.resnets.0.conv1.weight"][0] for level in levels],
        "layers_per_block": count(shapes, "down_blocks.0.resnets."),
        "down_block_types": ["CrossAttnDownBlock2D" if there else "DownBlock2D" for there in attends],
        "mid_block_type": "UNetMidBlock2DCrossAttn" if f"{middle}.norm.weight" in shapes else "UNetMidBlock2D",
        "transformer_layers_per_block": depths,
        "cross_attention_dim": texts[0] if texts else unet.get("cross_attention_dim"),
        "use_linear_projection": len(inwards[0]) == 2 if inwards else False,
        "addition_embed_type": "text_time" if added else None,
        "projection_class_embeddings_input_dim": added[1] if added else None,
        "conditioning_channels": shapes[f"{seen}.conv_in.weight"][1],
        "conditioning_embedding_out_channels": [
            shapes[f"{seen}.conv_in.weight"][0],
            *(shapes[name][0] for name in halvings),
        ],
    }


def _flux(shapes: Shapes, transformer: Config) -> dict[str, Any]:
    width, channels = shapes["x_embedder.weight"]
    heads_of = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    modes = shapes.get("controlnet_mode_embedder.weight")
    hint = shapes.get("input_hint_block.conv_out.weight")
    return {
        "in_channels": channels,
        "num_layers": count(shapes, "transformer_blocks."),
        "num_single_layers": count(shapes, "single_transformer_blocks."),
        "attention_head_dim": heads_of,
        "num_attention_heads": width // heads_of,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": list(transformer.get("axes_dims_rope", (16, 56, 56))),
        "num_mode": modes[0] if modes else None,
        "conditioning_embedding_channels": hint[0] if hint else None,
    }


def _kind(width: Any) -> str:
    return f" ({_READS[width]})" if width in _READS else ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _inner(config: Config) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])
