"""The sound of latents, beside a picture (LTX-2) or alone, and how fast the frames of videos follow each other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..devices import is_out_of_memory
from ..errors import InputError, InsufficientMemoryError, NumericalError, RecordError
from ..model_source import ModelSource, pipeline_class
from ..plan import Plan
from ..session import Session
from ._decode import Decoder, check_tiling, decode_arguments, use_dtype_of
from ._handle import Handle
from ._jobs import each_job, need_jobs
from ._marks import vae_mark
from ._pipeline import call_parameters
from ._plain import from_plain
from ._records import Latents, Sound
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._waveforms import finished, samples_per_second

ENCODER_HALF = "encoder"
# Frames per second of models whose pipeline doesn't take it as an argument, by the start of the class's name. Source:
# the example in the docstring of each pipeline in diffusers 0.42; Wan 2.2 5B: its model card.
_FRAME_RATES = {"CogVideoX": 8.0, "HunyuanVideo": 15.0, "Mochi": 30.0, "Wan": 16.0}
_WAN_22_5B = 24.0


def frame_rate_of(source: ModelSource, call: dict[str, Any]) -> float | None:
    """Frames per second of a video made by this call; None for pictures and models that don't say."""
    known = call_parameters(pipeline_class(source))
    for name in ("frame_rate", "fps"):
        if name in known:
            value = call.get(name, known[name].default)
            return float(value) if isinstance(value, int | float) and value > 0 else None
    if source.pipeline_class.startswith("Wan") and source.options.get("expand_timesteps"):
        return _WAN_22_5B
    return next((rate for start, rate in _FRAME_RATES.items() if source.pipeline_class.startswith(start)), None)


def decode_sound(
    handle: Handle,
    latents: Latents,
    *,
    tiling: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, int] | None:
    """The sound of `latents`: a float32 waveform (B, channels, samples) from -1 to 1 on the CPU, and samples a second.
    None for latents without sound.

    Runs the model's audio VAE and, where it has one, its vocoder, in a phase of its own; of a model that makes sound
    alone that is the phase decode, and what its pipeline does after the VAE is done, too. tiling and plan are for such
    a model, as in `decode`: "auto" decodes whole and in shorter and shorter pieces only if memory runs out, "on" in
    pieces of 512 latent frames.

    Raises RecordError for latents of another kind of model, InputError, InsufficientMemoryError, NumericalError.
    """
    session = session or Session()
    tiling, source = check_tiling(handle, tiling), handle.source()
    sound = _checked(source, latents)
    if sound is None:
        return None
    if sound.ending is not None:
        return _alone(handle, source, [latents], tiling, session, plan)[0]
    tails = {name for name, part in models(source) if role_of(part) is Role.TAIL}
    with OpenPhase(handle, source, "sound", session, owned={sound.component} | tails) as phase:
        return _beside_a_picture(phase, sound)


def decode_sound_many(
    handle: Handle,
    jobs: Sequence[Latents],
    *,
    tiling: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
) -> list[tuple[torch.Tensor, int]]:
    """The sound of each of several latents of a model that makes sound alone, with its VAE loaded once for all that
    need it in one dtype; as `decode_sound` gives it for them one by one.

    plan: of the most demanding one. Raises what `decode_sound` does, and InputError for no latents and for latents
    that aren't of sound alone; then there is no sound of any.
    """
    session, made = session or Session(), []
    tiling, source = check_tiling(handle, tiling), handle.source()
    for latents in need_jobs(jobs):
        sound = _checked(source, latents)
        if sound is None or sound.ending is None:
            raise InputError(f"{latents.pipeline} makes more than sound: decode its latents one by one.")
    for _, group in itertools.groupby(jobs, key=lambda latents: (latents.component, latents.dtype)):
        made += _alone(handle, source, list(group), tiling, session, plan)
    return made


def _checked(source: ModelSource, latents: Any) -> Sound | None:
    """The sound of latents, if they have some. Raises InputError for what isn't latents, RecordError for those of
    another VAE."""
    if not isinstance(latents, Latents):
        raise InputError(f"Decode needs the latents that Denoise made, not {type(latents).__name__}.")
    sound = latents.sound
    part = source.components.get(sound.component) if sound is not None else None
    if sound is not None and (part is None or vae_mark(part) != sound.vae):
        raise RecordError(
            "The latents' field sound doesn't match this model. Decode them with the model that made them."
        )
    return sound


def _alone(
    handle: Handle, source: ModelSource, jobs: Sequence[Latents], tiling: str, session: Session, plan: Plan | None
) -> list[tuple[torch.Tensor, int]]:
    """The phase decode, for latents of sound alone whose VAE is one in one dtype."""
    name = jobs[0].component
    with OpenPhase(handle, source, "decode", session, owned={name}, plan=plan) as phase:
        component = phase.components[name]
        component.skip = (ENCODER_HALF,)
        use_dtype_of(jobs[0], component)
        vae: Any = component.module
        decoder, made = Decoder(phase, component, tiling), []
        for latents in each_job(phase, jobs):
            waveform = decoder.decode(functools.partial(decode_arguments, latents, vae, phase.device), whole=True)
            if latents.sound is not None and latents.sound.ending is not None:
                waveform = finished(waveform, latents.sound.ending)
            made.append((_on_cpu(waveform), samples_per_second(vae.config)))
        return made


def _beside_a_picture(phase: Phase, sound: Sound) -> tuple[torch.Tensor, int]:
    component = phase.components[sound.component]
    component.skip = (ENCODER_HALF,)
    vae: Any = component.module
    args, kwargs = from_plain(sound.decode, phase.device)
    try:
        decoded = vae.decode(*args, **kwargs)
        decoded = decoded[0] if isinstance(decoded, tuple) else decoded.sample
        vocoder = getattr(phase.pipeline, "vocoder", None)
        waveform = decoded if vocoder is None else vocoder(decoded)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise InsufficientMemoryError(
                f"The sound ran out of memory on {phase.device}. The latents are kept: decode with device=cpu."
            ) from None
        raise
    return _on_cpu(waveform), samples_per_second(vae.config if vocoder is None else vocoder.config)


def _on_cpu(waveform: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(waveform).all():
        raise NumericalError("Decoding the sound produced values that aren't numbers (NaN). Try dtype=bfloat16.")
    return waveform.detach().to("cpu", torch.float32, copy=True)
