"""Transformers that grew out of FLUX.1: Chroma and FLUX.2.

Sources: the names in the published files, which are those of https://github.com/lodestone-rock/flow (Chroma) and
https://github.com/black-forest-labs/flux2 (src/flux2/model.py), and diffusers' ChromaTransformer2DModel and
Flux2Transformer2DModel. Chroma's last norm has no weights; FLUX.2's has them the other way round, as FLUX.1's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, keep, rename, split, swap
from .flux import blocks_of_two_streams

_STREAMS = (
    ("img", "to_{}", "norm_{}", "ff", "to_out.0"),
    ("txt", "add_{}_proj", "norm_added_{}", "ff_context", "to_add_out"),
)


def _chroma(_: Shapes) -> Iterator[Rule]:
    guide = "distilled_guidance_layer"
    yield keep(f"{guide}.in_proj.{{p}}")
    yield keep(f"{guide}.out_proj.{{p}}")
    yield rename(f"{guide}.layers.{{n}}.in_layer.{{p}}", f"{guide}.layers.{{n}}.linear_1.{{p}}")
    yield rename(f"{guide}.layers.{{n}}.out_layer.{{p}}", f"{guide}.layers.{{n}}.linear_2.{{p}}")
    yield rename(f"{guide}.norms.{{n}}.scale", f"{guide}.norms.{{n}}.weight")
    yield from blocks_of_two_streams()


def _flux2(_: Shapes) -> Iterator[Rule]:
    yield rename("img_in.{p}", "x_embedder.{p}")
    yield rename("txt_in.{p}", "context_embedder.{p}")
    for old, new in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder")):
        for layer, number in (("in_layer", 1), ("out_layer", 2)):
            yield rename(f"{old}.{layer}.{{p}}", f"time_guidance_embed.{new}.linear_{number}.{{p}}")
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        yield rename(f"{name}.lin.{{p}}", f"{name}.linear.{{p}}")
    streams = (
        ("img", "to_{}", "norm_{}", "ff", "to_out.0"),
        ("txt", "add_{}_proj", "norm_added_{}", "ff_context", "to_add_out"),
    )
    for stream, project, norm, feed, out in streams:
        here, there = f"double_blocks.{{n}}.{stream}", "transformer_blocks.{n}"
        yield split(f"{here}_attn.qkv.{{p}}", *(f"{there}.attn.{project.format(x)}.{{p}}" for x in "qkv"))
        yield rename(f"{here}_attn.norm.query_norm.scale", f"{there}.attn.{norm.format('q')}.weight")
        yield rename(f"{here}_attn.norm.key_norm.scale", f"{there}.attn.{norm.format('k')}.weight")
        yield rename(f"{here}_attn.proj.{{p}}", f"{there}.attn.{out}.{{p}}")
        yield rename(f"{here}_mlp.0.{{p}}", f"{there}.{feed}.linear_in.{{p}}")
        yield rename(f"{here}_mlp.2.{{p}}", f"{there}.{feed}.linear_out.{{p}}")
    here, there = "single_blocks.{n}", "single_transformer_blocks.{n}.attn"
    yield rename(f"{here}.linear1.{{p}}", f"{there}.to_qkv_mlp_proj.{{p}}")
    yield rename(f"{here}.linear2.{{p}}", f"{there}.to_out.{{p}}")
    yield rename(f"{here}.norm.query_norm.scale", f"{there}.norm_q.weight")
    yield rename(f"{here}.norm.key_norm.scale", f"{there}.norm_k.weight")
    yield rename("final_layer.linear.{p}", "proj_out.{p}")
    yield swap("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    """Of what both have in common."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return {
        "img_in.weight": (width, config["in_channels"]),
        "txt_in.weight": (width, config["joint_attention_dim"]),
        f"double_blocks.{config['num_layers'] - 1}.img_attn.proj.weight": (width, width),
        f"double_blocks.{config['num_layers']}.img_attn.proj.weight": None,
        f"single_blocks.{config['num_single_layers'] - 1}.norm.key_norm.scale": (config["attention_head_dim"],),
        f"single_blocks.{config['num_single_layers']}.norm.key_norm.scale": None,
    }


def _flux2_sizes(config: Mapping[str, Any]) -> Sizes:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    guided = config.get("guidance_embeds", True)
    return {**_sizes(config), "guidance_in.in_layer.weight": (width, 256) if guided else None}


LAYOUTS = (
    PartLayout(
        name="chroma",
        title="a Chroma transformer",
        role="denoiser",
        classes=("ChromaTransformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.norm.key_norm.scale"),
        rules=_chroma,
        sizes=_sizes,
    ),
    PartLayout(
        name="flux2",
        title="a FLUX.2 transformer",
        role="denoiser",
        classes=("Flux2Transformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("double_stream_modulation_img.lin.weight", "single_blocks.0.linear1.weight"),
        rules=_flux2,
        sizes=_flux2_sizes,
    ),
)
