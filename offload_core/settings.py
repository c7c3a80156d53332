"""One settings object with one set of defaults. Environment variables and presets become it at the edge."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError
from .limits import check_budget

#: How a model's weights may be held: as its files have them, or packed to 8 bits on their way in (`phases.load`).
WEIGHT_STORAGES = ("as stored", "fp8")


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
    resident_memory: the most that the larger weights of a component may take on the execution device after their use,
    0 for none of them, or "auto" (all that the budget has room for).
    pinned_memory: the most pinned RAM that may be taken for staging and for weights that go over the link again: a
    budget as above, 0 for none, or "auto" (see `Machine.pinned_limit`). No more than `host_memory` in any case.
    resident_below: weights smaller than this many bytes always stay on the execution device.
    drop_page_cache: whether file pages are dropped from the page cache as soon as they were read.
    direct_io: "auto" (past the page cache if the model doesn't fit it), "on" or "off".
    read_threads: threads that read ahead, each with a buffer of its own; 0 reads only when a weight is needed.
    encode_missing: whether Denoise may encode again what the embeds don't hold (another prompt, another text length);
    if not, it is a MissingRecordError.
    vae_tiling: "auto", "on" or "off" for Decode. "auto" tiles only if a plain decode runs out of memory.
    warm: whether what a phase reads from weight files is kept in RAM for later phases, as far as `host_memory` has room
    that nothing else needs.
    prompt_cache_folder: where the answers of encoders are kept between processes, too; None keeps them in memory only.
    """

    execution_device: str = "auto"
    offload_device: str = "cpu"
    device_memory: int | str = "auto"
    host_memory: int | str = "auto"
    activation_memory: int | str = "auto"
    resident_memory: int | str = "auto"
    pinned_memory: int | str = "auto"
    resident_below: int = 1 << 20
    direct_io: str = "auto"
    drop_page_cache: bool = False
    read_threads: int = 2
    encode_missing: bool = True
    vae_tiling: str = "auto"
    warm: bool = False
    prompt_cache_folder: str | None = None


def check_settings(settings: OffloadSettings) -> None:
    """Raises InputError for a setting that no phase could obey, on any machine."""
    for name in ("device_memory", "host_memory", "activation_memory", "resident_memory", "pinned_memory"):
        value = getattr(settings, name)
        if name in ("device_memory", "host_memory") or value not in (0, "0"):  # a phase may do without the others
            check_budget(value, name)
    for name in ("vae_tiling", "direct_io"):
        value = getattr(settings, name)
        if value not in ("auto", "on", "off"):
            raise InputError(f"{name} is {value!r}; use auto, on or off.")
    for name in ("resident_below", "read_threads"):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} is {value!r}; use a whole number from 0 on.")
    if not isinstance(settings.warm, bool):
        raise InputError(f"warm is {settings.warm!r}; use True or False.")
    folder = settings.prompt_cache_folder
    if folder is not None and (not isinstance(folder, str) or not folder):
        raise InputError(f"prompt_cache_folder is {folder!r}; use the path of a folder as text, or None.")
    if str(settings.offload_device) != "cpu":
        raise InputError(f"offload_device is {settings.offload_device!r}; weights can only be offloaded to cpu.")
