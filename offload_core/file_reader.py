"""Byte ranges of weight files into CPU memory: large reads from the original file, without a map or a second copy.

A map costs a page fault per page and leaves the order to the kernel. Here the file is read in pieces of a few MiB, by
the page cache or around it (direct I/O, which spares the copy into the cache and the pages it evicts). Direct I/O wants
file offsets, addresses and lengths that are multiples of a block, and tensors lie anywhere, so direct reads go through
a page-aligned buffer and from there to their place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import short_path
from .errors import ModelError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_log = logging.getLogger(__name__)

# What file systems ask of direct I/O at most. One that asks for more refuses the read and is read through its cache.
BLOCK_BYTES = 4096
_ALIGNMENT = 64  # positions of chunks: a multiple of every element size, and a cache line
_LARGEST_ELEMENT = 8
_MAX_GAP_BYTES = 16 << 10  # between rows: reading less than this costs less than another call
_PIECE_BUFFERS = 4  # a piece that goes straight to its place, in buffers: it is only how often `stop` is asked
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}

Stop = Callable[[], bool]


class ReadStopped(Exception):  # noqa: N818 -- a wish, not a fault
    """`stop` answered true, so the rest of the range wasn't read."""


@dataclass(frozen=True)
class FileRange:
    """Where bytes lie. offset: from the start of the file, in bytes."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from a changed one. size: bytes. inode: 0 where the platform has none."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> FileIdentity:
        """The identity of the file with this path or open descriptor. Raises OSError."""
        status = os.fstat(file) if isinstance(file, int) else os.stat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: FileIdentity) -> str | None:
        """How the file `now` differs from what it was, in words; None if it doesn't."""
        if self.size != now.size:
            return f"its size was {self.size:,} bytes and is {now.size:,}"
        if self.inode and now.inode and self.inode != now.inode:
            return f"its size is still {self.size:,} bytes, but it is another file of that name"
        if self.mtime_ns != now.mtime_ns:
            return f"its size is still {self.size:,} bytes, but it was written to"
        return None


class ReadBuffer:
    """Page-aligned memory for one reading thread. nbytes: its real size, `chunk_bytes` rounded up to whole blocks."""

    def __init__(self, chunk_bytes: int = 4 << 20) -> None:
        # Two blocks at least, so that a chunk which starts inside the first has something left after rounding down.
        self.nbytes = max(_round_up(chunk_bytes), 2 * BLOCK_BYTES)
        # Private, because shared memory, which is Python's default, gets no huge pages.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        memory = mmap.mmap(-1, self.nbytes, **private)
        huge_pages = getattr(mmap, "MADV_HUGEPAGE", None)
        if huge_pages is not None:
            with contextlib.suppress(OSError):  # a kernel without them
                # Fewer, larger segments per request: direct reads of 4 MiB were measured 1.5 times as fast.
                memory.madvise(huge_pages)
        self._bytes: memoryview | None = memoryview(memory)
        self._tensor: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def bytes(self) -> memoryview:
        if self._bytes is None:
            raise ValueError("The read buffer is closed.")
        return self._bytes

    @property
    def tensor(self) -> torch.Tensor:
        """The whole buffer: (nbytes,) uint8."""
        if self._tensor is None:
            raise ValueError("The read buffer is closed.")
        return self._tensor

    def close(self) -> None:
        """Gives the memory back, at the latest when the last view of it is gone. May be called again."""
        self._bytes = self._tensor = None


