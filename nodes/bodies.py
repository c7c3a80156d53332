"""The node bodies: plain functions from plain inputs to outputs. They know the engine and nothing of ComfyUI.

No weights pass through here: a handle, embeds, latents and images are all a body ever holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError, OffloadError

from . import schema
from .foreseen import foreseen
from .progress import describe_phase
from .results import NodeResult

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from .calls import NodeCall
    from .state import PackState

log = logging.getLogger(__name__)

RECORD_KEY = "phase_offload"  # of our exact record, in a LATENT


def load(
    call: NodeCall, *, model: str, dtype: str, device: str, device_memory: str = "auto", host_memory: str = "auto"
) -> NodeResult:
    """PhaseOffloadLoad: a handle of the chosen model. Reads configs and headers only."""
    folder = call.state.model_folder(model)
    settings = call.state.settings(device_memory=device_memory, host_memory=host_memory)
    handle = offload_core.load(folder, device=call.state.device(device), dtype=dtype, settings=settings)
    call.observer.status(f"{model}: ready, nothing loaded yet")
    return NodeResult((handle,))


def load_fingerprint(state: PackState, *, model: Any = None, **_unused: Any) -> str:
    """Changes with the files of the model. A model that can't be used has its error as the fingerprint."""
    try:
        return state.fingerprint(str(model))
    except OffloadError as error:
        return f"unusable: {error}"


def load_problem(
    state: PackState, *, model: Any = None, device_memory: Any = None, host_memory: Any = None, **_unused: Any
) -> str | None:
    """Why a model name or a budget can't be used. Only the words are looked at, not the files or the machine."""
    from offload_core.limits import check_budget

    try:
        if model is not None:
            state.model_folder(str(model))
        for name, value in (("device_memory", device_memory), ("host_memory", host_memory)):
            if value is not None:
                check_budget(value, name)
    except OffloadError as error:
        return str(error)
    return None


def encode_prompt(call: NodeCall, *, model: Any, prompt: str, negative_prompt: str) -> NodeResult:
    """PhaseOffloadEncodePrompt: embeds of both prompts.

    An empty negative prompt is the model's own default, but where guidance is true CFG: that does nothing without one.
    """
    negative = negative_prompt or ("" if model.guidance_name == "true_cfg_scale" else None)
    with foreseen(call, offload_core.foresee_encode, model, prompt, negative) as plan:
        embeds = offload_core.encode(model, prompt, negative, session=call.session, plan=plan)
    _say_how_it_went(call)
    return NodeResult((embeds,))


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
) -> NodeResult:
    """PhaseOffloadDenoise: a LATENT of `batch` pictures. 0 (and a negative guidance) leave the model's own default."""
    options, notes = _pipeline_options(model, steps=steps, guidance=guidance, width=width, height=height, batch=batch)
    with foreseen(call, offload_core.foresee_denoise, model, embeds, seed=seed, **options) as plan:
        latents = offload_core.denoise(model, embeds, seed=seed, session=call.session, plan=plan, **options)
    _say_how_it_went(call, *notes)
    return NodeResult(({"samples": latents.samples, RECORD_KEY: latents},))


def vae_decode(call: NodeCall, *, model: Any, latent: Mapping[str, Any], tiling: str) -> NodeResult:
    """PhaseOffloadVAEDecode: IMAGE [B, H, W, 3], 0 to 1. The frames of videos follow each other in the batch."""
    latents, notes = _latents_to_decode(model, latent)
    with foreseen(call, offload_core.foresee_decode, model, latents, tiling=tiling) as plan:
        pixels = offload_core.decode(model, latents, "pt", tiling=tiling, session=call.session, plan=plan)
    image = _as_image(pixels).to(**call.state.host.image_placement())
    _say_how_it_went(call, *notes)
    return NodeResult((image,))


