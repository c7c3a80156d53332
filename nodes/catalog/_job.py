"""What Denoise Phase is asked for, and Plan Preview about: inputs, and the arguments of the pipeline they stand for."""

from __future__ import annotations

from typing import Any

from offload_core.errors import InputError
from offload_core.schedulers import SCHEDULERS

from ..schema import Input

MODEL_DEFAULT = 0  # steps, width, height: the model's own default
GUIDANCE_DEFAULT = -1.0  # guidance: the model's own default
STRENGTH_DEFAULT = -1.0  # the model's own default
MODELS_OWN = "model's own"
SECONDS_DEFAULT = 0.0  # of a sound: the model's own

JOB = (
    Input(
        "steps",
        "INT",
        "Denoising steps. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=1000,
    ),
    Input(
        "guidance",
        "FLOAT",
        "How closely to follow the prompt. -1: the model's own default. It sets true_cfg_scale for models that "
        "have it, else guidance_scale.",
        default=GUIDANCE_DEFAULT,
        min=-1.0,
        max=100.0,
        step=0.1,
    ),
    Input(
        "width",
        "INT",
        "Width in pixels. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=16384,
        step=8,
    ),
    Input(
        "height",
        "INT",
        "Height in pixels. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=16384,
        step=8,
    ),
    Input("batch", "INT", "Pictures made at once. Memory grows with each.", default=1, min=1, max=64),
)

STRENGTH = Input(
    "strength",
    "FLOAT",
    "How much of the picture to make anew: 1 all of it, 0.3 a little. -1: the model's own default. It has an "
    "effect where there is a picture to start from.",
    default=STRENGTH_DEFAULT,
    min=-1.0,
    max=1.0,
    step=0.01,
    optional=True,
)
SCHEDULER = Input(
    "scheduler",
    "COMBO",
    "The scheduler that makes the steps. Of the others only those work that fit the model: diffusers says "
    "which are of one kind with its own, and the node names them if one doesn't fit.",
    default=MODELS_OWN,
    options=(MODELS_OWN, *SCHEDULERS),
    optional=True,
)
SECONDS = Input(
    "seconds",
    "FLOAT",
    "Seconds of sound, of a model that makes nothing else (Stable Audio, ACE-Step). 0: what Encode Prompt Phase was "
    "given, else the model's own.",
    default=SECONDS_DEFAULT,
    min=0.0,
    max=3600.0,
    step=0.1,
    optional=True,
)


def pipeline_options(
    model: Any,
    *,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    batch: int,
    seconds: float = SECONDS_DEFAULT,
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the pipeline, without those left to its defaults; and what couldn't be honoured."""
    options: dict[str, Any] = {"num_inference_steps": steps, "width": width, "height": height}
    options = {name: value for name, value in options.items() if value != MODEL_DEFAULT}
    if {"width", "height"} & set(options) and model.only_sound:
        raise InputError("This model makes sound: leave width and height at 0.")
    notes = add_seconds(options, model, seconds)
    if guidance >= 0:
        if model.guidance_name is None:
            notes.append(f"This model has no guidance: {guidance:g} was not used.")
        else:
            options[model.guidance_name] = guidance
    if batch > 1:
        if model.images_name is None:
            thing = "sound" if model.only_sound else "picture"
            raise InputError(f"This model makes one {thing} at a time: set batch to 1 instead of {batch}.")
        options[model.images_name] = batch
    return options, notes


def add_seconds(options: dict[str, Any], model: Any, seconds: float) -> list[str]:
    """Adds the length of a sound to the pipeline's arguments, or says why it has no effect."""
    if seconds == SECONDS_DEFAULT:
        return []
    if model.seconds_name is None:
        return [f"This model makes more than sound: {seconds:g} seconds were not used."]
    options[model.seconds_name] = seconds
    return []


def add_strength(options: dict[str, Any], model: Any, strength: float) -> list[str]:
    """Adds the strength to the pipeline's arguments, or says why it has no effect. model: as the pipeline that takes
    the picture; None where there is none."""
    if strength < 0:
        return []
    if model is None:
        return [f"There is no picture to start from: strength {strength:g} was not used."]
    if "strength" not in model.defaults:
        return [f"{model.pipeline} takes no strength: {strength:g} was not used."]
    options["strength"] = strength
    return []
