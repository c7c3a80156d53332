"""Clips: pictures, or the frames of a LATENT, that are one video to start from.

The pipelines for it take the frames as their `video` and have as many of their own as there are; they take no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..model_source import ModelSource
from ._tasks import VIDEO_TO_VIDEO, class_for_task, starts_from_a_clip

if TYPE_CHECKING:
    from ._scope import Phase


def is_clip(samples: torch.Tensor) -> bool:
    """Whether a LATENT holds several frames of a video. samples: (B, C, h, w) or (B, C, T, h, w)."""
    return samples.ndim == 5 and samples.shape[2] > 1


def check_clip(source: ModelSource, samples: torch.Tensor) -> None:
    """Raises InputError, with why, if the model can't start from this LATENT of several frames."""
    videos, _, frames = samples.shape[:3]
    try:
        class_for_task(source, VIDEO_TO_VIDEO)
    except InputError as error:
        raise InputError(f"This latent holds {frames} frames of a video. {error}") from None
    if videos > 1:
        raise InputError(f"This latent holds {videos} videos, and Denoise starts from one at a time. Choose one.")


def frames_of(pipeline: Any, samples: torch.Tensor) -> int:
    """How many frames the video has that such latents are of."""
    return (int(samples.shape[2]) - 1) * _frames_per_cell(pipeline) + 1


def whole_clip(phase: Phase, call: dict[str, Any]) -> dict[str, Any]:
    """`call` with as many frames of its clip as the VAE makes latents of: the first, and then so many for each more.

    Pipelines would leave out the rest unasked, or fail on it. A note of the phase says how many are left out.
    """
    if not starts_from_a_clip(phase.source):
        return call
    clip = call["video"]
    each = _frames_per_cell(phase.pipeline)
    count = (len(clip) - 1) // each * each + 1
    if count == len(clip):
        return call
    phase.notes.append(
        f"The clip has {len(clip)} frames and this model takes 1 and a multiple of {each}: the first {count} count."
    )
    return {**call, "video": clip[:count]}


def given_pictures(call: Mapping[str, Any]) -> list[Any]:
    """The pictures that a pipeline's call starts from or looks at: the frames of a clip, or its picture or pictures."""
    given = call.get("video", call.get("image", []))
    return given if isinstance(given, list) else [given]


def _frames_per_cell(pipeline: Any) -> int:
    return int(getattr(pipeline, "vae_scale_factor_temporal", 1))