def plan_preview(
    call: NodeCall, *, model: Any, prompt: str, steps: int, guidance: float, width: int, height: int, batch: int
) -> NodeResult:
    """PhaseOffloadPlanPreview: what the job will take, as a table and as a chart. Reads configs and headers only."""
    from offload_core.plan_chart import plan_picture
    from offload_core.plan_table import plan_line, plan_table

    options, notes = _pipeline_options(model, steps=steps, guidance=guidance, width=width, height=height, batch=batch)
    found = offload_core.foresee_job(
        model.model,
        prompt or None,
        settings=replace(model.settings, execution_device=model.device),
        dtype=model.dtype,
        loras=model.loras,
        session=call.session,
        **options,
    )
    table = "\n".join((plan_table(found), *notes))
    call.observer.status("\n".join((plan_line(found.plan), *found.plan.hints, *notes)))
    chart = _picture_as_image(plan_picture(found))
    values = (table, chart.to(**call.state.host.image_placement()))
    return NodeResult(values, ui={"text": [table]}, shown=chart)


def purge_cache(call: NodeCall, *, anything: Any) -> NodeResult:
    """PhaseOffloadPurgeCache: the same value, and a sentence that says what was freed."""
    call.state.host.release_cache()
    sentence = offload_core.purge(device=call.state.host.auto_device()).sentence()
    call.observer.status(sentence)
    return NodeResult((anything, sentence), ui={"text": [sentence]})


BODIES: dict[str, Callable[..., NodeResult]] = {
    schema.LOAD.id: load,
    schema.ENCODE.id: encode_prompt,
    schema.DENOISE.id: denoise,
    schema.DECODE.id: vae_decode,
    schema.PLAN.id: plan_preview,
    schema.PURGE.id: purge_cache,
}
FINGERPRINTS: dict[str, Callable[..., Any]] = {schema.LOAD.id: load_fingerprint}
PROBLEMS: dict[str, Callable[..., str | None]] = {schema.LOAD.id: load_problem}


def _pipeline_options(
    model: Any, *, steps: int, guidance: float, width: int, height: int, batch: int
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments of the pipeline, without those left to its defaults; and what couldn't be honoured."""
    options: dict[str, Any] = {"num_inference_steps": steps, "width": width, "height": height}
    options = {name: value for name, value in options.items() if value != schema.MODEL_DEFAULT}
    notes = []
    if guidance >= 0:
        if model.guidance_name is None:
            notes.append(f"This model has no guidance: {guidance:g} was not used.")
        else:
            options[model.guidance_name] = guidance
    if batch > 1:
        if model.images_name is None:
            raise InputError(f"This model makes one picture at a time: set batch to 1 instead of {batch}.")
        options[model.images_name] = batch
    return options, notes


def _latents_to_decode(model: Any, latent: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The exact record of Denoise Phase if the LATENT still agrees with it; else what its `samples` say."""
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        raise InputError("This LATENT holds several tensors (sound and picture): split it before VAE Decode Phase.")
    samples = samples.to("cpu")  # the host may keep latents on the device
    record = latent.get(RECORD_KEY)
    if record is None:
        return offload_core.latents_from_samples(model, samples), []
    if record.is_stale(samples):
        return record.with_samples(samples), ["The latent was changed after Denoise Phase; the change is decoded."]
    return record, []


def _as_image(pixels: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) or (B, F, C, H, W) → [B, H, W, C] or [B·F, H, W, C], a tensor of its own."""
    import torch

    image = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels
    return image.movedim(1, -1).to(torch.float32).contiguous()


def _picture_as_image(picture: Image) -> torch.Tensor:
    """IMAGE [1, H, W, 3] of an RGB picture."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).unsqueeze(0)


def _say_how_it_went(call: NodeCall, *notes: str) -> None:
    phases = call.session.report.phases
    lines = [describe_phase(phases[-1])] if phases else []
    for note in notes:
        log.warning("%s", note)
    call.observer.status("\n".join((*notes, *lines)))
