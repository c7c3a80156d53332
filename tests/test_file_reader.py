"""Reading byte ranges of weight files: the file's own bytes by every route, and never those of a changed file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_core import file_reader
from offload_core.errors import ModelError
from offload_core.file_reader import BLOCK_BYTES, FileIdentity, ReadBuffer, ReadStopped, WeightFile

CONTENT = random.Random(3).randbytes(300_001)  # ends in mid-block
OFFSETS = (0, 1, 8, 64, 4095, 4096, 4104, 70_001, 290_000)
SIZES = (0, 1, 63, 4096, 5000, 8192, 70_000, len(CONTENT))
SMALL = 8192  # a buffer that every longer range needs several times
MISSING = {"nothing": (), "preadv": ("preadv",), "posix_fadvise": ("posix_fadvise",), "O_DIRECT": ("O_DIRECT",)}
MISSING["any of them"] = ("preadv", "posix_fadvise", "O_DIRECT")

needs_preadv = pytest.mark.skipif(not hasattr(os, "preadv"), reason="takes preadv's place")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="an open file can't be renamed over or truncated")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return weights(tmp_path / "transformer" / "model.safetensors")


@pytest.fixture
def buffer() -> Iterator[ReadBuffer]:
    buffer = ReadBuffer(SMALL)
    yield buffer
    buffer.close()


@pytest.fixture
def pretend_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct I/O that every file system grants, because the flag stands for something else."""
    monkeypatch.setattr(os, "O_DIRECT", getattr(os, "O_CLOEXEC", 0) or getattr(os, "O_NOINHERIT", 0), raising=False)


