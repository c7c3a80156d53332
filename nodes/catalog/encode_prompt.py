"""Encode Prompt Phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..foreseen import foreseen
from ..results import NodeResult
from ..schema import EMBEDS_TYPE, IMAGES_TYPE, MODEL, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadEncodePrompt",
    display_name="Encode Prompt Phase",
    description="Loads the text encoders, encodes the prompt and the negative prompt, and gives the memory back.",
    inputs=(
        MODEL,
        Input("prompt", "STRING", "What the picture should show.", default="", multiline=True),
        Input(
            "negative_prompt",
            "STRING",
            "What the picture should not show. Empty: the model's own default. It has an effect only where the "
            "guidance is on.",
            default="",
            multiline=True,
        ),
        Input(
            "images",
            IMAGES_TYPE,
            "From Encode Image Phase, for models that read pictures together with the prompt (Qwen-Image-Edit) and "
            "those that can't do without one. Others don't need it here: leave it out, and the prompt isn't encoded "
            "again when the picture changes.",
            optional=True,
        ),
    ),
    outputs=(Output("embeds", EMBEDS_TYPE, "The encoded prompts, in RAM."),),
    search_aliases=("prompt", "text encode", "clip text encode", "negative prompt", "offload"),
)


def encode_prompt(call: NodeCall, *, model: Any, prompt: str, negative_prompt: str, images: Any = None) -> NodeResult:
    """PhaseOffloadEncodePrompt: embeds of both prompts.

    An empty negative prompt is the model's own default, but where guidance is true CFG: that does nothing without one.
    """
    negative = negative_prompt or ("" if model.guidance_name == "true_cfg_scale" else None)
    options = {} if images is None else {"images": images}
    with foreseen(call, offload_core.foresee_encode, model, prompt, negative, **options) as plan:
        embeds = offload_core.encode(model, prompt, negative, session=call.session, plan=plan, **options)
    call.say_how_it_went()
    return NodeResult((embeds,))


NODE = Node(SCHEMA, encode_prompt)