class WeightFile:
    """A file of weights, open for reading from several threads, each with its own ReadBuffer.

    identity: what the file must be; by default what it is now. direct: read around the page cache. keep_cached: False
    drops the pages that buffered reads leave in the cache. bytes_read, seconds: what the reads of all threads have
    delivered, without padding, and the time that took, summed over the threads.

    Opening raises ModelError if the file isn't there, can't be read or isn't what `identity` says. Every read raises
    ModelError if the file was changed before or meanwhile, ends early or can't be read, and ValueError for bytes that
    it never had or once it is closed; what `dest` holds then is undefined. Renaming another file over it is harmless.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: FileIdentity | None = None,
        *,
        direct: bool = False,
        keep_cached: bool = True,
    ) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self.seconds = 0.0
        self._preadv: Any = getattr(os, "preadv", None)
        self._fadvise: Any = None if keep_cached else getattr(os, "posix_fadvise", None)
        self._lock = threading.Lock()  # of the counters and of what is open
        self._seek_lock = threading.Lock()  # of the descriptors' positions, where there is no preadv
        self._descriptors: list[int] = []
        self._readers = 0
        self._closed = False
        try:
            self._plain = self._open()
            self.identity = identity or FileIdentity.of(self._plain)
            self._compare(self._plain)
            self._direct = self._open_direct() if direct else None
        except OSError as error:
            self.close()
            raise self._unreadable(error) from None
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether reads go around the page cache. A file system may refuse at the first one; then it becomes False."""
        return self._direct is not None

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file, or lets the last read that is under way do so. May be called again."""
        with self._lock:
            self._closed = True
            self._close_unless_read()

    def check(self) -> None:
        """Raises ModelError if the file isn't what it was, ValueError if it is closed."""
        with self._reading():
            pass

    def read_into(self, dest: torch.Tensor, offset: int, buffer: ReadBuffer, *, stop: Stop | None = None) -> None:
        """Fills `dest`, (n,) uint8 on the CPU, with the n bytes at `offset`.

        stop: asked before each piece, at most four buffers long. Raises ReadStopped if it says so.
        """
        target = _Target(dest)
        self._check_range(offset, target.nbytes)
        with self._reading():
            began = time.perf_counter()
            position = 0
            try:
                while position < target.nbytes:
                    _ask(stop)
                    position += self._read_piece(target, position, offset + position, buffer)
            finally:
                self._add(position, began)

    def read_chunks(
        self, offset: int, nbytes: int, buffer: ReadBuffer, *, stop: Stop | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The `nbytes` bytes at `offset` in order: (position in the range, (count,) uint8 view of `buffer`).

        A view holds until the next step. Positions are multiples of 64 bytes and views start at multiples of 8 bytes,
        so a view can be viewed as the tensor's dtype. stop: asked before each chunk. Raises ReadStopped if it says so.
        """
        self._check_range(offset, nbytes)
        return self._chunks(offset, nbytes, buffer, stop)

    def read_rows(
        self, dest: torch.Tensor, offset: int, row_bytes: int, rows: Sequence[int], buffer: ReadBuffer
    ) -> None:
        """Gathers rows of a table: row i lies at `offset` + i * `row_bytes`. dest: (len(rows) * row_bytes,) uint8.

        Rows may repeat and come in any order. Always through the page cache, which small reads are better off with.
        """
        target = _Target(dest)
        if target.nbytes != len(rows) * row_bytes:
            raise ValueError(f"{len(rows)} rows of {row_bytes} bytes don't fit {target.nbytes} bytes exactly.")
        if not target.nbytes:
            return
        places: dict[int, list[int]] = {}  # by row: where in `dest` it goes
        for index, row in enumerate(rows):
            places.setdefault(row, []).append(index * row_bytes)
        order = sorted(places)
        if order[0] < 0:
            raise ValueError(f"A table has no row {order[0]}.")
        self._check_range(offset, (order[-1] + 1) * row_bytes)
        with self._reading():
            for run in _runs(order, row_bytes, buffer.nbytes):
                began = time.perf_counter()
                self._read_run(run, offset + run[0] * row_bytes, row_bytes, target, places, buffer)
                self._add(sum(len(places[row]) for row in run) * row_bytes, began)

    # --- pieces of a range ---

    def _read_piece(self, target: _Target, position: int, at: int, buffer: ReadBuffer) -> int:
        """Reads what belongs at `position` of the target from byte `at` of the file on; how many bytes it got."""
        left = target.nbytes - position
        piece = min(left, _PIECE_BUFFERS * buffer.nbytes)
        if not self.direct:
            return self._read_plain(target.bytes[position : position + piece], at)
        inside = at % BLOCK_BYTES
        congruent = (target.address + position - at) % BLOCK_BYTES == 0
        if congruent and not inside and left >= BLOCK_BYTES:
            return self._read_blocks(target.bytes[position : position + piece - piece % BLOCK_BYTES], at)
        # A congruent target needs the buffer for its first and its last block only.
        span = BLOCK_BYTES if congruent else min(buffer.nbytes, _round_up(inside + left))
        needed = min(span, inside + left)
        _fill(self._read_blocks, buffer.bytes[:span], at - inside, needed)
        target.fill(position, buffer.tensor.data_ptr() + inside, needed - inside)
        return needed - inside

    def _chunks(
        self, offset: int, nbytes: int, buffer: ReadBuffer, stop: Stop | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        position = 0
        while position < nbytes:
            _ask(stop)
            with self._reading():
                began = time.perf_counter()
                chunk = self._read_chunk(offset + position, nbytes - position, buffer)
                self._add(len(chunk), began)
            yield position, chunk
            position += len(chunk)

    def _read_chunk(self, at: int, left: int, buffer: ReadBuffer) -> torch.Tensor:
        direct = self.direct  # asked once: another reader may be refused meanwhile
        inside = at % BLOCK_BYTES if direct else 0
        needed = min(buffer.nbytes, inside + left)
        if direct:
            _fill(self._read_blocks, buffer.bytes[: _round_up(needed)], at - inside, needed)
        else:
            _fill(self._read_plain, buffer.bytes[:needed], at, needed)
        count = needed - inside
        if count < left:
            count -= count % _ALIGNMENT  # the next chunk reads the rest
        if inside % _LARGEST_ELEMENT:
            ctypes.memmove(buffer.tensor.data_ptr(), buffer.tensor.data_ptr() + inside, count)
            inside = 0
        return buffer.tensor[inside : inside + count]

    def _read_run(
        self,
        run: list[int],
        at: int,
        row_bytes: int,
        target: _Target,
        places: dict[int, list[int]],
        buffer: ReadBuffer,
    ) -> None:
        """Reads from row run[0], at byte `at`, to row run[-1] and puts the rows of the run in their places."""
        span = (run[-1] - run[0] + 1) * row_bytes
        if span <= buffer.nbytes:
            view, source = buffer.bytes[:span], buffer.tensor.data_ptr()
        else:  # a single row: read where it goes first, copy from there
            place = places[run[0]][0]
            view, source = target.bytes[place : place + row_bytes], target.address + place
        _fill(self._read_plain, view, at, span)
        for row in run:
            for place in places[row]:
                target.fill(place, source + (row - run[0]) * row_bytes, row_bytes)

    # --- descriptors ---

    def _open(self, flag: int = 0) -> int:
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | flag)
        self._descriptors.append(descriptor)
        return descriptor

    def _open_direct(self) -> int | None:
        """A second descriptor that goes around the page cache, None (and a line in the log) if that isn't to be had."""
        try:
            flag, no_cache = getattr(os, "O_DIRECT", 0), getattr(fcntl, "F_NOCACHE", None)
            if not flag and no_cache is None:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            descriptor = self._open(flag)
            if not flag:
                fcntl.fcntl(descriptor, no_cache, 1)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._log_refusal(error)
            return None
        self._compare(descriptor)  # the name may mean another file by now
        return descriptor

    def _log_refusal(self, error: OSError) -> None:
        _log.info("%s is read through the page cache: no direct I/O here (%s).", short_path(self.path), error.strerror)

    def _reading(self) -> _Reading:
        return _Reading(self)

    def _begin_read(self) -> None:
        with self._lock:
            if self._closed:
                raise ValueError(f"{short_path(self.path)} is closed.")
            self._readers += 1

    def _end_read(self) -> None:
        with self._lock:
            self._readers -= 1
            if self._closed:
                self._close_unless_read()

    def _close_unless_read(self) -> None:
        while self._descriptors and not self._readers:
            os.close(self._descriptors.pop())

    def _read_plain(self, view: memoryview, at: int) -> int:
        """Reads through the page cache up to len(view) bytes, at least one."""
        try:
            count = self._read_at(self._plain, view, at)
        except OSError as error:
            raise self._unreadable(error) from None
        if not count:
            raise self._ended(at)
        if self._fadvise is not None:
            start = at - at % BLOCK_BYTES  # the kernel drops whole pages only
            with contextlib.suppress(OSError):
                self._fadvise(self._plain, start, _round_up(at + count) - start, os.POSIX_FADV_DONTNEED)
        return count

    def _read_blocks(self, view: memoryview, at: int) -> int:
        """Reads around the page cache up to len(view) bytes, at least one; all arguments are multiples of a block."""
        direct = self._direct
        if direct is not None:
            try:
                count = self._read_at(direct, view, at)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise self._unreadable(error) from None
                with self._lock:
                    first, self._direct = self._direct is not None, None
                if first:
                    self._log_refusal(error)
            else:
                if not count:
                    raise self._ended(at)
                return count
        return self._read_plain(view, at)

    def _read_at(self, descriptor: int, view: memoryview, at: int) -> int:
        if self._preadv is not None:
            return self._preadv(descriptor, [view], at)
        with self._seek_lock, io.FileIO(descriptor, closefd=False) as file:
            file.seek(at)
            return file.readinto(view)

    def _add(self, nbytes: int, began: float) -> None:
        seconds = time.perf_counter() - began
        with self._lock:
            self.bytes_read += nbytes
            self.seconds += seconds

    # --- errors ---

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.identity.size:
            size = self.identity.size
            raise ValueError(f"{short_path(self.path)} has {size:,} bytes, so not the {nbytes:,} bytes at {offset:,}.")

    def _compare_now(self) -> None:
        """Raises ModelError if the open file isn't what it was."""
        self._compare(self._plain)

    def _compare(self, descriptor: int) -> None:
        was = self.identity
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            raise self._unreadable(error) from None
        if status.st_mtime_ns == was.mtime_ns and status.st_size == was.size and status.st_ino == was.inode:
            return
        difference = was.difference(FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino))
        if difference:
            raise self._changed(difference)

    def _ended(self, at: int) -> ModelError:
        return self._changed(f"its size was {self.identity.size:,} bytes and reading ended at {at:,}")

    def _changed(self, how: str) -> ModelError:
        return ModelError(f"{short_path(self.path)} changed while it was in use ({how}). Load the model again.")

    def _unreadable(self, error: OSError) -> ModelError:
        if isinstance(error, FileNotFoundError):
            return ModelError(f"{short_path(self.path)} does not exist. Put it back, or load the model again.")
        reason = error.strerror or str(error)
        advice = "Check its permissions and the drive it is on, then load the model again."
        return ModelError(f"{short_path(self.path)} can't be read ({reason}). {advice}")


