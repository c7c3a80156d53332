"""The ring: the blocks of device memory that streamed weights pass through, booked as a whole."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from ..ledger import Ledger, Reservation
from ._arena import Arena, Region
from ._copies import CopyEngine
from ._weight import Entry

Regions = dict[Entry, tuple[Arena, Region]]


class Ring:
    """One or more arenas. Not thread-safe but for deaths of storages, which any thread may cause: the cache's lock
    guards it. grown_bytes: what was added because operators needed more than was planned."""

    def __init__(self, engine: CopyEngine, ledger: Ledger) -> None:
        self._engine, self._ledger = engine, ledger
        self._freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arenas: dict[int, tuple[Arena, Reservation]] = {}
        self.grown_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena, _ in self._arenas.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest arena: what one operator can get at most."""
        return max((arena.nbytes for arena, _ in self._arenas.values()), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of regions whose storages are alive."""
        return sum(arena.held_bytes for arena, _ in self._arenas.values())

    def add(self, nbytes: int, *, spare: int = 0) -> None:
        """Another arena of `nbytes`, if it leaves `spare` bytes of the budget. Raises BudgetError, OutOfMemoryError."""
        align = self._engine.align
        nbytes = max(nbytes // align, 1) * align  # what an operator needs is aligned already; a plan's room may not be
        if spare:
            self._ledger.reserve("device", "ring", nbytes + align + spare).release()
        reservation = self._ledger.reserve("device", "ring", nbytes + align)
        try:
            arena = Arena(nbytes, self._engine.allocate, self._freed, align=align, whole=self._engine.whole)
        except BaseException:
            reservation.release()
            raise
        self._arenas[id(arena)] = (arena, reservation)

    def take(self, needed: Sequence[Entry], beside: Sequence[Entry] = ()) -> Regions:
        """Regions for all of `needed` that leave room for all of `beside`, or none."""
        regions: Regions = {}
        for entry in (*needed, *beside):
            found = self._take_one(entry.nbytes)
            if found is None:
                break
            regions[entry] = found
        fits = len(regions) == len(needed) + len(beside)
        for entry in beside if fits else tuple(regions):
            arena, unused = regions.pop(entry)
            arena.give(unused)
        return regions

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether the largest arena could hold all of these at once."""
        align = self._engine.align
        return sum(-(-entry.nbytes // align) * align for entry in entries) <= self.largest

    def reclaim(self) -> None:
        """Takes back the regions whose storages died."""
        if self._freed.empty():
            return
        streams: set[Any] = set()
        back: list[tuple[Arena, Region]] = []
        while True:
            try:
                death = self._freed.get_nowait()
            except queue.Empty:
                break
            pair = self._arenas.get(death.arena)
            if pair is not None:
                region = pair[0].buried(death)
                streams |= region.streams
                back.append((pair[0], region))
        if back:
            self._engine.retire(streams)
            for arena, region in back:
                arena.give(region)

    def shrink(self) -> None:
        """Gives back the blocks of which nothing is held."""
        self.reclaim()
        for key, (arena, reservation) in list(self._arenas.items()):
            if not arena.busy_bytes:
                del self._arenas[key]
                reservation.release()

    def close(self) -> int:
        """Gives the blocks back. Returns the bytes of regions that somebody outside still holds."""
        self.reclaim()
        held = self.held_bytes
        for _, reservation in self._arenas.values():
            reservation.release()
        self._arenas.clear()
        return held

    def _take_one(self, nbytes: int) -> tuple[Arena, Region] | None:
        for arena, _ in self._arenas.values():
            region = arena.take(nbytes)
            if region is not None:
                return arena, region
        return None
