"""Masters: the one source of truth of a weight's bytes. Hot copies come from it and are never read back into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ..file_reader import FileRange, ReadBuffer, WeightFile
from ..ledger import Reservation
from ..packing import pack_rows, packed_row_bytes
from ..stored_weight import StoredWeight
from ..warm import WarmKey, WarmUse, content_sum
from ._shape import as_bytes, normal_mode

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
        """(position in bytes, uint8 tensor valid until the next step); positions are multiples of the element size."""

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


class PiecesMaster:
    """A weight that lies in several pieces, of one file or of many, each of whole elements."""

    in_file = True

    def __init__(self, pieces: Sequence[FileMaster], dtype: torch.dtype) -> None:
        self.pieces, self.dtype, self.nbytes = pieces, dtype, sum(piece.nbytes for piece in pieces)

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        for start, piece in self._placed():
            piece.read_into(dest[start : start + piece.nbytes], buffer, stop)

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        for start, piece in self._placed():
            for position, chunk in piece.chunks(buffer, stop):
                yield start + position, chunk

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        for index, row in enumerate(rows):
            place = dest[index * row_bytes : (index + 1) * row_bytes]
            start, piece = next((s, p) for s, p in self._placed() if s <= row * row_bytes < s + p.nbytes)
            piece.rows(place, row_bytes, [row - start // row_bytes], buffer)

    def _placed(self) -> Iterator[tuple[int, FileMaster]]:
        start = 0
        for piece in self.pieces:
            yield start, piece
            start += piece.nbytes

    def close(self) -> None:
        """The files are shared; whoever opened them closes them."""


class MadeMaster:
    """A matrix that isn't in the file as it is needed: the transpose of what is there, or the identity.

    It is made whole each time it is read, outside the ledger: models have one or two such matrices, of a few MB.
    """

    in_file = True

    def __init__(self, stored: StoredWeight, source: Master | None) -> None:
        self._stored, self._source = stored, source
        self.dtype, self.nbytes = stored.torch_dtype, stored.nbytes

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        dest.copy_(as_bytes(self._make(buffer, stop)))

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, as_bytes(self._make(buffer, stop))

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        table = as_bytes(self._make(buffer, None)).view(-1, row_bytes)
        torch.index_select(table, 0, torch.tensor(rows, dtype=torch.int64), out=dest.view(-1, row_bytes))

    def _make(self, buffer: ReadBuffer, stop: Stop | None) -> torch.Tensor:
        with normal_mode():
            if self._source is None:
                return torch.eye(self._stored.shape[0], dtype=self.dtype)
            there = torch.empty(tuple(reversed(self._stored.shape)), dtype=self.dtype)
            self._source.read_into(as_bytes(there), buffer, stop)
            return there.t().contiguous()

    def close(self) -> None:
        """The file is shared; whoever opened it closes it."""


class RowPacker:
    """Another master's matrix as packed rows (`packing.FLOAT8_ROWS`), made anew each time it is read.

    width: of a row, in elements. Rows are packed as they come, so that no whole weight is in RAM beside them.
    """

    def __init__(self, source: Master, rows: int, width: int) -> None:
        self._source, self._width = source, width
        self.dtype, self.nbytes, self.in_file = torch.uint8, rows * packed_row_bytes(width), source.in_file

    def read_into(self, dest: torch.Tensor, buffer: ReadBuffer, stop: Stop | None = None) -> None:
        for position, packed in self.chunks(buffer, stop):
            dest[position : position + packed.numel()].copy_(packed)

    def chunks(self, buffer: ReadBuffer, stop: Stop | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        row_bytes, position = self._width * self._source.dtype.itemsize, 0
        rest = torch.empty(0, dtype=torch.uint8)  # of a row that goes on in the next chunk
        for _, chunk in self._source.chunks(buffer, stop):
            with normal_mode():
                joined = torch.cat([rest, chunk]) if rest.numel() else chunk
                whole = joined.numel() // row_bytes * row_bytes
                packed = pack_rows(joined[:whole].clone().view(self._source.dtype).view(-1, self._width))
                rest = joined[whole:].clone()
            yield position, packed.view(-1)
            position += packed.numel()

    def rows(self, dest: torch.Tensor, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer) -> None:
        size = self._width * self._source.dtype.itemsize
        with normal_mode():
            raw = torch.empty(len(rows) * size, dtype=torch.uint8)
            self._source.rows(raw, size, rows, buffer)
            dest.copy_(pack_rows(raw.view(self._source.dtype).view(len(rows), self._width)).view(-1))

    def close(self) -> None:
        self._source.close()


def stored_master(stored: StoredWeight, open_file: Callable[[Path], WeightFile], warm: WarmUse | None = None) -> Master:
    """The master of a weight that is made from files: of its packed bytes, if it is packed. open_file: gives the reader
    of each file. warm: where copies of their bytes are kept."""
    dtype = stored.torch_dtype if stored.packing is None else torch.uint8
    pieces = [FileMaster(open_file(piece.path), piece, dtype, warm) for piece in stored.pieces]
    if not pieces:
        return MadeMaster(stored, None)
    whole: Master = pieces[0] if len(pieces) == 1 else PiecesMaster(pieces, dtype)
    return MadeMaster(stored, whole) if stored.how == "transposed" else whole


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
