"""Devices by torch's generic accelerator interface, so that CUDA, ROCm, XPU and MPS share one path."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .errors import DeviceError, InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device) -> torch.device:
    """The torch device that `device` names. "auto" is the accelerator if there is one, else the CPU.

    Raises DeviceError if it isn't there, InputError if it isn't a device name.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if str(device) == "auto":
        return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else _CPU
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise InputError(f"{device!r} isn't a device. Use auto, cpu, or an accelerator such as cuda:0.") from None
    if wanted.type == "cpu":
        return _CPU
    if accelerator is None or wanted.type != accelerator.type:
        here = f"This machine has {accelerator.type}" if accelerator else "torch finds no accelerator on this machine"
        raise DeviceError(f"The device {wanted} isn't available: {here}. Use device=auto or device=cpu.")
    if (wanted.index or 0) >= torch.accelerator.device_count():
        raise DeviceError(
            f"The device {wanted} isn't available: there are {torch.accelerator.device_count()} {wanted.type} devices, "
            "counted from 0."
        )
    return torch.device(wanted.type, wanted.index if wanted.index is not None else 0)


def device_title(device: torch.device) -> str:
    """A device's name for people: that of its driver, where torch can tell it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"this machine's {device.type.upper()}"


_CPU = torch.device("cpu")
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The torch dtype that `dtype` names, None for "auto". Raises InputError for any other name."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise InputError(f"{dtype!r} isn't a dtype that models run in. Use auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch keeps for reuse on `device` back to the driver."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        if device.type == "cuda" and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()  # they sit in the caching allocator after the first product
        _module_call(device, "empty_cache")


def empty_pinned_cache() -> None:
    """Gives pinned memory that torch keeps for reuse back to the system, where it can: its own function for that is
    newer than the one under a private name (torch 2.7)."""
    private = getattr(torch._C, "_accelerator_emptyHostCache", None) or getattr(torch._C, "_host_emptyCache", None)
    empty = getattr(torch.accelerator, "empty_host_cache", None) or private
    if empty is not None:
        with contextlib.suppress(RuntimeError):
            empty()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out: some backends and the CPU's allocator raise a bare RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)


def reserved_bytes(device: torch.device) -> int:
    return int(_module_call(device, "memory_reserved") or 0)


def allocated_bytes(device: torch.device) -> int:
    return int(_module_call(device, "memory_allocated") or 0)


def peak_bytes(device: torch.device) -> int:
    return int(_module_call(device, "max_memory_allocated") or 0)


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)  # starts the device: its statistics don't by themselves
    _module_call(device, "reset_peak_memory_stats")


def total_bytes(device: torch.device) -> int | None:
    """Memory of the whole device, None where the driver doesn't say (and for the CPU)."""
    info = _module_call(device, "mem_get_info")
    return int(info[1]) if info else None


def _module_call(device: torch.device, name: str) -> Any:
    """Calls `torch.<device type>.<name>(device)`, None where that backend has no such function."""
    if device.type == "cpu":
        return None
    function: Callable[..., Any] | None = getattr(getattr(torch, device.type, None), name, None)
    if function is None:
        return None
    return function() if name == "empty_cache" else function(device)


def trim_heap() -> None:
    """Asks the C library to return freed pages to the system, where it can (glibc keeps them otherwise)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


class HostPeak:
    """Peak resident set of this process, in bytes, since it was made.

    On Linux the kernel keeps the high-water mark (proc(5): writing 5 to clear_refs resets VmHWM); elsewhere the mark is
    the largest value seen at the calls of `sample`.
    """

    def __init__(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self._kernel = True
        except OSError:
            self._kernel = False
        self._seen = 0
        self.sample()

    def sample(self) -> int:
        self._seen = max(self._seen, _high_water_mark() if self._kernel else resident_bytes())
        return self._seen


def _high_water_mark() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)


class RandomState:
    """The state of torch's random generators: the CPU's, and that of `device` where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    def changed(self) -> bool:
        """Whether random numbers were drawn since."""
        return any(not torch.equal(now, then) for now, then in zip(self._now(), self._states, strict=True))

    def restore(self) -> None:
        cpu, *own = self._states
        torch.set_rng_state(cpu)
        for state in own:
            getattr(torch, self._device.type).set_rng_state(state, self._device)

    def _now(self) -> list[torch.Tensor]:
        own = _module_call(self._device, "get_rng_state")
        return [torch.get_rng_state(), *([own] if own is not None else [])]
