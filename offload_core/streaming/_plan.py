"""Which weights stay resident and which are streamed: a pure function of their sizes and the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._report_table import human_bytes
from ..errors import BudgetError
from ..ledger import at_least

_IN_FLIGHT = 6  # weights in the ring; with two the disk idles while one is used, more only cost resident ones


@dataclass(frozen=True)
class WeightSize:
    """A weight as the plan sees it, in expected order of use.

    group: weights that one operator may need together have the same. lookup_only: a table whose rows are gathered.
    nbytes: of the hot copy.
    """

    name: str
    nbytes: int
    group: str = ""
    lookup_only: bool = False


@dataclass(frozen=True)
class PartSize:
    """A tensor of a module as the plan sees it.

    sizes: of its hot copies; several for a weight of a class of its own, none for one that can't be streamed. nbytes:
    of all of it. stays: whether it must be on the device, however large. is_norm: whether only norms use it; they stay
    while there is room for them.
    """

    sizes: tuple[WeightSize, ...]
    nbytes: int
    stays: bool = False
    is_norm: bool = False


@dataclass(frozen=True)
class StreamPlan:
    """Where a component's weights are while it runs. All figures are bytes on the execution device.

    resident: names of large weights that stay hot once they were used; everything else large passes through the ring.
    whole: everything is resident, there is nothing to stream. small_bytes: weights and buffers that are never
    offloaded. lookup_bytes: tables whose rows are read where they are. available_bytes: what the plan was made for.
    """

    whole: bool
    resident: frozenset[str]
    resident_bytes: int
    streamed_bytes: int
    lookup_bytes: int
    ring_bytes: int
    small_bytes: int
    available_bytes: int

    @property
    def device_bytes(self) -> int:
        """The most that the component's weights take on the execution device."""
        return self.small_bytes + self.resident_bytes + self.ring_bytes

    def can_replace(self, other: StreamPlan) -> bool:
        """Whether this is a plan for the same weights as `other`, made for no more room, with a ring of its own too."""
        mine = (self.whole, self.small_bytes, self.lookup_bytes, self.resident_bytes + self.streamed_bytes)
        theirs = (other.whole, other.small_bytes, other.lookup_bytes, other.resident_bytes + other.streamed_bytes)
        rings = self.ring_bytes > 0 and other.ring_bytes > 0
        return mine == theirs and rings and self.available_bytes <= other.available_bytes


