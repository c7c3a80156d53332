"""Wan VACE: the transformer of Wan with blocks beside it that see what a clip is to be made from.

Sources: the names in the published files, which are those of https://github.com/ali-vilab/VACE
(vace/models/wan/modules/model.py), and diffusers' WanVACETransformer3DModel. The blocks beside it are named inside as
its own are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, keep, rename
from .other_transformers import wan_rules, wan_sizes


def _rules(shapes: Shapes) -> Iterator[Rule]:
    for old, new in (("before_proj", "proj_in"), ("after_proj", "proj_out")):
        yield rename(f"vace_blocks.{{n}}.{old}.{{p}}", f"vace_blocks.{{n}}.{new}.{{p}}")
    yield keep("vace_patch_embedding.{p}")
    for rule in wan_rules(shapes):
        yield rule
        if rule.source.startswith("blocks."):
            yield replace(rule, source=f"vace_{rule.source}", targets=tuple(f"vace_{name}" for name in rule.targets))


def _sizes(config: Mapping[str, Any]) -> Sizes:
    width, blocks = config["num_attention_heads"] * config["attention_head_dim"], len(config["vace_layers"])
    return {
        **wan_sizes(config),
        "vace_patch_embedding.weight": (width, config["vace_in_channels"], *config["patch_size"]),
        f"vace_blocks.{blocks - 1}.after_proj.weight": (width, width),
        f"vace_blocks.{blocks}.after_proj.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="wan vace",
        title="a Wan VACE transformer",
        role="denoiser",
        classes=("WanVACETransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("blocks.0.self_attn.norm_q.weight", "head.modulation", "vace_blocks.0.after_proj.weight"),
        rules=_rules,
        sizes=_sizes,
    ),
)
