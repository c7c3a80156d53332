"""One settings object with one set of defaults. Environment variables and presets become it at the edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadSettings:
    """How phases and offloaded modules run.

    execution_device: where it computes: "auto" (the accelerator if there is one, else the CPU) or a torch device.
    offload_device: where weights wait; only "cpu", which means RAM as far as `host_memory` goes and their files beyond.
    device_memory: the most that weights, their ring and the activation reserve may take on the execution device:
    bytes, "6GiB", "60%" of it, "leave 2GiB" of it free, or "auto" (what is free now, less a headroom).
    host_memory: the same for RAM: staging, pinned memory, private copies. If the CPU executes, hot weights count too.
    activation_memory: the part of `device_memory` that isn't given to weights: bytes, "1GiB", "15%" of that budget, or
    "auto" (a share of it, see `limits.activation_reserve`).
    resident_below: weights smaller than this many bytes always stay on the execution device.
    direct_io: "auto" (past the page cache if the model doesn't fit it), "on" or "off".
    read_threads: threads that read ahead, each with a buffer of its own; 0 reads only when a weight is needed.
    encode_missing: whether Denoise may encode again what the embeds don't hold (another prompt, another text length);
    if not, it is a MissingRecordError.
    vae_tiling: "auto", "on" or "off" for Decode. "auto" tiles only if a plain decode runs out of memory.
    """

    execution_device: str = "auto"
    offload_device: str = "cpu"
    device_memory: int | str = "auto"
    host_memory: int | str = "auto"
    activation_memory: int | str = "auto"
    resident_below: int = 1 << 20
    direct_io: str = "auto"
    read_threads: int = 2
    encode_missing: bool = True
    vae_tiling: str = "auto"
