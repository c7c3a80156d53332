"""Pixels as a host's IMAGE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


def as_image(pixels: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) or (B, F, C, H, W) → [B, H, W, C] or [B·F, H, W, C], a tensor of its own."""
    import torch

    image = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels
    return image.movedim(1, -1).to(torch.float32).contiguous()


def picture_as_image(picture: Image) -> torch.Tensor:
    """IMAGE [1, H, W, 3] of an RGB picture."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).unsqueeze(0)
