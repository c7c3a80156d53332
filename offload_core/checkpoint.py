"""Headers of safetensors files: which tensor lies where, checked to the byte before anything is allocated.

The format is eight bytes of little-endian header length, that many bytes of JSON, then the data
(https://github.com/huggingface/safetensors, "Format"). The safetensors library reads whole tensors; streaming from disk
needs the byte ranges, so the checks that the library makes are made here too. Whatever is accepted here, the library
accepts. Stricter than the library: a repeated key, an unknown field, or too many tensors is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from .errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_TENSORS = 100_000  # per file; the largest public checkpoints stay below 100,000 over all their shards
MAX_DIMENSIONS = 64
_MAX_COUNT = 2**63 - 1
_CHUNK_BYTES = 1 << 20

# Bits per element of every dtype that safetensors 0.8 knows, and torch's name for it (None: torch has no such type).
DTYPES: Mapping[str, tuple[int, str | None]] = MappingProxyType(
    {
        "BOOL": (8, "bool"),
        "F4": (4, "float4_e2m1fn_x2"),
        "F6_E2M3": (6, None),
        "F6_E3M2": (6, None),
        "U8": (8, "uint8"),
        "I8": (8, "int8"),
        "F8_E5M2": (8, "float8_e5m2"),
        "F8_E4M3": (8, "float8_e4m3fn"),
        "F8_E8M0": (8, "float8_e8m0fnu"),
        "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
        "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
        "I16": (16, "int16"),
        "U16": (16, "uint16"),
        "F16": (16, "float16"),
        "BF16": (16, "bfloat16"),
        "I32": (32, "int32"),
        "U32": (32, "uint32"),
        "F32": (32, "float32"),
        "C64": (64, "complex64"),
        "F64": (64, "float64"),
        "I64": (64, "int64"),
        "U64": (64, "uint64"),
    }
)

_AGAIN = "Download it again."
_NO_PICKLE = "It may hold pickle, which can run code, and is never opened. Use the model's safetensors files."
# What a file under the wrong name begins with: bytes, what it is, what to do about it.
_IMPOSTORS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git-LFS pointer, not the file itself", "Run `git lfs pull` or download it again."),
    (b"<!doctype", "a saved web page", _AGAIN),
    (b"<html", "a saved web page", _AGAIN),
    (b"<?xml", "a saved web page (XML)", _AGAIN),
    (b"pk\x03\x04", "a zip archive, as torch.save writes", _NO_PICKLE),
    (b"\x80\x02", "a pickle", _NO_PICKLE),
    (b"\x80\x03", "a pickle", _NO_PICKLE),
    (b"\x80\x04", "a pickle", _NO_PICKLE),
    (b"\x80\x05", "a pickle", _NO_PICKLE),
    (b"gguf", "a GGUF file", "Rename it to end in .gguf, or use the model's safetensors files."),
    (b"\x89hdf", "an HDF5 file", "Use the model's safetensors files."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first."),
    (b"{", "JSON text", _AGAIN),
)


class TensorEntry(NamedTuple):
    """Where one tensor lies. begin/end: byte offsets from `Header.data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors tile the file from `data_start` to `file_bytes` without gap or overlap.

    tensors: in the order of the data. header_sha256: hex digest of the JSON bytes. mtime_ns: of the file when read.
    """

    tensors: dict[str, TensorEntry] = field(repr=False)
    metadata: dict[str, str] = field(repr=False)
    data_start: int
    file_bytes: int
    header_sha256: str
    mtime_ns: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads and checks the header of a safetensors file; no weight is read, so the file's size doesn't matter.

    Raises ModelError (one sentence: file, what, what to do) for anything that isn't a whole, sound safetensors file.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # before opening: opening a pipe would wait for its writer
            raise _error(path, "is not a regular file", "Name a .safetensors file.")
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            raw = _read_raw_header(file, path, status.st_size)
    except FileNotFoundError:
        raise _error(path, "does not exist", "Check the name, or download it again.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(path, f"can't be read ({reason})", "Check its permissions and the drive it is on.") from None
    document = _parse(raw, path)
    metadata = _check_metadata(document.pop("__metadata__", None), path)
    if len(document) > MAX_TENSORS:
        raise _too_many(path)
    entries = [(name, _check_entry(name, value, path)) for name, value in document.items()]
    entries.sort(key=lambda item: item[1][2:])
    data_start = 8 + len(raw)
    _check_coverage(entries, status.st_size - data_start, data_start, path)
    return Header(
        tensors=dict(entries),
        metadata=metadata,
        data_start=data_start,
        file_bytes=status.st_size,
        header_sha256=hashlib.sha256(raw).hexdigest(),
        mtime_ns=status.st_mtime_ns,
    )


def short_path(path: str | os.PathLike[str]) -> str:
    """The last two parts of a path with "/" between: enough to know which file is meant, without where it lives."""
    return "/".join(part for part in Path(path).parts[-2:] if part != Path(path).anchor)


def show(value: object, limit: int = 100) -> str:
    """A name that came from a file or a user, quoted and cut to a length fit for a message; only printable text."""
    if isinstance(value, str):
        text = value[: limit + 1]
        quoted = f"'{text}'" if text.isprintable() and "'" not in text else repr(text)
    else:
        quoted = repr(value)
    return quoted if len(quoted) <= limit + 2 else quoted[: limit - 1] + "..."


def describe_impostor(start: bytes) -> tuple[str, str] | None:
    """What a file is by its first bytes, if it is a known kind that isn't safetensors: (what it is, what to do)."""
    lowered = start.lstrip().lower()
    for magic, what, advice in _IMPOSTORS:
        if lowered.startswith(magic):
            return what, advice
    if start[257:262] == b"ustar":
        return "a tar archive, as old torch.save wrote", _NO_PICKLE
    return None


def _error(path: Path, what: str, advice: str) -> ModelError:
    return ModelError(f"{short_path(path)} {what}. {advice}")


def _damaged(path: Path, what: str) -> ModelError:
    return _error(path, f"has a damaged header: {what}", _AGAIN)


def _too_many(path: Path) -> ModelError:
    return _error(path, f"names more than {MAX_TENSORS:,} tensors, as no known model does", _AGAIN)


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = file.read(count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _read_raw_header(file: BinaryIO, path: Path, file_bytes: int) -> bytes:
    """The header's JSON bytes. Its declared length is believed only as far as the file and the limits go."""
    if file_bytes == 0:
        raise _error(path, "is empty (0 bytes)", _AGAIN)
    start = _read_exactly(file, min(file_bytes, 512))
    declared = int.from_bytes(start[:8], "little")
    plausible = file_bytes >= 8 and declared <= MAX_HEADER_BYTES and start[8:9] in (b"{", b" ", b"\n", b"\t", b"\r")
    if not plausible:
        known = describe_impostor(start)
        if known:
            what, advice = known
            raise _error(path, f"is {what} ({file_bytes:,} bytes), although its name ends in {path.suffix}", advice)
    if file_bytes < 8:
        raise _error(path, f"has only {file_bytes} bytes, where a safetensors file has at least 10", _AGAIN)
    if declared > MAX_HEADER_BYTES:
        what = f"is no safetensors file: it claims a header of {declared:,} bytes (limit {MAX_HEADER_BYTES:,})"
        raise _error(path, what, _AGAIN)
    if declared + 8 > file_bytes:
        what = f"is cut short: its header needs {declared + 8:,} bytes, the file has {file_bytes:,}"
        raise _error(path, what, _AGAIN)
    if not plausible:
        raise _damaged(path, "it does not start with '{'")
    return _read_counted(file, path, start[8 : 8 + declared], declared)


def _read_counted(file: BinaryIO, path: Path, start: bytes, length: int) -> bytes:
    """Reads the rest of the header in pieces and stops at too many tensors, before memory is spent on them."""
    parts, have = [start], len(start)
    count, tail = start.count(b'"data_offsets"'), start[-13:]
    while have < length:
        part = _read_exactly(file, min(_CHUNK_BYTES, length - have))
        if not part:
            raise _error(path, f"ended after {have + 8:,} bytes while it was read", "Is it still being written?")
        count += (tail + part).count(b'"data_offsets"')
        if count > MAX_TENSORS:
            raise _too_many(path)
        parts.append(part)
        have += len(part)
        tail = part[-13:]
    return b"".join(parts)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    parse_int = _strict_int if b"-0" in raw else int  # the plain one is much faster
    try:
        document = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique_dict, parse_constant=_refuse_constant, parse_int=parse_int
        )
    except UnicodeDecodeError as error:
        raise _damaged(path, f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _damaged(path, "its JSON is nested too deeply") from None
    except DuplicateKeyError as error:
        raise _damaged(path, f"the key {show(error.key)} appears twice") from None
    except ValueError as error:
        raise _damaged(path, f"its JSON is invalid ({str(error)[:80]})") from None
    if not isinstance(document, dict):
        raise _damaged(path, "its JSON is not an object")
    if b"\\u" in raw:
        for name in document:
            if not _encodable(name):
                raise _damaged(path, f"the name {show(name)} is not valid Unicode")
    return document


class DuplicateKeyError(ValueError):
    """A JSON object says two things under one key."""

    def __init__(self, key: str):
        super().__init__(f"the key {show(key)} appears twice")
        self.key = key


def unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json that raises DuplicateKeyError instead of letting the last value win."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _strict_int(digits: str) -> int:
    if digits.startswith("-"):
        raise ValueError(f"{digits[:20]} is negative")
    return int(digits)


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_metadata(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _damaged(path, "__metadata__ is not an object")
    for key, text in value.items():
        if not isinstance(text, str) or not _encodable(key) or not _encodable(text):
            raise _damaged(path, f"the __metadata__ value of {show(key)} is not text")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT  # not isinstance: True is an int, but no size


def _check_entry(name: str, value: Any, path: Path) -> TensorEntry:
    where = f"tensor {show(name)}"
    if not isinstance(value, dict):
        raise _damaged(path, f"{where} is not an object")
    if value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{where} has the fields {show(sorted(value))} instead of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        what = f"has {where} of the unknown dtype {show(dtype)}"
        raise _error(path, what, "A newer version of this package may know it.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _damaged(path, f"{where} has the impossible shape {show(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _damaged(path, f"{where} has the impossible data_offsets {show(offsets)}")
    begin, end = offsets
    bits = DTYPES[dtype][0]
    for size in shape:
        bits *= size
        if bits > _MAX_COUNT:
            raise _damaged(path, f"{where} of shape {show(shape)} is larger than any file")
    if end < begin or bits != 8 * (end - begin):
        need = f"{bits // 8:,}" if bits % 8 == 0 else f"{bits / 8:,}"
        what = f"{where} ({dtype}, shape {show(shape)}) needs {need} bytes, its data_offsets hold {end - begin:,}"
        raise _damaged(path, what)
    return TensorEntry(dtype, tuple(shape), begin, end)


def _check_coverage(entries: list[tuple[str, TensorEntry]], data_bytes: int, data_start: int, path: Path) -> None:
    """The tensors, sorted by offset, must tile the data exactly."""
    position, previous = 0, ""
    for name, entry in entries:
        if entry.begin < position:
            what = f"tensors {show(previous)} and {show(name)} overlap at byte {entry.begin:,} of the data"
            raise _damaged(path, what)
        if entry.begin > position:
            raise _damaged(path, f"bytes {position:,} to {entry.begin:,} of the data belong to no tensor")
        position, previous = entry.end, name
    if position != data_bytes:
        what = "is cut short" if position > data_bytes else "has bytes too many at its end"
        expected, actual = data_start + position, data_start + data_bytes
        raise _error(path, f"{what}: its header describes {expected:,} bytes, the file has {actual:,}", _AGAIN)


MARK_SAMPLES, MARK_SAMPLE_BYTES = 16, 4096


def content_mark(file: Path) -> str:
    """A fingerprint of a weights file by its header and 64 KiB of samples spread over its data.

    It doesn't depend on the file's name or time, so saved embeddings survive a copied model; a fine-tune of the same
    architecture changes nearly every weight and so the samples.
    """
    if file.suffix.lower() == ".gguf":
        from .gguf_file import read_gguf_header

        header = read_gguf_header(file)
    else:
        header = read_header(file)
    digest = hashlib.sha256(f"{header.header_sha256} {header.file_bytes}".encode())
    with file.open("rb") as data:
        for index in range(MARK_SAMPLES):
            data.seek(header.data_start + (header.file_bytes - header.data_start) * index // MARK_SAMPLES)
            digest.update(data.read(MARK_SAMPLE_BYTES))
    return digest.hexdigest()
