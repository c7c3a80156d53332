"""The transformers of FLUX.1 and its relatives.

Sources: the names in the published files, which are those of https://github.com/black-forest-labs/flux
(src/flux/model.py, src/flux/modules/layers.py), and diffusers' FluxTransformer2DModel. The last norm's modulation gives
(shift, scale) there and (scale, shift) in diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, keep, rename, split, swap

_STREAMS = (("img", "to_{}", "norm_{}", "norm1", "ff", "to_out.0"),) + (
    ("txt", "add_{}_proj", "norm_added_{}", "norm1_context", "ff_context", "to_add_out"),
)


def blocks_of_two_streams() -> Iterator[Rule]:
    """The double and single blocks, which FLUX.1 and Chroma share; Chroma's have no modulation of their own."""
    for stream, project, norm, modulation, feed, out in _STREAMS:
        here, there = f"double_blocks.{{n}}.{stream}", "transformer_blocks.{n}"
        yield rename(f"{here}_mod.lin.{{p}}", f"{there}.{modulation}.linear.{{p}}")
        yield split(f"{here}_attn.qkv.{{p}}", *(f"{there}.attn.{project.format(x)}.{{p}}" for x in "qkv"))
        yield rename(f"{here}_attn.norm.query_norm.scale", f"{there}.attn.{norm.format('q')}.weight")
        yield rename(f"{here}_attn.norm.key_norm.scale", f"{there}.attn.{norm.format('k')}.weight")
        yield rename(f"{here}_attn.proj.{{p}}", f"{there}.attn.{out}.{{p}}")
        yield rename(f"{here}_mlp.0.{{p}}", f"{there}.{feed}.net.0.proj.{{p}}")
        yield rename(f"{here}_mlp.2.{{p}}", f"{there}.{feed}.net.2.{{p}}")
    here, there = "single_blocks.{n}", "single_transformer_blocks.{n}"
    yield rename(f"{here}.modulation.lin.{{p}}", f"{there}.norm.linear.{{p}}")
    parts = (*(f"{there}.attn.to_{x}.{{p}}" for x in "qkv"), f"{there}.proj_mlp.{{p}}")
    yield split(f"{here}.linear1.{{p}}", *parts, shares=(1, 1, 1, 4))
    yield rename(f"{here}.linear2.{{p}}", f"{there}.proj_out.{{p}}")
    yield rename(f"{here}.norm.query_norm.scale", f"{there}.attn.norm_q.weight")
    yield rename(f"{here}.norm.key_norm.scale", f"{there}.attn.norm_k.weight")
    yield rename("img_in.{p}", "x_embedder.{p}")
    yield rename("txt_in.{p}", "context_embedder.{p}")
    yield rename("final_layer.linear.{p}", "proj_out.{p}")


def _flux(_: Shapes) -> Iterator[Rule]:
    for old, new in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance")):
        for layer, number in (("in_layer", 1), ("out_layer", 2)):
            yield rename(f"{old}_in.{layer}.{{p}}", f"time_text_embed.{new}_embedder.linear_{number}.{{p}}")
    yield from blocks_of_two_streams()
    yield swap("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}")


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _flux_sizes(config: Mapping[str, Any]) -> Sizes:
    width = _width(config)
    return {
        "img_in.weight": (width, config["in_channels"]),
        "txt_in.weight": (width, config["joint_attention_dim"]),
        "vector_in.in_layer.weight": (width, config["pooled_projection_dim"]),
        "guidance_in.in_layer.weight": (width, 256) if config.get("guidance_embeds") else None,
        f"double_blocks.{config['num_layers'] - 1}.img_attn.proj.weight": (width, width),
        f"double_blocks.{config['num_layers']}.img_attn.proj.weight": None,
        f"single_blocks.{config['num_single_layers'] - 1}.modulation.lin.weight": (3 * width, width),
        f"single_blocks.{config['num_single_layers']}.modulation.lin.weight": None,
    }


def _flux_diffusers_sizes(config: Mapping[str, Any]) -> Sizes:
    width = _width(config)
    guidance = "time_text_embed.guidance_embedder.linear_1.weight"
    return {
        "x_embedder.weight": (width, config["in_channels"]),
        "context_embedder.weight": (width, config["joint_attention_dim"]),
        guidance: (width, 256) if config.get("guidance_embeds") else None,
        f"transformer_blocks.{config['num_layers']}.attn.to_q.weight": None,
        f"single_transformer_blocks.{config['num_single_layers'] - 1}.attn.to_q.weight": (width, width),
        f"single_transformer_blocks.{config['num_single_layers']}.attn.to_q.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="flux",
        title="a FLUX.1 transformer",
        role="denoiser",
        classes=("FluxTransformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=(
            "double_blocks.0.img_attn.norm.key_norm.scale",
            "single_blocks.0.linear1.weight",
            "vector_in.in_layer.weight",
        ),
        rules=_flux,
        sizes=_flux_sizes,
    ),
    PartLayout(
        name="flux, as diffusers saves it",
        title="a FLUX.1 transformer",
        role="denoiser",
        classes=("FluxTransformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=(
            "transformer_blocks.0.attn.add_q_proj.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
            "time_text_embed.timestep_embedder.linear_1.weight",
        ),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_flux_diffusers_sizes,
    ),
)
