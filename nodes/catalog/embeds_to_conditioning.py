"""Embeds To Conditioning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..conditioning import as_conditioning
from ..results import NodeResult
from ..schema import CONDITIONING_TYPE, EMBEDS_TYPE, MODEL, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadEmbedsToConditioning",
    display_name="Embeds To Conditioning",
    description=(
        "Hands encoded prompts to ComfyUI's own samplers, where both mean the same by them: SD 1.5, SDXL, SD 3, FLUX.1 "
        "and Wan. Loads nothing."
    ),
    inputs=(MODEL, Input("embeds", EMBEDS_TYPE, "The encoded prompts, from Encode Prompt Phase.")),
    outputs=(
        Output("positive", CONDITIONING_TYPE, "The prompt, for KSampler with ComfyUI's own copy of the model."),
        Output("negative", CONDITIONING_TYPE, "The negative prompt."),
    ),
    search_aliases=("conditioning", "clip text encode", "ksampler", "convert", "bridge", "offload"),
)


def embeds_to_conditioning(call: NodeCall, *, model: Any, embeds: Any) -> NodeResult:
    """PhaseOffloadEmbedsToConditioning: the tensors that the model's denoiser would read, as CONDITIONING."""
    positive, negative = offload_core.conditioning_of(model, embeds, session=call.session)
    if negative is None:
        raise InputError("These embeds hold no negative prompt: encode them again, with an empty one at least.")
    return NodeResult((as_conditioning(positive), as_conditioning(negative)))


NODE = Node(SCHEMA, embeds_to_conditioning)
