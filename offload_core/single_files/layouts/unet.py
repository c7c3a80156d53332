"""The UNets of Stable Diffusion 1.5 and SDXL.

Sources: the names in the published checkpoints, which are those of
https://github.com/CompVis/stable-diffusion (ldm/modules/diffusionmodules/openaimodel.py), and diffusers'
UNet2DConditionModel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, keep, rename

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_OUTER = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def original_unet(shapes: Shapes) -> Iterator[Rule]:
    """Blocks are numbered through there: each level has its resnets, and all but the last a resampling block.

    A resampler follows the resnets of its level on the way down and is the last module of the level's last block on
    the way up.
    """
    for old, new in _OUTER.items():
        yield rename(f"{old}.{{p}}", f"{new}.{{p}}")
    inputs, outputs = count(shapes, "input_blocks."), count(shapes, "output_blocks.")
    downs = [number for number in range(inputs) if f"input_blocks.{number}.0.op.weight" in shapes]
    per_level = (downs[0] if downs else inputs) - 1
    for number in range(1, inputs):
        level, layer = divmod(number - 1, per_level + 1)
        block, here = f"down_blocks.{level}", f"input_blocks.{number}"
        if number in downs:
            yield rename(f"{here}.0.op.{{p}}", f"{block}.downsamplers.0.conv.{{p}}")
            continue
        yield from _resnet(f"{here}.0", f"{block}.resnets.{layer}")
        yield rename(f"{here}.1.{{rest}}", f"{block}.attentions.{layer}.{{rest}}")
    yield from _resnet("middle_block.0", "mid_block.resnets.0")
    yield rename("middle_block.1.{rest}", "mid_block.attentions.0.{rest}")
    yield from _resnet("middle_block.2", "mid_block.resnets.1")
    for number in range(outputs):
        level, layer = divmod(number, per_level + 1)
        block, here = f"up_blocks.{level}", f"output_blocks.{number}"
        yield from _resnet(f"{here}.0", f"{block}.resnets.{layer}")
        for place in (1, 2):
            yield rename(f"{here}.{place}.conv.{{p}}", f"{block}.upsamplers.0.conv.{{p}}")
        yield rename(f"{here}.1.{{rest}}", f"{block}.attentions.{layer}.{{rest}}")


def _resnet(old: str, new: str) -> Iterator[Rule]:
    for inner, name in _RESNET.items():
        yield rename(f"{old}.{inner}.{{p}}", f"{new}.{name}.{{p}}")


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _original_sizes(config: Mapping[str, Any]) -> Sizes:
    widths = config["block_out_channels"]
    per_level = _first(config.get("layers_per_block", 2))
    inputs, outputs = len(widths) * (per_level + 1), len(widths) * (per_level + 1)
    added = config.get("projection_class_embeddings_input_dim")
    label = (widths[0] * 4, int(added or 0)) if config.get("addition_embed_type") == "text_time" else None
    return {
        "input_blocks.0.0.weight": (widths[0], config["in_channels"], 3, 3),
        "middle_block.1.transformer_blocks.0.attn2.to_k.weight": (widths[-1], config["cross_attention_dim"]),
        f"input_blocks.{inputs}.0.in_layers.0.weight": None,
        f"output_blocks.{outputs}.0.in_layers.0.weight": None,
        "label_emb.0.0.weight": label,
    }


def _diffusers_sizes(config: Mapping[str, Any]) -> Sizes:
    widths = config["block_out_channels"]
    added = config.get("projection_class_embeddings_input_dim")
    return {
        "conv_in.weight": (widths[0], config["in_channels"], 3, 3),
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight": (widths[-1], config["cross_attention_dim"]),
        f"down_blocks.{len(widths)}.resnets.0.conv1.weight": None,
        "add_embedding.linear_1.weight": (widths[0] * 4, added) if added else None,
    }


LAYOUTS = (
    PartLayout(
        name="unet",
        title="a Stable Diffusion UNet",
        role="denoiser",
        classes=("UNet2DConditionModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("input_blocks.0.0.weight", "middle_block.1.transformer_blocks.0.attn2.to_k.weight", "out.2.weight"),
        rules=original_unet,
        sizes=_original_sizes,
    ),
    PartLayout(
        name="unet, as diffusers saves it",
        title="a Stable Diffusion UNet",
        role="denoiser",
        classes=("UNet2DConditionModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("conv_in.weight", "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight", "conv_out.weight"),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_diffusers_sizes,
    ),
)
