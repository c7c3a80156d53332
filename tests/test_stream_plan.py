"""The plan is a pure function that keeps within the budget, wastes none of it, and says what the smallest one is."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import BudgetError
from offload_core.ledger import at_least
from offload_core.limits import parse_budget
from offload_core.streaming import StreamPlan, WeightSize, make_plan
from offload_core.streaming._plan import largest_group

ALIGN = 64
weights = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from(["", "", "", "g", "h"]), st.booleans()), min_size=1, max_size=14
).map(lambda rows: [WeightSize(f"w{i}", n, group, table and i % 5 == 0) for i, (n, group, table) in enumerate(rows)])


def blocks(count: int, *nbytes: int) -> list[WeightSize]:
    """`count` blocks, each with weights of these sizes."""
    return [WeightSize(f"{block}.{index}", size) for block in range(count) for index, size in enumerate(nbytes)]


def plan_or_none(sizes: list[WeightSize], available: int, **options: int) -> StreamPlan | None:
    try:
        return make_plan(sizes, available=available, **options)
    except BudgetError:
        return None


def ring_cost(plan: StreamPlan) -> int:
    return plan.ring_bytes + ALIGN if plan.ring_bytes else 0


@given(weights, st.integers(0, 500))
def test_it_is_never_above_the_budget_and_a_larger_budget_never_streams_more(
    sizes: list[WeightSize], small: int
) -> None:
    total = small + sum(size.nbytes for size in sizes)
    streamed = None
    for available in range(0, total + 300, 37):
        plan = plan_or_none(sizes, available, small_bytes=small)
        if plan is None:
            assert streamed is None, "a larger budget was refused"
            continue
        assert plan.small_bytes + plan.resident_bytes + ring_cost(plan) <= available
        assert plan.available_bytes == available
        assert streamed is None or plan.streamed_bytes <= streamed
        streamed = plan.streamed_bytes
    assert streamed == 0


@given(weights, st.integers(0, 500))
def test_every_weight_is_accounted_for_once(sizes: list[WeightSize], small: int) -> None:
    by_name = {size.name: size for size in sizes}
    for available in range(0, 20_000, 531):
        plan = plan_or_none(sizes, available, small_bytes=small)
        if plan is None:
            continue
        assert plan.resident <= by_name.keys()
        assert plan.resident_bytes == sum(by_name[name].nbytes for name in plan.resident)
        total = plan.resident_bytes + plan.streamed_bytes + plan.lookup_bytes
        assert total == sum(size.nbytes for size in sizes)
        assert plan.whole == (len(plan.resident) == len(sizes))


@given(weights)
def test_the_ring_holds_the_hungriest_operator(sizes: list[WeightSize]) -> None:
    for available in range(0, 20_000, 531):
        plan = plan_or_none(sizes, available)
        if plan is not None and plan.streamed_bytes:
            hungriest = largest_group([size for size in sizes if not size.lookup_only], ALIGN)
            assert hungriest <= plan.ring_bytes <= max(hungriest, min(6 * hungriest, available // 2))


@given(weights, st.integers(0, 500))
def test_the_smallest_budget_works_and_one_byte_less_does_not(sizes: list[WeightSize], small: int) -> None:
    rest = [size for size in sizes if not size.lookup_only]
    smallest = small + min(largest_group(rest, ALIGN) + ALIGN, sum(size.nbytes for size in rest))
    assert make_plan(sizes, available=smallest, small_bytes=small)
    if smallest > small:
        with pytest.raises(BudgetError):
            make_plan(sizes, available=smallest - 1, small_bytes=small)


@given(weights, st.integers(0, 500), st.integers(0, 4000))
def test_a_refusal_names_a_budget_that_works(sizes: list[WeightSize], small: int, available: int) -> None:
    try:
        make_plan(sizes, available=available, small_bytes=small, name="the transformer")
    except BudgetError as error:
        message = str(error)
    else:
        return
    assert "the transformer" in message
    for words, size in re.findall(r"(at least|memory by) ([\d.]+(?: \w+)?)", message):
        needed = size_in(size) + (available if words == "memory by" else 0)
        assert make_plan(sizes, available=needed, small_bytes=small)
        assert plan_or_none(sizes, int(needed * 0.85), small_bytes=small) is None  # it isn't named far too large
    assert "Raise device_memory by" in message


def size_in(text: str) -> int:
    return parse_budget(text.removesuffix("."), free=0, total=0, auto=0, name="device_memory")


@given(st.integers(1, 1 << 43))
def test_a_size_in_words_holds_what_it_was_asked_for(nbytes: int) -> None:
    assert nbytes <= size_in(at_least(nbytes)) <= nbytes * 1.1 + 1


@given(weights, st.integers(0, 20_000))
def test_it_is_deterministic(sizes: list[WeightSize], available: int) -> None:
    assert plan_or_none(sizes, available) == plan_or_none(list(sizes), available)


@given(weights)
def test_lookup_tables_stay_where_they_are_unless_everything_fits(sizes: list[WeightSize]) -> None:
    tables = {size.name for size in sizes if size.lookup_only}
    total = sum(size.nbytes for size in sizes)
    for available in range(0, total, 113):
        plan = plan_or_none(sizes, available)
        assert plan is None or not plan.resident & tables
    whole = make_plan(sizes, available=total)
    assert whole.whole
    assert whole.resident >= tables


def streamed_runs(sizes: list[WeightSize], plan: StreamPlan) -> list[int]:
    """Bytes that are streamed between one resident weight and the next, round the cycle."""
    order = [*sizes, *sizes]
    runs = [
        sum(size.nbytes for size in group)
        for resident, group in itertools.groupby(order, key=lambda size: size.name in plan.resident)
        if not resident
    ]
    return runs or [0]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "sizes",
    [
        blocks(40, 1000),
        blocks(20, 300, 300, 300, 300, 1200, 1200),
        blocks(19, 100, 2000, 700),
        [*blocks(30, 500), *(WeightSize(f"big{i}", 3000) for i in range(8))],
        [WeightSize(f"r{i}", random.Random(i).randrange(100, 2000)) for i in range(60)],
    ],
    ids=["equal", "transformer", "uneven", "two kinds", "random"],
)
def test_residents_lie_evenly_between_streamed_weights(sizes: list[WeightSize], share: float) -> None:
    total, largest = sum(size.nbytes for size in sizes), max(size.nbytes for size in sizes)
    available = int(total * share) + 2 * largest + ALIGN
    plan = make_plan(sizes, available=available)
    assert plan.resident
    even = plan.streamed_bytes / len(plan.resident)
    assert max(streamed_runs(sizes, plan)) <= 3 * even + 4 * largest
    assert available - plan.ring_bytes - plan.resident_bytes < 2 * largest, "room was left unused"


def test_a_ring_that_is_there_already_costs_nothing() -> None:
    sizes = blocks(10, 1000)
    plan = make_plan(sizes, available=3000, ring_there=1024)
    assert plan.ring_bytes == 0
    assert plan.resident_bytes == 3000
    assert make_plan(sizes, available=0, ring_there=1024).streamed_bytes == 10_000


def test_a_ring_that_is_there_but_too_small_is_no_help() -> None:
    sizes = blocks(10, 1000)
    with pytest.raises(BudgetError):
        make_plan(sizes, available=1000, ring_there=960)
    assert make_plan(sizes, available=1088, ring_there=960).ring_bytes == 1024


def test_small_weights_that_do_not_fit_are_refused_beside_any_ring() -> None:
    with pytest.raises(BudgetError, match="small"):
        make_plan(blocks(10, 1000), available=500, small_bytes=501, ring_there=1 << 20)


def test_the_ring_is_counted_with_the_padding_of_each_weight() -> None:
    sizes = [WeightSize(f"{i}", 65, "one operator") for i in range(10)] + [WeightSize("other", 1000)]
    assert make_plan(sizes, available=10 * 128 + ALIGN).ring_bytes == 10 * 128
