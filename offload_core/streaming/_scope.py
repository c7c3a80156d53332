"""A scope: one device, one pair of budgets, one ring and one set of readers for all modules that run in it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..file_reader import FileIdentity, ReadBuffer, WeightFile
from ..ledger import Ledger, Reservation
from ..limits import (
    Machine,
    Memory,
    activation_reserve,
    auto_device_budget,
    auto_host_budget,
    parse_budget,
    parse_limit,
)
from ..memory_host import Pins
from ..settings import OffloadSettings, check_settings
from ..stored_weight import StoredWeight
from ..warm import WarmStore
from ._accelerator import AcceleratorCopies, link_bytes
from ._cache import WeightCache
from ._copies import CopyEngine, CpuCopies
from ._forms import DtypeRule
from ._homes import Homes
from ._managed import Managed
from ._plan import StreamPlan
from ._readers import Readers

log = logging.getLogger(__name__)

_LARGEST_CHUNK, _SMALLEST_CHUNK = 4 << 20, 64 << 10
_STAGING_BYTES = 64 << 20


class OffloadScope:
    """Everything that modules under offload share. `close` gives all of it back.

    poll: see WeightCache. machine: what answers about memory. pins: who pins memory, None for torch. warm: copies of
    weights in RAM, which give way to whatever is booked here; with `settings.warm` they are used, and added to.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        device: torch.device,
        *,
        poll: Callable[[int], None] | None = None,
        machine: Machine | None = None,
        pins: Pins | None = None,
        warm: WarmStore | None = None,
    ) -> None:
        check_settings(settings)
        self.settings, self.device = settings, device
        self.machine, self._warm_store = machine or Machine(), warm
        self.ledger, self.device_memory, self.host_memory = self._ledger()
        total = self.ledger.limits["device"]
        self.resident_limit = parse_limit(settings.resident_memory, self.device_memory, "resident_memory")
        self.activation_bytes = activation_reserve(settings.activation_memory, total)
        self.warm = warm.use(self.ledger.spare_host_bytes) if warm is not None and settings.warm else None
        self._reserve = self.ledger.reserve("device", "activations", self.activation_bytes)
        self._unpacking: Reservation | None = None
        chunk = min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, total // 128 // 4096 * 4096))
        self._buffers = [ReadBuffer(chunk) for _ in range(1 + max(settings.read_threads, 0))]
        self._staging = self.ledger.reserve("host", "staging", self.staging_bytes)
        self.engine = self._engine(chunk, pins)
        self.cache = WeightCache(self.engine, self.ledger, self._buffers, poll=poll)
        self._files: dict[Path, WeightFile] = {}
        self._managed: list[weakref.ref[Managed]] = []
        self._closed_bytes = 0
        self._end = weakref.finalize(self.cache, _shut, self.cache.readers, self._buffers, self._files)
        self._end.atexit = False

    def attach(
        self,
        module: nn.Module,
        *,
        name: str,
        files: Sequence[Path] | None = (),
        dtype_of: DtypeRule | None = None,
        restore: bool = True,
        plain_if_whole: bool = False,
        keep_grad: bool = False,
        planned: StreamPlan | None = None,
        added_bytes: int = 0,
        homes: Homes | None = None,
        was_there: bool = False,
        stored: Mapping[str, StoredWeight] | None = None,
        pack: Collection[str] = (),
    ) -> Managed:
        """Takes a module under offload; see `Managed.attach` for the arguments.

        Raises BudgetError, ManagedModuleError or ModelError; nothing changed then.
        """
        managed = Managed(self, name)
        managed.attach(
            module,
            files,
            dtype_of,
            restore=restore,
            plain_if_whole=plain_if_whole,
            keep_grad=keep_grad,
            planned=planned,
            added_bytes=added_bytes,
            homes=homes,
            was_there=was_there,
            stored=stored,
            pack=pack,
        )
        self._managed.append(weakref.ref(managed))
        return managed

    def forget(self, managed: Managed) -> None:
        self._managed = [ref for ref in self._managed if ref() is not None and ref() is not managed]

    @property
    def in_use(self) -> bool:
        """Whether any module is under offload here."""
        return bool(self.modules)

    def available(self) -> int:
        """Bytes of device memory that a further module could get: what is free and not promised to residents."""
        return self.ledger.free("device") - self.cache.promised_bytes

    def make_room(self, nbytes: int) -> None:
        """Makes up to `nbytes` available by streaming weights of modules that were attached before and wait now. If
        that isn't enough, their ring is given back, too: the next module makes one that serves them all."""
        for managed in self.modules:
            while (missing := nbytes + self._ring_missing() - self.available()) > 0 and managed.stream_more(missing):
                pass
        if nbytes + self._ring_missing() > self.available():
            self.cache.empty_ring()

    @property
    def unpacking_bytes(self) -> int:
        """What is kept for weights that are unpacked while an operator uses them."""
        return self._unpacking.nbytes if self._unpacking is not None else 0

    def keep_unpacking(self, nbytes: int) -> None:
        """Keeps so much for that; modules run one after another, so the hungriest one's is enough. BudgetError."""
        if nbytes > self.unpacking_bytes:
            if self._unpacking is not None:
                self._unpacking.release()
            self._unpacking = self.ledger.reserve("device", "unpacking", nbytes)

    def _ring_missing(self) -> int:
        """Bytes of a ring for the attached modules that isn't there yet."""
        needed = self.largest_bytes
        return needed + self.engine.align if needed > self.cache.ring.largest else 0

    @property
    def largest_bytes(self) -> int:
        """Bytes of the ring that the hungriest operator of any attached module needs."""
        return max((managed.largest_bytes for managed in self.modules), default=0)

    @property
    def modules(self) -> list[Managed]:
        """The modules that are under offload here."""
        return [managed for ref in self._managed if (managed := ref()) is not None]

    @property
    def promised_host_bytes(self) -> int:
        """Bytes of weights that will stay in pinned memory and aren't there yet."""
        entries = [entry for managed in self.modules for entry in managed.entries]
        return sum(link_bytes(entry) for entry in entries if entry.keep_on_host and entry.host is None)

    def file(self, path: Path) -> WeightFile:
        """The reader of a weight file, opened once. Read past the page cache where that couldn't hold it anyway."""
        if path not in self._files:
            identity = FileIdentity.of(path)
            self._files[path] = WeightFile(
                path,
                identity,
                direct=self._direct(identity.size),
                keep_cached=not self.settings.drop_page_cache,
            )
        return self._files[path]

    @property
    def bytes_read(self) -> int:
        """Bytes read from weight files so far."""
        return self._closed_bytes + sum(file.bytes_read for file in self._files.values())

    @property
    def warm_bytes(self) -> int:
        """Bytes of weights that were in RAM already, so that they weren't read."""
        return self.warm.taken_bytes if self.warm is not None else 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers through which files are read."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _direct(self, nbytes: int) -> bool:
        if self.settings.direct_io != "auto":
            return self.settings.direct_io == "on"
        spare = self.machine.host().free - (self.ledger.free("device") if self.device.type == "cpu" else 0)
        return nbytes > spare // 2

    def close(self) -> int:
        """Releases every module, joins the readers, frees everything. Returns bytes that somebody still holds."""
        for managed in self.modules:
            managed.release(restore=False)
        held = self.cache.close()
        self._end.detach()
        for file in self._files.values():
            self._closed_bytes += file.bytes_read
            file.close()
        self._files.clear()
        self._staging.release()
        if self._unpacking is not None:
            self._unpacking.release()
        self._reserve.release()
        return held

    def _ledger(self) -> tuple[Ledger, Memory, Memory]:
        settings, host, warm = self.settings, self.machine.host(), self._warm_store
        if warm is not None:
            host = replace(host, free=host.free + warm.held_bytes)  # it gives way
        host_auto = auto_host_budget(host)
        host_budget = parse_budget(
            settings.host_memory, free=host.free, total=host.total, auto=host_auto, name="host_memory"
        )
        on_cpu = self.device.type == "cpu"
        memory = None if on_cpu else self.machine.device(self.device)
        if on_cpu:
            memory, auto = host, host_budget
        elif memory is None:
            memory, auto = Memory(total=0, free=0, source="unknown"), 1 << 62
        else:
            auto = auto_device_budget(memory)
        device_budget = parse_budget(
            settings.device_memory, free=memory.free, total=memory.total, auto=auto, name="device_memory"
        )
        if on_cpu and settings.host_memory == "auto":
            # Hot weights are in RAM, too: what the user allows for them isn't taken back by a cautious guess.
            host_budget = max(host_budget, min(device_budget + _STAGING_BYTES, host.free))
        return Ledger(device=device_budget, host=host_budget, shared=on_cpu, evictable=warm), memory, host

    def _engine(self, chunk_bytes: int, pins: Pins | None) -> CopyEngine:
        if self.device.type == "cpu":
            return CpuCopies()
        chunks = 2 * len(self._buffers)
        limit, asked = (
            self.machine.pinned_limit(),
            parse_limit(self.settings.pinned_memory, self.host_memory, "pinned_memory"),
        )
        limit = limit if asked is None else min(limit, asked)
        return AcceleratorCopies(
            self.device, self.ledger, chunk_bytes=chunk_bytes, chunks=chunks, pinned_bytes=limit, pins=pins
        )


def _shut(readers: Readers, buffers: list[ReadBuffer], files: dict[Any, WeightFile]) -> None:
    """What is left to do when a scope is dropped without `close`."""
    readers.close()
    for buffer in buffers:
        buffer.close()
    for file in files.values():
        file.close()
