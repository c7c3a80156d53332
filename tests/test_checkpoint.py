"""The safetensors header reader: agrees with the library on good files, refuses everything else by name and quickly."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save_file

from offload_core.checkpoint import DTYPES, MAX_HEADER_BYTES, MAX_TENSORS, read_header, show
from offload_core.errors import ModelError

ONE_BYTE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def packed(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file. header: JSON value or raw bytes; length: the declared one, if it isn't to be true."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(**changes: object) -> dict[str, object]:
    return {**ONE_BYTE, **changes}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "broken.safetensors"
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 400
    assert message.endswith((".", "?"))
    return message


# --- good files ---

TORCH_DTYPES = [getattr(torch, name) for _, name in DTYPES.values() if name and name != "float4_e2m1fn_x2"]


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=6, unique=True))
    tensors = {}
    for name in names:
        if name == "__metadata__":
            continue
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        dtype = draw(st.sampled_from(TORCH_DTYPES))
        itemsize = torch.empty(0, dtype=dtype).element_size()
        count = torch.Size(shape).numel()
        raw = torch.tensor([number % 2 for number in range(count * itemsize)], dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensors


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=state_dicts(), metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3))
def test_files_written_by_the_library_read_as_the_library_reads_them(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    path = tmp_path / "good.safetensors"
    try:
        save_file(tensors, path, metadata=metadata or None)  # {} makes safetensors 0.8 write a file it can't read
    except (SafetensorError, UnicodeEncodeError):
        return
    content = path.read_bytes()
    header = read_header(path)
    assert header.file_bytes == len(content)
    assert header.metadata == metadata
    with safe_open(path, "pt") as opened:
        assert set(header.tensors) == set(opened.keys())
    for name, reference in deserialize(content):
        entry = header.tensors[name]
        assert (entry.dtype, list(entry.shape)) == (reference["dtype"], reference["shape"])
        begin, end = header.data_start + entry.begin, header.data_start + entry.end
        assert content[begin:end] == bytes(reference["data"])
        assert entry.nbytes == len(reference["data"])


def test_every_dtype_of_the_library_is_known_here(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as caught:
        deserialize(packed({"a": tensor(dtype="NONE")}, b"1"))
    assert set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value))) - {"NONE"} == set(DTYPES)
    for dtype, (bits, torch_name) in DTYPES.items():
        content = packed({"a": tensor(dtype=dtype, shape=[8], data_offsets=[0, bits])}, bytes(bits))
        assert len(deserialize(content)) == 1
        assert read_header(write(tmp_path, content)).tensors["a"].nbytes == bits
        assert torch_name is None or isinstance(getattr(torch, torch_name), torch.dtype)


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    content = packed({"late": tensor(data_offsets=[1, 2]), "early": tensor()}, b"12")
    assert list(read_header(write(tmp_path, content)).tensors) == ["early", "late"]


def test_padding_and_empty_metadata_are_fine(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, packed(b'{"__metadata__":null}   \n  ')))
    assert (header.tensors, header.metadata) == ({}, {})


# --- hostile headers ---

ENTRY = json.dumps(ONE_BYTE).encode()
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "five bytes": (b"\1\0\0\0\0", "only 5 bytes"),
    "length 2^63-1": (packed({}, length=2**63 - 1), "claims a header of 9,223,372,036,854,775,807 bytes"),
    "length 2^64-1": (packed({}, length=2**64 - 1), "claims a header"),
    "length over the limit": (packed({}, length=MAX_HEADER_BYTES + 1), "limit 100,000,000"),
    "length past the end": (packed({}, length=3), "needs 11 bytes, the file has 10"),
    "length zero": (packed({}, length=0), "JSON is invalid"),
    "length one short": (packed({"a": ONE_BYTE}, b"1", length=len(ENTRY) + 6), "JSON is invalid"),
    "a list": (packed(b"[]", b""), "does not start with '{'"),
    "text behind the object": (packed(b"{}x"), "JSON is invalid"),
    "NUL padding": (packed(b"{}\0\0"), "JSON is invalid"),
    "byte order mark": (packed(b"\xef\xbb\xbf{}"), "does not start with '{'"),
    "not UTF-8": (packed(b'{"a\xff":' + ENTRY + b"}", b"1"), "not UTF-8"),
    "lone surrogate": (packed(b'{"\\ud800":' + ENTRY + b"}", b"1"), "not valid Unicode"),
    "not a number": (packed(b'{"a":NaN}'), "NaN is not JSON"),
    "deep nesting": (packed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "endless number": (packed(b'{"a":' + b"9" * 5_000 + b"}"), "JSON is invalid"),
    "repeated tensor": (packed(b'{"twice":' + ENTRY + b',"twice":' + ENTRY + b"}", b"1"), "'twice' appears twice"),
    "repeated field": (packed(b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"1"), "'shape'"),
    "metadata of numbers": (packed({"__metadata__": {"key": 1}}), "'key' is not text"),
    "metadata is a list": (packed({"__metadata__": []}), "__metadata__ is not an object"),
    "entry is null": (packed({"gone": None}), "'gone' is not an object"),
    "entry is a list": (packed({"a": ["U8", [1], [0, 1]]}, b"1"), "'a' is not an object"),
    "field missing": (packed({"a": {"dtype": "U8", "shape": [1]}}, b"1"), "has the fields ['dtype', 'shape']"),
    "field unknown": (packed({"a": tensor(scale=1)}, b"1"), "'scale'"),
    "dtype unknown": (packed({"a": tensor(dtype="Q7")}, b"1"), "unknown dtype 'Q7'"),
    "dtype is a list": (packed({"a": tensor(dtype=["U8"])}, b"1"), "unknown dtype ['U8']"),
    "shape negative": (packed({"a": tensor(shape=[-1])}, b"1"), "impossible shape [-1]"),
    "shape fractional": (packed({"a": tensor(shape=[1.0])}, b"1"), "impossible shape [1.0]"),
    "shape true": (packed({"a": tensor(shape=[True])}, b"1"), "impossible shape [True]"),
    "shape is a number": (packed({"a": tensor(shape=1)}, b"1"), "impossible shape 1"),
    "too many dimensions": (packed({"a": tensor(shape=[1] * 65)}, b"1"), "impossible shape"),
    "shape past 2^63": (packed({"a": tensor(shape=[2**64])}, b"1"), "impossible shape"),
    "product overflows": (packed({"a": tensor(shape=[2**32, 2**32], data_offsets=[0, 0])}), "larger than any file"),
    "overflow, then zero": (packed({"a": tensor(shape=[2**62, 4, 0], data_offsets=[0, 0])}), "larger than any file"),
    "span too long": (packed({"a": tensor(data_offsets=[0, 2])}, b"12"), "needs 1 bytes, its data_offsets hold 2"),
    "span too short": (packed({"a": tensor(shape=[2])}, b"1"), "needs 2 bytes, its data_offsets hold 1"),
    "half a byte": (packed({"a": tensor(dtype="F4")}, b"1"), "needs 0.5 bytes"),
    "offsets reversed": (packed({"a": tensor(data_offsets=[1, 0])}, b"1"), "hold -1"),
    "offsets negative": (packed({"a": tensor(data_offsets=[-1, 0])}, b"1"), "impossible data_offsets [-1, 0]"),
    "offset minus zero": (packed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', b"1"), "-0 is negative"),
    "three offsets": (packed({"a": tensor(data_offsets=[0, 1, 2])}, b"1"), "impossible data_offsets"),
    "offsets far away": (packed({"a": tensor(data_offsets=[2**62, 2**62 + 1])}, b"1"), "belong to no tensor"),
    "overlap": (packed({"a": ONE_BYTE, "b": ONE_BYTE}, b"1"), "'a' and 'b' overlap"),
    "hole": (packed({"a": ONE_BYTE, "b": tensor(data_offsets=[2, 3])}, b"123"), "bytes 1 to 2 of the data"),
    "trailing bytes": (packed({"a": ONE_BYTE}, b"12"), "bytes too many at its end"),
    "data of no tensor": (packed({}, b"1"), "describes 10 bytes, the file has 11"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[case]
    path = write(tmp_path, content)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        message = refusal(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert reason in message
    assert peak < 8 << 20
    assert time.perf_counter() - start < 5


def test_a_million_tiny_tensors_are_refused_before_memory_is_spent_on_them(tmp_path: Path) -> None:
    entry = b',"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    path = tmp_path / "many.safetensors"
    with path.open("wb") as file:
        length = 1_000_000 * len(entry % 0)
        file.write(struct.pack("<Q", length) + b"{" + b"".join(entry % n for n in range(MAX_TENSORS + 1))[1:])
        file.truncate(8 + length)
    tracemalloc.start()
    try:
        message = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "more than 100,000 tensors" in message
    assert peak < 32 << 20


def test_mutated_headers_never_raise_anything_else_and_what_is_accepted_the_library_accepts_too(tmp_path: Path) -> None:
    chance = random.Random(20)
    names = ("x.weight", "x.bias", "y-0", "é")
    header = {name: tensor(shape=[2, 3], data_offsets=[n * 6, n * 6 + 6]) for n, name in enumerate(names)}
    good = packed({"__metadata__": {"format": "pt"}, **header}, bytes(24))
    tokens = [b"-", b"0", b"9", b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"F4", b"\xff", b"\0", b"e9", b" "]
    path = tmp_path / "mutant.safetensors"
    accepted = 0
    for _ in range(800):
        mutant = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            kind, at = chance.randrange(4), chance.randrange(len(mutant))
            if kind == 0:
                mutant[at] = chance.randrange(256)
            elif kind == 1:
                token = chance.choice(tokens)
                mutant[at : at + len(token)] = token
            elif kind == 2:
                del mutant[at : at + chance.randint(1, 4)]
            else:
                mutant[at:at] = chance.choice(tokens)
        if chance.random() < 0.7:  # most with a true length, or hardly any would get past it
            body = len(mutant) - 24 - 8
            mutant[:8] = struct.pack("<Q", max(body, 0))
        path.write_bytes(mutant)
        try:
            read_header(path)
        except ModelError:
            continue
        accepted += 1
        deserialize(bytes(mutant))
    assert 0 < accepted < 500


# --- files that are something else, or not whole ---


class Bomb:
    """Unpickled, it would leave a marker."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def impostor(kind: str, folder: Path) -> tuple[Path, str]:
    path = folder / "broken.safetensors"
    marker = folder / "marker"
    if kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4265146304\n")
        return path, "Git-LFS pointer"
    if kind == "page":
        path.write_text("\n<!DOCTYPE html><html><body>Not found</body></html>")
        return path, "saved web page"
    if kind == "error":
        path.write_text('{"error": "Repository not found"}')
        return path, "JSON text"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(marker)))
        return path, "pickle"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))
        return path, "zip archive"
    if kind == "torch":
        torch.save({"weight": torch.zeros(2)}, path)
        return path, "zip archive"
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            archive.add(__file__, "pickle")
        return path, "tar archive"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    return path, "GGUF"


