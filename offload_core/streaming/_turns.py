"""Modules of one scope that take turns: a module that rests has no weights on the device, one that is awake has its
weights there from their first use on, as many as there is room for. And modules that stay only a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import BudgetError
from ._managed import Managed
from ._parts import Part
from ._plan import WeightSize, make_plan
from ._weight import Entry, StreamedWeight

if TYPE_CHECKING:
    from ._scope import OffloadScope


def rest(managed: Managed) -> None:
    """Lets every hot copy of a wrapped weight go. Changed ones become the master's first, nothing else is copied.

    Buffers and weights that can't be streamed stay. A weight that is used all the same passes through the ring.
    Raises BudgetError if RAM is too short for a changed weight whose master is a file; what is left of it stays hot.
    """
    managed.scope.engine.drain()
    for part in _wrapped(managed):
        for entry in _entries(part):
            managed.scope.cache.stream(entry)
    managed.resting = True


def wake(managed: Managed) -> None:
    """Plans a module that rests for the room there is now. Its weights come when they are used.

    Raises BudgetError, and changes nothing, if its largest operator has no room beside what others hold.
    """
    scope, parts = managed.scope, _wrapped(managed)
    cache = scope.cache
    sizes = [
        WeightSize(entry.names[0], entry.nbytes, entry.group, part.is_lookup)
        for part in parts
        for entry in _entries(part)
    ]
    plan = make_plan(
        sizes,
        available=scope.available(),
        resident_limit=scope.resident_limit,
        ring_there=cache.ring.largest,
        ring_for_others=scope.largest_bytes,
        align=scope.engine.align,
        ahead=cache.fetches_ahead(size.nbytes for size in sizes),
        name=managed.name,
        device=str(scope.device),
    )
    if plan.ring_bytes > 0:
        cache.add_arena(plan.ring_bytes)
    small = managed.plan.small_bytes
    managed.plan = replace(plan, small_bytes=small, available_bytes=plan.available_bytes + small)
    managed.resting = False
    for part in parts:
        entries = _entries(part)
        for entry in entries:
            entry.lookup_only = part.is_lookup and not plan.whole
        cache.keep(entry for entry in entries if entry.names[0] in plan.resident)


@contextlib.contextmanager
def for_a_while(scope: OffloadScope) -> Iterator[OffloadScope]:
    """A block in which another module is attached to `scope` and released again.

    Whoever was there makes room for it as ever, and has its resident weights and its ring back after the block: they
    come from their masters when they are used.
    """
    cache = scope.cache
    before = {entry: entry.lookup_only for managed in scope.modules for entry in managed.entries if entry.resident}
    ring_bytes = cache.ring.largest
    try:
        yield scope
    finally:
        gone = [entry for entry in before if not entry.resident and entry.cache is cache]
        if gone or cache.ring.largest != ring_bytes:
            cache.empty_ring()
            with contextlib.suppress(BudgetError):  # it grows when it is needed
                if cache.ring.largest < ring_bytes:
                    cache.add_arena(ring_bytes)
            for entry in gone:
                entry.lookup_only = before[entry]
            cache.keep(gone)


def keep_on_host(managed: Managed) -> None:
    """Has what is read from files stay in pinned memory, as far as the host budget goes: a module that wakes again
    isn't read again. For one that rests, before its first use."""
    parts = _wrapped(managed)
    for part in parts:
        for entry in part.entries:
            entry.keep_on_host = False
    managed.plan_host(parts)


def hot_bytes(managed: Managed) -> int:
    """Bytes of the module on the device: its hot copies, and what never leaves it."""
    wrapped = _wrapped(managed)
    stays = sum(part.nbytes for part in managed.parts if part not in wrapped)
    return stays + sum(entry.nbytes for part in wrapped for entry in _entries(part) if entry.hot is not None)


def _wrapped(managed: Managed) -> list[Part]:
    return [part for part in managed.parts if part.entries and not part.plain]


def _entries(part: Part) -> list[Entry]:
    """The weights that are there now: one may have taken the place of another (`weight.data = ...`)."""
    found = {weight._entry: None for place in part.places if isinstance(weight := place.get(), StreamedWeight)}
    return list(found) or part.entries
