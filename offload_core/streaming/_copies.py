"""Copy engines: how a weight's bytes get from its master into a hot copy. One for the CPU, one for accelerators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ..file_reader import ReadBuffer
from ._masters import FileMaster, Master, Stop
from ._shape import as_bytes, flat, normal_mode
from ._weight import Entry


class CopyEngine(Protocol):
    """What the cache asks of a device.

    align: bytes that hot copies are aligned to. whole: whether regions can be made over one block.
    eager: whether a used slot should be let go at once, so that the next copy into it waits for little.
    """

    device: torch.device
    align: int
    whole: bool
    eager: bool

    def prepare_casts(self, nbytes: int) -> None:
        """Says that weights of up to `nbytes` will be cast on the device, where the engine needs a buffer for that."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, 1-D, for a hot copy or an arena. Raises torch.OutOfMemoryError."""

    def fill(self, entry: Entry, hot: torch.Tensor, buffer: ReadBuffer, stop: Stop) -> Any:
        """Fills a hot copy from the master. Returns what `before_use` has to wait for, None if it is complete.

        Called on any thread, several at once with their own buffers.
        """

    def take_warm(self, entry: Entry) -> torch.Tensor | None:
        """Memory that holds a weight's hot copy already (uint8, 1-D), from the last phase that used it."""

    def give_warm(self, entry: Entry, memory: torch.Tensor) -> None:
        """Offers the memory of a hot copy, which nobody else has any more, to the next phase."""

    def before_use(self, entry: Entry) -> None:
        """Orders the calling thread's compute after the copy of a hot weight."""

    def is_complete(self, entry: Entry) -> bool:
        """Whether a hot copy can be used from any thread and stream without waiting."""

    def retire(self, streams: Iterable[Any]) -> None:
        """Orders later copies after everything that was enqueued on these streams: their slots are used again."""

    def forget(self, entry: Entry) -> None:
        """Gives back what is kept of a weight beside its hot copy."""

    def want_pinned(self, nbytes: int) -> None:
        """Announces how much of that will be taken."""

    @property
    def pinned_free(self) -> int:
        """Bytes of pinned memory in which weights could stay in RAM."""

    def trim(self) -> None:
        """Gives back pinned memory of which nothing is in use; it is taken again when it is needed."""

    def drain(self) -> None:
        """Waits until no copy is in flight."""

    def close(self) -> None:
        """Gives back streams and staging memory."""


class CpuCopies:
    """Hot copies in RAM: bytes are read straight into them, cast chunk by chunk where the compute dtype differs."""

    align = 64
    whole = True
    eager = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def prepare_casts(self, nbytes: int) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        with normal_mode():
            return torch.empty(nbytes, dtype=torch.uint8)

    def fill(self, entry: Entry, hot: torch.Tensor, buffer: ReadBuffer, stop: Stop) -> None:
        master = entry.master
        assert master is not None
        with normal_mode():
            if entry.casts:
                cast_into(flat(hot), master, entry.casts, buffer, stop)
            elif entry.resident and isinstance(master, FileMaster):
                entry.mark = master.read_own(as_bytes(hot), buffer, stop)
            else:
                master.read_into(as_bytes(hot), buffer, stop)

    def take_warm(self, entry: Entry) -> torch.Tensor | None:
        taken = entry.master.take() if isinstance(entry.master, FileMaster) and not entry.casts else None
        if taken is None:
            return None
        memory, entry.mark = taken
        return memory

    def give_warm(self, entry: Entry, memory: torch.Tensor) -> None:
        mark, entry.mark = entry.mark, None
        if mark is not None and isinstance(entry.master, FileMaster) and not entry.casts:
            entry.master.give(memory, mark)

    def before_use(self, entry: Entry) -> None:
        pass

    def is_complete(self, entry: Entry) -> bool:
        return True

    def retire(self, streams: Iterable[Any]) -> None:
        pass

    def forget(self, entry: Entry) -> None:
        pass

    def want_pinned(self, nbytes: int) -> None:
        pass

    @property
    def pinned_free(self) -> int:
        return 0

    def trim(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def cast_into(
    dest: torch.Tensor, master: Master, casts: Iterable[torch.dtype], buffer: ReadBuffer, stop: Stop | None
) -> None:
    """Fills `dest` (1-D) with a master's values, sent through the given dtypes one after the other."""
    size = master.dtype.itemsize
    for position, chunk in master.chunks(buffer, stop):
        start, count = position // size, chunk.numel() // size
        dest[start : start + count].copy_(cast(chunk.view(master.dtype), casts))


def cast(values: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    for dtype in dtypes:
        values = values.to(dtype)
    return values