def make_plan(
    sizes: Sequence[WeightSize],
    *,
    available: int,
    resident_limit: int | None = None,
    small_bytes: int = 0,
    ring_there: int = 0,
    ring_for_others: int = 0,
    align: int = 64,
    ahead: bool = True,
    name: str = "the module",
    device: str = "the device",
) -> StreamPlan:
    """A plan for weights `sizes` in `available` bytes, of which `small_bytes` go to what is never offloaded.

    resident_limit: the most bytes of `sizes` that may be resident, None for all there is room for.
    ring_there: bytes of a ring that exists already and isn't part of `available`. ring_for_others: what other modules
    need of the ring. align: bytes that hot copies in the ring are aligned to; the ring itself takes so many more.
    ahead: whether weights are fetched ahead of their use.

    Every weight is used once a pass, so which ones are resident doesn't matter for the bytes that are streamed, but
    they have to lie evenly between the streamed ones: then copies have compute to hide behind. The ring holds six of
    the largest operators' weights, so that several are read while one is used; less if that is over half the room, or
    over what doesn't fit: the ring itself keeps weights from being resident.

    Raises BudgetError, with the smallest budget that can work, if the largest operator's weights don't fit.
    """
    room = available - small_bytes
    total = sum(size.nbytes for size in sizes)
    most = total if resident_limit is None else resident_limit
    ring = ring_for_others if ring_for_others > ring_there else 0
    ring_total = ring + align if ring else 0
    if total + ring_total <= room and total <= most:
        names = frozenset(size.name for size in sizes)
        return StreamPlan(True, names, total, 0, 0, ring, small_bytes, available)
    lookup = sum(size.nbytes for size in sizes if size.lookup_only)
    rest = [size for size in sizes if not size.lookup_only]
    total -= lookup
    if total + ring_total <= room and total <= most:
        names = frozenset(size.name for size in rest)
        return StreamPlan(False, names, total, 0, lookup, ring, small_bytes, available)
    largest = max(largest_group(rest, align), ring_for_others)
    ring = 0
    if ring_there < largest:
        needed = min(largest + align, total + ring_total) if total <= most else largest + align
        if needed > room:
            raise BudgetError(
                f"The budget of {device} leaves {human_bytes(max(available, 0))} for the weights of {name}, which need "
                f"at least {at_least(small_bytes + needed)}: {human_bytes(small_bytes)} of small ones that stay, and "
                f"{human_bytes(needed)} for the largest operator. Raise device_memory by "
                f"{at_least(small_bytes + needed - available)} or more."
            )
        room -= align
        ring = max(largest, min(_IN_FLIGHT * largest, total - min(room, most), room // 2)) if ahead else largest
    elif room < 0:
        raise BudgetError(
            f"The budget of {device} leaves {human_bytes(max(available, 0))} for the small weights of {name}, which "
            f"take {human_bytes(small_bytes)} and stay. Raise device_memory by {at_least(-room)} or more."
        )
    resident = spread(rest, min(room - ring, most))
    kept = sum(size.nbytes for size in rest if size.name in resident)
    streamed = total - kept
    return StreamPlan(False, resident, kept, streamed, lookup, ring, small_bytes, available)


def plan_parts(
    parts: Sequence[PartSize],
    *,
    resident_below: int,
    ahead: Callable[[list[WeightSize]], bool],
    added_bytes: int = 0,
    **room: Any,
) -> tuple[StreamPlan, list[bool]]:
    """A plan for a module, and for each part whether it is a small one, which is never offloaded.

    resident_below: parts of fewer bytes are small, while the budget can hold them all; else fewer of them are.
    ahead: whether weights of these sizes are fetched ahead. added_bytes: of weights that the module will be given later
    (LoRA); they are small ones of the plan, whatever their size. room: as `make_plan` takes it. Raises BudgetError like
    it.
    """
    below = resident_below
    while True:
        small = [part.stays or part.nbytes < below or (part.is_norm and below > 0) for part in parts]
        sizes = [size for part, is_small in zip(parts, small, strict=True) if not is_small for size in part.sizes]
        nbytes = added_bytes + sum(part.nbytes for part, is_small in zip(parts, small, strict=True) if is_small)
        try:
            return make_plan(sizes, small_bytes=nbytes, ahead=ahead(sizes), **room), small
        except BudgetError:
            if not below:
                raise
        below //= 4


def largest_group(sizes: Sequence[WeightSize], align: int = 1) -> int:
    """Bytes of the weights that the hungriest operator needs together: the smallest ring that works."""
    groups: Counter[str] = Counter()
    for size in sizes:
        groups[size.group or size.name] += -(-size.nbytes // align) * align
    return max(groups.values(), default=0)


def spread(sizes: Sequence[WeightSize], room: int) -> frozenset[str]:
    """Weights of up to `room` bytes, spread evenly over the order.

    They are asked in one order, whatever the room: the middle one, the quarters, the eighths, and so on; each stays
    that still fits. So a larger room never keeps fewer bytes: the first weight it alone takes fills it up.
    """
    bits = max(len(sizes) - 1, 1).bit_length()
    chosen: set[str] = set()
    for _, size in sorted(enumerate(sizes), key=lambda pair: f"{pair[0]:0{bits}b}"[::-1]):
        if size.nbytes <= room:
            chosen.add(size.name)
            room -= size.nbytes
    return frozenset(chosen)
