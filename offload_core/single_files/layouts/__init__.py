"""The layouts that are known, one module for related parts. Each row names its source."""

from __future__ import annotations

from ..layout import PartLayout
from . import autoencoders, flux, text_encoders, unet

LAYOUTS: tuple[PartLayout, ...] = (*unet.LAYOUTS, *flux.LAYOUTS, *text_encoders.LAYOUTS, *autoencoders.LAYOUTS)
