"""Which bytes of which file a tensor in memory is: told by the mapping behind it, never by its name.

The loaders map a safetensors file and cut tensors out of the mapping as long as nothing has to be changed (no cast, no
merge). Such a tensor can be read from its file again at any time; every other tensor exists in memory only. Names don't
tell the two apart: loaders rename, merge and cast.

Linux says in /proc/self/smaps which file is mapped where, and how many pages of a mapping were changed in place (such
pages are private to the process and differ from the file). Elsewhere the place of a mapping is found by vote.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .checkpoint import DTYPES, Header, read_header
from .errors import ModelError
from .file_reader import FileRange

_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES, _SAMPLES = 4096, 8

_PAGE_IS_FILE, _PAGE_IS_SWAPPED, _PAGE_IS_PRESENT = (
    1 << 61,
    1 << 62,
    1 << 63,
)  # Documentation/admin-guide/mm/pagemap.rst
_MAP_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Span:
    """The memory of one tensor from its first to its last element.

    start: address. nbytes: of the span. dtype: of the tensor. tensor: keeps the memory alive and gives its bytes.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    tensor: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def bytes(self, begin: int, end: int) -> memoryview:
        """The bytes `begin` to `end` of the span as they are in memory now, not copied."""
        first = self.start - self.tensor.untyped_storage().data_ptr()
        with torch.inference_mode(False), torch.no_grad():
            view = torch.empty(0, dtype=torch.uint8)
            view.set_(self.tensor.untyped_storage(), first + begin, (end - begin,), (1,))
            return memoryview(view.numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class FileMapping:
    """A piece of a file in the address space of this process.

    offset: in the file, of the byte at `start`. device, inode: of the file, as the kernel names them. path: where the
    file is now, None if it was deleted or replaced. changed: whether pages of it may differ from the file.
    """

    start: int
    end: int
    offset: int
    device: int
    inode: int
    path: str | None
    changed: bool


def read_mappings(folder: Path = Path("/proc/self")) -> list[FileMapping] | None:
    """The mapped files of this process by address; None where the system has no such list (Windows, macOS)."""
    for name in ("smaps", "maps"):
        with contextlib.suppress(OSError):
            return list(_parse(os.fsdecode((folder / name).read_bytes())))
    return None


def _parse(text: str) -> Iterator[FileMapping]:
    """Mappings of files in the text of /proc/self/smaps, or of maps, which doesn't count changed pages."""
    head: re.Match[str] | None = None
    counts: dict[str, int] = {}
    for line in [*text.split("\n"), "0-0 ---- 0 0:0 0"]:
        match = _MAP_LINE.fullmatch(line)
        if match is None:
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                counts[key] = int(value[:-3])
            continue
        if head is not None and head[7] != "0":
            # A changed page is anonymous; swapped out it is counted as swap alone. "Dirty" is something else: a page
            # of a file that was just written is dirty and equals the file.
            known = "Anonymous" in counts and "Swap" in counts
            shared = head[3][3] == "s"
            yield _mapping(head, changed=not shared and (not known or counts["Anonymous"] + counts["Swap"] > 0))
        head, counts = match, {}


def _mapping(head: re.Match[str], changed: bool) -> FileMapping:
    device = os.makedev(int(head[5], 16), int(head[6], 16))
    path = None if head[8].endswith(_DELETED) else head[8].replace("\\012", "\n")
    return FileMapping(int(head[1], 16), int(head[2], 16), int(head[4], 16), device, int(head[7]), path, changed)


def find_file_ranges(
    spans: Sequence[Span],
    files: Iterable[Path],
    mappings: Callable[[], list[FileMapping] | None] = read_mappings,
) -> list[FileRange | None]:
    """For each span the range of one of `files` whose bytes it is now; None for a span that is in no file.

    A span that was changed in place counts as in the file only if its bytes are still the file's. Where `mappings`
    answers None, see `_vote`: there a change between the samples that are compared is not noticed.

    Raises ModelError if a mapped file was cut short (its memory can't be read any more) or, where it comes to a vote,
    if it isn't a sound safetensors file.
    """
    files = list(files)
    if not files or not spans:
        return [None] * len(spans)
    there = mappings()
    return _look_up(spans, files, there) if there is not None else _vote(spans, files)


def _look_up(spans: Sequence[Span], files: list[Path], mappings: list[FileMapping]) -> list[FileRange | None]:
    owned = _mappings_of(files, mappings)
    starts = [mapping.start for mapping, _ in owned]
    ranges: list[FileRange | None] = []
    for span in spans:
        index = bisect.bisect_right(starts, span.start) - 1
        ranges.append(_range_in(span, owned[index:]) if index >= 0 and span.nbytes else None)
    return ranges


def _mappings_of(files: list[Path], mappings: list[FileMapping]) -> list[tuple[FileMapping, Path]]:
    """The mappings of these files, by address."""
    by_inode: dict[tuple[int, int], Path] = {}
    by_path: dict[str, Path] = {}
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            by_inode[status.st_dev, status.st_ino] = file
            by_path[os.path.realpath(file)] = file
    found = []
    for mapping in mappings:
        if mapping.path is None:
            continue
        # On btrfs and overlayfs the kernel's list has another device than stat. A path is as good: it follows the file
        # when it is moved, and a file that another was put in the place of is "deleted".
        owner = by_inode.get((mapping.device, mapping.inode)) or by_path.get(mapping.path)
        if owner is not None:
            found.append((mapping, owner))
    return sorted(found, key=lambda pair: pair[0].start)


def _range_in(span: Span, owned: Sequence[tuple[FileMapping, Path]]) -> FileRange | None:
    """The range of a span that begins in the first of these mappings; it may go on in the next if the file does."""
    first, file = owned[0]
    offset, position, changed = first.offset + span.start - first.start, first.start, False
    for mapping, path in owned:
        if mapping.start != position or path != file or mapping.offset - first.offset != mapping.start - first.start:
            return None
        position, changed = mapping.end, changed or mapping.changed
        if position >= span.end:
            break
    if position < span.end:
        return None
    if offset + span.nbytes > file.stat().st_size:
        raise ModelError(
            f"{file} was cut short after it was loaded: it ends before byte {offset + span.nbytes:,}, which is in use. "
            "Download it again and load the model again."
        )
    if changed and not all(_equals_file(span, offset, file, *piece) for piece in _changed_pieces(span)):
        return None
    return FileRange(file, offset, span.nbytes)


def _changed_pieces(span: Span) -> list[tuple[int, int]]:
    """Pieces (begin, end) of the span, in bytes from its start, that may differ from the file it was mapped from.

    The whole span where the kernel doesn't say (/proc/self/pagemap may be closed).
    """
    page = mmap.PAGESIZE
    first, count = span.start // page, (span.end - 1) // page - span.start // page + 1
    entries = b""
    with contextlib.suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = pagemap.read(count * 8)
    if len(entries) != count * 8:
        return [(0, span.nbytes)]
    bits = np.frombuffer(entries, np.uint64)
    in_file = ((bits & _PAGE_IS_FILE) != 0) | ((bits & _PAGE_IS_PRESENT) == 0)
    changed = np.flatnonzero(~in_file | ((bits & _PAGE_IS_SWAPPED) != 0))
    runs = np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1) if len(changed) else []
    to_begin = first * page - span.start
    pieces = [(to_begin + int(run[0]) * page, to_begin + int(run[-1] + 1) * page) for run in runs]
    return [(max(begin, 0), min(end, span.nbytes)) for begin, end in pieces]


