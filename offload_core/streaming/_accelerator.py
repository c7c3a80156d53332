"""Copies to an accelerator: a side stream, events and pinned memory, over torch's generic interface (CUDA, ROCm, XPU).

Nothing here makes the host wait for the device, but a reader that needs its staging memory back. Compute waits for a
copy by an event on its own stream; a copy waits for compute by an event recorded after the last holder of the slot let
go. On MPS, where storages can't be made over a part of another, each slot is an allocation of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..devices import empty_pinned_cache
from ..errors import BudgetError
from ..file_reader import ReadBuffer, ReadStopped
from ..ledger import Ledger, Reservation
from ..memory_host import Pins
from ._copies import cast, cast_into
from ._masters import Master, Stop
from ._shape import as_bytes, flat
from ._weight import Entry

log = logging.getLogger(__name__)

_SLAB_BYTES = 256 << 20
_WAIT_S = 0.05


class AcceleratorCopies:
    """The copy engine of a device with streams.

    chunk_bytes: size of a staging chunk. chunks: how many there are. pinned_bytes: the most pinned memory it may take.
    pins: who pins it, None for torch.
    """

    align = 512
    eager = True

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        *,
        chunk_bytes: int,
        chunks: int,
        pinned_bytes: int,
        pins: Pins | None = None,
    ) -> None:
        self.device, self.whole = device, device.type != "mps"
        self._ledger = ledger
        self._stream = torch.Stream(device=device)
        self._home = torch.accelerator.current_stream(device)
        self._pinned = PinnedMemory(ledger, pinned_bytes, pins)
        self._staging = Staging(self._pinned, chunk_bytes, chunks)
        self._cast_lock = threading.Lock()
        self._cast_buffer: torch.Tensor | None = None
        self._cast_reservation: Reservation | None = None

    @property
    def pinned_free(self) -> int:
        """Bytes of pinned memory that weights could still get."""
        return self._pinned.free

    def want_pinned(self, nbytes: int) -> None:
        self._pinned.want(nbytes)

    def prepare_casts(self, nbytes: int) -> None:
        """A device buffer for stored bytes of up to `nbytes` a weight that are cast after the link."""
        nbytes = min(-(-nbytes // 64) * 64, self._staging.chunk_bytes)
        with self._cast_lock:
            if self._cast_buffer is None or self._cast_buffer.numel() < nbytes:
                self.drain()
                reservation = self._ledger.reserve("device", "cast", nbytes)
                try:
                    self._cast_buffer = self.allocate(nbytes)
                except BaseException:
                    reservation.release()
                    raise
                if self._cast_reservation is not None:
                    self._cast_reservation.release()
                self._cast_reservation = reservation

    def allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # The allocator may hand out memory that kernels enqueued before still use: copies come after them.
        self._stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        return memory

    def fill(self, entry: Entry, hot: torch.Tensor, buffer: ReadBuffer, stop: Stop) -> Any:
        master = entry.master
        assert master is not None
        with torch.inference_mode(False), torch.no_grad(), self._stream:
            kept = self._kept(entry, master, buffer, stop)
            if kept is not None:
                self._send(flat(hot), kept, entry)
            else:
                self._stage(flat(hot), master, entry, buffer, stop)
            return self._stream.record_event()

    def take_warm(self, entry: Entry) -> torch.Tensor | None:
        return None  # what is warm is in RAM

    def give_warm(self, entry: Entry, memory: torch.Tensor) -> None:
        pass

    def before_use(self, entry: Entry) -> None:
        stream = torch.accelerator.current_stream(self.device)
        if entry.ready is not None:
            stream.wait_event(entry.ready)
        if entry.region is not None:
            entry.region.streams.add(stream)
        elif stream != self._home and entry.hot is not None:
            entry.hot.record_stream(stream)

    def is_complete(self, entry: Entry) -> bool:
        if entry.ready is not None and entry.ready.query():
            entry.ready = None
        return entry.ready is None and torch.accelerator.current_stream(self.device) == self._home

    def retire(self, streams: Iterable[Any]) -> None:
        for stream in streams:
            self._stream.wait_event(stream.record_event())

    def forget(self, entry: Entry) -> None:
        if entry.host is not None:
            self._stream.synchronize()
            self._pinned.give(entry.host)
            entry.host = None

    def trim(self) -> None:
        self._pinned.trim()
        empty_pinned_cache()

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._staging.close()
        self._pinned.close()
        self._cast_buffer = None
        if self._cast_reservation is not None:
            self._cast_reservation.release()
        empty_pinned_cache()

    # --- the three ways of a weight --------------------------------------------------------------------------------

    def _kept(self, entry: Entry, master: Master, buffer: ReadBuffer, stop: Stop) -> torch.Tensor | None:
        """The weight's bytes in pinned memory, as they go over the link, if it is one that stays in RAM."""
        if not entry.keep_on_host:
            return None
        if entry.host is None:
            host = self._pinned.take(entry.layout.count * _link_dtype(entry, master).itemsize)
            if host is None:
                entry.keep_on_host = False
                return None
            try:
                if _cast_on_host(entry, master):
                    cast_into(host.view(entry.layout.dtype), master, entry.casts, buffer, stop)
                else:
                    master.read_into(host, buffer, stop)
            except BaseException:
                self._pinned.give(host)
                raise
            entry.host = host
        return entry.host

    def _send(self, hot: torch.Tensor, pinned: torch.Tensor, entry: Entry) -> None:
        assert entry.master is not None
        if not entry.casts or _cast_on_host(entry, entry.master):
            as_bytes(hot).copy_(pinned, non_blocking=True)
            return
        self._cast_on_device(hot, pinned, 0, entry)

    def _stage(self, hot: torch.Tensor, master: Master, entry: Entry, buffer: ReadBuffer, stop: Stop) -> None:
        """Through pinned chunks, each used again when its copy is done."""
        on_host = _cast_on_host(entry, master)
        for position, chunk in master.chunks(buffer, stop):
            for start, part in _pieces(chunk, self._staging.chunk_bytes):
                values = cast(part.view(master.dtype), entry.casts) if on_host else part
                source = as_bytes(values) if on_host else values
                with self._staging.chunk(stop) as staged:
                    pinned = staged.memory[: source.numel()]
                    pinned.copy_(source)
                    if entry.casts and not on_host:
                        self._cast_on_device(hot, pinned, position + start, entry)
                    else:
                        at = (position + start) // master.dtype.itemsize * hot.dtype.itemsize
                        as_bytes(hot)[at : at + pinned.numel()].copy_(pinned, non_blocking=True)
                    staged.event = self._stream.record_event()

    def _cast_on_device(self, hot: torch.Tensor, pinned: torch.Tensor, position: int, entry: Entry) -> None:
        """Copies stored bytes to a device buffer and casts from there, both in the order of the copy stream."""
        assert entry.master is not None
        stored = entry.master.dtype
        with self._cast_lock:
            assert self._cast_buffer is not None
            for offset, piece in _pieces(pinned, self._cast_buffer.numel()):
                raw = self._cast_buffer[: piece.numel()]
                raw.copy_(piece, non_blocking=True)
                start, count = (position + offset) // stored.itemsize, piece.numel() // stored.itemsize
                hot[start : start + count].copy_(cast(raw.view(stored), entry.casts))