@pytest.mark.parametrize("kind", ["pointer", "page", "error", "pickle", "zip", "torch", "tar", "gguf"])
def test_file_under_a_wrong_name_is_recognised_by_its_bytes(kind: str, tmp_path: Path) -> None:
    path, what = impostor(kind, tmp_path)
    assert what in refusal(path)
    assert not (tmp_path / "marker").exists()


def test_header_length_that_looks_like_a_pickle_is_read_as_a_length(tmp_path: Path) -> None:
    raw = b'{"a":' + ENTRY + b"}"
    content = packed(raw.ljust(0x0280), b"1")
    assert content.startswith(b"\x80\x02")
    assert list(read_header(write(tmp_path, content)).tensors) == ["a"]


@pytest.mark.parametrize("kept", ["all but one", "half", "header only", "half the header", "seven"])
def test_cut_file_is_refused_with_the_size_it_should_have_and_the_size_it_has(kept: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(50, 50)}, path)
    whole = path.read_bytes()
    start = read_header(path).data_start
    size = {"all but one": len(whole) - 1, "half": len(whole) // 2, "header only": start, "seven": 7}.get(kept, 50)
    path.write_bytes(whole[:size])
    message = refusal(path)
    assert f"{size:,}" in message
    if size > 8:
        assert "cut short" in message
        assert f"{len(whole) if size >= start else start:,} bytes" in message


def test_missing_file_folder_and_forbidden_name_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path / "folder.safetensors")
    with pytest.raises(ModelError, match="can't be read"):
        read_header(tmp_path / "nul\0.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
def test_sixty_gigabytes_are_checked_in_a_moment(tmp_path: Path) -> None:
    paths = []
    for part in range(12):
        header = {
            f"blocks.{part}.{n}.weight": {
                "dtype": "BF16",
                "shape": [12_500_000],
                "data_offsets": [n * 25_000_000, (n + 1) * 25_000_000],
            }
            for n in range(200)
        }
        path = tmp_path / f"part{part}.safetensors"
        content = packed(header)
        with path.open("wb") as file:
            file.write(content)
            file.truncate(len(content) + 200 * 25_000_000)
        paths.append(path)
    start = time.perf_counter()
    assert sum(read_header(path).file_bytes for path in paths) > 60e9
    assert time.perf_counter() - start < 1  # 0.02 s on an idle machine


def test_names_in_messages_are_short_and_printable() -> None:
    assert show("a.weight") == "'a.weight'"
    assert show("C:\\models") == "'C:\\models'"
    assert "\x1b" not in show("\x1b[31mred")
    assert len(show("x" * 10_000)) < 110
    assert show("\ud800").isascii()
