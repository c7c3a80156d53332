"""Room for hot copies: which there are, which may go, and in what order they do when another one is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from .._report_table import human_bytes
from ..devices import is_out_of_memory
from ..errors import BudgetError
from ..ledger import Ledger, at_least
from ._copies import CopyEngine
from ._edits import PrivateMaker, was_edited
from ._order import AccessOrder
from ._ring import Regions, Ring
from ._weight import Entry

log = logging.getLogger(__name__)

LOOK_AHEAD = 48  # accesses scanned for what to fetch next; more than any ring holds
_WAIT_S = 0.02
_GROW_AFTER_S = 0.2  # how long a full ring waits for held slots before it tries to grow
_DEMOTE_AFTER_S = 1.0  # before resident weights make room for it
_PATIENCE_S = 10.0  # and before it is an error

TakeBack = Callable[[Entry], bool]  # cancels the fetch of a weight that no thread has begun; returns whether it could


class Room:
    """The hot copies of one cache. All of it is under the cache's lock, which `find` lets go while it waits."""

    def __init__(
        self,
        engine: CopyEngine,
        ledger: Ledger,
        order: AccessOrder[Entry],
        private: PrivateMaker,
        lock: threading.Condition,
    ) -> None:
        self.ring = Ring(engine, ledger)
        self._engine, self._ledger, self._order, self._private = engine, ledger, order, private
        self._lock = lock
        self._entries: set[Entry] = set()
        self._groups: dict[tuple[str, str], list[Entry]] = {}  # what one operator may need together
        self._in_ring: set[Entry] = set()
        self._spent: dict[Entry, None] = {}  # used copies in the ring, the longest unused first

    # --- weights that come and go --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.group and entry not in self._entries:
                self._groups.setdefault((entry.owner, entry.group), []).append(entry)
            self._entries.add(entry)

    def ungroup(self, entry: Entry) -> None:
        """Says that no operator will ask for a weight again, although it isn't released: another took its place."""
        group = self._groups.get((entry.owner, entry.group), [])
        if entry in group:
            group.remove(entry)

    def remove(self, entries: Collection[Entry]) -> None:
        self._entries.difference_update(entries)
        for key in {(entry.owner, entry.group) for entry in entries}:
            rest = [entry for entry in self._groups.pop(key, ()) if entry not in entries]
            if rest:
                self._groups[key] = rest

    @property
    def promised_bytes(self) -> int:
        """Bytes that resident weights will take which aren't hot yet."""
        return sum(entry.nbytes for entry in self._entries if entry.resident and entry.reservation is None)

    # --- hot copies --------------------------------------------------------------------------------------------------

    def arrived(self, entry: Entry) -> None:
        """A copy in the ring became hot."""
        self._in_ring.add(entry)

    def used(self, entry: Entry) -> None:
        """Makes a copy the last of those that may go."""
        if entry.region is not None:
            self._spent.pop(entry, None)
            self._spent[entry] = None

    def forget_plans(self) -> None:
        """What was fetched ahead may go: it isn't expected any more."""
        for entry in self._in_ring:
            if entry.planned:
                entry.planned = False
                self._spent.setdefault(entry)

    def adopt(self, entry: Entry) -> None:
        """If a hot copy was written to through a view, its values become the master's."""
        if entry.hot is not None and was_edited(entry):
            self._engine.before_use(entry)
            self._private.adopt(entry)

    def drop(self, entry: Entry) -> None:
        """Lets a hot copy go. Its memory is free when nobody holds it."""
        entry.hot = entry.fast = entry.ready = None
        entry.region = None
        entry.planned = False
        self._in_ring.discard(entry)
        self._spent.pop(entry, None)
        if entry.reservation is not None:
            entry.reservation.release()
            entry.reservation = None

    def retire(self, keep: Sequence[Entry]) -> None:
        """Lets go of what was used and isn't expected soon, where that is due before room is needed."""
        if self._spent and self._engine.eager:
            self._drop_spent(keep)
        self.ring.reclaim()

    # --- room --------------------------------------------------------------------------------------------------------

    def spare(self, needed: Sequence[Entry], keep: Sequence[Entry]) -> Regions:
        """Room in the ring that is there, or that used copies leave. None is taken from what is expected soon."""
        self.ring.reclaim()
        regions = self._take(needed)
        if not regions and self._drop_spent(keep):
            regions = self._take(needed)
        return regions

    def find(self, needed: Sequence[Entry], keep: Sequence[Entry], take_back: TakeBack) -> Regions:
        """Room in the ring for weights that are needed now: from what was used, then from what was fetched ahead, then
        from what others hold, for which it waits a while; then the ring grows, into what is free of the budget and then
        into the place of resident weights, or it is an error by name.

        Nothing if `keep` isn't what it was: another thread sent for one of them, or one was given up to make room.
        """
        started = time.perf_counter()
        while True:
            found = self.spare(needed, keep) or self._from_planned(needed, keep, take_back)
            if found:
                return found
            waited = time.perf_counter() - started
            busy = self._in_flight(keep) or self._others_hold(keep)
            if not busy or waited > _GROW_AFTER_S:
                if self._give_up(keep):
                    return {}
                found = self._take(needed, alone=True)
                if found:
                    return found
                error = self._grow(needed, keep)
                if error is not None and (not busy or waited > _DEMOTE_AFTER_S) and self._demote(needed, keep):
                    continue
                try:
                    if error is not None and (not busy or waited > _PATIENCE_S):
                        raise error
                finally:
                    del error  # this frame is in its traceback: together they would keep what the caller's frames hold
            if busy:
                self._lock.wait(_WAIT_S)
                gone = next((entry for entry in needed if entry.cache is None), None)
                if gone is not None:
                    raise gone.cold_error()
                if any(entry.hot is not None or entry.fetch is not None for entry in needed):
                    return {}

    def _take(self, needed: Sequence[Entry], *, alone: bool = False) -> Regions:
        """Regions for all of `needed`, or none. Unless `alone`, the other weights that their operators may need must
        fit beside them: `linear` takes its bias when it has its weight already, and then that can't be moved."""
        return self.ring.take(needed, () if alone else self._others_of(needed))

    def _others_of(self, needed: Sequence[Entry]) -> Sequence[Entry]:
        others = [
            entry
            for key in {(entry.owner, entry.group): None for entry in needed}
            for entry in self._groups.get(key, ())
            if entry.hot is None and entry.fetch is None
            if not (entry.resident or entry.lookup_only or entry in needed)
        ]
        return others if self.ring.fits((*needed, *others)) else ()

    def _fits(self, entry: Entry) -> bool:
        """Whether a resident weight could be streamed: the ring holds all that its operator may need with it."""
        return self.ring.fits(self._groups.get((entry.owner, entry.group), [entry]))

    def _drop_spent(self, keep: Sequence[Entry]) -> bool:
        return self._drop_all(entry for entry in self._spent if not (entry.planned or entry in keep or entry.pinned))

    def _drop_all(self, entries: Iterable[Entry]) -> bool:
        """Drops those copies that nobody holds a view of: dropping others would free nothing yet. Whether any was."""
        gone = [entry for entry in entries if not _is_held(entry)]
        for entry in gone:
            self.adopt(entry)
            self.drop(entry)
        if gone:
            self.ring.reclaim()
        return bool(gone)

    def _from_planned(self, needed: Sequence[Entry], keep: Sequence[Entry], take_back: TakeBack) -> Regions:
        """Drops copies that were fetched ahead, the last needed first, and takes back what no thread has begun."""
        ahead = [other for other in self._order.upcoming(LOOK_AHEAD) if other not in keep]
        for other in reversed(list(dict.fromkeys(ahead))):
            in_ring = other in self._in_ring and not other.pinned
            if take_back(other) or (in_ring and self._drop_all([other])):
                self.ring.reclaim()
                found = self._take(needed)
                if found:
                    return found
        self._drop_all([other for other in self._in_ring if other not in keep and not other.pinned])
        return self._take(needed)

    def _give_up(self, keep: Sequence[Entry]) -> bool:
        """Drops copies of an operator's own weights, which split the ring. Returns whether there were any."""
        return self._drop_all([entry for entry in keep if entry in self._in_ring and entry.pinned == 1])

    def _in_flight(self, keep: Sequence[Entry]) -> bool:
        return any(entry.fetch is not None and entry not in keep for entry in self._entries)

    def _others_hold(self, keep: Sequence[Entry]) -> bool:
        """Whether regions are alive that this operator doesn't hold: another thread's, or an alias somebody keeps."""
        held = sum(entry.nbytes for entry in keep if entry in self._in_ring)
        return self.ring.held_bytes > held

    def _grow(self, needed: Sequence[Entry], keep: Sequence[Entry]) -> BudgetError | None:
        """Makes the ring larger by room for the largest of `needed`, or says why it can't. What is promised to resident
        weights isn't taken."""
        entry = max(needed, key=lambda each: each.nbytes)
        try:
            self.ring.add(entry.nbytes, spare=self.promised_bytes)
        except (BudgetError, RuntimeError, MemoryError) as error:
            if not isinstance(error, BudgetError) and not is_out_of_memory(error):
                raise
            together = sum(each.nbytes for each in dict.fromkeys((*keep, *needed)))
            missing = self._ledger.limits["device"] - self._ledger.free("device") + together + 2 * self._engine.align
            return BudgetError(
                f"There is no room for {entry.name} ({human_bytes(entry.nbytes)}): the ring of "
                f"{human_bytes(self.ring.nbytes)} is held by other uses of its weights, or one operator needs "
                f"{human_bytes(together)} of weights together. Set device_memory to at least {at_least(missing)}."
            )
        self.ring.grown_bytes += entry.nbytes
        log.info("The ring grew by %s for %s", human_bytes(entry.nbytes), entry.name)
        return None

    def _demote(self, needed: Sequence[Entry], keep: Sequence[Entry]) -> bool:
        """Streams resident weights from now on, so that the ring can grow into their place. Returns whether there are
        enough of them: if not, none is."""
        largest = max(entry.nbytes for entry in needed)
        missing = largest + 2 * self._engine.align + self.promised_bytes - self._ledger.free("device")
        chosen: list[Entry] = []
        for entry in sorted(self._entries, key=lambda each: each.nbytes, reverse=True):
            is_idle = not (entry.pinned or entry in keep or entry.fetch is not None or _is_held(entry))
            if missing > 0 and entry.resident and entry.wrappers and is_idle and self._fits(entry):
                chosen.append(entry)
                missing -= entry.nbytes
        if missing > 0 or not chosen:
            return False
        for entry in chosen:
            log.info("%s is streamed from now on: others hold the ring, which takes its place", entry.name)
            self.adopt(entry)
            self.drop(entry)
            entry.resident = False
        return True


def _is_held(entry: Entry) -> bool:
    """Whether somebody holds a view of a hot copy."""
    return entry.hot is not None and bool(torch._C._storage_Use_Count(entry.hot.untyped_storage()._cdata) > 2)