def _cast_on_host(entry: Entry, master: Master) -> bool:
    """Whether a weight is cast before the link: when that makes it smaller."""
    return bool(entry.casts) and master.dtype.itemsize > entry.layout.dtype.itemsize


def _link_dtype(entry: Entry, master: Master) -> torch.dtype:
    return entry.layout.dtype if _cast_on_host(entry, master) else master.dtype


def link_bytes(entry: Entry) -> int:
    """Bytes that go over the link for one hot copy."""
    assert entry.master is not None
    return entry.layout.count * _link_dtype(entry, entry.master).itemsize


def _pieces(chunk: torch.Tensor, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, chunk.numel(), nbytes):
        yield start, chunk[start : start + nbytes]


class PinnedMemory:
    """Pinned memory in slabs, booked at the size they really have: torch's allocator rounds up to powers of two.

    Where pinning fails, or `pins` refuses, there is none, said once in the log, and copies go through ordinary memory.
    """

    def __init__(self, ledger: Ledger, limit: int, pins: Pins | None = None) -> None:
        self._ledger, self._limit, self._pins = ledger, limit, pins
        self._slabs: list[tuple[torch.Tensor, Reservation]] = []
        self._free: list[tuple[int, int, int]] = []  # slab, offset, bytes
        self._where: dict[int, tuple[int, int, int]] = {}
        self._lock = threading.Lock()
        self._wanted = 0
        self.works = True

    def want(self, nbytes: int) -> None:
        """Says that this much will be taken in small parts, so that slabs are made neither too small nor too large."""
        with self._lock:
            self._wanted += nbytes

    @property
    def free(self) -> int:
        if not self.works:
            return 0
        with self._lock:
            unused = sum(size for _, _, size in self._free)
            taken = sum(slab.numel() for slab, _ in self._slabs)
        return unused + max(min(self._limit - taken, self._ledger.free("host")), 0)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Pinned bytes (uint8, 1-D), None if there is no room or pinning doesn't work."""
        size = -(-nbytes // 64) * 64
        with self._lock:
            found = self._find(size)
            if found is None and self._add_slab(size):
                found = self._find(size)
            if found is None:
                return None
            slab, offset, room = found
            self._free.remove(found)
            if room > size:
                self._free.append((slab, offset + size, room - size))
            memory = self._slabs[slab][0][offset : offset + nbytes]
            self._where[memory.data_ptr()] = (slab, offset, size)
            self._wanted = max(self._wanted - size, 0)
            return memory

    def give(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._free.append(self._where.pop(memory.data_ptr()))

    def trim(self) -> None:
        """Gives back slabs of which nothing is taken. What was kept there will be wanted again."""
        with self._lock:
            for number, (slab, reservation) in enumerate(self._slabs):
                if slab.numel() and sum(size for at, _, size in self._free if at == number) == slab.numel():
                    self._free = [part for part in self._free if part[0] != number]
                    self._unpin(slab)
                    self._slabs[number] = (torch.empty(0, dtype=torch.uint8), reservation)
                    self._wanted += slab.numel()
                    reservation.release()

    def close(self) -> None:
        with self._lock:
            for slab, reservation in self._slabs:
                self._unpin(slab)
                reservation.release()
            self._slabs.clear()
            self._free.clear()
            self._where.clear()

    def _find(self, size: int) -> tuple[int, int, int] | None:
        return min((free for free in self._free if free[2] >= size), key=lambda free: free[2], default=None)

    def _add_slab(self, size: int) -> bool:
        if not self.works:
            return False
        taken = sum(slab.numel() for slab, _ in self._slabs)
        room = min(self._limit - taken, self._ledger.free("host"))
        nbytes = 1 << (size - 1).bit_length()
        while nbytes < self._wanted and nbytes * 2 <= min(_SLAB_BYTES, room):
            nbytes *= 2
        if nbytes > room:
            return False
        try:
            reservation = self._ledger.reserve("host", "pinned", nbytes)
        except BudgetError:
            return False
        try:
            slab = self._pin(nbytes)
        except BaseException as error:
            reservation.release()
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            self.works = False
            log.warning("Pinning memory failed (%s); copies go through ordinary memory, more slowly.", str(error))
            return False
        self._free.append((len(self._slabs), 0, nbytes))
        self._slabs.append((slab, reservation))
        return True

    def _pin(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            if self._pins is None:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            slab = torch.empty(nbytes, dtype=torch.uint8)
        if not self._pins.pin(slab):
            raise RuntimeError("the host refuses to pin more")
        return slab

    def _unpin(self, slab: torch.Tensor) -> None:
        if self._pins is not None and slab.numel():
            self._pins.unpin(slab)


class _Chunk:
    """A staging chunk. event: recorded after the copy from it, to be waited for before it is written again."""

    def __init__(self, memory: torch.Tensor, home: queue.SimpleQueue[_Chunk]) -> None:
        self.memory, self._home, self.event = memory, home, None

    event: Any

    def __enter__(self) -> _Chunk:
        return self

    def __exit__(self, *_: Any) -> None:
        self._home.put(self)


class Staging:
    """A fixed number of pinned chunks between files and the device. Made when the first is needed."""

    def __init__(self, pinned: PinnedMemory, chunk_bytes: int, chunks: int) -> None:
        self.chunk_bytes, self._count, self._pinned = chunk_bytes, chunks, pinned
        self._ready: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()
        self._made = False
        self._lock = threading.Lock()
        self._own: Reservation | None = None

    def chunk(self, stop: Stop) -> _Chunk:
        """A chunk whose last copy is done; waits for one. Raises ReadStopped if it is asked to stop meanwhile."""
        with self._lock:
            if not self._made:
                self._make()
                self._made = True
        while True:
            try:
                chunk = self._ready.get(timeout=_WAIT_S)
                break
            except queue.Empty:
                if stop():
                    raise ReadStopped from None
        if chunk.event is not None:
            chunk.event.synchronize()
            chunk.event = None
        return chunk

    def _make(self) -> None:
        slab = self._pinned.take(self.chunk_bytes * self._count)
        if slab is None:
            self._own = self._pinned._ledger.reserve("host", "staging", self.chunk_bytes * self._count)
            slab = torch.empty(self.chunk_bytes * self._count, dtype=torch.uint8)
        for start in range(0, slab.numel(), self.chunk_bytes):
            self._ready.put(_Chunk(slab[start : start + self.chunk_bytes], self._ready))

    def close(self) -> None:
        while not self._ready.empty():
            self._ready.get()
        if self._own is not None:
            self._own.release()
