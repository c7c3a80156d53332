"""Copies of weights that stay in RAM when a phase ends, so that the next phase of the model needn't read its files.

A copy is the bytes of one range of a file, as stored. It is found by the file's identity (size, time, inode) and the
range, and used only after the reader saw that the open file is still that one, so a file that changed is read anew.
Copies take what nothing else needs of `host_memory`: they count as free, and a reservation that needs their place gets
it before it is granted (`Ledger`). Where the CPU computes, a weight's copy is the weight itself: it is handed to the
phase, and comes back at its end if its content is what was read. So an edited weight is never kept.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .file_reader import FileIdentity

_SUM_BYTES = 1 << 20  # that a content sum takes at once
_ODD = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, as multiplicative hashing uses it (Knuth, TAOCP 3, 6.4)


@dataclass(frozen=True)
class WarmKey:
    """Which bytes: `nbytes` at `offset` of the file at `path` while it is the one that `identity` says."""

    path: str
    identity: FileIdentity
    offset: int
    nbytes: int


@dataclass
class _Copy:
    """memory: (nbytes,) uint8 with a storage of its own. total: its content sum, None if it was never handed out.
    used: the number of the scope that used it last."""

    memory: torch.Tensor
    total: int | None
    used: int


class WarmStore:
    """Warm copies of all sessions that share it. Safe to use from any thread at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: OrderedDict[WarmKey, _Copy] = OrderedDict()  # the longest unused first
        self._held = self._scopes = self._releases = 0
        self._used: Counter[int] = Counter()  # bytes by the scope that used them last
        self._storages: set[int] = set()

    @property
    def held_bytes(self) -> int:
        """Bytes of RAM that warm copies take, those that a running phase uses left out."""
        return self._held

    def release(self, nbytes: int | None = None) -> int:
        """Frees `nbytes` of warm copies, the longest unused first, or all of them. Returns the bytes.

        If there are fewer, those that a running phase uses or makes aren't kept when it ends, either.
        """
        with self._lock:
            freed = self._drop(self._held if nbytes is None else nbytes)
            if nbytes is None or freed < nbytes:
                self._releases += 1
            return freed

    def make_room(self, nbytes: int) -> int:
        """Frees `nbytes` for a reservation, as far as there are. Returns the bytes."""
        with self._lock:
            return self._drop(nbytes)

    def use(self, room: Callable[[], int]) -> WarmUse:
        """For one scope. room: bytes of RAM that its budget has for warm copies, those that are held included."""
        with self._lock:
            self._scopes += 1
            return WarmUse(self, room, self._scopes, self._releases)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a warm copy."""
        with self._lock:
            return storage._cdata in self._storages

    def _drop(self, nbytes: int) -> int:
        freed = 0
        while self._copies and freed < nbytes:
            freed += self._remove(next(iter(self._copies))).memory.numel()
        return freed

    def _remove(self, key: WarmKey) -> _Copy:
        copy = self._copies.pop(key)
        self._held -= key.nbytes
        self._used[copy.used] -= key.nbytes
        self._storages.discard(copy.memory.untyped_storage()._cdata)
        return copy

    def _touch(self, key: WarmKey, scope: int) -> _Copy:
        copy = self._copies[key]
        self._used[copy.used] -= key.nbytes
        self._used[scope] += key.nbytes
        copy.used = scope
        self._copies.move_to_end(key)
        return copy

    def _add(self, key: WarmKey, copy: _Copy, room: int) -> bool:
        """Only copies that this scope didn't use make way. An order that repeats and doesn't fit would find none of
        its weights if the longest unused went first."""
        while self._held + key.nbytes > room:
            if not self._copies or next(iter(self._copies.values())).used >= copy.used:
                return False
            self._remove(next(iter(self._copies)))
        self._copies[key] = copy
        self._held += key.nbytes
        self._used[copy.used] += key.nbytes
        self._storages.add(copy.memory.untyped_storage()._cdata)
        return True


class WarmUse:
    """What one scope does with a store. taken_bytes: that weren't read from files."""

    def __init__(self, store: WarmStore, room: Callable[[], int], number: int, releases: int) -> None:
        self._store, self._room, self._number, self._releases = store, room, number, releases
        self.taken_bytes = 0

    def find(self, key: WarmKey) -> torch.Tensor | None:
        """The copy, to be read from: (nbytes,) uint8. It stays in the store."""
        with self._store._lock:
            if key not in self._store._copies:
                return None
            self.taken_bytes += key.nbytes
            return self._store._touch(key, self._number).memory

    def take(self, key: WarmKey) -> tuple[torch.Tensor, int] | None:
        """The copy and its content sum; it is the caller's, until it is given back."""
        with self._store._lock:
            if key not in self._store._copies:
                return None
            copy = self._store._remove(key)
            self.taken_bytes += key.nbytes
        return copy.memory, content_sum(copy.memory) if copy.total is None else copy.total

    def wants(self, key: WarmKey) -> bool:
        """Whether a copy would be kept now, if there is one more."""
        store = self._store
        with store._lock:
            fresh = key not in store._copies and store._releases == self._releases
            others = store._used[self._number]
        return fresh and key.nbytes > 0 and others + key.nbytes <= self._room()

    def keep_copy(self, key: WarmKey, memory: torch.Tensor) -> None:
        """Keeps a copy of what was read, if there is room."""
        copy = self.memory_for(key)
        if copy is not None:
            self.keep(key, copy.copy_(memory))

    def memory_for(self, key: WarmKey) -> torch.Tensor | None:
        """Memory for a copy that would be kept, None if there is no room for one."""
        import torch

        from .devices import is_out_of_memory

        if not self.wants(key):
            return None
        try:
            return torch.empty(key.nbytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def keep(self, key: WarmKey, memory: torch.Tensor, total: int | None = None) -> None:
        """Keeps `memory` itself, if there is room."""
        room = self._room()
        with self._store._lock:
            if key not in self._store._copies and self._store._releases == self._releases:
                self._store._add(key, _Copy(memory, total, self._number), room)

    def give(self, key: WarmKey, memory: torch.Tensor, total: int) -> None:
        """Keeps the memory of a weight that a phase is done with, if nobody else holds it and it is what was read."""
        import torch

        holders = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
        if holders <= 2 and self.wants(key) and content_sum(memory) == total:  # `memory`, and the call's own
            self.keep(key, memory, total)


def content_sum(memory: torch.Tensor) -> int:
    """A 64-bit sum of (n,) uint8 that changes with any change of content but for a chance of some 2**-60.

    Each word is multiplied by an odd weight of its own, so that words which change places count, too.
    """
    import torch

    words = memory.numel() // 8 * 8
    total = int.from_bytes(bytes(memory[words:].tolist()), "little")
    with torch.inference_mode(False), torch.no_grad():
        for piece in memory[:words].view(torch.int64).split(_SUM_BYTES // 8):
            total = total * _ODD + int((piece * _weights()[: piece.numel()]).sum())
    return total % (1 << 64)


@functools.cache
def _weights() -> torch.Tensor:
    import torch

    generator = torch.Generator("cpu").manual_seed(0)
    with torch.inference_mode(False):
        return torch.randint(-(1 << 62), 1 << 62, (_SUM_BYTES // 8,), dtype=torch.int64, generator=generator) | 1
