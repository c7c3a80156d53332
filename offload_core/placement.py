"""Which weights of a component stay resident: a search among good guesses, each judged by what a pass would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .streaming import WeightSize, largest_group, spread

Cost = Callable[[frozenset[str], int], float]

_FEW = 16  # weights up to which single exchanges are tried, too
_TRIES = 600
_WORTH = 0.01  # a guess replaces another if it saves this share of a pass
_DEPTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # rings, in the largest operator's weights


class Placement:
    """A search for the resident set of weights `sizes` in `room` bytes with the least `cost(resident, ring_bytes)`.

    What isn't resident needs a ring that holds the hungriest operator's part of it, and `least_ring` bytes. `start` is
    kept unless another one is better by a hundredth. tests/test_plan.py compares it with a search of all sets.
    """

    def __init__(
        self, sizes: Sequence[WeightSize], room: int, cost: Cost, *, align: int = 1, least_ring: int = 0
    ) -> None:
        self.sizes, self.room, self.align, self.least_ring = list(sizes), room, align, least_ring
        self._cost = cost
        self._known: dict[frozenset[str], float | None] = {}

    def search(self, start: frozenset[str]) -> tuple[frozenset[str], int]:
        """(resident, ring bytes). Raises ValueError if not even `start` fits."""
        best = start
        if self._price(start) is None:
            raise ValueError("The start of the search doesn't fit the room.")
        guesses = [start, *self._guesses()]
        for guess in guesses:
            best = self._better(best, guess)
        if len(self.sizes) <= _FEW:
            for guess in sorted(guesses, key=lambda each: self._price(each) or float("inf"))[:4]:
                best = self._better(best, self._climb(guess))
        return best, self._ring(best) or 0

    def _better(self, best: frozenset[str], other: frozenset[str]) -> frozenset[str]:
        price, least = self._price(other), self._price(best)
        assert least is not None
        return other if price is not None and price < least * (1 - _WORTH) else best

    def _price(self, resident: frozenset[str]) -> float | None:
        """None if it doesn't fit."""
        if resident not in self._known:
            ring = self._ring(resident)
            self._known[resident] = None if ring is None else self._cost(resident, ring)
        return self._known[resident]

    def _ring(self, resident: frozenset[str]) -> int | None:
        """The largest ring that is left and of use; None if that is too small."""
        rest = [size for size in self.sizes if size.name not in resident]
        kept = sum(size.nbytes for size in self.sizes) - sum(size.nbytes for size in rest)
        largest = largest_group(rest, self.align)
        needed = max(largest, self.least_ring)
        useful = min(self.room - kept, max(int(_DEPTHS[-1] * largest), needed))
        ring = useful // self.align * self.align  # as it is made
        return ring if ring >= needed else None

    def _guesses(self) -> Iterator[frozenset[str]]:
        """Spread over the order, for rings of several depths; and the same beside the largest ones, which then stay."""
        largest_first = sorted(self.sizes, key=lambda size: size.nbytes, reverse=True)
        for count in range(min(8, len(self.sizes))):
            fixed = largest_first[:count]
            rest = [size for size in self.sizes if size not in fixed]
            room = self.room - sum(size.nbytes for size in fixed)
            for depth in _DEPTHS:
                left = int(room - max(depth * largest_group(rest, self.align), self.least_ring))
                if left >= 0:
                    yield frozenset(size.name for size in fixed) | spread(rest, left)

    def _climb(self, resident: frozenset[str]) -> frozenset[str]:
        """The best that single additions, removals and exchanges lead to."""
        best, price = resident, self._price(resident)
        improved = price is not None
        while improved and len(self._known) < _TRIES:
            improved = False
            for other in self._neighbours(best):
                found = self._price(other)
                if found is not None and price is not None and found < price * (1 - 1e-6):
                    best, price, improved = other, found, True
        return best

    def _neighbours(self, resident: frozenset[str]) -> Iterator[frozenset[str]]:
        inside = [size.name for size in self.sizes if size.name in resident]
        outside = [size.name for size in self.sizes if size.name not in resident]
        yield from (resident - {name} for name in inside)
        yield from (resident | {name} for name in outside)
        yield from (resident - {name} | {other} for name in inside for other in outside)
