"""The weight cache on the CPU: the bits of resident weights, never a byte over budget, whatever the order of use."""

from __future__ import annotations

import _thread
import copy
import functools
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cache_harness import (
    ALIGN,
    Attached,
    Block,
    Blocks,
    Call,
    from_file,
    group_bytes,
    in_turn,
    inputs,
    reader_threads,
    run_threads,
    same_tensors,
    save,
    seeded,
    smallest_budget,
    tensors_of,
    wait_until,
    weight_bytes,
)
from offload_core.errors import BudgetError, ColdWeightError
from offload_core.settings import OffloadSettings
from offload_core.streaming import StreamedWeight, enable_offload
from offload_core.streaming import _room as room_module
from offload_core.streaming._arena import Arena, Region
from offload_core.streaming._cache import WeightCache
from offload_core.streaming._readers import Readers

RESIDENT = seeded(Blocks)
X = inputs()
TOTAL, SMALLEST = weight_bytes(RESIDENT), smallest_budget(RESIDENT)
BUDGETS = [SMALLEST, SMALLEST + 1000, TOTAL // 4, TOTAL // 2, TOTAL - 1, TOTAL, TOTAL * 2]
SMALL_SETTINGS = OffloadSettings(
    execution_device="cpu", device_memory=SMALLEST, host_memory=1 << 30, activation_memory=0, resident_below=0
)

calls = st.recursive(
    st.tuples(st.integers(0, 5), st.just(())),
    lambda inner: st.tuples(st.integers(0, 5), st.lists(inner, min_size=1, max_size=2).map(tuple)),
    max_leaves=4,
)
programs = st.lists(calls, max_size=20)


class Together(nn.Module):
    """Weights that one operator takes, all or some of them."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        for index, count in enumerate(rows):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(count, 16)))

    def forward(self, *indices: int) -> torch.Tensor:
        return torch.cat([getattr(self, f"w{index}") for index in indices])


class Parts(nn.Module):
    def __init__(self, *rows: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Together(*each) for each in rows)

    def forward(self, part: int, *indices: int) -> torch.Tensor:
        return self.parts[part](*indices)


def resident(program: Any = None, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return RESIDENT(x, program)


def blocks() -> nn.Module:
    return copy.deepcopy(RESIDENT)


@pytest.fixture(autouse=True, scope="module")
def quick_collector() -> Iterator[None]:
    """Collecting garbage needn't look at all of torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(RESIDENT, tmp_path_factory.mktemp("blocks") / "model.safetensors")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_GROW_AFTER_S", 0.02)
    monkeypatch.setattr(room_module, "_PATIENCE_S", 0.2)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_GROW_AFTER_S", 60.0)
    monkeypatch.setattr(room_module, "_PATIENCE_S", 60.0)


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Checks that no hot copy is ever made over the memory of another that is alive. The list counts them."""
    made: list[int] = []
    alive: list[tuple[weakref.ref[Any], int, int]] = []
    lock, original = threading.RLock(), Arena.tensor

    def tensor(self: Arena, region: Region, layout: Any) -> torch.Tensor:
        with lock:
            hot = original(self, region, layout)
            start, end = hot.data_ptr(), hot.data_ptr() + layout.nbytes
            assert start % ALIGN == 0
            alive[:] = [each for each in alive if each[0]() is not None]
            assert all(end <= first or last <= start for _, first, last in alive), "memory is used twice"
            alive.append((weakref.ref(hot.untyped_storage()), start, end))
            made.append(1)
            return hot

    monkeypatch.setattr(Arena, "tensor", tensor)
    yield made
    gc.collect()
    assert all(each[0]() is None for each in alive), "a hot copy outlived its scope"


# --- right bits within the budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_gives_the_bits_of_resident_weights_and_is_kept(
    path: Path, regions: list[int], budget: int, threads: int
) -> None:
    module = from_file(RESIDENT, path)
    with Attached(module, budget, files=[path], threads=threads) as attached:
        for _ in range(5):
            assert torch.equal(attached(X), resident())
        assert attached.checks == attached.accesses > 0
        assert attached.storages.peak == attached.ledger.peak("device") <= budget
        assert attached.scope.bytes_read >= attached.cache.counts.fetched_bytes  # some may be read and not used yet
        assert bool(regions) == bool(attached.cache.counts.streamed_bytes) == (budget < TOTAL)
        assert attached.release() == 0
    assert attached.ledger.by_kind("device") == attached.ledger.by_kind("host") == {}
    assert attached.storages.live == 0


@settings(max_examples=12, deadline=None)
@given(program=programs, share=st.floats(0, 1), threads=st.sampled_from([0, 1, 2]), in_file=st.booleans())
def test_any_program_of_repeats_skips_and_recursion_gives_the_bits_of_resident_weights(
    path: Path, program: list[Call], share: float, threads: int, in_file: bool
) -> None:
    module = from_file(RESIDENT, path) if in_file else blocks()
    budget = SMALLEST * 2 + int((TOTAL - SMALLEST * 2) * share)  # a caller's weight may be held while it calls another
    with Attached(module, budget, files=[path] if in_file else [], threads=threads) as attached:
        for each in (program, in_turn(6), program[::-1], program):
            assert torch.equal(attached(X, each), resident(each))
        assert attached.storages.peak <= budget
        assert attached.release() == 0
    assert attached.storages.live == attached.ledger.used("device") == attached.ledger.used("host") == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", [SMALLEST, TOTAL // 3, TOTAL])
def test_late_copies_are_waited_for(path: Path, regions: list[int], budget: int, seed: int) -> None:
    """Each hot copy is NaN until its bytes arrive, some time later."""
    programs: list[Any] = [None, [(3, ()), (3, ()), (0, ((5, ()),))], None, in_turn(6)[::-1], None]
    with Attached(from_file(RESIDENT, path), budget, files=[path], seed=seed) as attached:
        for program in programs:
            assert torch.equal(attached(X, program), resident(program))


def test_a_copy_that_is_used_too_early_would_show() -> None:
    """What the delayed copies prove rests on this: a hot copy without its bytes gives NaN, not luck."""
    with Attached(blocks(), TOTAL // 2) as attached:
        attached.fills._fill = lambda *_: None
        assert attached(X).isnan().all()


def test_hot_copies_are_aligned() -> None:
    with Attached(blocks(), TOTAL // 2) as attached, torch.no_grad():
        for weight in attached.module.parameters():
            assert weight.view(-1).data_ptr() % ALIGN == 0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.MultiheadAttention(32, 4, batch_first=True), id="attention"),
        pytest.param(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), id="encoder layer"),
        pytest.param(
            lambda: nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True) for _ in range(2))),
            id="two encoder layers",
        ),
    ],
)
def test_fused_operators_get_all_their_weights_in_the_smallest_ring(
    make: Callable[[], nn.Module], inference: bool
) -> None:
    module, x = seeded(make), torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    extra = nn.Linear(64, 64)  # so that not everything fits
    twin = nn.ModuleList([copy.deepcopy(module), extra]).eval()
    layer = module[0] if isinstance(module, nn.Sequential) else module
    largest = max(group_bytes(layer), group_bytes(extra))
    with Attached(twin, largest + ALIGN) as attached, torch.inference_mode(inference), torch.no_grad():
        assert attached.managed.plan.ring_bytes == largest
        for _ in range(3):
            wanted, got = module(*args), twin[0](*args)
            pairs = zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]
            assert all(torch.equal(*pair) for pair in pairs)
            twin[1](torch.zeros(1, 64))
        assert attached.cache.ring.grown_bytes == 0
        assert attached.cache.counts.streamed_bytes > 0


def test_an_operator_that_takes_twelve_weights_gets_them_together_in_the_smallest_ring() -> None:
    module = seeded(lambda: Parts((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8), (52,)))
    everything = module.parts[0](*range(12)).detach()
    with Attached(module, smallest_budget(module)) as attached:
        for _ in range(3):
            assert torch.equal(attached(0, *range(12)), everything)
            attached(1, 0)
        assert attached.cache.ring.grown_bytes == 0


def test_an_operator_gets_its_weights_together_although_one_is_hot_in_the_middle_of_the_ring(impatient: None) -> None:
    module = seeded(lambda: Parts((30,), (30, 70)))
    with Attached(module, smallest_budget(module)) as attached:
        attached(0, 0)
        attached(1, 0)
        attached(1, 0, 1)


def test_a_layer_gets_its_bias_although_a_small_weight_was_hot_at_the_start_of_the_ring(impatient: None) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 96)))
    with Attached(module, smallest_budget(module)), torch.no_grad():
        _ = module[0].bias * 1
        module[1](X)


def test_a_module_that_is_one_operator_is_refused_a_budget_for_a_part_of_its_weights() -> None:
    module = seeded(lambda: nn.Linear(32, 96))
    with pytest.raises(BudgetError, match="12.4 KiB"):
        Attached(module, weight_bytes(module) - 1).release()
    with Attached(module, weight_bytes(module)) as attached:
        attached(X)


# --- reading ahead, and no needless traffic ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "program", "share"),
    [
        ((64,) * 6, None, 0.0),
        ((64,) * 6, [(2, ()), (2, ()), (4, ((1, ()),)), (0, ())], 0.0),
        ((40, 96, 33, 64, 96, 50), None, 0.15),  # large ones don't always fit beside each other
    ],
    ids=["in turn", "repeats", "of many sizes"],
)
def test_after_the_first_pass_weights_are_there_before_they_are_needed(
    hidden: tuple[int, ...], program: Any, share: float
) -> None:
    module = seeded(lambda: Blocks(hidden))
    with Attached(module, weight_bytes(module) // 2 + smallest_budget(module)) as attached:
        attached._on_access = lambda: wait_until(attached.is_idle)  # reading is as fast as can be
        for _ in range(2):
            attached(X, program)
        counts = attached.cache.counts
        misses, hits = counts.misses, counts.hits
        for _ in range(10):
            attached(X, program)
        assert counts.fetches > 40
        assert counts.misses - misses <= 1 + share * (counts.hits - hits)


def test_without_threads_every_streamed_weight_is_a_miss_and_nothing_else_changes() -> None:
    with Attached(blocks(), TOTAL // 2, threads=0) as attached:
        for _ in range(3):
            assert torch.equal(attached(X), resident())
        assert attached.cache.counts.misses == attached.cache.counts.fetches
        assert reader_threads() == []


def test_what_fits_is_brought_once() -> None:
    with Attached(blocks(), TOTAL) as attached:
        for _ in range(8):
            attached(X)
        assert attached.cache.counts.fetched_bytes == TOTAL
        assert set(attached.fills.count.values()) == {1}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("calls_a_step", [1, 2])
def test_one_unit_short_moves_a_small_multiple_of_the_overflow(threads: int, calls_a_step: int) -> None:
    module = seeded(lambda: Blocks((64,) * 10))
    unit = group_bytes(module.blocks[0].up)
    total, steps = weight_bytes(module), 5
    with Attached(module, total - unit, threads=threads) as attached:
        for _ in range(steps * calls_a_step):
            attached(X)
        plan, fetched = attached.managed.plan, attached.cache.counts.streamed_bytes
        passes = steps * calls_a_step
        assert plan.streamed_bytes <= 4 * unit
        assert 0 < fetched <= passes * plan.streamed_bytes + plan.ring_bytes
        assert max(attached.fills.count.values()) <= passes + 1  # what was read ahead for a pass that never came
        assert attached.cache.counts.fetched_bytes - fetched == plan.resident_bytes


@pytest.mark.parametrize("budget", [SMALLEST, TOTAL // 3, TOTAL // 2])
def test_a_pass_reads_each_streamed_weight_once(path: Path, budget: int) -> None:
    with Attached(from_file(RESIDENT, path), budget, files=[path]) as attached:
        attached._on_access = lambda: wait_until(attached.is_idle)
        passes = 10
        for _ in range(passes):
            attached(X)
        plan = attached.managed.plan
        assert attached.scope.bytes_read <= plan.resident_bytes + passes * plan.streamed_bytes + plan.ring_bytes
        for name, count in attached.fills.count.items():
            assert count == 1 if name in plan.resident else count <= passes + 1


def test_wrong_guesses_cost_reads_but_no_errors_and_no_bytes_over_the_budget() -> None:
    orders = [in_turn(6), in_turn(6)[::-1], ((5, ()), (1, ()), (3, ())), ((0, ()),) * 6, in_turn(6)[::2]]
    with Attached(blocks(), TOTAL // 3) as attached:
        for _ in range(4):
            for program in orders:
                assert torch.equal(attached(X, program), resident(program))
        used = 4 * sum(len(program) for program in orders) * TOTAL // 6
        assert attached.cache.counts.fetched_bytes < 2 * used
        assert attached.storages.peak <= TOTAL // 3


def test_twenty_runs_leave_the_ledger_and_the_masters_as_they_were() -> None:
    with Attached(blocks(), TOTAL // 2) as attached:
        attached(X)
        masters = {name: entry.master for name, entry in attached.entries.items()}
        booked = attached.ledger.by_kind("device"), attached.ledger.by_kind("host")
        for _ in range(20):
            attached(X)
        assert (attached.ledger.by_kind("device"), attached.ledger.by_kind("host")) == booked
        assert all(entry.master is masters[name] for name, entry in attached.entries.items())


def test_a_lookup_never_brings_its_table() -> None:
    module = seeded(lambda: nn.Sequential(nn.Embedding(1000, 32), Block(32, 64)))
    tokens = torch.tensor([[3, 999, 3, 0]])
    wanted = module(tokens).detach()
    with Attached(module, smallest_budget(module[1])) as attached:
        assert attached.managed.plan.lookup_bytes == 128_000
        for _ in range(2):
            assert torch.equal(attached(tokens), wanted)
        assert "0.weight" not in attached.fills.count


# --- copies that somebody holds ---------------------------------------------------------------------------------------


def hold(module: nn.Module, *names: str) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module.get_parameter(name).view(-1) for name in names]


def test_a_full_ring_that_can_grow_does_grow(impatient: None) -> None:
    module = seeded(lambda: Parts((64,), (64,), (64,)))
    with Attached(module, 2 * 4096 + 4 * ALIGN, threads=0) as attached:
        for entry in attached.entries.values():
            entry.resident = False  # so that the budget has room beside the ring
        ring = attached.cache.ring.nbytes
        held = hold(module, "parts.0.w0")
        before = held[0].clone()
        held += hold(module, "parts.1.w0")
        assert attached.cache.ring.nbytes == ring + 4096
        assert torch.equal(held[0], before)
        assert attached.storages.peak <= attached.ledger.limits["device"]
        assert attached.release() == 2 * 4096
    assert attached.ledger.used("device") == 0


def test_a_ring_that_cannot_grow_is_an_error_by_name_within_the_patience(impatient: None) -> None:
    module = seeded(lambda: Parts((64,), (64,), (64,)))
    with Attached(module, 4096 + ALIGN) as attached:
        held = hold(module, "parts.1.w0")
        began = time.monotonic()
        with pytest.raises(BudgetError, match=r"m\.parts\.2\.w0.*4\.0 KiB.*device_memory"):
            attached(2, 0)
        assert time.monotonic() - began < 20
        del held
        assert torch.equal(attached(2, 0), attached(2, 0))
        assert attached.cache.ring.grown_bytes == 0


def test_a_copy_that_is_let_go_meanwhile_makes_room(patient: None) -> None:
    module = seeded(lambda: Parts((64,), (64,), (64,)))
    waiting = threading.Event()
    with Attached(module, 4096 + ALIGN) as attached:
        held = hold(module, "parts.1.w0")

        def let_go() -> None:
            waiting.wait()
            held.clear()

        attached._on_access = waiting.set
        run_threads(lambda: attached(2, 0), let_go)
        assert attached.cache.ring.grown_bytes == 0


def test_an_alias_outlives_release_with_its_values_and_is_told() -> None:
    with Attached(blocks(), TOTAL // 2) as attached:
        for entry in attached.entries.values():
            entry.resident = False
        held = hold(attached.module, "blocks.1.up.weight")
        attached(X)
        assert attached.release() == held[0].nbytes
        assert torch.equal(held[0], RESIDENT.blocks[1].up.weight.view(-1))
        assert attached.storages.live > 0
        del held
        assert attached.storages.live == 0


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("budget", [SMALLEST, TOTAL // 2])
def test_four_threads_make_progress_together(regions: list[int], budget: int, threads: int) -> None:
    programs = [in_turn(6), in_turn(6)[::-1], ((1, ()), (3, ()), (1, ())), ((4, ()), (0, ((2, ()),)))]
    with Attached(blocks(), budget, threads=threads) as attached:

        def work(program: Any) -> None:
            wanted = resident(program)
            for _ in range(2):
                assert torch.equal(attached(X, program), wanted)

        run_threads(*(lambda program=program: work(program) for program in programs))
        assert attached.storages.peak <= budget


def meet(attached: Attached, first: str, second: str, other: Callable[[], Any]) -> threading.Thread:
    """Starts `other` in a thread when the copy of `first` is being filled, and lets that end when `second` is begun, or
    has had the time to be."""
    thread = threading.Thread(target=other, daemon=True)

    def before(entry: Any) -> None:
        if entry.names[0] == first and not thread.ident:
            thread.start()
            end = time.monotonic() + 0.3
            while attached.entries[second].fetch is None and time.monotonic() < end:
                time.sleep(0.001)

    attached.fills.before = before
    return thread


def test_two_operators_that_need_the_whole_ring_each_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "_PATIENCE_S", 1.5)
    module = seeded(lambda: Parts((16, 16), (16, 16)))
    errors: list[BaseException] = []

    def other() -> None:
        try:
            attached(1, 0, 1)
        except BaseException as error:
            errors.append(error)

    with Attached(module, smallest_budget(module), threads=0) as attached:
        thread = meet(attached, "parts.0.w0", "parts.1.w0", other)
        try:
            attached(0, 0, 1)
        finally:
            thread.join()
        assert not errors


def test_two_threads_that_need_the_same_weight_bring_it_once() -> None:
    entered, go = threading.Event(), threading.Event()
    with Attached(blocks(), SMALLEST) as attached:

        def before(entry: Any) -> None:
            entered.set()
            go.wait(20)

        def second() -> None:
            entered.wait(20)
            attached._on_access = go.set
            hold(attached.module, "blocks.1.up.weight")

        attached.fills.before = before
        run_threads(lambda: hold(attached.module, "blocks.1.up.weight") and None, second)
        assert attached.fills.count["blocks.1.up.weight"] == 1


# --- cold weights -----------------------------------------------------------------------------------------------------


def test_a_weight_that_was_kept_is_cold_after_release_and_the_module_has_its_own_back() -> None:
    module = blocks()
    before = tensors_of(module)
    attached = Attached(module, TOTAL // 2)
    attached(X)
    kept = list(module.parameters())
    attached.release()
    assert same_tensors(module, before)
    assert torch.equal(attached(X), resident())
    for weight in kept:
        assert isinstance(weight, StreamedWeight)
        with pytest.raises(ColdWeightError, match=r"m\.blocks\."):
            weight + 1


def test_a_module_that_is_left_cold_says_so_whichever_weight_is_reached() -> None:
    attached = Attached(blocks(), TOTAL // 2, resident_below=300)
    attached(X)
    attached.managed.release(restore=False)
    attached.scope.close()
    for weight in attached.module.parameters():
        with torch.no_grad(), pytest.raises(ColdWeightError):
            weight.sum()
    with pytest.raises(ColdWeightError):
        attached(X)


def test_a_weight_of_a_dropped_module_is_cold() -> None:
    offload = enable_offload(blocks(), settings=SMALL_SETTINGS)
    kept = offload.module.blocks[0].up.weight
    offload.module(X)
    del offload
    with pytest.raises(ColdWeightError):
        kept + 1


def test_dropping_a_module_without_release_frees_all_of_it_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()
    gc.disable()
    try:
        monkeypatch.setitem(WeightCache.__init__.__kwdefaults__, "inline_bytes", 0)
        offload = enable_offload(blocks(), settings=SMALL_SETTINGS)
        with torch.no_grad():
            offload.module(X)
        assert reader_threads()
        managed = offload._managed
        kept: list[Any] = [offload, offload.module, managed, managed.scope, managed.scope.cache]
        kept += [arena._block.untyped_storage() for arena, _ in managed.scope.cache.ring._arenas.values()]
        refs = [weakref.ref(each) for each in kept]
        del offload, managed, kept
        wait_until(lambda: all(ref() is None for ref in refs), 2.0)  # a reader may be in the middle of its last copy
        wait_until(lambda: not reader_threads())
    finally:
        gc.enable()


def test_a_thread_that_waits_for_room_is_told_when_the_scope_closes(patient: None) -> None:
    module = seeded(lambda: Parts((64,), (64,), (64,)))
    attached = Attached(module, 4096 + ALIGN)
    held = hold(module, "parts.1.w0")
    attached.strict = False
    waiting = threading.Event()

    def wait() -> None:
        with pytest.raises(ColdWeightError):
            attached(2, 0)

    def close() -> None:
        waiting.wait(20)
        wait_until(lambda: attached.cache._lock.acquire(blocking=False) and not attached.cache._lock.release())
        attached.scope.close()

    attached._on_access = waiting.set
    run_threads(wait, close)
    del held
    assert attached.ledger.used("device") == 0
    assert attached.storages.live == 0


def test_a_thread_that_waits_for_a_weight_is_told_when_the_weight_is_released() -> None:
    waits, go, fill = threading.Event(), threading.Event(), threading.Event()
    module = seeded(lambda: Parts((64,), (64,), (64,)))
    with Attached(module, 4096 + ALIGN) as attached:
        attached.fills.before = lambda entry: fill.wait(20) and None
        seen: list[int] = []

        def on_access() -> None:
            seen.append(1)
            if len(seen) == 2:  # in the middle of the wait for the reader
                waits.set()
                go.wait(20)

        attached._on_access = on_access
        attached.strict = False

        def use() -> None:
            with pytest.raises(ColdWeightError):
                attached(2, 0)

        def release() -> None:
            waits.wait(20)
            fill.set()
            attached.managed.release(restore=True)
            go.set()

        run_threads(use, release)
        assert attached.fills.count["parts.2.w0"] == 1


# --- interrupts -------------------------------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818 -- a host's interrupt
    pass


@pytest.mark.parametrize("budget", [SMALLEST, TOTAL // 2, TOTAL])
def test_an_interrupt_at_any_weight_access_leaves_it_usable_and_a_retry_gives_the_right_bits(budget: int) -> None:
    with Attached(blocks(), budget) as attached:
        k = 0
        while True:
            k += 1
            counter = iter(range(1, k + 1))

            def interrupt(counter: Iterator[int] = counter, k: int = k) -> None:
                if next(counter, None) == k:
                    raise Stop

            attached._on_access = interrupt
            try:
                attached(X)
            except Stop:
                pass  # the error's frames hold weights, so the retry comes when it is gone
            else:
                break
            attached._on_access = None
            assert torch.equal(attached(X), resident())
        assert k > 1
        assert attached.release() == 0
    assert attached.storages.live == attached.ledger.used("device") == attached.ledger.used("host") == 0


@pytest.mark.parametrize("resident_below", [300, 1 << 20])
def test_an_interrupt_at_any_point_of_attach_leaves_the_module_as_it_was(resident_below: int) -> None:
    module = blocks()
    before = tensors_of(module)
    for k in range(1, 200):
        counter = iter(range(1, k + 1))
        scopes: list[Attached] = []

        def interrupt(counter: Iterator[int] = counter, k: int = k) -> None:
            if next(counter, None) == k:
                raise Stop

        try:
            attached = Attached(
                module, TOTAL * 2, resident_below=resident_below, on_access=interrupt, prepare=scopes.append
            )
        except Stop:
            assert same_tensors(module, before)
            assert not any("_apply" in vars(part) for part in module.modules())
            assert scopes[0].ledger.by_kind("device") == scopes[0].ledger.by_kind("host") == {}
            assert scopes[0].storages.live == 0
        else:
            attached._on_access = None
            with attached:
                assert torch.equal(attached(X), resident())
            break
    assert k > 12


def test_a_keyboard_interrupt_in_the_middle_of_a_wait_leaves_it_usable(request: pytest.FixtureRequest) -> None:
    # A process that a shell started in the background ignores SIGINT, and so would this test.
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    go = threading.Event()
    with Attached(blocks(), SMALLEST, threads=1) as attached:

        def before(entry: Any) -> None:
            _thread.interrupt_main()
            go.wait(20)

        attached.fills.before = before
        with pytest.raises(KeyboardInterrupt):
            attached(X)
        attached.fills.before = None
        assert not attached.is_idle()
        go.set()
        for _ in range(2):
            assert torch.equal(attached(X), resident())
        assert attached.release() == 0


@pytest.mark.timeout(60)
def test_a_copy_that_an_interrupt_kept_from_being_queued_is_made_by_whoever_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A KeyboardInterrupt may come between any two steps, also between noting a copy and queueing it."""
    with Attached(blocks(), SMALLEST, threads=1) as attached:
        assert torch.equal(attached(X), resident())
        with monkeypatch.context() as patched:
            patched.setattr(Readers, "submit", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                attached(X)
        for _ in range(2):
            assert torch.equal(attached(X), resident())
        assert attached.release() == 0


def _interrupted(*_: Any, **__: Any) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("threads", [0, 2])
def test_release_in_the_middle_of_a_copy_waits_for_it(threads: int) -> None:
    with Attached(blocks(), SMALLEST, threads=threads, seed=1) as attached:
        attached._on_access = iter([None] * 3).__next__  # stops at the fourth access
        with pytest.raises(StopIteration):
            attached(X)
        attached._on_access = None
        assert attached.release() == 0
        assert attached.storages.live == 0
        assert reader_threads() == []


# --- errors of reading ------------------------------------------------------------------------------------------------


class Odd(Exception):  # noqa: N818 -- an error that nothing knows
    pass


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_reading_reaches_who_waits_with_its_type(threads: int) -> None:
    with Attached(blocks(), SMALLEST, threads=threads) as attached:
        attached.fills.fail_at, attached.fills.error = 1, lambda: Odd("block 7 is bad")
        with pytest.raises(Odd, match="block 7 is bad"):
            attached(X)
        assert torch.equal(attached(X), resident())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threads", [0, 2])
def test_after_an_error_of_reading_nobody_waits_for_the_operators_other_weights(threads: int) -> None:
    module = seeded(lambda: Parts((3, 1, 4), (52,)))
    with Attached(module, smallest_budget(module), threads=threads, inline_bytes=1 << 20) as attached:
        attached.fills.fail_at, attached.fills.error = 1, Odd
        with pytest.raises(Odd):
            attached(0, 0, 1, 2)
        assert attached.release() == 0


def test_an_error_of_reading_ahead_stops_nobody_if_the_weight_can_be_read_when_it_is_needed() -> None:
    with Attached(blocks(), TOTAL // 2) as attached:
        attached(X)
        attached._on_access = lambda: wait_until(attached.is_idle)
        failed: list[str] = []
        demanded: set[Any] = set()
        begin = attached.cache._begin

        def spy(entry: Any, keep: Any, *, demand: bool) -> Any:
            (demanded.add if demand else demanded.discard)(entry)
            return begin(entry, keep, demand=demand)

        def before(entry: Any) -> None:
            if entry not in demanded and len(failed) < 3:
                failed.append(entry.names[0])
                raise Odd

        attached.cache._begin, attached.fills.before = spy, before  # type: ignore[method-assign]
        for _ in range(3):
            assert torch.equal(attached(X), resident())
        assert len(failed) == 3


def test_memory_that_runs_out_for_a_resident_weight_makes_it_a_streamed_one() -> None:
    with Attached(blocks(), TOTAL - 1) as attached:
        attached.storages.fail_at = attached.storages.calls + 3
        for _ in range(3):
            assert torch.equal(attached(X), resident())
        streamed = [entry.names[0] for entry in attached.entries.values() if not entry.resident]
        assert len(set(streamed) & attached.managed.plan.resident) == 1
