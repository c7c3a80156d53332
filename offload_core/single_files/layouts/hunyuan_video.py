"""HunyuanVideo: its transformer, its VAE, and the Llama that encodes its texts.

Sources: the names in the published files, which are those of https://github.com/Tencent/HunyuanVideo
(hyvideo/modules/models.py), and diffusers' HunyuanVideoTransformer3DModel. The VAE is published under diffusers' names,
Llama under transformers'. The last norm's modulation is the other way round in diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, VAE_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep, rename, split, swap

_STREAMS = (("img", "to_{}", "norm_{}", "norm1", "ff", "to_out.0"),) + (
    ("txt", "add_{}_proj", "norm_added_{}", "norm1_context", "ff_context", "to_add_out"),
)
_PAIR = ((0, 1), (2, 2))


def _transformer(_: Shapes) -> Iterator[Rule]:
    yield rename("img_in.proj.{p}", "x_embedder.proj.{p}")
    for old, new in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder")):
        for place, number in _PAIR:
            yield rename(f"{old}.mlp.{place}.{{p}}", f"time_text_embed.{new}.linear_{number}.{{p}}")
    for old, number in (("in_layer", 1), ("out_layer", 2)):
        yield rename(f"vector_in.{old}.{{p}}", f"time_text_embed.text_embedder.linear_{number}.{{p}}")
    yield from _refiner()
    for stream, project, norm, modulation, feed, out in _STREAMS:
        here, there = f"double_blocks.{{n}}.{stream}", "transformer_blocks.{n}"
        yield split(f"{here}_attn_qkv.{{p}}", *(f"{there}.attn.{project.format(x)}.{{p}}" for x in "qkv"))
        yield from (rename(f"{here}_attn_{x}_norm.weight", f"{there}.attn.{norm.format(x)}.weight") for x in "qk")
        yield rename(f"{here}_attn_proj.{{p}}", f"{there}.attn.{out}.{{p}}")
        yield rename(f"{here}_mod.linear.{{p}}", f"{there}.{modulation}.linear.{{p}}")
        yield from _feed(f"{here}_mlp", f"{there}.{feed}")
    here, there = "single_blocks.{n}", "single_transformer_blocks.{n}"
    parts = (*(f"{there}.attn.to_{x}.{{p}}" for x in "qkv"), f"{there}.proj_mlp.{{p}}")
    yield split(f"{here}.linear1.{{p}}", *parts, shares=(1, 1, 1, 4))
    yield rename(f"{here}.linear2.{{p}}", f"{there}.proj_out.{{p}}")
    yield from (rename(f"{here}.{x}_norm.weight", f"{there}.attn.norm_{x}.weight") for x in "qk")
    yield rename(f"{here}.modulation.linear.{{p}}", f"{there}.norm.linear.{{p}}")
    yield rename("final_layer.linear.{p}", "proj_out.{p}")
    yield swap("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}")


def _refiner() -> Iterator[Rule]:
    """Of the blocks that the text goes through first."""
    outer = "context_embedder"
    yield rename("txt_in.input_embedder.{p}", f"{outer}.proj_in.{{p}}")
    for place, number in _PAIR:
        timestep = f"{outer}.time_text_embed.timestep_embedder.linear_{number}.{{p}}"
        yield rename(f"txt_in.t_embedder.mlp.{place}.{{p}}", timestep)
        text = f"{outer}.time_text_embed.text_embedder.linear_{number}.{{p}}"
        yield rename(f"txt_in.c_embedder.linear_{number}.{{p}}", text)
    here, there = "txt_in.individual_token_refiner.blocks.{n}", f"{outer}.token_refiner.refiner_blocks.{{n}}"
    yield split(f"{here}.self_attn_qkv.{{p}}", *(f"{there}.attn.to_{x}.{{p}}" for x in "qkv"))
    yield rename(f"{here}.self_attn_proj.{{p}}", f"{there}.attn.to_out.0.{{p}}")
    yield from (rename(f"{here}.norm{n}.{{p}}", f"{there}.norm{n}.{{p}}") for n in (1, 2))
    yield from _feed(f"{here}.mlp", f"{there}.ff")
    yield rename(f"{here}.adaLN_modulation.1.{{p}}", f"{there}.norm_out.linear.{{p}}")


def _feed(here: str, there: str) -> Iterator[Rule]:
    yield rename(f"{here}.fc1.{{p}}", f"{there}.net.0.proj.{{p}}")
    yield rename(f"{here}.fc2.{{p}}", f"{there}.net.2.{{p}}")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    width, double, single = (
        config["num_attention_heads"] * config["attention_head_dim"],
        config["num_layers"],
        config["num_single_layers"],
    )
    patch = (config["patch_size_t"], config["patch_size"], config["patch_size"])
    return {
        "img_in.proj.weight": (width, config["in_channels"], *patch),
        "txt_in.input_embedder.weight": (width, config["text_embed_dim"]),
        "guidance_in.mlp.0.weight": (width, 256) if config.get("guidance_embeds") else None,
        f"double_blocks.{double - 1}.img_attn_proj.weight": (width, width),
        f"double_blocks.{double}.img_attn_proj.weight": None,
        f"single_blocks.{single - 1}.modulation.linear.weight": (3 * width, width),
        f"single_blocks.{single}.modulation.linear.weight": None,
    }


def _vae_sizes(config: Mapping[str, Any]) -> Sizes:
    widths, latent = config["block_out_channels"], config["latent_channels"]
    return {
        "encoder.conv_in.conv.weight": (widths[0], config["in_channels"], 3, 3, 3),
        "decoder.conv_in.conv.weight": (widths[-1], latent, 3, 3, 3),
        "quant_conv.weight": (2 * latent, 2 * latent, 1, 1, 1),
    }


def _llama(_: Shapes) -> Iterator[Rule]:
    yield drop("logit_scale")
    yield drop("lm_head.weight")
    yield keep("model.{rest}")


def _llama_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    return {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        f"model.layers.{layers - 1}.mlp.up_proj.weight": (config["intermediate_size"], width),
        f"model.layers.{layers}.mlp.up_proj.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="hunyuan-video",
        title="a HunyuanVideo transformer",
        role="denoiser",
        classes=("HunyuanVideoTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=(
            "txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight",
            "vector_in.in_layer.weight",
            "double_blocks.0.img_attn_qkv.weight",
        ),
        rules=_transformer,
        sizes=_sizes,
    ),
    PartLayout(
        name="hunyuan-video vae",
        title="a HunyuanVideo VAE",
        role="vae",
        classes=("AutoencoderKLHunyuanVideo",),
        prefixes=VAE_PREFIXES,
        needs=(
            "encoder.down_blocks.0.resnets.0.conv1.conv.weight",
            "decoder.mid_block.attentions.0.to_q.weight",
            "quant_conv.weight",
        ),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_vae_sizes,
    ),
    PartLayout(
        name="llama",
        title="a text encoder of Llama's kind",
        role="encoder",
        classes=("LlamaModel",),
        prefixes=("text_encoders.llama.transformer.", ""),
        needs=("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"),
        rules=_llama,
        sizes=_llama_sizes,
        lacks=(
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.pre_feedforward_layernorm.weight",
        ),
    ),
)
