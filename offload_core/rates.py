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
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import OffloadError
from .file_reader import ReadBuffer, WeightFile
from .known import KnownMachine
from .plan import Rates
from .small_files import cache_folder, read_json, write_json

log = logging.getLogger(__name__)

_LARGEST_PRODUCT, _ELEMENTS, _FILE_BYTES = 8192, 16 << 20, 128 << 20
# What of a card's published peak its kernels reach on large transformers; and of a slot's and a disk's.
COMPUTE_SHARE, LINK_SHARE, DISK_SHARE, MEMORY_SHARE = 0.6, 0.8, 0.6, 0.75
BUSY_SHARE = 0.25  # of the CPUs, that others may take while the machine is measured
_UNTIL = "until"  # in the file: when rates that were measured beside busy programs are measured again
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
    """Rates of this machine with `device`: those kept in `file`, else measured now and kept. Those that were measured
    beside busy programs are kept for an hour."""
    file = file or cache_folder() / "rates.json"
    key = machine_key(device)
    kept = read_json(file)
    if isinstance(kept.get(key), dict) and kept[key].get(_UNTIL, float("inf")) > time.time():
        try:
            return Rates(**{name: value for name, value in kept[key].items() if name != _UNTIL})
        except TypeError:
            log.warning("%s has no usable rates for this machine; they are measured again.", file)
    began, busy = time.perf_counter(), others_busy_s()
    rates = measure(device, file.parent)
    others = (others_busy_s() - busy) / (time.perf_counter() - began)
    kept[key] = asdict(rates)
    if others > BUSY_SHARE * (os.cpu_count() or 1):
        log.info("Other programs kept %.1f CPUs busy while this machine was measured.", others)
        kept[key][_UNTIL] = time.time() + 3600
    write_json(file, kept, indent=2)
    return rates


def others_busy_s() -> float:
    """CPU seconds that other processes have taken since the system started."""
    import psutil

    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - time.process_time()


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
        access, read = _streaming_s(folder)
    disk, cached = _disk(folder)
    return Rates(flops, moved, operator, disk, cached, link, read, access, source=f"measured on {device}")


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
    """Seconds that an operator of a model costs, the library's own code around it included, where there is next to
    nothing to compute."""
    from diffusers import FluxTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "in_channels": 4}
    model = FluxTransformer2DModel(**sizes, joint_attention_dim=8, pooled_projection_dim=8, num_single_layers=2)
    model = model.to(device).eval()
    x, ids = torch.ones(1, 4, 8, device=device), torch.zeros(4, 3, device=device)
    time_s = torch.ones(1, device=device)

    def run() -> None:
        model(x[..., :4], x, x[:, 0], time_s, ids, ids)

    with _Operators() as operators:
        run()
    return _best(run, sync, budget_s=0.5) / operators.count


def _streaming_s(folder: Path | None) -> tuple[float, float]:
    """Seconds that a use of a weight takes more where others are streamed, and that a small streamed one takes."""
    from safetensors.torch import load_file, save_file

    count, width = 60, 32
    nbytes = count * width * width * 4
    stack = nn.Sequential(*(Linear(width, width, bias=False) for _ in range(count))).requires_grad_(False)
    x = torch.ones(2, width)
    place = folder if folder is not None and folder.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as made, torch.inference_mode(False):
        file = Path(made) / "weights.safetensors"
        save_file(stack.state_dict(), file)
        stack.load_state_dict(load_file(file), assign=True)
        with torch.no_grad():
            plain = _best(lambda: stack(x), lambda: None)
            found = [_streamed(stack, x, int(nbytes * share), file) for share in (0.3, 0.8)]
    (many_s, many_bytes), (few_s, few_bytes) = found
    many, few = (streamed * count // nbytes for streamed in (many_bytes, few_bytes))
    read = max((many_s - few_s) / (many - few), 1e-6)
    return max((few_s - plain - few * read) / count, 0.0), read


def _streamed(stack: nn.Module, x: torch.Tensor, nbytes: int, file: Path) -> tuple[float, int]:
    """Seconds of a call with so much memory for weights, and bytes that are streamed."""
    from .settings import OffloadSettings
    from .streaming import enable_offload

    settings = OffloadSettings(
        execution_device="cpu", device_memory=nbytes, host_memory="1GiB", activation_memory=0, resident_below=0
    )
    result = enable_offload(stack, settings=settings, component="rates", files=[file])
    try:
        return _best(lambda: stack(x), lambda: None), result.plan.streamed_bytes
    finally:
        result.release()


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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
