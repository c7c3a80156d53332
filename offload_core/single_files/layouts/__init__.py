"""The layouts that are known, one module for related parts. Each row names its source."""

from __future__ import annotations

from ..layout import PartLayout
from . import (
    autoencoders,
    flux,
    flux_relatives,
    language_models,
    llama_cpp,
    other_transformers,
    sd3,
    text_encoders,
    unet,
    wan_autoencoder,
)

LAYOUTS: tuple[PartLayout, ...] = (
    *unet.LAYOUTS,
    *flux.LAYOUTS,
    *flux_relatives.LAYOUTS,
    *sd3.LAYOUTS,
    *other_transformers.LAYOUTS,
    *text_encoders.LAYOUTS,
    *language_models.LAYOUTS,
    *llama_cpp.LAYOUTS,
    *autoencoders.LAYOUTS,
    *wan_autoencoder.LAYOUTS,
)
