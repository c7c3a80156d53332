"""The weight cache: makes weights hot for operators, and fetches ahead what they need next.

A resident set stays hot once it was used. Everything else passes through the ring: fetched ahead in the expected
order, used, and let go. A hot copy is only ever handed out as a tensor; its memory is used again when that tensor's
storage is dead, which the storage itself tells (`_arena`). So dropping a copy here never takes memory from under
anybody; at worst it is free later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import is_out_of_memory
from ..errors import BudgetError
from ..file_reader import ReadBuffer, ReadStopped
from ..ledger import Ledger
from ._arena import Arena, Region
from ._copies import CopyEngine, cast, cast_into
from ._edits import Edits, PrivateMaker, become, writable_master
from ._fetch import Fetch, forget_frames, job_for
from ._order import AccessOrder
from ._readers import Readers
from ._ring import Ring
from ._room import LOOK_AHEAD, Room
from ._shape import Layout, as_bytes, normal_mode
from ._weight import Entry, aten

log = logging.getLogger(__name__)

_WAIT_S = 0.02


@dataclass
class CacheCounts:
    """What the cache did. fetched_bytes: of hot copies made; streamed_bytes: of those in the ring; stall_s: seconds
    that compute waited for them."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    streamed_bytes: int = 0
    fetches: int = 0
    stall_s: float = 0.0


