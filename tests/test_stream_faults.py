"""Whatever fails while weights are streamed, and whenever: nothing is left behind, and a retry gives the right bits."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cache_harness import (
    Blocks,
    from_file,
    inputs,
    reader_threads,
    same_tensors,
    save,
    seeded,
    tensors_of,
    weight_bytes,
)
from offload_core.errors import ModelError, OffloadError
from offload_core.file_reader import WeightFile
from offload_core.settings import OffloadSettings
from offload_core.streaming import Offload, OffloadScope, _enable, _room, enable_offload
from offload_core.streaming._cache import WeightCache
from offload_core.streaming._copies import CpuCopies

RESIDENT = seeded(lambda: Blocks((24, 40)))
X = inputs()
TOTAL = weight_bytes(RESIDENT)
BUDGET = TOTAL // 2 + 2000
PASSES = 2

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors and mappings by /proc")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="an open file can't be renamed over or truncated")


class Fault(Exception):  # noqa: N818 -- an error that nothing in the engine knows
    pass


class Switch:
    """Raises at the k-th of the calls that it sees; `fired` says whether it came to that."""

    def __init__(self, k: int, error: Callable[[], BaseException]) -> None:
        self.k, self.error = k, error
        self.calls = 0
        self.fired = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1
            if self.calls == self.k:
                self.fired = True
                raise self.error()


def fail_allocations(monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    original = CpuCopies.allocate
    monkeypatch.setattr(CpuCopies, "allocate", lambda self, nbytes: (switch(), original(self, nbytes))[1])


def fail_fills(monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    original = CpuCopies.fill
    monkeypatch.setattr(CpuCopies, "fill", lambda self, *args: (switch(), original(self, *args))[1])


def fail_half_way(monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    original = CpuCopies.fill
    monkeypatch.setattr(CpuCopies, "fill", lambda self, *args: (original(self, *args), switch())[0])


def fail_reads(monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    original = WeightFile._read_at
    monkeypatch.setattr(WeightFile, "_read_at", lambda self, *args: (switch(), original(self, *args))[1])


def fail_thread_starts(monkeypatch: pytest.MonkeyPatch, switch: Switch) -> None:
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith("offload-reader-"):
            switch()
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Switch], None], Callable[[], BaseException], Any]] = {
    "out of memory": (fail_allocations, lambda: torch.OutOfMemoryError("made to fail"), torch.OutOfMemoryError),
    "no host memory": (fail_allocations, lambda: MemoryError("made to fail"), MemoryError),
    "odd allocation": (fail_allocations, lambda: Fault("made to fail"), Fault),
    "copy": (fail_fills, lambda: Fault("made to fail"), Fault),
    "interrupted copy": (fail_half_way, lambda: KeyboardInterrupt("made to fail"), KeyboardInterrupt),
    "read": (fail_reads, lambda: OSError(5, "Input/output error"), ModelError),
    "thread": (fail_thread_starts, lambda: RuntimeError("can't start new thread"), ()),
}


@pytest.fixture(autouse=True, scope="module")
def quick_collector() -> Iterator[None]:
    """Collecting garbage needn't look at all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def scopes(monkeypatch: pytest.MonkeyPatch) -> list[OffloadScope]:
    """Every scope that `enable_offload` makes."""
    made: list[OffloadScope] = []

    class Spied(OffloadScope):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(_enable, "OffloadScope", Spied)
    monkeypatch.setattr(_room, "_PATIENCE_S", 2.0)
    return made


