"""Regions of an arena never overlap, and none is free while anything still has its storage."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.streaming import Layout
from offload_core.streaming._arena import Arena, Region

ALIGN = 64


class Rig:
    """An arena, and what became free of it."""

    def __init__(self, nbytes: int, **options: Any) -> None:
        self.freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        blocks: list[weakref.ref[Any]] = []
        self.blocks = blocks

        def allocate(nbytes: int) -> torch.Tensor:
            block = torch.empty(nbytes, dtype=torch.uint8)
            blocks.append(weakref.ref(block.untyped_storage()))
            return block

        self.arena = Arena(nbytes, allocate, self.freed, align=ALIGN, **options)

    def tensor(self, count: int, value: float = 0.0) -> torch.Tensor:
        region = self.arena.take(count * 4)
        assert region is not None
        return self.arena.tensor(region, floats(count)).fill_(value)

    def reclaim(self) -> int:
        """Gives back what died; how many regions that were."""
        count = 0
        while not self.freed.empty():
            self.arena.give(self.arena.buried(self.freed.get()))
            count += 1
        return count


def is_alive(block: weakref.ref[Any]) -> bool:
    return block() is not None


def floats(*shape: int) -> Layout:
    return Layout.of(torch.empty(shape, device="meta"))


def spans(regions: list[Region]) -> list[tuple[int, int]]:
    return sorted((region.offset, region.offset + region.taken) for region in regions)


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20)), max_size=60))
def test_regions_never_overlap_and_a_free_arena_is_one_piece(steps: list[tuple[int, int]]) -> None:
    arena = Rig(2048).arena
    taken: list[Region] = []
    for nbytes, victim in steps:
        if victim < len(taken):
            arena.give(taken.pop(victim))
        largest = arena.largest_free
        region = arena.take(nbytes)
        assert (region is not None) == (largest >= max(-(-nbytes // ALIGN), 1) * ALIGN)
        if region is not None:
            assert region.taken >= region.nbytes == nbytes
            taken.append(region)
        ends = spans(taken)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert all(start % ALIGN == 0 and start >= 0 and end <= 2048 for start, end in ends)
        assert arena.busy_bytes == sum(end - start for start, end in ends)
    for region in taken:
        arena.give(region)
    assert arena.largest_free == 2048
    assert arena.busy_bytes == 0


@given(st.permutations(range(8)))
def test_neighbours_that_are_free_become_one_whatever_the_order(order: list[int]) -> None:
    arena = Rig(8 * ALIGN).arena
    regions = [arena.take(ALIGN) for _ in range(8)]
    assert arena.take(1) is None
    for index in order:
        region = regions[index]
        assert region is not None
        arena.give(region)
    assert arena.largest_free == 8 * ALIGN


@pytest.mark.parametrize("shift", [0, 1, 8, 63])
def test_hot_copies_are_aligned_wherever_the_block_lies(shift: int) -> None:
    freed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arena = Arena(4096, lambda nbytes: torch.empty(nbytes + shift, dtype=torch.uint8)[shift:], freed, align=ALIGN)
    alive = []
    while (region := arena.take(100)) is not None:
        alive.append(arena.tensor(region, floats(25)))
    assert len(alive) == 32
    assert {tensor.data_ptr() % ALIGN for tensor in alive} == {0}
    for number, tensor in enumerate(alive):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in alive] == [[number] for number in range(32)]


def test_tensors_have_the_layout_they_were_asked_for() -> None:
    rig = Rig(4096)
    layout = Layout.of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    region = rig.arena.take(layout.nbytes)
    assert region is not None
    tensor = rig.arena.tensor(region, layout)
    assert tensor.stride() == layout.stride
    assert tensor.untyped_storage().nbytes() == layout.nbytes


def saved_by_autograd(tensor: torch.Tensor) -> Any:
    return torch.ones(tensor.shape, requires_grad=True) * tensor


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor.view(2, 8),
        lambda tensor: tensor[3:5],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.uint8),
        saved_by_autograd,
    ],
    ids=["view", "slice", "detach", "storage", "parameter", "numpy", "bytes", "saved by autograd"],
)
def test_a_region_is_not_free_while_an_alias_of_it_lives(alias: Any) -> None:
    rig = Rig(1024)
    tensor = rig.tensor(16, 7.0)
    held = alias(tensor)
    del tensor
    gc.collect()
    assert rig.reclaim() == 0
    assert rig.arena.held_bytes == 64
    del held
    assert rig.reclaim() == 1
    assert rig.arena.held_bytes == rig.arena.busy_bytes == 0


def test_a_storage_in_a_garbage_cycle_is_not_taken_for_dead_while_a_tensor_has_it() -> None:
    rig = Rig(1024)
    tensor = rig.tensor(16, 7.0)
    cycle: dict[str, Any] = {"storage": tensor.untyped_storage()}
    cycle["itself"] = cycle
    del cycle
    gc.collect()
    assert rig.reclaim() == 0
    del tensor
    assert rig.reclaim() == 1


def test_an_alias_keeps_the_block_when_the_arena_is_gone() -> None:
    rig = Rig(1 << 20)
    held = rig.tensor(1000, 3.0)[10:20]
    freed, blocks = rig.freed, rig.blocks
    del rig
    gc.collect()
    others = [torch.full((1 << 18,), 9.0) for _ in range(8)]  # would land in the block if it were free
    assert is_alive(blocks[0])
    assert held.tolist() == [3.0] * 10
    del held, others
    assert not is_alive(blocks[0])
    assert freed.empty()  # nobody is there to be told


def test_the_block_dies_with_the_arena_when_nothing_is_held() -> None:
    rig = Rig(1 << 20)
    rig.tensor(1000)
    blocks = rig.blocks
    del rig
    assert not is_alive(blocks[0])


def test_deaths_that_the_garbage_collector_finds_arrive_from_any_thread() -> None:
    """The collector may run in any allocation, also in the middle of looking at the queue."""
    rig = Rig(64 * 512)
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    found = 0
    try:

        def litter() -> None:
            for _ in range(64):
                cycle: dict[str, Any] = {"tensor": tensors.pop()}
                cycle["itself"] = cycle

        tensors = [rig.tensor(8) for _ in range(512)]
        threads = [threading.Thread(target=litter) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            found += rig.reclaim()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    found += rig.reclaim()
    assert found == 512
    assert rig.arena.largest_free == 64 * 512


def test_regions_may_be_allocations_of_their_own() -> None:
    rig = Rig(1024, whole=False)
    assert rig.blocks == []
    first, second = rig.tensor(16, 1.0), rig.tensor(16, 2.0)
    assert len(rig.blocks) == 2
    assert (first.sum(), second.sum()) == (16, 32)
    assert rig.arena.busy_bytes == rig.arena.held_bytes == 128
    del first
    assert rig.reclaim() == 1
    assert not is_alive(rig.blocks[0])


def test_a_region_is_free_again_when_its_own_allocation_fails() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    arena = Arena(1024, refuse, queue.SimpleQueue(), align=ALIGN, whole=False)
    region = arena.take(1024)
    assert region is not None
    with pytest.raises(torch.OutOfMemoryError):
        arena.tensor(region, floats(256))
    assert arena.largest_free == 1024
