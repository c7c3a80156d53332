"""Masters: the one source of truth of a weight's bytes. Hot copies come from it and are never read back into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ..file_reader import FileRange, ReadBuffer, WeightFile
from ..ledger import Reservation
from ..warm import WarmKey, WarmUse, content_sum
from ._shape import as_bytes

Stop = Callable[[], bool]
_CHUNK = 4 << 20


class Master(Protocol):
    """Bytes of one weight in its stored dtype, in memory order. Reading is safe from several threads."""

    dtype: torch.dtype
    nbytes: int
    in_file: bool

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        """Fills `dest` (uint8, 1-D, CPU) with all bytes."""

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """(position in bytes, uint8 tensor valid until the next step); positions are multiples of 64."""

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        """Fills `dest` with the given rows, each `row_bytes` long."""

    def close(self) -> None:
        """Gives back what the master alone holds."""


class FileMaster:
    """A weight in its original safetensors file, or in the warm copy of its bytes. warm: where such copies are."""

    in_file = True

    def __init__(self, file: WeightFile, where: FileRange, dtype: torch.dtype, warm: WarmUse | None = None) -> None:
        self.file, self.where, self.dtype, self.nbytes = file, where, dtype, where.nbytes
        self.warm = warm
        self._key = WarmKey(str(where.path), file.identity, where.offset, where.nbytes)

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        copy = self._copy()
        if copy is not None:
            dest.copy_(copy)
            return
        self.file.read_into(dest, self.where.offset, buffer, stop=stop)
        if self.warm is not None:
            self.warm.keep_copy(self._key, dest)

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        copy = self._copy()
        if copy is None and self.warm is not None and (copy := self.warm.memory_for(self._key)) is not None:
            self.file.read_into(copy, self.where.offset, buffer, stop=stop)
            self.warm.keep(self._key, copy)
        if copy is not None:
            return pieces(copy)
        return self.file.read_chunks(self.where.offset, self.nbytes, buffer, stop=stop)

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        copy = self._copy()
        if copy is not None:
            gather_rows(dest, copy, row_bytes, rows)
        else:
            self.file.read_rows(dest, self.where.offset, row_bytes, rows, buffer)

    def _copy(self) -> torch.Tensor | None:
        """The warm copy, if there is one and the file is still what it is a copy of (ModelError)."""
        copy = self.warm.find(self._key) if self.warm is not None else None
        if copy is not None:
            self.file.check()
        return copy

    # --- where the CPU computes: the copy is the weight itself ---

    def take(self) -> tuple[torch.Tensor, int] | None:
        """The memory of the warm copy, (nbytes,) uint8, to be used as the weight, and its content sum."""
        taken = self.warm.take(self._key) if self.warm is not None else None
        if taken is not None:
            self.file.check()
        return taken

    def read_own(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> int | None:
        """Fills `dest`, memory of a weight that may be given at its end, and returns its content sum; None if it need
        not be given."""
        if self.warm is None:
            self.read_into(dest, buffer, stop)
            return None
        self.file.read_into(dest, self.where.offset, buffer, stop=stop)
        return content_sum(dest)

    def give(self, memory: torch.Tensor, total: int) -> None:
        """Offers the memory of a weight that nobody uses any more."""
        if self.warm is not None:
            self.warm.give(self._key, memory, total)

    def close(self) -> None:
        """The file is shared; whoever opened it closes it."""


class HostMaster:
    """A weight in RAM: one that never was in a file, or that was changed and became private."""

    in_file = False

    def __init__(self, tensor: torch.Tensor, reservation: Reservation | None = None) -> None:
        self.tensor, self.dtype, self.reservation = tensor, tensor.dtype, reservation
        self.nbytes = tensor.numel() * tensor.element_size()
        self._bytes = as_bytes(tensor)

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        dest.copy_(self._bytes)

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        return pieces(self._bytes)

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        gather_rows(dest, self._bytes, row_bytes, rows)

    def close(self) -> None:
        if self.reservation is not None:
            self.reservation.release()


def pieces(memory: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(position, view) of bytes in RAM, as a read of a file would give them."""
    for start in range(0, memory.numel(), _CHUNK):
        yield start, memory[start : start + _CHUNK]


def gather_rows(dest: torch.Tensor, table: torch.Tensor, row_bytes: int, rows: Sequence[int]) -> None:
    """Fills `dest` with the given rows of a table, both as bytes."""
    index = torch.tensor(rows, dtype=torch.int64)
    torch.index_select(table.view(-1, row_bytes), 0, index, out=dest.view(-1, row_bytes))
