"""Language models that encode texts: Qwen3, and Qwen2.5-VL with its eyes.

Sources: the names in the published files, which are transformers' own. Its newer releases call the language part of a
vision model otherwise; the loader of a component knows both (`phases/_stored.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layout import PartLayout, Sizes
from ..rules import drop, keep


def _sizes(config: Mapping[str, Any]) -> Sizes:
    text = config.get("text_config") or config
    width, layers = text["hidden_size"], text["num_hidden_layers"]
    return {
        "model.embed_tokens.weight": (text["vocab_size"], width),
        f"model.layers.{layers - 1}.mlp.up_proj.weight": (text["intermediate_size"], width),
        f"model.layers.{layers}.mlp.up_proj.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="qwen3",
        title="a Qwen3 text encoder",
        role="encoder",
        classes=("Qwen3Model", "Qwen3ForCausalLM"),
        prefixes=("text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_8b.transformer.", ""),
        needs=("model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight"),
        lacks=("model.layers.0.pre_feedforward_layernorm.weight",),  # Gemma 3's
        rules=lambda shapes: (keep("model.{rest}"), keep("lm_head.weight"), drop("logit_scale")),
        sizes=_sizes,
    ),
    PartLayout(
        name="qwen2.5-vl",
        title="a Qwen2.5-VL text encoder",
        role="encoder",
        classes=("Qwen2_5_VLForConditionalGeneration",),
        prefixes=("text_encoders.qwen25_7b.transformer.", ""),
        needs=("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "visual.patch_embed.proj.weight"),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_sizes,
    ),
)
