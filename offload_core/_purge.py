"""Give memory back that libraries keep for reuse, and say how much it was."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass

import torch

from .devices import empty_cache, reserved_bytes, resident_bytes, resolve_device, trim_heap


@dataclass(frozen=True)
class PurgeReport:
    """Bytes given back: device_bytes to the driver of `device`, host_bytes of this process's resident set."""

    device: str
    device_bytes: int
    host_bytes: int

    def sentence(self) -> str:
        host = f"{self.host_bytes / 2**20:.0f} MiB of RAM"
        if self.device == "cpu":
            return f"Freed {host}."
        return f"Freed {self.device_bytes / 2**20:.0f} MiB on {self.device} and {host}."


def purge(device: str | torch.device = "auto") -> PurgeReport:
    """Collects garbage, empties torch's caches for `device` and pinned memory, and trims the heap."""
    where = resolve_device(device)
    device_before, host_before = reserved_bytes(where), resident_bytes()
    gc.collect()
    empty_cache(where)
    _empty_pinned_cache()
    trim_heap()
    return PurgeReport(
        str(where), max(0, device_before - reserved_bytes(where)), max(0, host_before - resident_bytes())
    )


def _empty_pinned_cache() -> None:
    """torch keeps freed pinned memory for reuse; it has an empty function since 2.7, private under two names."""
    for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):
        function = getattr(torch._C, name, None)
        if function is not None:
            with contextlib.suppress(RuntimeError):
                function()
                return
