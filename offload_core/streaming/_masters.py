"""Masters: the one source of truth of a weight's bytes. Hot copies come from it and are never read back into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ..file_reader import FileRange, ReadBuffer, WeightFile
from ..ledger import Reservation
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
    """A weight in its original safetensors file."""

    in_file = True

    def __init__(self, file: WeightFile, where: FileRange, dtype: torch.dtype) -> None:
        self.file, self.where, self.dtype, self.nbytes = file, where, dtype, where.nbytes

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        self.file.read_into(dest, self.where.offset, buffer, stop=stop)

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        return self.file.read_chunks(self.where.offset, self.nbytes, buffer, stop=stop)

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        self.file.read_rows(dest, self.where.offset, row_bytes, rows, buffer)

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
        for start in range(0, self.nbytes, _CHUNK):
            yield start, self._bytes[start : start + _CHUNK]

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        table = self._bytes.view(-1, row_bytes)
        torch.index_select(table, 0, torch.tensor(rows, dtype=torch.int64), out=dest.view(-1, row_bytes))

    def close(self) -> None:
        if self.reservation is not None:
            self.reservation.release()
