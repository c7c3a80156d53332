"""A module whose weights are streamed computes the bits of its resident twin, whatever it is, in any budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload_core.streaming import Offload, StreamedWeight
from streaming_models import (
    BY_NAME,
    CASES,
    Case,
    Fp8Linear,
    Stack,
    assert_equal,
    flux_call,
    from_files,
    noise,
    offload,
    one_compute_thread,
    passes,
    seeded_module,
    smallest_budget,
    twin_of,
    weight_bytes,
)

__all__ = ["one_compute_thread"]
IN_FILES = tuple(case for case in CASES if case.in_files)
# By default all small modules run, and of the models those that differ most; of files, one of each. The slow tests
# run them all.
SLOW = ("sdxl_unet", "vae", "clip")
SLOW_IN_FILES = (*SLOW, "sd15_unet", "t5", "attention", "convolutions", "new_weight_norm")


def but_slow(cases: tuple[Case, ...], slow: tuple[str, ...]) -> list[Any]:
    """The cases as parameters of a test, those named in `slow` not by default."""
    return [pytest.param(each, id=str(each), marks=[pytest.mark.slow] * (str(each) in slow)) for each in cases]


def budgets(module: nn.Module, **arguments: Any) -> list[tuple[int, bool]]:
    """Everything fits; a bit more than half does; the least that is accepted. With and without reading ahead."""
    total, least = weight_bytes(module), smallest_budget(module, **arguments)
    return [(2 * total + 4096, True), (max(int(0.6 * total), least), True), (least, True), (least, False)]


def assert_streamed(offloaded: Offload, budget: int, module: nn.Module) -> None:
    report = offloaded.report()
    assert report.peak_bytes <= budget
    assert report.streamed_bytes > 0
    if budget < weight_bytes(module):
        assert offloaded.plan.streamed_bytes + offloaded.plan.lookup_bytes > 0
        assert any(isinstance(weight, StreamedWeight) for weight in module.parameters())


@torch.no_grad()
def check(module: nn.Module, expected: list[torch.Tensor], case: Case, **arguments: Any) -> None:
    for budget, by_readers in budgets(module, **arguments):
        with offload(module, budget, by_readers=by_readers, **arguments) as offloaded:
            assert_equal(passes(module, case.calls), expected, f"{case} in {budget} bytes")
            assert_streamed(offloaded, budget, module)
            if arguments.get("files"):
                assert offloaded.report().read_bytes > 0


@pytest.mark.parametrize("case", but_slow(CASES, SLOW))
@torch.no_grad()
def test_weights_streamed_from_ram_give_the_bits_of_resident_ones(case: Case) -> None:
    module = case.build()
    check(module, passes(twin_of(module), case.calls), case)


@pytest.mark.parametrize("case", but_slow(IN_FILES, SLOW_IN_FILES))
@torch.no_grad()
def test_weights_streamed_from_files_give_the_bits_of_resident_ones(case: Case, tmp_path: Path) -> None:
    module, files = from_files(case.build(), tmp_path)
    check(module, passes(twin_of(module), case.calls), case, files=files)


@pytest.mark.parametrize(
    "name", ["flux", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vae", "clip"))]
)
@torch.no_grad()
def test_bfloat16_weights_in_files_give_the_bits_of_resident_ones(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    module, files = from_files(case.build().to(torch.bfloat16), tmp_path)
    assert next(module.parameters()).dtype == torch.bfloat16
    check(module, passes(twin_of(module), case.calls), case, files=files)


@pytest.mark.parametrize("in_files", [False, True])
@torch.no_grad()
def test_weights_stored_in_eight_bits_give_the_bits_of_resident_ones(in_files: bool, tmp_path: Path) -> None:
    call = lambda module: module(noise(2, 64, dtype=torch.bfloat16))  # noqa: E731
    case = Case("fp8", seeded_module(lambda: nn.Sequential(*(Fp8Linear(64) for _ in range(4)))), (call,))
    module, files = from_files(case.build(), tmp_path) if in_files else (case.build(), [])
    assert module[0].weight.dtype == torch.float8_e4m3fn
    check(module, passes(twin_of(module), case.calls), case, files=files)


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["linear", "attention", "encoder_layer", "convolutions", "tied_tables"])
def test_grad_mode_outside_and_inside_change_nothing(name: str, outside: Any, inside: Any) -> None:
    case = BY_NAME[name]
    module = case.build()
    with inside():
        expected = passes(twin_of(module), case.calls)
    budget = smallest_budget(module)
    with outside():
        offloaded = offload(module, budget)
    with offloaded, inside():
        assert_equal(passes(module, case.calls), expected)
        assert_streamed(offloaded, budget, module)
    with torch.no_grad():
        assert_equal(passes(module, case.calls), passes(twin_of(module), case.calls))


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
def test_a_hot_copy_made_in_one_mode_is_used_in_the_other(inside: Any) -> None:
    module = BY_NAME["attention"].build()
    twin = twin_of(module)
    x = noise(2, 10, 32)
    with offload(module, 1.0) as offloaded:
        for mode in (inside, torch.no_grad, torch.inference_mode, torch.enable_grad, inside):
            with mode():
                assert torch.equal(module(x)[0], twin(x)[0])
        assert offloaded.report().streamed_bytes > 0


@torch.no_grad()
def test_autocast_gives_the_bits_of_resident_weights_and_keeps_no_copies() -> None:
    module = BY_NAME["linear"].build()
    twin, budget = twin_of(module), smallest_budget(module)
    with offload(module, budget) as offloaded, torch.autocast("cpu", dtype=torch.bfloat16):
        for x in (noise(3, 64), noise(1, 64), noise(3, 64)):
            result = module(x)
            assert result.dtype == torch.bfloat16 and torch.equal(result, twin(x))
        assert_streamed(offloaded, budget, module)


class Operators(TorchDispatchMode):
    """Notes each operator's name, and the weights that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in args if isinstance(value, StreamedWeight)]
        self.weights[func.__name__] = max(len(given), self.weights.get(func.__name__, 0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_operator_that_takes_twelve_weights_gets_them_all_at_once(mode: Any) -> None:
    module = BY_NAME["encoder_layer"].build()
    twin, x, budget = twin_of(module), noise(2, 10, 32), smallest_budget(module)
    with offload(module, budget, read_threads=0) as offloaded, mode():
        with Operators() as seen:
            result = module(x)
        assert seen.weights["_transformer_encoder_layer_fwd.default"] == 12
        assert torch.equal(result, twin(x))
        assert_streamed(offloaded, budget, module)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_takes_its_fast_path_with_a_cold_cache(mode: Any) -> None:
    module = seeded_module(lambda: nn.MultiheadAttention(32, 4, batch_first=True))()
    twin, x, budget = twin_of(module), noise(2, 10, 32), smallest_budget(module)
    with mode():
        expected = twin(x, x, x)[0]
        with offload(module, budget) as offloaded, Operators() as seen:
            assert torch.equal(module(x, x, x)[0], expected)
            assert "_native_multi_head_attention.default" in seen.weights
            assert offloaded.report().streamed_bytes > 0


@pytest.mark.parametrize("in_files", [False, True])
def test_four_threads_at_once_get_the_bits_of_resident_weights(in_files: bool, tmp_path: Path) -> None:
    module = seeded_module(lambda: Stack(8))()
    files: list[Path] = []
    if in_files:
        module, files = from_files(module, tmp_path)
    twin = twin_of(module)
    orders = [None, (7, 5, 3, 1), (0, 0, 6, 6, 2), (4, 3, 2, 1, 0)]
    inputs = [noise(2, 64, seed=str(index)) for index in range(4)]
    start = threading.Barrier(4)

    def work(index: int) -> bool:
        start.wait()
        with torch.inference_mode() if index % 2 else torch.no_grad():
            return all(
                torch.equal(module(inputs[index], orders[index]), twin(inputs[index], orders[index])) for _ in range(8)
            )

    with offload(module, 0.6, files=files) as offloaded, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
        assert_streamed(offloaded, int(0.6 * weight_bytes(module)), module)


def test_a_worker_thread_may_attach_another_may_run_and_a_third_release() -> None:
    module = BY_NAME["flux"].build()
    with torch.no_grad():
        expected = passes(twin_of(module), [flux_call(1)])

    def in_a_thread(work: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    def run() -> list[torch.Tensor]:
        with torch.inference_mode():
            return passes(module, [flux_call(1)])

    offloaded = in_a_thread(lambda: offload(module, 0.3))
    assert_equal(in_a_thread(run), expected)
    assert_streamed(offloaded, int(0.3 * weight_bytes(module)), module)
    assert in_a_thread(offloaded.release) == 0


@torch.no_grad()
def test_without_reading_threads_the_bits_are_the_same() -> None:
    case = BY_NAME["flux"]
    module = case.build()
    check(module, passes(twin_of(module), case.calls), case, read_threads=0)


@torch.no_grad()
def test_tied_weights_are_one_object_and_charged_once() -> None:
    module = BY_NAME["t5"].build()
    assert module.shared.weight is module.encoder.embed_tokens.weight
    with offload(module, 10 * weight_bytes(module)) as offloaded:
        assert module.shared.weight is module.encoder.embed_tokens.weight
        assert offloaded.plan.small_bytes + offloaded.plan.resident_bytes == weight_bytes(module)
    tied = BY_NAME["tied_tables"].build()
    with offload(tied, smallest_budget(tied)):
        assert tied["head"].weight is tied["plain"].weight
    assert tied["head"].weight is tied["plain"].weight


@torch.no_grad()
def test_recurrent_weights_stay_resident_by_rule() -> None:
    module = BY_NAME["lstm"].build()
    with offload(module, smallest_budget(module) + 4096):
        kinds = {name: isinstance(weight, StreamedWeight) for name, weight in module.named_parameters()}
    assert not any(streamed for name, streamed in kinds.items() if name.startswith("lstm"))
    assert any(kinds.values())


@torch.no_grad()
def test_strides_and_offsets_survive() -> None:
    for name in ("channels_last", "transposed", "offset"):
        module = BY_NAME[name].build()
        before = [(w.shape, w.stride(), w.storage_offset(), w.is_contiguous()) for w in module.parameters()]
        hot = twin_of(module)
        with offload(module, smallest_budget(module)) as offloaded:
            after = [(w.shape, w.stride(), w.storage_offset(), w.is_contiguous()) for w in module.parameters()]
            assert before == after
            for weight, same in zip(module.parameters(), hot.parameters(), strict=True):
                assert weight.clone().stride() == same.stride() and torch.equal(weight, same)
            assert offloaded.report().streamed_bytes > 0


@torch.no_grad()
def test_a_hot_copy_is_aligned_wherever_its_master_lies(tmp_path: Path) -> None:
    module, files = from_files(BY_NAME["flux"].build(), tmp_path)
    with offload(module, 0.4, files=files):
        pointers = {weight.view(-1).data_ptr() % 64 for weight in module.parameters()}
    assert pointers == {0}
