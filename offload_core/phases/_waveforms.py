"""Models that make sound alone: which they are, and what their pipelines do to the waveform after the VAE.

A pipeline of pictures ends with a processor, which Decode runs. One of sound ends with a few lines of its `__call__`:
they are here, a function for each, and what a function needs of the call is kept with the latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..model_source import ComponentSource, ModelSource
from ._roles import Role, models, role_of

# Arguments that say how many seconds the sound lasts, by what pipelines call them.
SECONDS_ARGUMENTS = ("audio_end_in_s", "audio_duration")
# VAEs of waveforms, beside those that have Audio in the name of their class.
_SOUND_VAES = ("AutoencoderOobleck",)


def makes_sound(part: ComponentSource) -> bool:
    """Whether this VAE decodes sound: diffusers' classes for it say so."""
    return "Audio" in part.class_name or part.class_name in _SOUND_VAES


def only_sound(source: ModelSource) -> bool:
    """Whether the model makes sound and no picture: it has no other VAE than those of sound."""
    vaes = [part for _, part in models(source) if role_of(part) is Role.VAE]
    return source.blocks is None and bool(vaes) and all(makes_sound(part) for part in vaes)


def check_seconds(name: str, value: Any) -> None:
    """Raises InputError for what isn't a length. name: one of `SECONDS_ARGUMENTS`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{name} is {value!r}; it must be a number of seconds above 0.")


def samples_per_second(config: Any) -> int:
    """Of what a sound VAE or a vocoder with this config gives."""
    names = ("output_sampling_rate", "sampling_rate", "sample_rate")
    return int(next(rate for name in names if (rate := getattr(config, name, None))))


@dataclass(frozen=True)
class Ending:
    """What is left to do to a decoded waveform. kind: a name of `KINDS`. start_sample, end_sample: the stretch of it
    that was asked for, to its end if that is None."""

    kind: str
    start_sample: int = 0
    end_sample: int | None = None


def ending_of(pipeline: Any, call: Mapping[str, Any] | None) -> Ending:
    """The ending of a pipeline (around modules, cold or not) that was called with `call`; of a whole waveform for None.

    Raises InputError for a pipeline whose ending isn't known here.
    """
    name = type(pipeline).__name__
    check_ending(name)
    kind = _KIND_OF[name]
    if kind == "cut" and call is not None:
        return Ending(kind, *_asked_stretch(pipeline, call))
    return Ending(kind)


def check_ending(pipeline: str) -> None:
    """Raises InputError for a pipeline of sound whose ending isn't known here. pipeline: its class's name."""
    if pipeline not in _KIND_OF:
        raise InputError(
            f"{pipeline} makes sound, and what it does to the sound after its VAE isn't known here, so it can't run in "
            f"phases. Those that can are {', '.join(_KIND_OF)}."
        )


def finished(waveform: torch.Tensor, ending: Ending) -> torch.Tensor:
    """The sound that the pipeline would give: float32 (B, channels, samples). waveform: the VAE's, in any dtype."""
    return KINDS[ending.kind](waveform.float(), ending)


def _asked_stretch(pipeline: Any, call: Mapping[str, Any]) -> tuple[int, int]:
    """The first sample and the one after the last, in the words and roundings of diffusers 0.42's
    StableAudioPipeline.__call__: without an end it is the longest that the transformer makes."""
    rate = pipeline.vae.config.sampling_rate
    longest_s = pipeline.transformer.config.sample_size * pipeline.vae.hop_length / rate
    start_s, end_s = call.get("audio_start_in_s", 0.0), call.get("audio_end_in_s")
    return int(start_s * rate), int((longest_s if end_s is None else end_s) * rate)


def _cut(waveform: torch.Tensor, ending: Ending) -> torch.Tensor:
    """Keeps the stretch that was asked for: the model always makes its whole length. Source: as `_asked_stretch`."""
    return waveform[:, :, ending.start_sample : ending.end_sample]


def _level(waveform: torch.Tensor, _: Ending) -> torch.Tensor:
    """Brings each sound to a peak of -1 dBFS; one above 1 in two steps. Source: diffusers 0.42's
    AceStepPipeline.__call__."""
    peak = waveform.abs().amax(dim=(1, 2), keepdim=True)
    if (peak > 1).any():
        waveform = waveform / peak.clamp(min=1.0)
    peak = waveform.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    return waveform * (10.0 ** (-1.0 / 20.0) / peak)


KINDS: Mapping[str, Callable[[torch.Tensor, Ending], torch.Tensor]] = {"cut": _cut, "level": _level}
_KIND_OF = {"StableAudioPipeline": "cut", "AceStepPipeline": "level"}