class WeightCache:
    """Hot copies of the weights of one scope, on one device, under one ledger. Safe to use from several threads.

    poll: called on the thread that needs a weight, with the bytes that `load` brought; may raise to stop.
    before_fetch: called on that thread with an operator's weights when one of them isn't hot, before room is made for
    it; may change what is resident.
    inline_bytes: weights up to this size are read by whoever needs them; a thread would cost more than it saves.
    """

    def __init__(
        self,
        engine: CopyEngine,
        ledger: Ledger,
        buffers: list[ReadBuffer],
        *,
        poll: Callable[[int], None] | None = None,
        inline_bytes: int = 1 << 20,
    ) -> None:
        self.engine, self.ledger, self.counts = engine, ledger, CacheCounts()
        self.order: AccessOrder[Entry] = AccessOrder()
        self._poll = poll
        self.before_fetch: Callable[[Sequence[Entry]], None] | None = None
        self._inline_bytes = inline_bytes
        self._own_buffer, *rest = buffers
        self._buffers = buffers
        self._buffer_lock = threading.Lock()
        self.readers = Readers(rest)
        self._lock = threading.Condition(threading.Lock())
        self._private = PrivateMaker(ledger)
        self._room = Room(engine, ledger, self.order, self._private, self._lock)
        self._touched: list[Entry] = []  # small copies that were used without taking the lock
        self._closed = self._fetches_ahead = False

    # --- what a scope does ---------------------------------------------------------------------------------------

    def add(self, entries: Iterable[Entry]) -> None:
        """Takes weights in. The order they come in is the first guess of the order they are used in."""
        entries = list(entries)
        with self._lock:
            for entry in entries:
                entry.small = entry.nbytes <= self._inline_bytes
            self._room.add(entries)
            self._fetches_ahead |= not all(entry.small for entry in entries)
            self.order.expect(entry for entry in entries if not entry.lookup_only)

    def load(self, entries: Iterable[Entry]) -> None:
        """Makes resident weights hot now, reading ahead. Their order says nothing about the order of use."""
        entries = list(entries)
        self.add(entries)
        for entry in entries:
            self.acquire([entry])
            if self._poll is not None:
                self._poll(entry.nbytes)
        with self._lock:
            self.order.forget(set(entries))

    @property
    def promised_bytes(self) -> int:
        """Bytes that resident weights will take which aren't hot yet."""
        with self._lock:
            return self._room.promised_bytes

    def fetches_ahead(self, sizes: Iterable[int]) -> bool:
        """Whether any weight of these sizes is fetched ahead: it isn't small, and there are threads to do it."""
        return len(self._buffers) > 1 and any(size > self._inline_bytes for size in sizes)

    def add_arena(self, nbytes: int) -> None:
        """Makes the ring larger by a block of `nbytes`. Raises BudgetError or torch.OutOfMemoryError."""
        with self._lock:
            self.ring.add(nbytes)

    def empty_ring(self) -> None:
        """Gives back the ring as far as nobody holds it, so that one of another size can take its place."""
        self.engine.drain()
        with self._lock:
            self._empty_ring()

    def cool(self, entries: Iterable[Entry]) -> None:
        """Gives back the hot and pinned copies of `entries`, and the ring; they are made again when they are needed.

        Nothing while another call is at work here: it may be the collector of garbage that asks.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._closed:
                return
            self.engine.drain()
            for entry in entries:
                if entry.cache is self:
                    self._settle(entry)
                    self._room.adopt(entry)
                    self._room.drop(entry)
                    self.engine.forget(entry)
            self.engine.trim()
            self._empty_ring()
        finally:
            self._lock.release()

    def _empty_ring(self) -> None:
        for entry in self._room:
            if entry.fetch is not None or entry.region is not None:
                self._settle(entry)
                self._room.adopt(entry)
                if entry.region is not None:
                    self._room.drop(entry)
        self.ring.shrink()

    @property
    def ring(self) -> Ring:
        return self._room.ring

    def release(self, entries: Iterable[Entry], *, keep_edits: bool = False) -> None:
        """Makes weights cold for good. Returns when none of their copies is in flight or held here.

        keep_edits: changes made through views of hot copies are written to the masters first.
        """
        entries = [entry for entry in entries if entry.cache is self]
        mine = set(entries)
        with self._lock:
            for entry in entries:
                self._settle(entry)
                if keep_edits:
                    self._room.adopt(entry)
            for entry in entries:
                entry.cache = None
                self._room.drop(entry)
                self.engine.forget(entry)
            self._room.remove(mine)
            self.order.forget(mine)
            self.ring.reclaim()

    def close(self) -> int:
        """Stops the readers, drains copies, gives all memory back. Returns bytes that somebody outside still holds."""
        with self._lock:
            self._closed = True
        self.readers.close()
        self.engine.drain()
        self.release(list(self._room))
        with self._lock:
            held = self.ring.close()
        self.engine.close()
        for buffer in self._buffers:
            buffer.close()
        return held

    # --- what an operator does -----------------------------------------------------------------------------------

    def acquire_one(self, entry: Entry) -> torch.Tensor:
        """Like `acquire`. A small copy that is there is handed out at once: what follows from it waits until the next
        one has to be fetched."""
        hot = entry.hot
        if hot is not None and entry.small and not self.engine.eager and len(self._touched) < LOOK_AHEAD:
            self._touched.append(entry)
            return hot
        return self.acquire((entry,))[0]

    def acquire(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Hot tensors of all `entries` at once, for one operator. They stay valid as long as they are held.

        Raises ColdWeightError after `close`, BudgetError if they can't be hot together, ModelError if a file changed.
        """
        if self._poll is not None:
            self._poll(0)
        if self.before_fetch is not None and any(entry.hot is None for entry in entries):
            self.before_fetch(entries)
        with self._lock:
            if self._closed:
                raise entries[0].cold_error()
            self._catch_up()
            self._room.retire(entries)
            for entry in entries:
                if not self.order.note(entry):
                    self._room.forget_plans()
            hots = [self._ensure(entries[0], entries)] if len(entries) == 1 else self._ensure_all(entries)
            for entry in entries:
                self._use(entry)
            if self._fetches_ahead:
                self._pump(entries)
        return hots

    def gather(self, entry: Entry, indices: torch.Tensor) -> torch.Tensor | None:
        """Rows of a table by `indices`, read from the master. None if so many are asked that the table is cheaper."""
        if self._closed:
            raise entry.cold_error()
        master, layout = entry.master, entry.layout
        assert master is not None
        with torch.inference_mode(False), torch.no_grad():
            rows, inverse = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
            if not rows.numel():
                return torch.empty((*indices.shape, layout.shape[1]), dtype=layout.dtype, device=self.engine.device)
            if rows.numel() > max(layout.shape[0] // 2, 1) and not entry.lookup_only:
                return None
            if int(rows[0]) < 0 or int(rows[-1]) >= layout.shape[0]:
                raise IndexError(f"index out of range in {entry.name}, which has {layout.shape[0]} rows")
            row_bytes = layout.shape[1] * master.dtype.itemsize
            raw = torch.empty(rows.numel() * row_bytes, dtype=torch.uint8)
            with self._buffer_lock:
                master.rows(raw, row_bytes, rows.tolist(), self._own_buffer)
            table = cast(raw.view(master.dtype).view(rows.numel(), layout.shape[1]), entry.casts)
            table, inverse = table.to(self.engine.device), inverse.to(self.engine.device)
            return aten.embedding.default(table, inverse)

    def edit(self, targets: Sequence[Entry], hot: dict[Entry, torch.Tensor]) -> Edits:
        """A scope in which an operator writes to the hot copies of `targets`."""
        return Edits(self, self._private, targets, hot)

    def new_private(self, old: Entry, value: torch.Tensor) -> Entry:
        """A weight that takes the place of `old` with the values of `value`. Raises BudgetError if RAM is short."""
        entry = self._private.entry(old, value, self)
        with self._lock:
            self._room.add([entry])
        return entry

    def replaced(self, entry: Entry) -> None:
        """Says that another weight took the place of `entry` and nobody has it any more."""
        with self._lock:
            self._room.ungroup(entry)

    def spoil(self, entry: Entry) -> None:
        """Drops a hot copy whose values are no longer the master's."""
        with self._lock:
            self._room.drop(entry)

    def recast(self, entry: Entry, dtype: torch.dtype, casts: tuple[torch.dtype, ...]) -> None:
        with self._lock:
            self._settle(entry)
            self._room.adopt(entry)
            self._room.drop(entry)
            entry.layout, entry.casts = entry.layout.with_dtype(dtype), casts

    def replace_hot(self, entry: Entry, layout: Layout, casts: tuple[torch.dtype, ...]) -> None:
        """Exchanges the copy of a resident weight for one of another dtype, with the values it has now."""
        assert entry.hot is not None
        reservation = self.ledger.reserve("device", "resident", layout.nbytes, entry.name)
        try:
            with torch.inference_mode(False), torch.no_grad():
                hot = layout.over(self.engine.allocate(layout.nbytes).untyped_storage())
                hot.copy_(entry.hot)
        except BaseException:
            reservation.release()
            raise
        with self._lock:
            self._room.drop(entry)
            entry.hot, entry.reservation, entry.layout, entry.casts = hot, reservation, layout, casts

    def keep_if_changed(self, entry: Entry, now: torch.Tensor) -> None:
        """Makes the values of a plain tensor the master's, if they aren't."""
        master = entry.master
        assert master is not None
        with torch.inference_mode(False), torch.no_grad():
            values = torch.empty(entry.layout.count, dtype=entry.layout.dtype)
            with self._buffer_lock:
                cast_into(values, master, entry.casts, self._own_buffer, None)
            if not torch.equal(as_bytes(values), as_bytes(now).cpu()):
                become(entry, writable_master(entry) or self._private.master(entry.layout, entry.name), now)

    def stream(self, entry: Entry) -> None:
        """Drops a resident copy: from now on the weight passes through the ring."""
        with self._lock:
            self._settle(entry)
            self._room.adopt(entry)
            entry.resident = False
            self._room.drop(entry)
            self.ring.reclaim()

    def keep(self, entries: Iterable[Entry]) -> None:
        """Makes streamed weights resident: they stay hot from their next fetch on."""
        with self._lock:
            for entry in entries:
                entry.resident = True

    # --- under the lock ------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Notes the uses that took no lock."""
        touched, self._touched = self._touched, []
        for entry in touched:
            if entry.hot is not None and entry.cache is self:
                self.order.note(entry)
                self._room.used(entry)

    def _use(self, entry: Entry) -> None:
        entry.planned = False
        self._room.used(entry)
        self.engine.before_use(entry)
        if entry.resident and entry.region is None and self.engine.is_complete(entry):
            entry.fast = entry.hot

    def _ensure_all(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Sends for all of `entries` before it waits for one: who holds some and waits for room for others could wait
        for somebody who does the same."""
        for entry in entries:
            entry.pinned += 1
        try:
            self._begin_all(entries)
            return [self._ensure(entry, entries) for entry in entries]
        finally:
            for entry in entries:
                entry.pinned -= 1

    def _begin_all(self, keep: Sequence[Entry]) -> None:
        """Makes room for all of `keep` that aren't hot, at once, and sends for them."""
        while missing := [entry for entry in keep if entry.hot is None and entry.fetch is None]:
            resident = next((entry for entry in missing if entry.resident), None)
            if resident is not None:
                fetch = self._resident_fetch(resident)
                if fetch is not None:
                    self._start(fetch, demand=True)
                continue
            for entry, region in self._room.find(missing, keep, self._take_back).items():
                self._start(self._ring_fetch(entry, region), demand=True)

    def _ensure(self, entry: Entry, keep: Sequence[Entry]) -> torch.Tensor:
        if entry.hot is not None:
            self.counts.hits += 1
            return entry.hot
        self.counts.misses += 1
        started = time.perf_counter()
        while entry.hot is None:
            if entry.small and entry.fetch is None:
                self._read_now(entry, keep)
                continue
            fetch = entry.fetch or self._begin(entry, keep, demand=True)
            if fetch is None:  # another thread sent for it while this one waited for room
                continue
            if fetch.job is None:
                self._read_unlocked(fetch)
            else:
                self.readers.hurry(fetch.job)
                self._wait(fetch)
            if self._closed or entry.cache is not self:
                raise entry.cold_error()
            error = fetch.error
            del fetch
            try:
                if error is not None and not isinstance(error, ReadStopped):
                    raise error
            finally:
                del error  # this frame is in its traceback: together they would keep what the caller's frames hold
        self.counts.stall_s += time.perf_counter() - started
        assert entry.hot is not None
        return entry.hot

    def _begin(self, entry: Entry, keep: Sequence[Entry], *, demand: bool) -> Fetch | None:
        """Makes room for a hot copy and sends for its bytes. None if there is no room and it isn't demanded."""
        fetch = self._make_fetch(entry, keep, demand=demand)
        return fetch and self._start(fetch, demand=demand)

    def _start(self, fetch: Fetch, *, demand: bool) -> Fetch:
        fetch.entry.fetch = fetch
        if not fetch.entry.small:
            fetch.job = job_for(self, fetch)
            if not self.readers.submit(fetch.job, urgent=demand):
                fetch.job = None
        return fetch

    def _make_fetch(self, entry: Entry, keep: Sequence[Entry], *, demand: bool) -> Fetch | None:
        fetch = self._resident_fetch(entry) if entry.resident else None
        if fetch is None:
            found = self._room.find([entry], keep, self._take_back) if demand else self._room.spare([entry], keep)
            if found:
                fetch = self._ring_fetch(entry, found[entry])
        return fetch

    def _ring_fetch(self, entry: Entry, found: tuple[Arena, Region]) -> Fetch:
        arena, region = found
        with normal_mode():
            return Fetch(entry, arena.tensor(region, entry.layout), region, None)

    def _resident_fetch(self, entry: Entry) -> Fetch | None:
        """Memory of its own for a resident weight. Where that isn't to be had the weight is streamed from now on."""
        reservation = warm = None
        try:
            warm = self.engine.take_warm(entry)
            reservation = self.ledger.reserve("device", "resident", entry.nbytes, entry.name)
            with normal_mode():
                memory = self.engine.allocate(entry.nbytes) if warm is None else warm
                hot = entry.layout.over(memory.untyped_storage())
        except BaseException as error:
            if reservation is not None:
                reservation.release()
            if warm is not None:
                self.engine.give_warm(entry, warm)
            if not isinstance(error, BudgetError) and not is_out_of_memory(error):
                raise
            if entry.nbytes > self.ring.largest:
                raise
            log.info("%s is streamed: there is no room to keep it (%s)", entry.name, str(error))
            entry.resident = False
            return None
        fetch = Fetch(entry, hot, None, reservation)
        fetch.filled = warm is not None
        return fetch

    def _read_now(self, entry: Entry, keep: Sequence[Entry]) -> None:
        """Reads a small weight under the lock: that is over before another thread could be asked to."""
        fetch = self._make_fetch(entry, keep, demand=True)
        if fetch is None:
            return
        with self._buffer_lock:
            ready, error = self._fill(fetch, self._own_buffer)
        self._arrive(fetch, ready, error)
        del fetch
        try:
            if error is not None:
                raise error
        finally:
            del error  # see `_ensure`

    def _read_unlocked(self, fetch: Fetch) -> None:
        """Reads on this thread, without the lock, so that other threads go on."""
        fetch.begun = True
        self._lock.release()
        try:
            with self._buffer_lock:
                ready, error = self._fill(fetch, self._own_buffer)
        finally:
            self._lock.acquire()
        if not fetch.done:
            self._arrive(fetch, ready, error)

    def read_ahead(self, fetch: Fetch, buffer: ReadBuffer) -> None:
        """What a reader does."""
        ready, error = self._fill(fetch, buffer)
        with self._lock:
            if not fetch.done:
                self._arrive(fetch, ready, error)

    def _fill(self, fetch: Fetch, buffer: ReadBuffer) -> tuple[Any, BaseException | None]:
        """Fills a hot copy. Never raises: what went wrong is told to whoever waits for the weight."""
        hot = fetch.hot
        if hot is None or fetch.done or fetch.filled:
            return None, None
        try:
            return self.engine.fill(fetch.entry, hot, buffer, self.readers.stopping), None
        except BaseException as error:
            return None, error

    def _arrive(self, fetch: Fetch, ready: Any, error: BaseException | None) -> None:
        entry = fetch.entry
        if error is None:
            entry.hot, entry.ready, entry.region, entry.reservation = fetch.hot, ready, fetch.region, fetch.reservation
            entry.seen = {id(w): w._version for ref in entry.wrappers if (w := ref()) is not None}
            entry.seen[0] = entry.hot._version if entry.hot is not None else 0
            if fetch.region is not None:
                self._room.arrived(entry)
                self.counts.streamed_bytes += entry.nbytes
            self.counts.fetches += 1
            self.counts.fetched_bytes += entry.nbytes
        else:
            forget_frames(error)  # they hold the hot copy
            if fetch.reservation is not None:
                fetch.reservation.release()
        fetch.hot, fetch.error, fetch.done = None, error, True
        fetch.job = None  # it holds the fetch and this cache
        entry.fetch = None
        self._lock.notify_all()

    def _wait(self, fetch: Fetch) -> None:
        while not fetch.done:
            self._lock.wait(_WAIT_S)
            if not fetch.done and fetch.job is not None and not self.readers.holds(fetch.job):
                fetch.job = None  # an interrupt came between the steps of sending for it: nobody would bring it
                self._read_unlocked(fetch)
                return
            if self._poll is not None and not fetch.done:
                self._lock.release()
                try:
                    self._poll(0)
                finally:
                    self._lock.acquire()

    def _pump(self, keep: Sequence[Entry]) -> None:
        """Fetches ahead, in the expected order, as far as the ring has room."""
        if not self.readers.ready():
            return
        for entry in self.order.upcoming(LOOK_AHEAD):
            if entry.fast is not None or entry.cache is not self or entry.lookup_only:
                continue
            if entry.hot is not None:
                entry.planned = True
            elif entry.fetch is None:
                if entry.small:
                    continue
                if self._begin(entry, keep, demand=False) is None:
                    return
                entry.planned = True
            else:
                entry.planned = True

    def _take_back(self, entry: Entry) -> bool:
        """Cancels a fetch that no thread has begun. Returns whether there was such a one."""
        fetch = entry.fetch
        if fetch is None or fetch.begun:
            return False
        if fetch.job is not None and not self.readers.cancel(fetch.job):
            return False
        self._arrive(fetch, None, ReadStopped())
        return True

    def _settle(self, entry: Entry) -> None:
        """Waits until no copy of a weight is in flight."""
        fetch = entry.fetch
        if fetch is None or self._take_back(entry):
            return
        while not fetch.done and not (self.readers.stopping() and not self.readers.alive):
            self._lock.wait(_WAIT_S)
        if not fetch.done:
            self._arrive(fetch, None, ReadStopped())
