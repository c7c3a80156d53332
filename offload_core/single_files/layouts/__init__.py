"""The layouts that are known, one module for related parts. Each row names its source."""

from __future__ import annotations

from ..layout import PartLayout
from . import (
    autoencoders,
    flux,
    flux_relatives,
    gemma,
    hunyuan_video,
    language_models,
    llama_cpp,
    ltx,
    ltx_autoencoder,
    lumina,
    other_transformers,
    sd3,
    text_encoders,
    unet,
    vision_encoders,
    wan22_autoencoder,
    wan_autoencoder,
    wan_vace,
)

LAYOUTS: tuple[PartLayout, ...] = (
    *unet.LAYOUTS,
    *flux.LAYOUTS,
    *flux_relatives.LAYOUTS,
    *sd3.LAYOUTS,
    *other_transformers.LAYOUTS,
    *wan_vace.LAYOUTS,
    *hunyuan_video.LAYOUTS,
    *lumina.LAYOUTS,
    *ltx.LAYOUTS,
    *text_encoders.LAYOUTS,
    *language_models.LAYOUTS,
    *llama_cpp.LAYOUTS,
    *gemma.LAYOUTS,
    *vision_encoders.LAYOUTS,
    *autoencoders.LAYOUTS,
    *wan_autoencoder.LAYOUTS,
    *wan22_autoencoder.LAYOUTS,
    *ltx_autoencoder.LAYOUTS,
)