@pytest.fixture(params=[0, 1 << 20], ids=["by readers", "by who needs it"])
def inline_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether weights are read by threads or, being small, by whoever needs them."""
    monkeypatch.setitem(WeightCache.__init__.__kwdefaults__, "inline_bytes", request.param)
    return int(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(RESIDENT, tmp_path_factory.mktemp("blocks") / "model.safetensors")


def attach(module: nn.Module, path: Path, *, resident_below: int = 0, device_memory: int = BUDGET) -> Offload:
    settings = OffloadSettings(
        execution_device="cpu",
        device_memory=device_memory,
        host_memory=1 << 30,
        activation_memory=0,
        resident_below=resident_below,
        read_threads=2,
    )
    return enable_offload(module, settings=settings, files=[path], component="blocks")


def run(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(X)


def wanted() -> torch.Tensor:
    return run(RESIDENT)


def opened(path: Path) -> tuple[int, int]:
    """Descriptors and mappings of a file that this process has."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the one that listed them
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    return links.count(str(path)), sum(line.endswith(str(path)) for line in maps)


def live_once(module: nn.Module, path: Path, **options: Any) -> None:
    """Attach, two passes, release. Right bits, or an error."""
    offload = attach(module, path, **options)
    try:
        for _ in range(PASSES):
            assert torch.equal(run(offload.module), wanted())
    finally:
        offload.release()


def sweep(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    scopes: list[OffloadScope],
    module: nn.Module,
    kind: str,
    **options: Any,
) -> Iterator[tuple[int, BaseException | None]]:
    """Lets the k-th call fail, for k = 1, 2, ... until none is left to fail, and checks what is left each time."""
    install, error, expected = FAULTS[kind]
    before = tensors_of(module)
    gc.collect()  # mappings of modules that are gone
    baseline = opened(path)
    for k in itertools.count(1):
        switch = Switch(k, error)
        caught: BaseException | None = None
        with monkeypatch.context() as patch:
            install(patch, switch)
            try:
                live_once(module, path, **options)
            except BaseException as raised:
                if isinstance(raised, AssertionError) or not expected or not isinstance(raised, expected):
                    raise
                caught = raised.with_traceback(None)
        gc.collect()
        if not switch.fired:
            assert caught is None
            return
        scope = scopes.pop()
        assert scope.ledger.by_kind("device") == scope.ledger.by_kind("host") == {}, f"booked after fault {k}"
        assert reader_threads() == []
        left = opened(path)
        assert left[0] == baseline[0], f"descriptors after fault {k}"
        assert left[1] <= baseline[1], f"mappings after fault {k}"
        assert same_tensors(module, before)
        assert not any("_apply" in vars(part) for part in module.modules())
        scopes.clear()
        yield k, caught