class _Reading:
    """The time of a read: the descriptors stay open, and the file is compared with what it was before and after."""

    __slots__ = ("_file",)

    def __init__(self, file: WeightFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        self._file._begin_read()
        try:
            self._file._compare_now()
        except BaseException:
            self._file._end_read()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file._compare_now()
        finally:
            self._file._end_read()


class _Target:
    """A tensor as memory to read into."""

    def __init__(self, dest: torch.Tensor) -> None:
        if dest.dtype is not torch.uint8 or dest.dim() != 1 or not dest.is_contiguous() or not dest.is_cpu:
            raise ValueError(f"A read wants (n,) contiguous uint8 on the CPU, not {tuple(dest.shape)} {dest.dtype}.")
        self.nbytes = len(dest)
        self.address = dest.data_ptr()
        self.bytes: Any = dest.numpy()  # anything that has a buffer; a memoryview of it costs a microsecond more

    def fill(self, position: int, source: int, nbytes: int) -> None:
        """Copies from the address `source`, without the interpreter's lock and without torch's threads."""
        assert position + nbytes <= self.nbytes
        ctypes.memmove(self.address + position, source, nbytes)


def _fill(read: Callable[[memoryview, int], int], view: memoryview, at: int, needed: int) -> None:
    """Reads from byte `at` of the file on until the first `needed` bytes of `view` are there."""
    have = 0
    while have < needed:
        have += read(view[have:], at + have)


def _runs(rows: Sequence[int], row_bytes: int, most_bytes: int) -> Iterator[list[int]]:
    """Cuts ascending rows into runs to be read by one call each: small gaps, and `most_bytes` from end to end."""
    run = [rows[0]]
    for row in rows[1:]:
        if (row - run[-1] - 1) * row_bytes > _MAX_GAP_BYTES or (row - run[0] + 1) * row_bytes > most_bytes:
            yield run
            run = []
        run.append(row)
    yield run


def _ask(stop: Stop | None) -> None:
    if stop is not None and stop():
        raise ReadStopped


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
