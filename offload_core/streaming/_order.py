"""The order in which weights are used, learnt from the past: what followed last time is expected to follow again."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_LONGEST = 200_000  # accesses remembered; a pass of the largest known model has a few thousand


class AccessOrder(Generic[Key]):
    """A log of accesses and the place in it where the same thing happened before.

    A denoiser touches its weights in one order, again and again. So the future is read off the log, from behind the
    last time that the current access (and the one before it) happened. When the order changes (another expert, a step
    cache, guidance off) the place is looked up anew: a wrong guess lasts one access.
    """

    def __init__(self, guess: Iterable[Key] = ()) -> None:
        self._log: list[Key] = []
        self._place = -1  # the log's index that the last access repeats; -1: it never happened before
        self._last: dict[Key, int] = {}
        self._last_pair: dict[tuple[Key, Key], int] = {}
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
            place = self._last_pair.get((log[-1], key), -1) if log else -1
            if place < 0:
                place = self._last.get(key, -1)
        self._place = place
        self._append(key)
        if len(log) > _LONGEST:
            self._forget_half()
        return expected

    def upcoming(self, count: int) -> Iterator[Key]:
        """The next `count` accesses as far as the past tells, the expected one first."""
        log, start = self._log, self._place + 1
        if not 0 < start < len(log):
            return
        yield from itertools.islice(itertools.cycle(log[start : start + count]), count)

    def _append(self, key: Key) -> None:
        index = len(self._log)
        self._last[key] = index
        if index:
            self._last_pair[self._log[-1], key] = index
        self._log.append(key)

    def _forget_half(self) -> None:
        recent = self._log[_LONGEST // 2 :]
        place = self._place - _LONGEST // 2
        self._log, self._last, self._last_pair = [], {}, {}
        for key in recent:
            self._append(key)
        self._place = max(place, -1)

    def forget(self, keys: set[Key]) -> None:
        """Drops everything known about `keys`: their module is gone."""
        rest = [key for key in self._log if key not in keys]
        self._log, self._last, self._last_pair = [], {}, {}
        self.expect(rest)