@needs_proc
@pytest.mark.parametrize(
    ("kind", "resident_below"),
    [*((kind, 0) for kind in FAULTS), *((kind, 200) for kind in ("out of memory", "odd allocation", "copy", "read"))],
)
def test_the_kth_of_anything_may_fail(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    scopes: list[OffloadScope],
    inline_bytes: int,
    kind: str,
    resident_below: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")  # a kept log record must keep no error, whose frames would keep hot copies
    module = from_file(RESIDENT, path)
    outcomes = [caught for _, caught in sweep(monkeypatch, path, scopes, module, kind, resident_below=resident_below)]
    if kind == "thread":
        assert outcomes == ([None, None] if not inline_bytes else [])
    else:
        assert any(outcomes)
    if kind == "out of memory":
        assert None in outcomes, "no failed allocation was made up for by streaming"
    live_once(module, path, resident_below=resident_below)
    assert torch.equal(run(module), wanted())
    assert all(isinstance(error, OffloadError) for error in outcomes if error is not None and kind == "read")


@needs_proc
def test_a_module_in_memory_survives_failed_copies_as_well(
    monkeypatch: pytest.MonkeyPatch, path: Path, scopes: list[OffloadScope], inline_bytes: int
) -> None:
    module = seeded(lambda: Blocks((24, 40)))
    assert sum(caught is not None for _, caught in sweep(monkeypatch, path, scopes, module, "copy")) > 3
    assert torch.equal(run(module), wanted())


def test_a_run_goes_on_after_a_failed_pass(
    monkeypatch: pytest.MonkeyPatch, path: Path, scopes: list[OffloadScope], inline_bytes: int
) -> None:
    """The fault passes, and the same attached module gives the right bits: no copy is half there."""
    offload = attach(from_file(RESIDENT, path), path)
    with offload:
        for k in range(1, 14):
            switch = Switch(k, lambda: Fault("made to fail"))
            with monkeypatch.context() as patch:
                fail_half_way(patch, switch)
                with contextlib.suppress(Fault):
                    assert torch.equal(run(offload.module), wanted())
            gc.collect()  # the frames of the failed pass
            assert torch.equal(run(offload.module), wanted())
    assert scopes[0].ledger.by_kind("device") == {}


class Canary:
    pass


def test_the_frames_of_a_failed_pass_go_with_its_error(
    monkeypatch: pytest.MonkeyPatch, path: Path, inline_bytes: int
) -> None:
    """They hold activations and views of hot weights, for which a retry may have no room beside them."""

    canaries: list[weakref.ref[Canary]] = []

    def fail() -> None:
        canary = Canary()
        canaries.append(weakref.ref(canary))
        run(offload.module)

    with attach(from_file(RESIDENT, path), path) as offload:
        fail_reads(monkeypatch, Switch(1, lambda: OSError(5, "Input/output error")))
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(ModelError):
                fail()
            assert canaries and canaries[0]() is None
        finally:
            gc.enable()


# --- files that change underneath -------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 1000)
        file.write(b"\xff" * 1000)
    os.utime(path, ns=(1, 1))  # the clock may be too coarse to show it


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = [truncate, cut_to_nothing, overwrite, append]


@pytest.fixture
def own_path(tmp_path: Path) -> Path:
    return save(RESIDENT, tmp_path / "model.safetensors")


@needs_posix
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_changed_is_a_sentence_and_never_garbage(
    own_path: Path, scopes: list[OffloadScope], inline_bytes: int, change: Callable[[Path], None]
) -> None:
    offload = attach(from_file(RESIDENT, own_path), own_path)
    run(offload.module)
    change(own_path)
    for _ in range(3):
        with pytest.raises(ModelError, match=r"model\.safetensors changed while it was in use.*Load the model again"):
            run(offload.module)
        gc.collect()
    assert offload.release() == 0
    assert scopes[0].ledger.by_kind("device") == scopes[0].ledger.by_kind("host") == {}
    assert reader_threads() == []


@needs_posix
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_everything_is_given_back_although_the_file_of_small_weights_changed(
    own_path: Path, scopes: list[OffloadScope], change: Callable[[Path], None]
) -> None:
    offload = attach(from_file(RESIDENT, own_path), own_path, resident_below=200)
    change(own_path)
    try:
        offload.release()
    except ModelError:
        pass
    finally:
        left = scopes[0].ledger.by_kind("device"), reader_threads()
        scopes[0].close()
    assert left == ({}, [])


@needs_posix
def test_a_file_of_the_same_name_is_harmless(own_path: Path, inline_bytes: int) -> None:
    with attach(from_file(RESIDENT, own_path), own_path) as offload:
        run(offload.module)
        other = own_path.with_name("other.safetensors")
        other.write_bytes(b"\xff" * own_path.stat().st_size)
        os.replace(other, own_path)
        for _ in range(2):
            assert torch.equal(run(offload.module), wanted())


@needs_posix
def test_a_deleted_file_is_harmless_while_it_is_open(own_path: Path, inline_bytes: int) -> None:
    with attach(from_file(RESIDENT, own_path), own_path) as offload:
        run(offload.module)
        own_path.unlink()
        assert torch.equal(run(offload.module), wanted())


@needs_proc
def test_an_attach_that_is_refused_leaves_nothing_open(path: Path) -> None:
    module = from_file(RESIDENT, path)
    before, baseline = tensors_of(module), opened(path)
    with pytest.raises(OffloadError):
        attach(module, path, device_memory=TOTAL // 20)
    assert same_tensors(module, before)
    assert opened(path) == baseline
    assert reader_threads() == []
    del module
    gc.collect()
