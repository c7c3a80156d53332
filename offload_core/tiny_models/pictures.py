"""Pictures to start from, made here."""

import torch
from PIL import Image

from .weights import seeded


def picture(name: str, height: int = 48, width: int = 64) -> Image.Image:
    """Return a smooth RGB picture that depends on the name alone."""
    coarse = torch.rand(1, 3, 4, 4, generator=seeded(name))
    pixels = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    return Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def mask(height: int = 48, width: int = 64) -> Image.Image:
    """Return a mask, white (to be painted) on the right half."""
    pixels = torch.zeros(height, width, dtype=torch.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels.numpy())
