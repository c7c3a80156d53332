"""Memory for hot copies: a block of device memory that streamed weights pass through, region by region.

A region is handed out as a storage of its own over a part of the block. It is free again when that storage is dead:
nobody holds a view, an alias or a saved tensor of it. That is told by the storage itself, so a slot can't be reused
under somebody's feet, whoever kept what. A storage keeps its block alive, also after the arena is gone.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from ._shape import Layout


class Region:
    """A part of an arena's block. streams: those that its hot copy was used on."""

    __slots__ = ("nbytes", "offset", "streams", "taken")

    def __init__(self, offset: int, nbytes: int, taken: int) -> None:
        self.offset, self.nbytes, self.taken = offset, nbytes, taken
        self.streams: set[Any] = set()


class _Death(weakref.ref[Any]):
    """Told when a storage dies. Kept by the arena; the storage must not know the arena."""

    __slots__ = ("arena", "region")
    region: Region
    arena: int


class Arena:
    """A block of `nbytes` and its free parts, first fit. Not thread-safe: the cache's lock guards it.

    `allocate` makes the block (uint8, on the device) or, where storages can't be made over a part of another (MPS),
    `whole=False` makes each region an allocation of its own and the arena only counts.
    """

    def __init__(
        self,
        nbytes: int,
        allocate: Callable[[int], torch.Tensor],
        freed: queue.SimpleQueue[_Death],
        *,
        align: int,
        whole: bool = True,
    ) -> None:
        self.nbytes, self.align, self._allocate, self._freed = nbytes, align, allocate, freed
        self._block = allocate(nbytes + align) if whole else None
        self._start = -self._block.data_ptr() % align if self._block is not None else 0
        self._free: list[tuple[int, int]] = [(0, nbytes)]
        self._deaths: dict[int, _Death] = {}

    @property
    def busy_bytes(self) -> int:
        return self.nbytes - sum(size for _, size in self._free)

    @property
    def largest_free(self) -> int:
        return max((size for _, size in self._free), default=0)

    def take(self, nbytes: int) -> Region | None:
        """A free region, None if there is none of that size."""
        size = max(-(-nbytes // self.align), 1) * self.align
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, free - size)
                return Region(offset, nbytes, size)
        return None

    def give(self, region: Region) -> None:
        """Takes a region back; the caller knows that nothing uses it."""
        start, end = region.offset, region.offset + region.taken
        rest = []
        for offset, size in self._free:
            if offset + size == start:
                start = offset
            elif offset == end:
                end = offset + size
            else:
                rest.append((offset, size))
        self._free = sorted([*rest, (start, end - start)])

    def tensor(self, region: Region, layout: Layout) -> torch.Tensor:
        """The region as a tensor of that layout. When its storage dies, the region arrives in the freed queue.

        Where a region is an allocation of its own that may fail; the region is free again then.
        """
        if self._block is None:
            try:
                storage: Any = self._allocate(region.nbytes).untyped_storage()
            except BaseException:
                self.give(region)
                raise
        else:
            pointer = self._block.data_ptr() + self._start + region.offset
            device = self._block.device
            storage = cast(Any, torch._C)._construct_storage_from_data_pointer(pointer, device, region.nbytes)
            storage._block = self._block  # it lives as long as the storage does
        death = _Death(storage, self._freed.put)
        death.region, death.arena = region, id(self)
        self._deaths[id(death)] = death
        return layout.over(storage)

    def buried(self, death: _Death) -> Region:
        """The region of a storage that died."""
        del self._deaths[id(death)]
        return death.region

    @property
    def held_bytes(self) -> int:
        """Bytes of regions whose storage is alive."""
        return sum(death.region.nbytes for death in self._deaths.values() if death() is not None)
