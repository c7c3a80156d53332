"""One settings object with one set of defaults. Environment variables and presets become it at the edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadSettings:
    """How phases run.

    execution_device: where a phase computes: "auto" (the accelerator if there is one, else the CPU) or a torch device.
    encode_missing: whether Denoise may encode again what the embeds don't hold (another prompt, another text length);
    if not, it is a MissingRecordError.
    vae_tiling: "auto", "on" or "off" for Decode. "auto" tiles only if a plain decode runs out of memory.
    """

    execution_device: str = "auto"
    encode_missing: bool = True
    vae_tiling: str = "auto"
