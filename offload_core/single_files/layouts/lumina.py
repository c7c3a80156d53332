"""Lumina-Image 2.0 and AuraFlow.

Sources: the names in the published files, which are those of https://github.com/Alpha-VLLM/Lumina-Image-2.0
(models/model.py) and https://github.com/cloneofsimo/minRF (advanced/mmdit.py), and diffusers' classes. Lumina has fewer
heads for k and v than for q. AuraFlow's last norm is the other way round in diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep, rename, split, swap


def _lumina(shapes: Shapes) -> Iterator[Rule]:
    """How the rows of q, k and v are dealt is told by the matrix behind them."""
    rows = shapes.get("layers.0.attention.qkv.weight", (3,))[0]
    width = shapes.get("layers.0.attention.out.weight", (1, 1))[1]
    shares = (width, (rows - width) // 2, (rows - width) // 2)
    for part in ("layers", "noise_refiner", "context_refiner"):
        here = f"{part}.{{n}}"
        yield split(f"{here}.attention.qkv.weight", *(f"{here}.attn.to_{x}.weight" for x in "qkv"), shares=shares)
        yield rename(f"{here}.attention.out.weight", f"{here}.attn.to_out.0.weight")
        yield from (rename(f"{here}.attention.{x}_norm.weight", f"{here}.attn.norm_{x}.weight") for x in "qk")
        yield from (
            rename(f"{here}.feed_forward.w{n}.{{p}}", f"{here}.feed_forward.linear_{n}.{{p}}") for n in (1, 2, 3)
        )
        first = "norm1" if part == "context_refiner" else "norm1.norm"  # that one isn't told the time
        yield rename(f"{here}.attention_norm1.weight", f"{here}.{first}.weight")
        yield rename(f"{here}.attention_norm2.weight", f"{here}.norm2.weight")
        yield rename(f"{here}.adaLN_modulation.1.{{p}}", f"{here}.norm1.linear.{{p}}")
        yield from (keep(f"{here}.ffn_norm{n}.weight") for n in (1, 2))
    yield keep("x_embedder.{p}")
    yield rename("cap_embedder.{rest}", "time_caption_embed.caption_embedder.{rest}")
    for place, number in ((0, 1), (2, 2)):
        yield rename(f"t_embedder.mlp.{place}.{{p}}", f"time_caption_embed.timestep_embedder.linear_{number}.{{p}}")
    yield rename("final_layer.adaLN_modulation.1.{p}", "norm_out.linear_1.{p}")
    yield rename("final_layer.linear.{p}", "norm_out.linear_2.{p}")
    yield drop("norm_final.weight")


def _lumina_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["hidden_size"], config["num_layers"]
    return {
        "cap_embedder.1.weight": (width, config["cap_feat_dim"]),
        f"layers.{layers - 1}.attention.out.weight": (width, width),
        f"layers.{layers}.attention.out.weight": None,
    }


_FEED = {"c_fc1": "linear_1", "c_fc2": "linear_2", "c_proj": "out_projection"}
_DOUBLE = {
    "w2q": "to_q",
    "w2k": "to_k",
    "w2v": "to_v",
    "w2o": "to_out.0",
    "w1q": "add_q_proj",
    "w1k": "add_k_proj",
    "w1v": "add_v_proj",
    "w1o": "to_add_out",
}


def _auraflow(_: Shapes) -> Iterator[Rule]:
    here, there = "double_layers.{n}", "joint_transformer_blocks.{n}"
    for old, new, norm, modulation in (
        ("mlpX", "ff", "norm1", "modX"),
        ("mlpC", "ff_context", "norm1_context", "modC"),
    ):
        yield from (rename(f"{here}.{old}.{a}.weight", f"{there}.{new}.{b}.weight") for a, b in _FEED.items())
        yield rename(f"{here}.{modulation}.1.weight", f"{there}.{norm}.linear.weight")
    yield from (rename(f"{here}.attn.{old}.weight", f"{there}.attn.{new}.weight") for old, new in _DOUBLE.items())
    here, there = "single_layers.{n}", "single_transformer_blocks.{n}"
    yield from (rename(f"{here}.mlp.{a}.weight", f"{there}.ff.{b}.weight") for a, b in _FEED.items())
    yield rename(f"{here}.modCX.1.weight", f"{there}.norm1.linear.weight")
    for old, new in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")):
        yield rename(f"{here}.attn.w1{old}.weight", f"{there}.attn.{new}.weight")
    yield keep("register_tokens")
    for place, number in ((0, 1), (2, 2)):
        yield rename(f"t_embedder.mlp.{place}.{{p}}", f"time_step_proj.linear_{number}.{{p}}")
    yield rename("cond_seq_linear.weight", "context_embedder.weight")
    yield rename("positional_encoding", "pos_embed.pos_embed")
    yield rename("init_x_linear.{p}", "pos_embed.proj.{p}")
    yield rename("final_linear.weight", "proj_out.weight")
    yield swap("modF.1.weight", "norm_out.linear.weight")


def _auraflow_sizes(config: Mapping[str, Any]) -> Sizes:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    double, single = config["num_mmdit_layers"], config["num_single_dit_layers"]
    return {
        "cond_seq_linear.weight": (width, config["joint_attention_dim"]),
        "positional_encoding": (1, config["pos_embed_max_size"], width),
        f"double_layers.{double - 1}.attn.w2q.weight": (width, width),
        f"double_layers.{double}.attn.w2q.weight": None,
        f"single_layers.{single - 1}.attn.w1q.weight": (width, width),
        f"single_layers.{single}.attn.w1q.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="lumina-2",
        title="a Lumina 2 transformer",
        role="denoiser",
        classes=("Lumina2Transformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("layers.0.attention.qkv.weight", "noise_refiner.0.attention.qkv.weight", "cap_embedder.1.weight"),
        rules=_lumina,
        sizes=_lumina_sizes,
        lacks=("cap_pad_token",),  # Z-Image's
    ),
    PartLayout(
        name="auraflow",
        title="an AuraFlow transformer",
        role="denoiser",
        classes=("AuraFlowTransformer2DModel",),
        prefixes=(*DENOISER_PREFIXES, "model."),
        needs=("double_layers.0.attn.w2q.weight", "single_layers.0.attn.w1q.weight", "positional_encoding"),
        rules=_auraflow,
        sizes=_auraflow_sizes,
    ),
)
