"""The order in which weights are used, learnt from the past: what followed last time is expected to follow again."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_CANDIDATES, _CONTEXT = 24, 32  # places compared when the order changed, and accesses compared at each
_LONGEST = 200_000  # accesses remembered; a pass of the largest known model has a few thousand


class AccessOrder(Generic[Key]):
    """A log of accesses and the place in it where the same thing happened before.

    A denoiser touches its weights in one order, again and again. So the future is read off the log, from behind the
    place where most of what happened just now happened before. When the order changes (another expert, a step cache,
    guidance off) the place is looked up anew: a wrong guess lasts one access.
    """

    def __init__(self, guess: Iterable[Key] = ()) -> None:
        self._log: list[Key] = []
        self._place = -1  # the log's index that the last access repeats; -1: it never happened before
        self._last: dict[Key, int] = {}
        self._last_pair: dict[tuple[Key, Key], int] = {}
        self._earlier: list[int] = []  # for each access, where the same pair was before it; -1: nowhere
        self.expect(guess)

    def expect(self, guess: Iterable[Key]) -> None:
        """Adds a guess, as if it had been seen: the order of registration, or of a trace."""
        for key in guess:
            self._append(key)
            if len(self._log) > _LONGEST:
                self._forget_half()
        self._place = -1

    def note(self, key: Key) -> bool:
        """Adds an access. Returns whether it was the one expected."""
        log, place = self._log, self._place + 1
        expected = self._place >= 0 and log[place] == key
        if not expected:
            place = self._find(key)
        self._place = place
        self._append(key)
        if len(log) > _LONGEST:
            self._forget_half()
        return expected

    def _find(self, key: Key) -> int:
        """Where `key` came before after most of what it comes after now; of places that are alike, the latest."""
        log = self._log
        best, longest = self._last.get(key, -1), 0
        candidate = self._last_pair.get((log[-1], key), -1) if log else -1
        for _ in range(_CANDIDATES):
            if candidate < 0:
                break
            alike = 1
            while alike < min(_CONTEXT, candidate) and log[candidate - 1 - alike] == log[-1 - alike]:
                alike += 1
            if alike > longest:
                best, longest = candidate, alike
            candidate = self._earlier[candidate]
        return best

    def upcoming(self, count: int) -> Iterator[Key]:
        """The next `count` accesses as far as the past tells, the expected one first."""
        log, start = self._log, self._place + 1
        if not 0 < start < len(log):
            return
        yield from itertools.islice(itertools.cycle(log[start : start + count]), count)

    def _append(self, key: Key) -> None:
        index = len(self._log)
        self._last[key] = index
        pair = (self._log[-1], key) if index else None
        self._earlier.append(self._last_pair.get(pair, -1) if pair is not None else -1)
        if pair is not None:
            self._last_pair[pair] = index
        self._log.append(key)

    def _forget_half(self) -> None:
        recent = self._log[_LONGEST // 2 :]
        place = self._place - _LONGEST // 2
        self._log, self._last, self._last_pair, self._earlier = [], {}, {}, []
        for key in recent:
            self._append(key)
        self._place = max(place, -1)

    def forget(self, keys: set[Key]) -> None:
        """Drops everything known about `keys`: their module is gone."""
        rest = [key for key in self._log if key not in keys]
        self._log, self._last, self._last_pair, self._earlier = [], {}, {}, []
        self.expect(rest)
