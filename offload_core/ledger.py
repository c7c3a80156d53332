"""Who holds how many bytes of which memory: every byte of a weight is reserved here before it is allocated."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Literal, Protocol

from ._report_table import human_bytes
from .errors import BudgetError

Tier = Literal["device", "host"]


class Reservation:
    """Bytes granted by a ledger, until `release` (which may be called twice)."""

    __slots__ = ("_ledger", "kind", "nbytes", "tier")

    def __init__(self, ledger: Ledger, tier: Tier, kind: str, nbytes: int) -> None:
        self._ledger: Ledger | None = ledger
        self.tier, self.kind, self.nbytes = tier, kind, nbytes

    def release(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger._give_back(self)


class Evictable(Protocol):
    """Who holds host memory that counts as free: it gives way to every reservation."""

    @property
    def held_bytes(self) -> int: ...

    def make_room(self, nbytes: int) -> int:
        """Frees so many bytes, as far as it has them. Returns the bytes."""


class Ledger:
    """Budgets of two tiers in bytes, "device" and "host", and what is reserved of them.

    `shared`: the execution device is the CPU, so that device bytes are host bytes too and count in both tiers.
    `evictable`: what it holds of the host tier is given back before a reservation that needs its place is granted.
    """

    def __init__(self, *, device: int, host: int, shared: bool = False, evictable: Evictable | None = None) -> None:
        self.limits: dict[Tier, int] = {"device": device, "host": host}
        self.shared, self._evictable = shared, evictable
        self._lock = threading.Lock()
        self._used: dict[Tier, Counter[str]] = {"device": Counter(), "host": Counter()}
        self._peak: dict[Tier, int] = {"device": 0, "host": 0}

    def reserve(self, tier: Tier, kind: str, nbytes: int, what: str = "") -> Reservation:
        """Grants `nbytes` of `tier` under the heading `kind` ("resident", "ring", "staging", "private", ...).

        Raises BudgetError, and books nothing, if that would pass the tier's limit. `what` names the weight.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes can't be reserved")
        with self._lock:
            for each in self._tiers(tier):
                used = self._used[each].total()
                if used + nbytes > self.limits[each]:
                    raise self._refusal(each, kind, nbytes, what, used)
            for each in self._tiers(tier):
                self._used[each][kind] += nbytes
                self._peak[each] = max(self._peak[each], self._used[each].total())
            spare = self.limits["host"] - self._used["host"].total()
        if self._evictable is not None and self._evictable.held_bytes > spare:
            self._evictable.make_room(self._evictable.held_bytes - spare)
        return Reservation(self, tier, kind, nbytes)

    def spare_host_bytes(self) -> int:
        """Bytes of the host budget that nothing but evictable memory takes."""
        with self._lock:
            return self.limits["host"] - self._used["host"].total()

    def allow(self, tier: Tier, nbytes: int) -> None:
        """Raises the limit of a tier by memory that was in use when the budget was measured by what is free, and that
        will be booked here. A negative number takes it back."""
        with self._lock:
            self.limits[tier] += nbytes

    def used(self, tier: Tier) -> int:
        with self._lock:
            return self._used[tier].total()

    def free(self, tier: Tier) -> int:
        """Bytes that a reservation of `tier` could get now."""
        with self._lock:
            return min(self.limits[each] - self._used[each].total() for each in self._tiers(tier))

    def peak(self, tier: Tier) -> int:
        with self._lock:
            return self._peak[tier]

    def by_kind(self, tier: Tier) -> dict[str, int]:
        with self._lock:
            return {kind: nbytes for kind, nbytes in self._used[tier].items() if nbytes}

    def _tiers(self, tier: Tier) -> tuple[Tier, ...]:
        return ("device", "host") if self.shared and tier == "device" else (tier,)

    def _give_back(self, reservation: Reservation) -> None:
        with self._lock:
            for each in self._tiers(reservation.tier):
                self._used[each][reservation.kind] -= reservation.nbytes

    def _refusal(self, tier: Tier, kind: str, nbytes: int, what: str, used: int) -> BudgetError:
        purpose = f"{kind} memory for {what}" if what else f"{kind} memory"
        limit = self.limits[tier]
        return BudgetError(
            f"{human_bytes(nbytes)} of {purpose} don't fit the {tier} budget of {human_bytes(limit)}, of which "
            f"{human_bytes(used)} are in use. Set {tier}_memory to at least {at_least(used + nbytes)}."
        )


def at_least(nbytes: int) -> str:
    """Like human_bytes, but never rounded down: a budget of what it says holds `nbytes`."""
    unit = 1024
    while unit * 1024 <= nbytes:
        unit *= 1024
    return human_bytes(nbytes if nbytes < 1024 else math.ceil(nbytes * 10 / unit) * unit // 10)
