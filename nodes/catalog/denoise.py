"""Denoise Phase."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..foreseen import foreseen, foreseen_of_several
from ..pictures import mask_as_picture
from ..results import NodeResult
from ..schema import EMBEDS_TYPE, IMAGES_TYPE, MODEL, RECORD_KEY, Input, Node, NodeSchema, Output
from ._job import (
    JOB,
    MODELS_OWN,
    SCHEDULER,
    SECONDS,
    SECONDS_DEFAULT,
    STRENGTH,
    STRENGTH_DEFAULT,
    add_strength,
    pipeline_options,
)

if TYPE_CHECKING:
    from ..calls import NodeCall

LARGEST_SEED = 2**64 - 1

SCHEMA = NodeSchema(
    id="PhaseOffloadDenoise",
    display_name="Denoise Phase",
    description=(
        "Loads the denoiser, makes a latent picture from noise, or from a picture, step by step, and gives the memory "
        "back."
    ),
    inputs=(
        MODEL,
        Input("embeds", EMBEDS_TYPE, "The encoded prompts, from Encode Prompt Phase."),
        Input(
            "seed",
            "INT",
            "The number the noise is made from. The same seed gives the same picture.",
            default=0,
            min=0,
            max=LARGEST_SEED,
            control_after_generate=True,
        ),
        *JOB,
        Input(
            "images",
            IMAGES_TYPE,
            "From Encode Image Phase: a picture to start from, to look at, or to set in motion.",
            optional=True,
        ),
        Input(
            "latent",
            "LATENT",
            "A latent picture or clip to start from, such as VAE Encode makes; its noise mask says where to repaint. "
            "In place of images.",
            optional=True,
        ),
        STRENGTH,
        SCHEDULER,
        SECONDS,
    ),
    outputs=(
        Output(
            "latent",
            "LATENT",
            "The latent picture, in ComfyUI's convention. It also carries the exact values VAE Decode Phase needs. A "
            "list of embeds or of other inputs gives a list: all are made in one phase.",
            is_list=True,
        ),
    ),
    search_aliases=(
        "ksampler",
        "sampler",
        "generate",
        "denoise",
        "seed",
        "steps",
        "guidance",
        "cfg",
        "scheduler",
        "offload",
    ),
    takes_lists=True,
)


def denoise(
    call: NodeCall,
    *,
    model: Any,
    embeds: Any,
    seed: int,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    batch: int,
    images: Any = None,
    latent: Mapping[str, Any] | None = None,
    strength: float = STRENGTH_DEFAULT,
    scheduler: str = MODELS_OWN,
    seconds: float = SECONDS_DEFAULT,
) -> NodeResult:
    """PhaseOffloadDenoise: a LATENT of `batch` pictures. 0 (and a negative guidance or strength) leave the model's own
    default."""
    job: dict[str, Any] = {"steps": steps, "guidance": guidance, "width": width, "height": height, "batch": batch}
    job["seconds"] = seconds
    start: dict[str, Any] = {"images": images, "latent": latent, "strength": strength}
    options, notes = _options(model, scheduler, **start, **job)
    with foreseen(call, offload_core.foresee_denoise, model, embeds, seed=seed, **options) as plan:
        latents = offload_core.denoise(model, embeds, seed=seed, session=call.session, plan=plan, **options)
    call.say_how_it_went(*notes)
    return _latent(call, latents)


def denoise_jobs(call: NodeCall, jobs: list[dict[str, Any]]) -> list[NodeResult]:
    """Several of them, with each model's denoiser loaded once for all that follow each other."""
    made: list[Any] = []
    said: dict[str, None] = {}
    for model, group in itertools.groupby(jobs, key=itemgetter("model")):
        asked = []
        for job in group:
            options, notes = _options(**{name: value for name, value in job.items() if name not in ("embeds", "seed")})
            asked.append({"embeds": job["embeds"], "seed": job["seed"], **options})
            said |= dict.fromkeys(notes)
        plan = foreseen_of_several(call, offload_core.foresee_denoise, [((model,), each) for each in asked])
        made += offload_core.denoise_many(model, asked, session=call.session, plan=plan)
    call.say_how_it_went(*said)
    return [_latent(call, latents) for latents in made]


def _options(
    model: Any,
    scheduler: str = MODELS_OWN,
    images: Any = None,
    latent: Mapping[str, Any] | None = None,
    strength: float = STRENGTH_DEFAULT,
    **job: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the engine's denoise, and what of the job couldn't be honoured."""
    images = _start(model, images, latent)
    if images is not None and job["batch"] > 1:
        job["batch"] *= images.starts  # so many of each picture
    options, notes = pipeline_options(model, **job)
    if images is not None:
        options["images"] = images
        _leave_size_to_picture(options)
    shown = None if images is None else replace(model, pipeline=images.pipeline)
    notes += add_strength(options, shown, strength)
    return options | ({} if scheduler == MODELS_OWN else {"scheduler": scheduler}), notes


def _latent(call: NodeCall, latents: Any) -> NodeResult:
    samples = latents.samples.to(call.state.host.image_placement()["device"])
    return NodeResult(({"samples": samples, RECORD_KEY: latents},))


def _start(model: Any, images: Any, latent: Mapping[str, Any] | None) -> Any:
    """What to start from, if anything: the encoded pictures, or those that a LATENT stands for."""
    if latent is None:
        return images
    if images is not None:
        raise InputError("Denoise Phase starts from images or from a latent: take one of the two off.")
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        raise InputError("This LATENT holds several tensors (sound and picture): Denoise Phase can't start from it.")
    mask = latent.get("noise_mask")
    return offload_core.images_from_samples(
        model, samples.to("cpu"), mask=None if mask is None else mask_as_picture(mask)
    )


def _leave_size_to_picture(options: dict[str, Any]) -> None:
    """Refuses a size where the picture sets it: it would have to be encoded again."""
    if {"width", "height"} & set(options):
        raise InputError(
            "The size comes from the picture: leave width and height of Denoise Phase at 0, and set them on Encode "
            "Image Phase."
        )


NODE = Node(SCHEMA, denoise, run_many=denoise_jobs)
