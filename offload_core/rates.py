"""How fast this machine is, measured once in a few seconds and kept in a small file; and how fast a described one is.

The file is `rates.json` in the user's cache folder, or where the variable PHASE_OFFLOAD_CACHE points. It may be edited:
what it holds is believed until the machine's processor, device or torch is another one.
"""

from __future__ import annotations

import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import OffloadError
from .file_reader import ReadBuffer, WeightFile
from .known import KnownMachine
from .plan import Rates
from .small_files import cache_folder, read_json, write_json

log = logging.getLogger(__name__)

_LARGEST_PRODUCT, _ELEMENTS, _FILE_BYTES = 8192, 16 << 20, 128 << 20
# What of a card's published peak its kernels reach on large transformers; and of a slot's and a disk's.
COMPUTE_SHARE, LINK_SHARE, DISK_SHARE, MEMORY_SHARE = 0.6, 0.8, 0.6, 0.75
_DISK_BYTES_PER_S, _CACHED_BYTES_PER_S = 3.5e9, 8e9


def rates_of(machine: KnownMachine, disk_bytes_per_s: float = _DISK_BYTES_PER_S) -> Rates:
    """Rates of a described machine: stated shares of its published peaks. Not measured."""
    flops = {dtype: value * COMPUTE_SHARE for dtype, value in machine.flops.items()}
    flops.setdefault("bfloat16", flops.get("float16", flops["float32"]))
    return Rates(
        flops=flops,
        memory_bytes_per_s=machine.memory_bytes_per_s * MEMORY_SHARE,
        operator_s=5e-6,
        disk_bytes_per_s=disk_bytes_per_s * DISK_SHARE,
        cached_bytes_per_s=_CACHED_BYTES_PER_S,
        link_bytes_per_s=machine.link_bytes_per_s * LINK_SHARE,
        source=f"published figures of {machine.title}, {COMPUTE_SHARE:.0%} of its peak compute assumed; not measured",
    )


def measured_rates(device: torch.device, *, file: Path | None = None) -> Rates:
    """Rates of this machine with `device`: those kept in `file`, else measured now and kept."""
    file = file or cache_folder() / "rates.json"
    key = machine_key(device)
    kept = read_json(file)
    if key in kept:
        try:
            return Rates(**kept[key])
        except TypeError:
            log.warning("%s has no usable rates for this machine; they are measured again.", file)
    rates = measure(device, file.parent)
    kept[key] = asdict(rates)
    write_json(file, kept, indent=2)
    return rates


def measure(device: torch.device, folder: Path | None = None) -> Rates:
    """Measures compute, memory, link and disk in a few seconds. folder: on the disk that is meant."""
    sync: Callable[[], None] = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    with torch.inference_mode():
        flops = {str(dtype).removeprefix("torch."): _flops(device, dtype, sync) for dtype in _dtypes()}
        source = torch.ones(_ELEMENTS, device=device)
        moved = 2 * source.nbytes / _best(lambda: source + 1, sync)
        operator = _operator_s(device, sync)
        link = None
        if device.type != "cpu":
            host = torch.empty(_ELEMENTS * 4, dtype=torch.uint8, pin_memory=True)
            link = host.nbytes / _best(lambda: host.to(device, non_blocking=True), sync)
    disk, cached = _disk(folder)
    return Rates(flops, moved, operator, disk, cached, link, source=f"measured on {device}")


def _dtypes() -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16)


def _flops(device: torch.device, dtype: torch.dtype, sync: Callable[[], None]) -> float:
    """Of products as large as a moment allows: a dtype without units of its own may be a thousand times slower."""
    size, rate = 256, 0.0
    while size <= _LARGEST_PRODUCT:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _best(lambda a=a: a @ a, sync)  # type: ignore[misc]
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > 0.02:
            break
        size *= 2
    return rate


def _operator_s(device: torch.device, sync: Callable[[], None]) -> float:
    """Seconds that an operator of a module costs where there is next to nothing to compute."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU()) for _ in range(25)]
    stack, x = nn.Sequential(*layers).to(device).eval(), torch.ones(2, 8, device=device)
    operators = 4 * len(layers)  # a linear layer is two: a transposed view, and the product
    return _best(lambda: stack(x), sync) / operators


def _best(run: Callable[[], Any], sync: Callable[[], None], budget_s: float = 0.2) -> float:
    """Seconds of the fastest run, of as many as a part of a second allows, three at least: neighbours only make it
    slower."""
    run()
    sync()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or (time.perf_counter() - began < budget_s and len(seconds) < 50):
        start = time.perf_counter()
        run()
        sync()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _disk(folder: Path | None) -> tuple[float, float]:
    """Bytes per second of large reads: around the page cache (or of it, where the system has no other), and from it."""
    place = folder if folder is not None and folder.is_dir() else None
    try:
        with tempfile.NamedTemporaryFile(dir=place, suffix=".bin", delete=False) as file:
            path = Path(file.name)
            block = os.urandom(8 << 20)
            for _ in range(_FILE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        try:
            return _read_rate(path, direct=True), _read_rate(path, direct=False)
        finally:
            path.unlink()
    except (OSError, OffloadError) as error:
        log.info("The disk's rate couldn't be measured (%s); a usual one is assumed.", error)
        return _DISK_BYTES_PER_S * DISK_SHARE, _CACHED_BYTES_PER_S / 4


def _read_rate(path: Path, *, direct: bool) -> float:
    dest, buffer = torch.empty(_FILE_BYTES // 4, dtype=torch.uint8), ReadBuffer()
    rates = []
    with WeightFile(path, direct=direct) as file:
        for turn in range(3):
            start = time.perf_counter()
            for part in range(4):
                file.read_into(dest, part * len(dest), buffer)
            if turn or direct:
                rates.append(_FILE_BYTES / (time.perf_counter() - start))
    buffer.close()
    return max(rates)


def machine_key(device: torch.device) -> str:
    """A name of this machine with `device`, for what was measured on it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type} {name} {os.cpu_count()} torch {torch.__version__}"
