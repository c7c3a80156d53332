"""The transformer of Stable Diffusion 3.5.

Sources: the names in the published files, which are those of https://github.com/Stability-AI/sd3.5 (mmditx.py), and
diffusers' SD3Transformer2DModel. Modulations that are applied last give (shift, scale) there, (scale, shift) here: the
final layer's, and that of the text in the last block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, keep, rename, split, swap


def _original(shapes: Shapes) -> Iterator[Rule]:
    last = count(shapes, "joint_blocks.") - 1
    yield rename("pos_embed", "pos_embed.pos_embed")
    yield rename("x_embedder.proj.{p}", "pos_embed.proj.{p}")
    yield keep("context_embedder.{p}")
    for old, new in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
        for place, number in ((0, 1), (2, 2)):
            yield rename(f"{old}.mlp.{place}.{{p}}", f"time_text_embed.{new}.linear_{number}.{{p}}")
    yield swap(
        f"joint_blocks.{last}.context_block.adaLN_modulation.1.{{p}}",
        f"transformer_blocks.{last}.norm1_context.linear.{{p}}",
    )
    here, there = "joint_blocks.{n}", "transformer_blocks.{n}"
    for attention in ("attn", "attn2"):
        block = f"{here}.x_block.{attention}"
        yield split(f"{block}.qkv.{{p}}", *(f"{there}.{attention}.to_{x}.{{p}}" for x in "qkv"))
        yield rename(f"{block}.proj.{{p}}", f"{there}.{attention}.to_out.0.{{p}}")
        for x in "qk":
            yield rename(f"{block}.ln_{x}.weight", f"{there}.{attention}.norm_{x}.weight")
    block = f"{here}.context_block.attn"
    yield split(f"{block}.qkv.{{p}}", *(f"{there}.attn.add_{x}_proj.{{p}}" for x in "qkv"))
    yield rename(f"{block}.proj.{{p}}", f"{there}.attn.to_add_out.{{p}}")
    for x in "qk":
        yield rename(f"{block}.ln_{x}.weight", f"{there}.attn.norm_added_{x}.weight")
    for block, norm, feed in (("x_block", "norm1", "ff"), ("context_block", "norm1_context", "ff_context")):
        yield rename(f"{here}.{block}.adaLN_modulation.1.{{p}}", f"{there}.{norm}.linear.{{p}}")
        yield rename(f"{here}.{block}.mlp.fc1.{{p}}", f"{there}.{feed}.net.0.proj.{{p}}")
        yield rename(f"{here}.{block}.mlp.fc2.{{p}}", f"{there}.{feed}.net.2.{{p}}")
    yield rename("final_layer.linear.{p}", "proj_out.{p}")
    yield swap("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    normed = (config["attention_head_dim"],) if config.get("qk_norm") else None
    dual = len(config.get("dual_attention_layers") or ())
    return {
        "x_embedder.proj.weight": (width, config["in_channels"], config["patch_size"], config["patch_size"]),
        "context_embedder.weight": (config["caption_projection_dim"], config["joint_attention_dim"]),
        "joint_blocks.0.x_block.attn.ln_q.weight": normed,
        "joint_blocks.0.x_block.attn2.qkv.weight": (3 * width, width) if dual else None,
        f"joint_blocks.{layers - 1}.x_block.attn.proj.weight": (width, width),
        f"joint_blocks.{layers}.x_block.attn.proj.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="sd3",
        title="a Stable Diffusion 3 transformer",
        role="denoiser",
        classes=("SD3Transformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("joint_blocks.0.context_block.attn.qkv.weight", "pos_embed", "final_layer.linear.weight"),
        rules=_original,
        sizes=_sizes,
    ),
)
