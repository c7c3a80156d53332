"""The sound of latents, beside a picture (LTX-2) or alone, and how fast the frames of videos follow each other."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..devices import is_out_of_memory
from ..errors import InputError, InsufficientMemoryError, NumericalError, RecordError
from ..model_source import ModelSource, pipeline_class
from ..plan import Plan
from ..session import Session
from ._decode import Decoder, check_tiling, decode_arguments, use_dtype_of
from ._handle import Handle
from ._marks import vae_mark
from ._pipeline import call_parameters
from ._plain import from_plain
from ._records import Latents, Sound
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._waveforms import Ending, finished, samples_per_second

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
    if not isinstance(latents, Latents):
        raise InputError(f"Decode needs the latents that Denoise made, not {type(latents).__name__}.")
    sound = latents.sound
    if sound is None:
        return None
    tiling = check_tiling(handle, tiling)
    source = handle.source()
    part = source.components.get(sound.component)
    if part is None or vae_mark(part) != sound.vae:
        raise RecordError(
            "The latents' field sound doesn't match this model. Decode them with the model that made them."
        )
    tails = {name for name, part in models(source) if role_of(part) is Role.TAIL}
    alone = sound.ending is not None
    name, owned = ("decode", {sound.component}) if alone else ("sound", {sound.component} | tails)
    plan = plan if alone else None  # it is of the picture
    with OpenPhase(handle, source, name, session or Session(), owned=owned, plan=plan) as phase:
        if sound.ending is not None:
            waveform, rate = _alone(phase, latents, sound.ending, tiling)
        else:
            waveform, rate = _beside_a_picture(phase, sound)
        if not torch.isfinite(waveform).all():
            raise NumericalError("Decoding the sound produced values that aren't numbers (NaN). Try dtype=bfloat16.")
        return waveform.detach().to("cpu", torch.float32, copy=True), rate


def _alone(phase: Phase, latents: Latents, ending: Ending, tiling: str) -> tuple[torch.Tensor, int]:
    component = phase.components[latents.component]
    component.skip = (ENCODER_HALF,)
    use_dtype_of(latents, component)
    vae: Any = component.module
    asked = functools.partial(decode_arguments, latents, vae, phase.device)
    waveform = Decoder(phase, component, tiling).decode(asked, whole=True)
    return finished(waveform, ending), samples_per_second(vae.config)


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
    return waveform, samples_per_second(vae.config if vocoder is None else vocoder.config)
