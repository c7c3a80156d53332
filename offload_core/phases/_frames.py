"""Frames of a video: from what a VAE decoded to the result, a few at a time, so that no second copy of a clip is made.

What the pipeline's processor does to frames it does to each by itself, so doing it in parts changes no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import NumericalError
from ._stretches import Stretches

PART_BYTES = 16 << 20  # of float32 frames that are worked on at once


def finished_frames(processor: Any, video: torch.Tensor | Stretches, output_type: str) -> Any:
    """What `processor.postprocess_video` gives for a video (B, C, F, H, W), on the CPU: float32 (B, F, H, W, C) in 0..1
    as an array ("np"), (B, F, C, H, W) in the video's dtype ("pt"), or lists of PIL images ("pil").

    Raises NumericalError for values that aren't numbers.
    """
    count = video.shape[2] if isinstance(video, torch.Tensor) else video.frames
    result: Any = None
    done = 0
    for stretch in [video] if isinstance(video, torch.Tensor) else video:
        check_finite(stretch)
        if result is None:
            result = _room_for(stretch, count, output_type)
        for place, clip in enumerate(stretch):
            first = done
            for part in _parts(clip):
                result[place][first : first + len(part)] = processor.postprocess(part, output_type)
                first += len(part)
        done += stretch.shape[2]
    return result


def check_finite(pixels: torch.Tensor) -> None:
    """Raises NumericalError for NaN and infinity. Makes no mask of the size of a clip."""
    low, high = torch.aminmax(pixels)
    if not torch.isfinite(low) or not torch.isfinite(high):
        raise NumericalError(
            "Decode produced values that aren't numbers (NaN), so there is no picture. "
            "Try dtype=float32 or bfloat16: some VAEs overflow in float16."
        )


def _room_for(stretch: torch.Tensor, frames: int, output_type: str) -> Any:
    """The empty result: memory that is taken as it is filled."""
    batch, channels, _, height, width = stretch.shape
    if output_type == "pil":
        return [[] for _ in range(batch)]
    if output_type == "np":
        return np.empty((batch, frames, height, width, channels), dtype=np.float32)
    return torch.empty((batch, frames, channels, height, width), dtype=stretch.dtype)


def _parts(clip: torch.Tensor) -> list[torch.Tensor]:
    """(C, F, H, W) -> views (f, C, H, W) of a few frames each."""
    frames = clip.movedim(1, 0)
    return list(frames.split(max(1, PART_BYTES // (frames[0].numel() * 4))))
