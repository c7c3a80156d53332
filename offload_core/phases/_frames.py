"""Frames of a video: from what a VAE decoded to the result, a few at a time, so that no second copy of a clip is made.

What the pipeline's processor does to frames it does to each by itself, so doing it in parts changes no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PART_BYTES = 16 << 20  # of float32 frames that are worked on at once


def finished_frames(processor: Any, video: torch.Tensor, output_type: str) -> Any:
    """What `processor.postprocess_video` gives for a video (B, C, F, H, W), on the CPU: float32 (B, F, H, W, C) in 0..1
    as an array ("np"), (B, F, C, H, W) in the video's dtype ("pt"), or lists of PIL images ("pil")."""
    batch, channels, frames, height, width = video.shape
    if output_type == "pil":
        return [[image for part in _parts(clip) for image in processor.postprocess(part, "pil")] for clip in video]
    result: Any
    if output_type == "np":
        result = np.empty((batch, frames, height, width, channels), dtype=np.float32)
    else:
        result = torch.empty((batch, frames, channels, height, width), dtype=video.dtype)
    for place, clip in enumerate(video):
        done = 0
        for part in _parts(clip):
            result[place, done : done + len(part)] = processor.postprocess(part, output_type)
            done += len(part)
    return result


def all_finite(pixels: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity, without a mask of the size of a clip."""
    low, high = torch.aminmax(pixels)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _parts(clip: torch.Tensor) -> list[torch.Tensor]:
    """(C, F, H, W) → views (f, C, H, W) of a few frames each."""
    frames = clip.movedim(1, 0)
    return list(frames.split(max(1, PART_BYTES // (frames[0].numel() * 4))))