def weights(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(CONTENT)
    os.utime(path, ns=(10**18, 10**18))  # long ago, so that a write right after shows on a coarse clock too
    return path


def target(nbytes: int, address: int = 0) -> torch.Tensor:
    """A place for `nbytes`, full of ones, whose address is `address` modulo a block."""
    room = torch.full((nbytes + 2 * BLOCK_BYTES,), 1, dtype=torch.uint8)
    start = (address - room.data_ptr()) % BLOCK_BYTES
    return room[start : start + nbytes]


def content(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def read(file: WeightFile, offset: int, nbytes: int, buffer: ReadBuffer, address: int = 0) -> bytes:
    dest = target(nbytes, address)
    file.read_into(dest, offset, buffer)
    return content(dest)


def ranges() -> Iterator[tuple[int, int]]:
    for offset in OFFSETS:
        for size in SIZES:
            yield offset, min(size, len(CONTENT) - offset)
    yield len(CONTENT), 0


def every_read(file: WeightFile, buffer: ReadBuffer) -> list[Callable[[], object]]:
    return [
        lambda: file.read_into(target(50_000), 9, buffer),
        lambda: list(file.read_chunks(9, 50_000, buffer)),
        lambda: file.read_rows(target(3000), 9, 1000, [40, 0, 20], buffer),
    ]


def open_descriptors() -> int:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to count descriptors")
    return len(os.listdir("/proc/self/fd"))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    message = str(caught.value)
    assert message.startswith("transformer/model.safetensors ")
    assert message.lower().endswith("load the model again.")
    return message


def through(change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `change` happen once, after the first read from the file."""
    real, left = os.preadv, [change]

    def preadv(descriptor: int, views: Any, at: int) -> int:
        count = real(descriptor, views, at)
        if left:
            left.pop()()
        return count

    monkeypatch.setattr(os, "preadv", preadv)


# --- the file's own bytes ---


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_every_range_is_what_the_file_holds(
    path: Path, buffer: ReadBuffer, direct: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MISSING[missing]:
        monkeypatch.delattr(os, name, raising=False)
    with WeightFile(path, direct=direct, keep_cached=False) as file:
        for offset, nbytes in ranges():
            expected = CONTENT[offset : offset + nbytes]
            for address in (64, 7, offset):  # in the engine's alignment, in none, and in that of the file
                assert read(file, offset, nbytes, buffer, address) == expected, (offset, nbytes, address)
            chunks = [(position, content(chunk)) for position, chunk in file.read_chunks(offset, nbytes, buffer)]
            assert b"".join(chunk for _, chunk in chunks) == expected, (offset, nbytes)
            assert [position for position, _ in chunks] == [
                sum(len(chunk) for _, chunk in chunks[:number]) for number in range(len(chunks))
            ]


def test_a_read_leaves_what_lies_beside_its_target_alone(path: Path, buffer: ReadBuffer) -> None:
    for direct in (False, True):
        with WeightFile(path, direct=direct) as file:
            for address in (0, 9, 4095):
                room = target(30_000, address)
                file.read_into(room[100:-100], 9, buffer)
                assert content(room[:100]) == content(room[-100:]) == b"\x01" * 100
                assert content(room[100:-100]) == CONTENT[9 : 9 + 29_800]


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_chunks_can_be_viewed_as_elements_wherever_the_range_begins(
    path: Path, buffer: ReadBuffer, direct: bool, pretend_direct: None
) -> None:
    with WeightFile(path, direct=direct) as file:
        for offset in OFFSETS[:-1]:
            parts = []
            for position, chunk in file.read_chunks(offset, 64_000, buffer):
                assert position % 64 == 0
                assert chunk.data_ptr() % 8 == 0
                parts.append(chunk.view(torch.int64).clone())
            expected = torch.frombuffer(bytearray(CONTENT[offset : offset + 64_000]), dtype=torch.int64)
            assert torch.equal(torch.cat(parts), expected)


@needs_preadv
def test_direct_reads_keep_to_blocks(
    path: Path, buffer: ReadBuffer, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        address = torch.frombuffer(views[0], dtype=torch.uint8).data_ptr()
        assert (at % BLOCK_BYTES, len(views[0]) % BLOCK_BYTES, address % BLOCK_BYTES) == (0, 0, 0)
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with WeightFile(path, direct=True) as file:
        for offset, nbytes in ranges():
            for address in (64, offset):
                read(file, offset, nbytes, buffer, address)
            for _ in file.read_chunks(offset, nbytes, buffer):
                pass


@needs_preadv
def test_an_equally_aligned_target_is_read_without_the_detour(
    path: Path, buffer: ReadBuffer, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        sizes.append(len(views[0]))
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with WeightFile(path, direct=True) as file:
        assert read(file, 72, 30_000, buffer, 72) == CONTENT[72:30_072]
    assert sizes == [BLOCK_BYTES, 6 * BLOCK_BYTES, BLOCK_BYTES]


@needs_preadv
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_reads_that_deliver_less_than_asked_are_continued(
    path: Path, buffer: ReadBuffer, direct: bool, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: real(descriptor, [views[0][:BLOCK_BYTES]], at))
    with WeightFile(path, direct=direct) as file:
        for address in (64, 13):
            assert read(file, 13, 50_000, buffer, address) == CONTENT[13:50_013]
        assert b"".join(content(chunk) for _, chunk in file.read_chunks(13, 50_000, buffer)) == CONTENT[13:50_013]
        dest = target(21_000)
        file.read_rows(dest, 13, 7000, [2, 1, 9], buffer)
        assert content(dest) == CONTENT[14_013:21_013] + CONTENT[7_013:14_013] + CONTENT[63_013:70_013]


@pytest.mark.parametrize("preadv", [True, False], ids=["preadv", "seek"])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_readers_of_one_file_do_not_disturb_each_other(
    path: Path, direct: bool, preadv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)

    def reader(seed: int) -> int:
        draw, buffer, total = random.Random(seed), ReadBuffer(SMALL), 0
        for _ in range(60):
            offset = draw.randrange(len(CONTENT) - 40_000)
            nbytes = draw.randrange(40_000)
            assert read(file, offset, nbytes, buffer) == CONTENT[offset : offset + nbytes]
            total += nbytes
        buffer.close()
        return total

    with WeightFile(path, direct=direct) as file, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(reader, range(4))) == file.bytes_read
        assert file.seconds > 0


# --- rows ---


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("rows") / "text_encoder" / "model.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 32), max_size=24),
    row_bytes=st.sampled_from([1, 2, 100, 1024, 4096, 8192, 9001]),
    offset=st.integers(0, 3000),
    direct=st.booleans(),
)
def test_rows_come_in_the_order_asked_for(
    table: Path, rows: list[int], row_bytes: int, offset: int, direct: bool
) -> None:
    buffer, dest = ReadBuffer(SMALL), target(len(rows) * row_bytes, 64)
    with WeightFile(table, direct=direct) as file:
        file.read_rows(dest, offset, row_bytes, rows, buffer)
        assert file.bytes_read == len(dest)
    buffer.close()
    starts = [offset + row * row_bytes for row in rows]
    assert content(dest) == b"".join(CONTENT[start : start + row_bytes] for start in starts)


@needs_preadv
def test_rows_that_lie_near_each_other_are_read_by_one_call(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        calls.append((at, len(views[0])))
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with WeightFile(table, direct=True) as file:
        file.read_rows(target(600), 8, 100, [7, 6, 900, 5, 7, 9], ReadBuffer(1 << 20))
    assert calls == [(508, 500), (90_008, 100)]


def test_rows_that_the_table_cannot_have_are_refused(table: Path, buffer: ReadBuffer) -> None:
    with WeightFile(table) as file:
        with pytest.raises(ValueError, match="no row -1"):
            file.read_rows(target(200), 0, 100, [1, -1], buffer)
        with pytest.raises(ValueError, match="300,001 bytes"):
            file.read_rows(target(200), 0, 100, [0, 3000], buffer)
        with pytest.raises(ValueError, match="don't fit"):
            file.read_rows(target(200), 0, 100, [0], buffer)


# --- a file that isn't what it was ---


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(250_000)
        file.write(b"other weights")


CHANGES = {
    "cut": lambda path: os.truncate(path, 200_000),
    "grown": lambda path: path.open("ab").write(b"more"),
    "overwritten": overwrite,
}


@needs_posix
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_changed_before_the_read_is_refused(
    path: Path, buffer: ReadBuffer, change: str, direct: bool
) -> None:
    with WeightFile(path, direct=direct) as file:
        file.check()
        CHANGES[change](path)
        for action in (file.check, *every_read(file, buffer)):
            assert "changed while it was in use (its size " in refusal(action)


@needs_preadv
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", range(3), ids=["into", "chunks", "rows"])
def test_a_file_that_is_changed_during_the_read_is_refused(
    path: Path, buffer: ReadBuffer, change: str, direct: bool, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    through(lambda: CHANGES[change](path), monkeypatch)
    with WeightFile(path, direct=direct) as file:
        assert "changed while it was in use (its size " in refusal(every_read(file, buffer)[which])


def test_the_message_of_a_cut_file_says_both_sizes(path: Path, buffer: ReadBuffer) -> None:
    identity = FileIdentity.of(path)
    path.write_bytes(CONTENT[:-1])
    message = refusal(lambda: WeightFile(path, identity))
    assert message == (
        "transformer/model.safetensors changed while it was in use (its size was 300,001 bytes and is 300,000). "
        "Load the model again."
    )


def test_a_file_that_was_changed_before_it_was_opened_is_refused(path: Path) -> None:
    identity = FileIdentity.of(path)
    WeightFile(path, identity).close()
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert "its size is still 300,001 bytes, but it was written to" in refusal(lambda: WeightFile(path, identity))


@needs_posix
def test_another_file_of_the_same_size_and_time_is_told_by_its_inode(path: Path, tmp_path: Path) -> None:
    identity = FileIdentity.of(path)
    os.replace(weights(tmp_path / "other" / "model.safetensors"), path)
    assert "another file of that name" in refusal(lambda: WeightFile(path, identity))
    WeightFile(path, FileIdentity(identity.size, identity.mtime_ns, inode=0)).close()


@needs_posix
def test_a_file_that_was_replaced_while_open_is_read_as_it_was(path: Path, tmp_path: Path, buffer: ReadBuffer) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(1000))
    for direct in (False, True):
        with WeightFile(weights(path), direct=direct) as file:
            assert read(file, 5, 100, buffer) == CONTENT[5:105]
            other.write_bytes(bytes(1000))
            os.replace(other, path)
            assert read(file, 5, 100_000, buffer) == CONTENT[5:100_005]
            file.check()


@needs_posix
def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    path: Path, tmp_path: Path, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real, before = weights(tmp_path / "other" / "model.safetensors"), os.open, open_descriptors()

    def replacing_open(name: Any, flags: int) -> int:
        descriptor = real(name, flags)
        if other.exists():
            os.replace(other, path)
        return descriptor

    monkeypatch.setattr(os, "open", replacing_open)
    assert "another file of that name" in refusal(lambda: WeightFile(path, direct=True))
    assert open_descriptors() == before


@needs_preadv
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_a_read_that_ends_early_means_that_the_file_changed(
    path: Path, buffer: ReadBuffer, direct: bool, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: real(descriptor, views, at) if at < 16_000 else 0)
    with WeightFile(path, direct=direct) as file:
        assert read(file, 9, 8000, buffer) == CONTENT[9:8009]
        for action in every_read(file, buffer):
            assert "reading ended at " in refusal(action)


@needs_preadv
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_a_drive_that_fails_is_named_as_the_reason(
    path: Path, buffer: ReadBuffer, direct: bool, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with WeightFile(path, direct=direct) as file:
        for action in every_read(file, buffer):
            assert f"can't be read ({os.strerror(errno.EIO)})" in refusal(action)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="transformer/model.safetensors does not exist. "):
        WeightFile(tmp_path / "transformer" / "model.safetensors", direct=True)


def test_bytes_outside_the_file_are_refused(path: Path, buffer: ReadBuffer) -> None:
    with WeightFile(path) as file:
        for offset, nbytes in [(-1, 1), (len(CONTENT), 1), (0, len(CONTENT) + 1)]:
            with pytest.raises(ValueError, match="300,001 bytes"):
                file.read_into(target(nbytes), offset, buffer)
            with pytest.raises(ValueError, match="300,001 bytes"):
                file.read_chunks(offset, nbytes, buffer)


@pytest.mark.parametrize(
    "dest",
    [
        torch.zeros(8),
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
    ],
    ids=["float", "signed", "matrix", "strided", "meta"],
)
def test_only_plain_bytes_on_the_cpu_are_read_into(path: Path, buffer: ReadBuffer, dest: torch.Tensor) -> None:
    with WeightFile(path) as file, pytest.raises(ValueError, match="contiguous uint8 on the CPU"):
        file.read_into(dest, 0, buffer)


# --- direct I/O that is refused ---


def test_direct_reading_that_the_file_system_refuses_at_opening_falls_back(
    path: Path,
    buffer: ReadBuffer,
    pretend_direct: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = os.open

    def refusing_open(name: Any, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags)

    monkeypatch.setattr(os, "open", refusing_open)
    with caplog.at_level(logging.INFO, file_reader.__name__), WeightFile(path, direct=True) as file:
        assert not file.direct
        assert read(file, 9, 50_000, buffer) == CONTENT[9:50_009]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "transformer/model.safetensors is read through the page cache" in caplog.text


@needs_preadv
@pytest.mark.parametrize("address", [64, 9], ids=["by the buffer", "in place"])
def test_direct_reading_that_the_file_system_refuses_at_a_read_falls_back(
    path: Path,
    buffer: ReadBuffer,
    pretend_direct: None,
    address: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, descriptors = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        descriptors.append(descriptor)
        if descriptor == descriptors[0]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with caplog.at_level(logging.INFO, file_reader.__name__), WeightFile(path, direct=True) as file:
        assert file.direct
        assert read(file, 9, 50_000, buffer, address) == CONTENT[9:50_009]
        assert not file.direct
        assert b"".join(content(chunk) for _, chunk in file.read_chunks(9, 50_000, buffer)) == CONTENT[9:50_009]
    assert len(caplog.records) == 1
    assert descriptors.count(descriptors[0]) == 1


@needs_preadv
def test_readers_that_are_refused_at_the_same_time_fall_back_with_one_line(
    path: Path, pretend_direct: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, together, refused = os.preadv, threading.Barrier(2), []

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        if len(refused) < 2:
            refused.append(descriptor)
            together.wait(30)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    caplog.set_level(logging.INFO, file_reader.__name__)
    with WeightFile(path, direct=True) as file, ThreadPoolExecutor(2) as pool:
        results = [pool.submit(read, file, offset, 50_000, ReadBuffer(SMALL)) for offset in (9, 60_009)]
        assert [result.result(60) for result in results] == [CONTENT[9:50_009], CONTENT[60_009:110_009]]
    assert len(caplog.records) == 1


def test_direct_reading_without_the_flag_asks_for_no_cache_where_that_exists(
    path: Path, buffer: ReadBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    macos = SimpleNamespace(F_NOCACHE=48, fcntl=lambda *call: asked.append(call))
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(file_reader, "fcntl", macos)
    with WeightFile(path, direct=True) as file:
        assert file.direct
        assert [call[1:] for call in asked] == [(48, 1)]
        assert read(file, 9, 50_000, buffer) == CONTENT[9:50_009]
    monkeypatch.setattr(file_reader, "fcntl", None)
    with WeightFile(path, direct=True) as file:
        assert not file.direct


# --- what stays behind ---


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="takes posix_fadvise's place")
def test_cached_pages_are_dropped_behind_buffered_reads_only_if_asked(
    path: Path, buffer: ReadBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *call: calls.append(call))
    with WeightFile(path) as file:
        read(file, 5000, 100_000, buffer)
    assert calls == []
    with WeightFile(path, keep_cached=False) as file:
        read(file, 5000, 100_000, buffer)
    assert {advice for _, _, advice in calls} == {os.POSIX_FADV_DONTNEED}
    dropped = {page for start, length, _ in calls for page in range(start, start + length, 4096)}
    assert dropped == set(range(4096, 105_000, 4096))


def test_no_descriptor_is_left_after_reads_and_errors(
    path: Path, buffer: ReadBuffer, pretend_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    identity = FileIdentity.of(path)
    with WeightFile(path, direct=True) as file:
        assert open_descriptors() == before + 2
        steps = file.read_chunks(0, 100_000, buffer)
        next(steps)  # and never to its end
        path.write_bytes(b"short")
        for action in every_read(file, buffer):
            refusal(action)
    assert open_descriptors() == before
    file.close()
    for wrong in (path, path.parent, path.parent / "missing"):
        with contextlib.suppress(ModelError):
            WeightFile(wrong, identity, direct=True)
    assert open_descriptors() == before

    def failing_fstat(descriptor: int) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing_fstat)
        refusal(lambda: WeightFile(path, direct=True))
    assert open_descriptors() == before


@needs_preadv
def test_a_file_that_is_closed_during_a_read_is_closed_after_it(
    path: Path, buffer: ReadBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = open_descriptors(), os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def preadv(descriptor: int, views: list[memoryview], at: int) -> int:
        reading.set()
        assert go_on.wait(30)
        return real(descriptor, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with ThreadPoolExecutor(1) as pool:
        file = WeightFile(path)
        result = pool.submit(read, file, 9, 100_000, buffer)
        assert reading.wait(30)
        file.close()
        assert open_descriptors() == before + 1
        go_on.set()
        assert result.result(30) == CONTENT[9:100_009]
    assert open_descriptors() == before


def test_a_closed_file_is_not_read(path: Path, buffer: ReadBuffer) -> None:
    file = WeightFile(path)
    steps = file.read_chunks(0, 50_000, buffer)
    next(steps)
    file.close()
    for action in (file.check, lambda: next(steps), *every_read(file, buffer)):
        with pytest.raises(ValueError, match="is closed"):
            action()


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_a_read_stops_between_pieces_and_the_file_stays_usable(path: Path, buffer: ReadBuffer, direct: bool) -> None:
    with WeightFile(path, direct=direct) as file:
        for read_all in (
            lambda stop: file.read_into(target(len(CONTENT)), 0, buffer, stop=stop),
            lambda stop: list(file.read_chunks(0, len(CONTENT), buffer, stop=stop)),
        ):
            answers, had = iter([False, False, True]), file.bytes_read
            with pytest.raises(ReadStopped):
                read_all(lambda answers=answers: next(answers))
            assert 0 < file.bytes_read - had <= 2 * 4 * SMALL
        assert read(file, 9, 50_000, buffer) == CONTENT[9:50_009]


def test_a_buffer_is_page_aligned_and_as_large_as_it_says() -> None:
    for asked, real in ((1, 8192), (8192, 8192), (8193, 12_288), (4 << 20, 4 << 20)):
        buffer = ReadBuffer(asked)
        assert (buffer.nbytes, len(buffer.tensor), len(buffer.bytes)) == (real, real, real)
        assert buffer.tensor.data_ptr() % BLOCK_BYTES == 0
        buffer.close()
    assert ReadBuffer().nbytes == 4 << 20


def test_a_view_of_a_closed_buffer_keeps_its_memory(path: Path) -> None:
    buffer = ReadBuffer(SMALL)
    with WeightFile(path) as file:
        _, chunk = next(file.read_chunks(8, 4096, buffer))
        buffer.close()
        buffer.close()
        assert content(chunk) == CONTENT[8:4104]
        with pytest.raises(ValueError, match="buffer is closed"):
            list(file.read_chunks(8, 4096, buffer))
