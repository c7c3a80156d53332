"""Conditioning To Embeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..conditioning import text_of
from ..results import NodeResult
from ..schema import CONDITIONING_TYPE, EMBEDS_TYPE, MODEL, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadConditioningToEmbeds",
    display_name="Conditioning To Embeds",
    description=(
        "Takes what ComfyUI's own text encoders made to Denoise Phase, where both mean the same by it: SD 1.5, SDXL, "
        "SD 3, FLUX.1 and Wan."
    ),
    inputs=(
        MODEL,
        Input("positive", CONDITIONING_TYPE, "The prompt, straight from CLIP Text Encode with the same text encoders."),
        Input(
            "negative",
            CONDITIONING_TYPE,
            "The negative prompt. Without one it is the empty text, encoded by the model's own encoders.",
            optional=True,
        ),
    ),
    outputs=(Output("embeds", EMBEDS_TYPE, "The encoded prompts, in RAM. For Denoise Phase."),),
    search_aliases=("conditioning", "clip text encode", "prompt weights", "convert", "bridge", "offload"),
)


def conditioning_to_embeds(call: NodeCall, *, model: Any, positive: Any, negative: Any = None) -> NodeResult:
    """PhaseOffloadConditioningToEmbeds: embeds that hold these tensors as they are."""
    texts = [text_of(positive, "positive"), None if negative is None else text_of(negative, "negative")]
    embeds = offload_core.embeds_from_conditioning(model, *texts, session=call.session)  # type: ignore[arg-type]
    call.say_how_it_went()
    return NodeResult((embeds,))


NODE = Node(SCHEMA, conditioning_to_embeds)
