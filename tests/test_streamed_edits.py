"""Whoever writes to a streamed weight changes its master, which is charged to the host budget, or changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.errors import BudgetError
from offload_core.streaming import StreamedWeight
from streaming_models import (
    Stack,
    assert_equal,
    from_files,
    noise,
    offload,
    one_compute_thread,
    seeded_module,
    smallest_budget,
    twin_of,
)

__all__ = ["one_compute_thread"]

X = noise(3, 64)
WEIGHT = 64 * 64 * 4


def stack_in_files(folder: Path) -> tuple[Any, list[Path]]:
    return from_files(seeded_module(Stack)(), folder)


def private_bytes(offloaded: Any) -> int:
    return offloaded._managed.scope.ledger.by_kind("host").get("private", 0)


EDITS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.mul_(2),
    "assigned": lambda w: setattr(w, "data", w.data * 2),
    "copied": lambda w: w.copy_(noise(64, 64)),
    "out=": lambda w: torch.mul(noise(64, 64), 2, out=w),
    "set_": lambda w: w.set_(noise(64, 64)),
}


@pytest.mark.parametrize("name", EDITS)
@torch.no_grad()
def test_an_edit_makes_the_master_private_and_charges_the_host(name: str, tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    with offload(module, 0.5, files=files) as offloaded:
        module(X)
        assert private_bytes(offloaded) == 0
        for count, index in enumerate((1, 4, 1), start=1):
            EDITS[name](module.blocks[index].weight)
            EDITS[name](twin.blocks[index].weight)
            assert private_bytes(offloaded) == min(count, 2) * WEIGHT
            assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0


@torch.no_grad()
def test_a_write_through_a_view_is_charged_when_it_is_written_back(tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    with offload(module, 0.5, files=files) as offloaded:
        for each in (module, twin):
            each.blocks[3].weight[5].zero_()
        for _ in range(3):
            assert torch.equal(module(X), twin(X))
        assert private_bytes(offloaded) in (0, WEIGHT)  # nothing yet where the weight is resident
        assert offloaded.report().streamed_bytes > 0
    assert_equal(list(module.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("name", EDITS)
@torch.no_grad()
def test_an_edit_over_the_host_budget_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    with offload(module, 0.5, files=files) as offloaded:
        module(X)
        ledger = offloaded._managed.scope.ledger
        with_hot = ledger.used("host") + sum(w.nbytes for w in module.parameters())
    with offload(module, 0.5, files=files, host_memory=with_hot) as offloaded:
        ledger = offloaded._managed.scope.ledger
        module(X)
        filler = ledger.reserve("host", "test", ledger.free("host") - WEIGHT // 2)
        before = ledger.by_kind("host")
        for index in range(6):
            with pytest.raises(BudgetError, match=r"transformer\.blocks\.\d\.weight.*host_memory"):
                EDITS[name](module.blocks[index].weight)
        assert ledger.by_kind("host").get("private", 0) == before.get("private", 0) == 0
        filler.release()
        for _ in range(2):
            assert torch.equal(module(X), twin(X))
        EDITS[name](module.blocks[2].weight)
        EDITS[name](twin.blocks[2].weight)
        assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0


FAILING: dict[str, Callable[[Any], Any]] = {
    "copy_ of another shape": lambda w: w.copy_(noise(3, 64, 64)),
    "add_ of another shape": lambda w: w.add_(noise(5)),
    "add_ of another dtype": lambda w: w.add_(torch.ones(64, 64, dtype=torch.complex64)),
    "masked_scatter_ of too little": lambda w: w.masked_scatter_(torch.ones(64, 64, dtype=torch.bool), noise(7)),
    "index_add_ out of range": lambda w: w.index_add_(0, torch.tensor([0, 99]), noise(2, 64)),
    "out= of another dtype": lambda w: torch.add(torch.ones(64, 64, dtype=torch.complex64), 1, out=w),
}


@pytest.mark.parametrize("name", FAILING)
@torch.no_grad()
def test_an_operator_that_fails_leaves_the_old_value(name: str, tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    with offload(module, 0.5, files=files) as offloaded:
        module(X)
        for index in range(6):
            with pytest.raises((RuntimeError, IndexError)):
                FAILING[name](module.blocks[index].weight)
            assert private_bytes(offloaded) == 0
        assert_equal(list(module.parameters()), list(twin.parameters()))
        assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0


@pytest.mark.parametrize("in_files", [False, True])
@torch.no_grad()
def test_edits_outlive_eviction_and_go_to_the_module_at_release(in_files: bool, tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path) if in_files else (seeded_module(Stack)(), [])
    twin = twin_of(module)
    on_disk = [(file, file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    budget = smallest_budget(module, files=files)
    objects = [id(weight) for weight in module.parameters()]
    with offload(module, budget, files=files) as offloaded:
        assert offloaded.plan.streamed_bytes > 0
        for index, block in enumerate(module.blocks):
            other = twin.blocks[index]
            for each in (block, other):
                each.weight.mul_(1.5)
                each.weight[index].zero_()
                each.bias.data = each.bias.data + 1
            for _ in range(3):
                assert torch.equal(module(X), twin(X))
        assert offloaded.report().peak_bytes <= budget
        assert offloaded.report().streamed_bytes > 0
    assert [id(weight) for weight in module.parameters()] == objects
    assert_equal(list(module.parameters()), list(twin.parameters()))
    assert torch.equal(module(X), twin(X))
    for file, content, changed in on_disk:
        assert file.read_bytes() == content and file.stat().st_mtime_ns == changed


@torch.no_grad()
def test_edits_go_from_one_offload_to_the_next(tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    for _ in range(3):
        with offload(module, 0.4, files=files) as offloaded:
            for each in (module, twin):
                each.blocks[2].weight.add_(1)
                each.blocks[5].bias.fill_(0.5)
            assert torch.equal(module(X), twin(X))
            assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0
        assert_equal(list(module.parameters()), list(twin.parameters()))


@torch.no_grad()
def test_an_edit_of_a_small_plain_weight_goes_to_the_module_at_release(tmp_path: Path) -> None:
    module, files = stack_in_files(tmp_path)
    twin = twin_of(module)
    with offload(module, 0.5, files=files, resident_below=1024) as offloaded:
        assert not isinstance(module.blocks[1].bias, StreamedWeight)
        for each in (module, twin):
            each.blocks[1].bias.data.add_(1)
            each.blocks[2].bias.mul_(2)
        assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0
    assert_equal(list(module.parameters()), list(twin.parameters()))


@torch.no_grad()
def test_a_tied_weight_is_edited_under_both_of_its_names() -> None:
    module: Any = seeded_module(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))))()
    module[3].weight = module[1].weight
    twin = twin_of(module)
    assert twin[3].weight is twin[1].weight
    with offload(module, 0.5) as offloaded:
        for each in (module, twin):
            each[3].weight.mul_(2)
            each[1].weight[0].zero_()
        for _ in range(2):
            assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0
    assert module[3].weight is module[1].weight
    assert_equal(list(module.parameters()), list(twin.parameters()))


@torch.no_grad()
def test_every_weight_edited_in_a_chain_of_operators_has_the_bits_of_resident_ones() -> None:
    module: Any = seeded_module(Stack)()
    twin = twin_of(module)
    with offload(module, 0.7) as offloaded:
        for each in (module, twin):
            for weight in each.parameters():
                weight.addcmul_(noise(*weight.shape), noise(*weight.shape), value=0.1).clamp_(-1, 1)
        assert torch.equal(module(X), twin(X))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0
    assert_equal(list(module.parameters()), list(twin.parameters()))


@torch.no_grad()
def test_no_room_is_kept_for_a_weight_whose_place_another_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the smallest ring its operator would wait for that room, in each forward."""
    monkeypatch.setattr("offload_core.streaming._room._GROW_AFTER_S", 60.0)
    module = seeded_module(Stack)()
    twin = twin_of(module)
    with offload(module, smallest_budget(module)) as offloaded:
        for each in (module, twin):
            each.blocks[0].bias.data = each.blocks[0].bias.data + 1
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(module(X)))
        thread.start()
        thread.join(30)
        waited = thread.is_alive()
        thread.join()
        assert not waited
        assert torch.equal(results[0], twin(X))
        assert offloaded.report().streamed_bytes > 0
