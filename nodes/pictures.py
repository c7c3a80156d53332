"""Pixels as a host's IMAGE and MASK, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image


def as_image(pixels: np.ndarray) -> torch.Tensor:
    """float32 (B, H, W, C) or (B, F, H, W, C) -> [B, H, W, C] or [B·F, H, W, C], over the same memory."""
    import numpy as np
    import torch

    return torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, *pixels.shape[-3:]))


def picture_as_image(picture: Image) -> torch.Tensor:
    """IMAGE [1, H, W, 3] of an RGB picture."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).unsqueeze(0)


def waveforms_as_image(audio: Mapping[str, Any]) -> torch.Tensor:
    """IMAGE [B, H, W, 3] of an AUDIO: each of its sounds drawn over its seconds."""
    import torch

    from offload_core.sound_chart import waveform_picture

    rate = audio["sample_rate"]
    return torch.cat([picture_as_image(waveform_picture(sound, rate)) for sound in audio["waveform"]])


def pictures_of(image: torch.Tensor) -> list[Image]:
    """RGB pictures of an IMAGE [B, H, W, C], rounded to 8 bits as files of pictures are. Its alpha is left aside."""
    from PIL import Image

    if image.ndim != 4 or image.shape[-1] not in (3, 4):
        raise InputError(f"The image has shape {tuple(image.shape)}; it must be [B, H, W, 3], or 4 with an alpha.")
    return [Image.fromarray(_in_8_bits(pixels[..., :3])) for pixels in image]


def mask_as_picture(mask: torch.Tensor) -> Image:
    """A grey picture of a MASK [H, W] or [1, H, W], white where it is 1. Raises InputError for several that differ."""
    from PIL import Image

    masks = mask.reshape(-1, *mask.shape[-2:])
    if (masks != masks[:1]).any():
        raise InputError(f"There are {len(masks)} masks that differ, and one picture to repaint. Choose one.")
    return Image.fromarray(_in_8_bits(masks[0]))


def _in_8_bits(pixels: torch.Tensor) -> Any:
    import torch

    return (pixels.cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
