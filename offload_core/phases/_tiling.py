"""Tiled VAE decoding with sizes that take effect.

`enable_tiling()` alone does nothing on VAEs whose tile size comes from `sample_size` (1024 for FLUX and SDXL), so the
sizes are always set here.
"""

from __future__ import annotations

import inspect
from typing import Any

TILE_PIXELS = 512


def tile(vae: Any, pixels: int) -> bool:
    """Makes `vae` decode in tiles of `pixels` a side, overlapping by a quarter. False if it can't. A VAE of waveforms
    has pieces in their place, of as many latent frames."""
    enable = getattr(vae, "enable_tiling", None)
    if enable is None:
        return False
    accepted = inspect.signature(enable).parameters
    stride = pixels * 3 // 4
    wanted = {
        "tile_sample_min_height": pixels,
        "tile_sample_min_width": pixels,
        "tile_sample_stride_height": stride,
        "tile_sample_stride_width": stride,
    }
    try:
        enable(**{name: value for name, value in wanted.items() if name in accepted})
    except NotImplementedError:
        return False
    if _is_of_waveforms(vae):
        vae.tile_latent_min_length, vae.tile_latent_overlap = pixels, pixels // 8  # an overlap on each side
    if hasattr(vae, "tile_latent_min_size"):
        vae.tile_sample_min_size = pixels
        vae.tile_latent_min_size = max(1, pixels // _spatial_scale(vae))
    if hasattr(vae, "tile_latent_min_height"):
        vae.tile_latent_min_height = vae.tile_latent_min_width = max(1, pixels // _spatial_scale(vae))
    return True


def tile_words(vae: Any, pixels: int) -> str:
    """The size of a tile, for people."""
    return f"{pixels} {'latent frames' if _is_of_waveforms(vae) else 'pixels'}"


def _is_of_waveforms(vae: Any) -> bool:
    return hasattr(vae, "tile_latent_min_length")


def _spatial_scale(vae: Any) -> int:
    ratio = getattr(vae, "spatial_compression_ratio", None)
    return int(ratio) if ratio else 2 ** (len(vae.config.block_out_channels) - 1)
