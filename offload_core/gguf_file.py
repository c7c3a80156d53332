"""GGUF files: which tensor lies where, and what its blocks mean. The packed blocks are never converted.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the header is read, whole and checked: the
`gguf` package's own reader maps the file and makes an object of every entry, of a tokenizer's 150,000 words too. What a
block type is (how many numbers in how many bytes) is that package's table, and how blocks become numbers is diffusers'.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .checkpoint import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, Header, TensorEntry, short_path, show
from .errors import ModelError

MAGIC = b"GGUF"
SUFFIX = ".gguf"

_VERSIONS = (2, 3)
_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")  # as safetensors calls them
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_KEPT_CHARACTERS = 1000  # of a value in the metadata; templates and vocabularies are longer
_SHAPE = "comfy.gguf.orig_shape."  # of a tensor that has more dimensions than GGUF holds
_CHUNK_ELEMENTS = 1 << 20
_READ_BYTES = 1 << 18
_MAX_NESTED = 4  # arrays within arrays; no known file has any
_AGAIN = "Download it again."


def read_gguf_header(path: str | os.PathLike[str]) -> Header:
    """The header of a GGUF file, as that of a safetensors file: a tensor's dtype is its block type ("Q4_K"), or one of
    safetensors' for plain numbers; shapes are torch's, the rows first.

    Raises ModelError (one sentence: file, what, what to do) for a file that isn't whole and sound.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: opening a pipe would wait for its writer
            raise _error(path, "is not a regular file", "Name a .gguf file.")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            reader = _Reader(file, path, status.st_size)
            metadata, infos = _parse(reader)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _error(path, f"can't be read ({reason})", "Check its name, its permissions and the drive.") from None
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _damaged(path, f"its alignment is {show(alignment)}")
    start = -(-len(reader.taken) // alignment) * alignment
    entries = sorted(
        ((name, _entry(path, name, *info, metadata, status.st_size - start)) for name, info in infos.items()),
        key=lambda item: item[1].begin,
    )
    last = 0
    for name, entry in entries:
        if entry.begin < last:
            raise _damaged(path, f"{show(name)} overlaps another tensor")
        last = entry.end
    words = {name: str(value) for name, value in metadata.items()}
    digest = hashlib.sha256(reader.taken).hexdigest()
    return Header(dict(entries), words, start, status.st_size, digest, status.st_mtime_ns)


def is_block_type(dtype: str) -> bool:
    """Whether a header's dtype is that of packed blocks that can be unpacked."""
    return dtype.startswith(("Q", "IQ")) and dtype in _unpackable()


def unpack_blocks(kind: str, data: torch.Tensor, table: torch.Tensor) -> None:
    """Fills `table` (rows, numbers of a row) from `data` (rows, bytes of a row) uint8, in blocks of `kind`.

    The numbers are those that diffusers' GGUFLinear computes with, cast as it casts them.
    """
    from diffusers.quantizers.gguf import utils

    block, size = _block(kind)
    step = max(_CHUNK_ELEMENTS // table.shape[1], 1)
    for start in range(0, table.shape[0], step):
        part = data[start : start + step]
        numbers = utils.dequantize_functions[_type_of(kind)](part.reshape(-1, size), block, size)
        table[start : start + step].copy_(numbers.reshape(part.shape[0], -1))


# ------------------------------------------------------------------------------------------------------ the header


class _Reader:
    """Takes values off the front of a file, and never more than the file or the limit of a header has. taken: all of it
    so far."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self._file, self._read, self._place = file, bytearray(), 0

    @property
    def taken(self) -> memoryview:
        return memoryview(self._read)[: self._place]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._need(count)
        self._place += count
        return bytes(self._read[self._place - count : self._place])

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self.path, "a name in it is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of the metadata; a long one is passed over and comes back as None."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            length = self.number("Q")
            data = self.take(length)
            return data.decode("utf-8", "replace") if length <= _KEPT_CHARACTERS else None
        if kind != _ARRAY:
            raise _damaged(self.path, f"a value is of the type {kind}, which doesn't exist")
        if depth > _MAX_NESTED:
            raise _damaged(self.path, "its arrays are nested too deeply")
        element, count = self.number("I"), self.number("Q")
        if element in _NUMBERS:
            data = self.take(count * struct.calcsize("<" + _NUMBERS[element]))
            return list(struct.unpack(f"<{count}{_NUMBERS[element]}", data)) if count <= MAX_DIMENSIONS else None
        self._need(count)  # each element takes more than a byte
        if element == _STRING:
            self._pass_strings(count)
        else:
            for _ in range(count):
                self.value(element, depth + 1)
        return None

    def _pass_strings(self, count: int) -> None:
        """A tokenizer has hundreds of thousands of words; nothing is made of them."""
        place, length = self._place, struct.Struct("<Q")
        for _ in range(count):
            if place + length.size > len(self._read):
                self._need(place + length.size - self._place)
            place += length.size + length.unpack_from(self._read, place)[0]
        self._need(place - self._place)
        self._place = place

    def _need(self, count: int) -> None:
        """Makes sure that so many more bytes were read. Raises ModelError if there can't be so many."""
        end = self._place + count
        if end > self.file_bytes:
            raise _error(self.path, "is cut short: its header goes on behind its end", _AGAIN)
        if end > MAX_HEADER_BYTES:
            raise _damaged(self.path, f"it goes on for more than {MAX_HEADER_BYTES:,} bytes")
        while end > len(self._read):
            part = self._file.read(max(end - len(self._read), _READ_BYTES))
            if not part:
                raise _error(self.path, "ended while it was read", "Is it still being written?")
            self._read += part


def _parse(reader: _Reader) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    """Metadata, and of each tensor its dimensions as GGUF has them, the number of its type, and its offset."""
    path = reader.path
    if reader.file_bytes == 0:
        raise _error(path, "is empty (0 bytes)", _AGAIN)
    if reader.take(min(4, reader.file_bytes)) != MAGIC:
        raise _error(path, "is no GGUF file, although its name ends in .gguf", _AGAIN)
    version = reader.number("I")
    if version not in _VERSIONS:
        raise _error(path, f"is GGUF of version {version}; versions 2 and 3 can be read", "Get a newer file.")
    tensors, values = reader.number("Q"), reader.number("Q")
    if tensors > MAX_TENSORS or values > MAX_TENSORS:
        raise _damaged(path, f"it claims {tensors:,} tensors and {values:,} entries of metadata")
    metadata = {}
    for _ in range(values):
        name = reader.string()
        metadata[name] = reader.value(reader.number("I"))
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, dimensions = reader.string(), reader.number("I")
        if dimensions > MAX_DIMENSIONS or name in infos:
            raise _damaged(path, f"{show(name)} has {dimensions} dimensions, or comes twice")
        shape = tuple(reader.number("Q") for _ in range(dimensions))
        infos[name] = (shape, reader.number("I"), reader.number("Q"))
    return metadata, infos


def _entry(
    path: Path,
    name: str,
    dimensions: tuple[int, ...],
    number: int,
    offset: int,
    metadata: Mapping[str, Any],
    data_bytes: int,
) -> TensorEntry:
    kind = _types().get(number)
    if kind is None:
        raise _damaged(path, f"{show(name)} is of the type {number}, which doesn't exist")
    block, size = _block(kind)
    count, shape = math.prod(dimensions), tuple(reversed(dimensions))
    original = metadata.get(_SHAPE + name)
    if isinstance(original, list) and all(type(size) is int and size >= 0 for size in original):
        if math.prod(original) != count:
            raise _damaged(path, f"{show(name)} has {count:,} numbers and the shape {show(original)}")
        shape = tuple(original)
    row = math.prod(shape[1:]) if len(shape) > 1 else count
    if count % block or row % block:
        raise _damaged(path, f"rows of {show(name)} aren't whole blocks of {kind}")
    nbytes = count // block * size
    if offset + nbytes > data_bytes:
        raise _error(path, f"is cut short: {show(name)} lies behind its end", _AGAIN)
    return TensorEntry(kind, shape, offset, offset + nbytes)


# ------------------------------------------------------------------------------------------------------ block types


@functools.cache
def _types() -> Mapping[int, str]:
    """Names of types by their number."""
    import gguf

    return {kind.value: kind.name for kind in gguf.GGMLQuantizationType}


@functools.cache
def _block(kind: str) -> tuple[int, int]:
    """(numbers, bytes) of a block."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[_type_of(kind)]
    return int(block), int(size)


def _type_of(kind: str) -> Any:
    import gguf

    return gguf.GGMLQuantizationType[kind]


@functools.cache
def _unpackable() -> Sequence[str]:
    from diffusers.quantizers.gguf import utils

    return tuple(kind.name for kind in utils.dequantize_functions if kind.name not in _PLAIN)


def _error(path: Path, what: str, advice: str) -> ModelError:
    return ModelError(f"{short_path(path)} {what}. {advice}")


def _damaged(path: Path, what: str) -> ModelError:
    return _error(path, f"has a damaged header: {what}", _AGAIN)
