"""What the machine has and what is taken of it, as JSON: RAM, the device, pinned memory. Measured when it is old."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

FRESH_S = 2.0


class MachineFigures:
    """Figures of the machine, at most two seconds old. Asking may take long (a driver that starts), so not on a web
    server's own thread."""

    def __init__(self, device: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        self._lock = threading.Lock()
        self._figures: dict[str, Any] = {}
        self._measured_s = 0.0

    def read(self) -> dict[str, Any]:
        """host: RAM; device: memory of the device that phases compute on, None if that is the CPU. Each with `total`
        and `free` bytes, `source` (what sets the bound) and `taken` (of it, by this process). pinned_limit: bytes."""
        with self._lock:
            if not self._figures or self._clock() - self._measured_s > FRESH_S:
                self._figures, self._measured_s = measure(self._device()), self._clock()
            return self._figures


def measure(device: str) -> dict[str, Any]:
    """The figures now. device: a name such as "cuda:0", or "auto"."""
    import torch

    from offload_core.devices import allocated_bytes, device_title, resident_bytes, resolve_device
    from offload_core.limits import Machine

    machine, where = Machine(), resolve_device(device)
    memory = machine.device(where)
    of_device = None
    if where.type != "cpu":
        known = asdict(memory) if memory else {"total": 0, "free": 0, "source": "unknown"}
        of_device = {**known, "taken": allocated_bytes(where), "name": str(where), "title": device_title(where)}
    return {
        "host": {**asdict(machine.host()), "taken": resident_bytes()},
        "device": of_device,
        "pinned_limit": machine.pinned_limit() if where.type != "cpu" else 0,
        "wsl": machine.is_wsl(),
        "torch": torch.__version__,
    }
