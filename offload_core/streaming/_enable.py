"""`enable_offload`: the face of the streaming engine for any module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import empty_cache, resolve_device
from ..settings import OffloadSettings
from ._guards import check_free, manager_of
from ._homes import Homes, take_to_host
from ._managed import Managed
from ._plan import StreamPlan
from ._scope import OffloadScope


@dataclass(frozen=True)
class StreamReport:
    """What an offloaded component took and did so far. Bytes and seconds.

    peak_bytes: most device memory that was reserved (weights, ring, activation reserve) of device_budget_bytes.
    host_peak_bytes: the same in RAM. resident_bytes: hot weights that stay. ring_bytes: what streamed weights pass
    through. streamed_bytes: bytes of hot copies that were made so far. read_bytes: bytes read from files. stall_s:
    seconds that compute waited for weights. grown_bytes: by how much the ring had to grow. unmanaged_bytes: weights
    that were added later (LoRA) and stay on the device.
    """

    device_budget_bytes: int
    host_budget_bytes: int
    peak_bytes: int
    host_peak_bytes: int
    resident_bytes: int
    ring_bytes: int
    streamed_bytes: int
    read_bytes: int
    fetches: int
    hits: int
    stall_s: float
    grown_bytes: int
    unmanaged_bytes: int
    by_kind: dict[str, int]


class Offload:
    """A module under offload. `module` is used as ever; `release` gives it back as it was, with its edits."""

    def __init__(self, module: nn.Module, managed: Managed) -> None:
        self.module = module
        self._managed = managed
        self.plan: StreamPlan = managed.plan

    def report(self) -> StreamReport:
        scope = self._managed.scope
        counts, ledger = scope.cache.counts, scope.ledger
        return StreamReport(
            device_budget_bytes=ledger.limits["device"],
            host_budget_bytes=ledger.limits["host"],
            peak_bytes=ledger.peak("device"),
            host_peak_bytes=ledger.peak("host"),
            resident_bytes=ledger.by_kind("device").get("resident", 0),
            ring_bytes=scope.cache.ring.nbytes,
            streamed_bytes=counts.fetched_bytes,
            read_bytes=scope.bytes_read,
            fetches=counts.fetches,
            hits=counts.hits,
            stall_s=counts.stall_s,
            grown_bytes=scope.cache.ring.grown_bytes,
            unmanaged_bytes=self._managed.new_bytes(self.module),
            by_kind=ledger.by_kind("device"),
        )

    def release(self) -> int:
        """Gives the module its own weights back and frees everything else. May be called twice.

        Returns the bytes of streamed copies that somebody outside still holds (0 is right).
        """
        if self._managed.released:
            return 0
        scope, held = self._managed.scope, 0
        try:
            self._managed.release(restore=True)
        finally:
            if not scope.in_use:  # it may be shared
                held = scope.close()
        return held

    def cool(self) -> None:
        """Gives back all memory that weights take beside their masters; the module stays under offload."""
        self._managed.cool()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def offload_of(module: nn.Module) -> Offload | None:
    """The offload that a module is under, whoever made it; None if it is under none."""
    managed = manager_of(module)
    return Offload(module, managed) if managed is not None else None


def enable_offload(
    module: nn.Module,
    *,
    settings: OffloadSettings | None = None,
    component: str = "model",
    files: Sequence[str | os.PathLike[str]] = (),
    scope: OffloadScope | None = None,
    homes: Homes | None = None,
) -> Offload:
    """Runs `module` on `settings.execution_device` inside `settings.device_memory`, with the same bits as if it were
    resident there. Call the module, or any method of it, as ever; inputs must be on the execution device.

    component: what it is called in messages and reports. files: its safetensors files; weights that were loaded from
    them in their own dtype (`from_pretrained` maps them) are read from there when they are needed. Without `files`
    they are found by what is mapped. A module that only lives in RAM is streamed from there; one that is on an
    accelerator is taken to RAM first, and goes back when it is released. scope: budgets and ring to be shared with
    other modules; it is closed with the last of them, and `settings` aren't asked. homes: of a module that was taken to
    RAM already (`take_to_host`), before a shared scope measured what is free.

    Raises BudgetError (with the smallest budget that works), ManagedModuleError for a module that is under offload
    already or has a kind of weight that can't be, DeviceError, InputError, ModelError. The module is unchanged then.
    """
    settings = settings or OffloadSettings()
    device = scope.device if scope is not None else resolve_device(settings.execution_device)
    if homes is None:
        check_free(module, component)
        homes = take_to_host(module, component)
    try:
        if scope is None:
            if homes:
                empty_cache(device)  # "auto" is what is free now
            scope = OffloadScope(settings, device)
        with torch.no_grad():
            managed = scope.attach(
                module,
                name=component,
                files=[Path(file) for file in files] or None,
                homes=homes,
                was_there=True,
            )
    except BaseException:
        if scope is not None and not scope.in_use:
            scope.close()
        homes.restore()
        raise
    return Offload(module, managed)
