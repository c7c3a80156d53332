"""Encode Prompt Phase."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import offload_core

from ..foreseen import foreseen, foreseen_of_several
from ..results import NodeResult
from ..schema import EMBEDS_TYPE, IMAGES_TYPE, MODEL, Input, Node, NodeSchema, Output
from ._job import SECONDS_DEFAULT, add_seconds

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
        Input(
            "seconds",
            "FLOAT",
            "Seconds of sound, for a model that reads them with the prompt (ACE-Step); Denoise Phase then makes as "
            "many. 0: the model's own.",
            default=SECONDS_DEFAULT,
            min=0.0,
            max=3600.0,
            step=0.1,
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


def encode_prompt(
    call: NodeCall,
    *,
    model: Any,
    prompt: str,
    negative_prompt: str,
    images: Any = None,
    seconds: float = SECONDS_DEFAULT,
) -> NodeResult:
    """PhaseOffloadEncodePrompt: embeds of both prompts.

    An empty negative prompt is the model's own default, but where guidance is true CFG: that does nothing without one.
    """
    negative = _negative(model, negative_prompt)
    options, notes = _options(model, images, seconds)
    with foreseen(call, offload_core.foresee_encode, model, prompt, negative, **options) as plan:
        embeds = offload_core.encode(model, prompt, negative, session=call.session, plan=plan, **options)
    call.say_how_it_went(*notes)
    return NodeResult((embeds,))


def encode_prompts(call: NodeCall, jobs: list[dict[str, Any]]) -> list[NodeResult]:
    """Several of them, with each model's encoders loaded once for all that follow each other."""
    made: list[Any] = []
    said: dict[str, None] = {}
    for model, group in itertools.groupby(jobs, key=itemgetter("model")):
        asked = [_question(model, job, said) for job in group]
        plan = foreseen_of_several(call, offload_core.foresee_encode, [((model,), each) for each in asked])
        made += offload_core.encode_many(model, asked, session=call.session, plan=plan)
    call.say_how_it_went(*said)
    return [NodeResult((embeds,)) for embeds in made]


def _question(model: Any, job: dict[str, Any], said: dict[str, None]) -> dict[str, Any]:
    """The arguments of the engine's encode. What of the job couldn't be honoured is added to `said`."""
    options, notes = _options(model, job.get("images"), job.get("seconds", SECONDS_DEFAULT))
    said |= dict.fromkeys(notes)
    return {"prompt": job["prompt"], "negative_prompt": _negative(model, job["negative_prompt"]), **options}


def _options(model: Any, images: Any, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the engine's encode beside the texts, and what of them couldn't be honoured."""
    options: dict[str, Any] = {} if images is None else {"images": images}
    return options, add_seconds(options, model, seconds)


def _negative(model: Any, text: str) -> str | None:
    return text or ("" if model.guidance_name == "true_cfg_scale" else None)


NODE = Node(SCHEMA, encode_prompt, run_many=encode_prompts)
