"""Encode Prompt Phase."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import offload_core

from ..foreseen import foreseen, foreseen_of_several
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
    outputs=(
        Output(
            "embeds",
            EMBEDS_TYPE,
            "The encoded prompts, in RAM. A list of prompts gives a list: all are encoded in one phase.",
            is_list=True,
        ),
    ),
    search_aliases=("prompt", "text encode", "clip text encode", "negative prompt", "offload"),
    takes_lists=True,
)


def encode_prompt(call: NodeCall, *, model: Any, prompt: str, negative_prompt: str, images: Any = None) -> NodeResult:
    """PhaseOffloadEncodePrompt: embeds of both prompts.

    An empty negative prompt is the model's own default, but where guidance is true CFG: that does nothing without one.
    """
    negative = _negative(model, negative_prompt)
    options = {} if images is None else {"images": images}
    with foreseen(call, offload_core.foresee_encode, model, prompt, negative, **options) as plan:
        embeds = offload_core.encode(model, prompt, negative, session=call.session, plan=plan, **options)
    call.say_how_it_went()
    return NodeResult((embeds,))


def encode_prompts(call: NodeCall, jobs: list[dict[str, Any]]) -> list[NodeResult]:
    """Several of them, with each model's encoders loaded once for all that follow each other."""
    made: list[Any] = []
    for model, group in itertools.groupby(jobs, key=itemgetter("model")):
        asked = [_question(model, job) for job in group]
        plan = foreseen_of_several(call, offload_core.foresee_encode, [((model,), each) for each in asked])
        made += offload_core.encode_many(model, asked, session=call.session, plan=plan)
    call.say_how_it_went()
    return [NodeResult((embeds,)) for embeds in made]


def _question(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the engine's encode."""
    words = {"prompt": job["prompt"], "negative_prompt": _negative(model, job["negative_prompt"])}
    return words if job.get("images") is None else {**words, "images": job["images"]}


def _negative(model: Any, text: str) -> str | None:
    return text or ("" if model.guidance_name == "true_cfg_scale" else None)


NODE = Node(SCHEMA, encode_prompt, run_many=encode_prompts)
