"""Gemma, which encodes texts for LTX-2 (Gemma 3, with eyes) and Lumina 2 (Gemma 2).

Sources: the names in the published files. Gemma 3's are those that transformers saved it by (4.50 to 5), or ComfyUI's
(comfy/text_encoders/llama.py of https://github.com/comfyanonymous/ComfyUI), where the language part comes first. Files
for texts alone leave out the eyes. ComfyUI's hold the tokenizer, too, as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..layout import PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep, rename

_GEMMA = "layers.0.pre_feedforward_layernorm.weight"
_PROJECTOR = "multi_modal_projector."


def _gemma3(language: str, eyes: tuple[str, ...], outer: str) -> Callable[[Shapes], Iterator[Rule]]:
    """language, eyes: what the names of these parts begin with; outer: what goes before the part between them."""

    def rules(_: Shapes) -> Iterator[Rule]:
        yield drop("spiece_model")
        yield drop("logit_scale")
        yield from (rename(f"{names}{{rest}}", "model.vision_tower.{rest}") for names in eyes)
        yield rename(f"{outer}{_PROJECTOR}{{rest}}", f"model.{_PROJECTOR}{{rest}}")
        yield rename("language_model.lm_head.weight", "lm_head.weight")
        yield keep("lm_head.weight")
        yield rename(f"{language}{{rest}}", "model.language_model.{rest}")

    return rules


def _gemma2(_: Shapes) -> Iterator[Rule]:
    yield drop("spiece_model")
    yield drop("logit_scale")
    yield drop("lm_head.weight")
    yield keep("model.{rest}")


def _sizes(language: str) -> Callable[[Mapping[str, Any]], Sizes]:
    def sizes(config: Mapping[str, Any]) -> Sizes:
        text = config.get("text_config") or config
        width, layers = text["hidden_size"], text["num_hidden_layers"]
        return {
            f"{language}embed_tokens.weight": (text["vocab_size"], width),
            f"{language}layers.{layers - 1}.mlp.up_proj.weight": (text["intermediate_size"], width),
            f"{language}layers.{layers}.mlp.up_proj.weight": None,
        }

    return sizes


def _gemma3_layout(name: str, language: str, eyes: tuple[str, ...], outer: str = "") -> PartLayout:
    return PartLayout(
        name=name,
        title="a Gemma 3 text encoder",
        role="encoder",
        classes=("Gemma3ForConditionalGeneration",),
        prefixes=("text_encoders.gemma3_12b.transformer.", ""),
        needs=(f"{language}embed_tokens.weight", f"{language}{_GEMMA}", f"{language}layers.0.self_attn.q_norm.weight"),
        rules=_gemma3(language, eyes, outer),
        sizes=_sizes(language),
    )


def sees(shapes: Shapes) -> bool:
    """Whether a file of Gemma 3 has the eyes, too."""
    return any(_PROJECTOR in name for name in shapes)


LAYOUTS = (
    _gemma3_layout("gemma3, ComfyUI's", "model.", ("vision_model.",)),
    _gemma3_layout("gemma3", "language_model.model.", ("vision_tower.vision_model.", "vision_tower.")),
    _gemma3_layout("gemma3, as transformers names it", "model.language_model.", ("model.vision_tower.",), "model."),
    PartLayout(
        name="gemma2",
        title="a Gemma 2 text encoder",
        role="encoder",
        classes=("Gemma2Model",),
        prefixes=("text_encoders.gemma2_2b.transformer.", ""),
        needs=("model.embed_tokens.weight", f"model.{_GEMMA}"),
        rules=_gemma2,
        sizes=_sizes("model."),
        lacks=("model.layers.0.self_attn.q_norm.weight",),
    ),
)