def _equals_file(span: Span, offset: int, file: Path, begin: int, end: int) -> bool:
    """Whether the bytes `begin` to `end` of a span are those of the file, where the span begins at `offset`."""
    with file.open("rb", buffering=0) as data:
        data.seek(offset + begin)
        while begin < end:
            chunk = data.read(min(_CHUNK_BYTES, end - begin))
            if not chunk or span.bytes(begin, begin + len(chunk)) != chunk:
                return False
            begin += len(chunk)
    return True


def _vote(spans: Sequence[Span], files: list[Path]) -> list[FileRange | None]:
    """The ranges on a system that doesn't list its mappings.

    All tensors cut from one mapping have the same distance from their place in the file, and a mapping begins at a
    page. So each pair of a span and a tensor of the file with the same size and dtype votes for a distance, and a span
    that lies at the right distance is accepted if its head, its tail and samples between (of 4 KiB each) are the
    file's. A tensor that was changed only between those samples passes.
    """
    ranges: list[FileRange | None] = [None] * len(spans)
    for file in files:
        header = read_header(file)
        for base, _ in _bases(spans, header).most_common():
            for index, span in enumerate(spans):
                offset = span.start - base
                inside = header.data_start <= offset and offset + span.nbytes <= header.file_bytes
                if ranges[index] is None and span.nbytes and inside and _samples_equal(span, offset, file):
                    ranges[index] = FileRange(file, offset, span.nbytes)
    return ranges


def _bases(spans: Sequence[Span], header: Header) -> Counter[int]:
    """Addresses at which the file may be mapped, each with the number of pairs that speak for it."""
    offsets: dict[tuple[int, str | None], list[int]] = defaultdict(list)
    for entry in header.tensors.values():
        offsets[entry.nbytes, DTYPES[entry.dtype][1]].append(header.data_start + entry.begin)
    votes: Counter[int] = Counter()
    for span in spans:
        for offset in offsets[span.nbytes, str(span.dtype).removeprefix("torch.")] if span.nbytes else ():
            if (span.start - offset) % mmap.PAGESIZE == 0:
                votes[span.start - offset] += 1
    return votes


def _samples_equal(span: Span, offset: int, file: Path) -> bool:
    last = max(span.nbytes - _SAMPLE_BYTES, 0)
    begins = sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)})
    return all(_equals_file(span, offset, file, at, min(at + _SAMPLE_BYTES, span.nbytes)) for at in begins)
