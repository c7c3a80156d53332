"""The access order is learnt in one pass, follows when it changes, and forgets what is gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.streaming import _order
from offload_core.streaming._order import AccessOrder

EXPERT_A = [f"a{index}" for index in range(12)]
EXPERT_B = [f"b{index}" for index in range(9)]
keys = st.integers(0, 7)


def wrong_guesses(order: AccessOrder, accesses: Iterable[object]) -> int:
    return sum(not order.note(key) for key in accesses)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30, unique=True), st.integers(1, 200))
def test_a_cyclic_order_is_predicted_after_one_pass_as_far_as_one_asks(cycle: list[int], count: int) -> None:
    order: AccessOrder[int] = AccessOrder()
    wrong_guesses(order, cycle)
    assert wrong_guesses(order, cycle[:1]) == 1  # that it is a cycle shows here
    for step in range(1, 3 * len(cycle)):
        expected = [cycle[(step + ahead) % len(cycle)] for ahead in range(count)]
        assert list(order.upcoming(count)) == expected
        assert order.note(cycle[step % len(cycle)])


@given(st.lists(keys, min_size=1, max_size=30))
def test_an_order_with_repeats_is_predicted_in_its_third_pass(program: list[int]) -> None:
    """The place in the log is found by the last two accesses, so it may take a pass to find it."""
    order: AccessOrder[int] = AccessOrder()
    for _ in range(2):
        wrong_guesses(order, program)
    missed = [wrong_guesses(order, program) for _ in range(6)]
    assert sum(missed) <= len(program)
    assert missed[-1] == 0


def test_a_guess_is_followed_from_the_first_access_on() -> None:
    order = AccessOrder(EXPERT_A)
    assert list(order.upcoming(3)) == []
    assert wrong_guesses(order, EXPERT_A) == 1
    assert list(order.upcoming(2)) == ["a0", "a1"]


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (EXPERT_A, EXPERT_B),
        (EXPERT_A + EXPERT_A, EXPERT_A),  # guidance: two calls a step, then one
        (EXPERT_A, EXPERT_A[:3] + EXPERT_A[7:]),  # blocks skipped
        (EXPERT_A, EXPERT_A[:2]),  # a step cache: only the first blocks run
        (EXPERT_A, EXPERT_A[:6] + EXPERT_A[3:]),  # some blocks twice
        (EXPERT_A, EXPERT_A[::-1]),
    ],
    ids=["two experts", "guidance off", "skipped blocks", "step cache", "repeats", "reversed"],
)
def test_a_switch_between_two_known_orders_costs_a_few_wrong_guesses(usual: list[str], other: list[str]) -> None:
    order: AccessOrder[str] = AccessOrder()
    for _ in range(2):
        wrong_guesses(order, usual * 2)
        wrong_guesses(order, other * 2)
    for _ in range(5):
        assert wrong_guesses(order, usual * 3) <= 3
        assert wrong_guesses(order, other * 3) <= 3


@given(st.lists(st.tuples(st.lists(keys, max_size=20), st.sets(keys, max_size=4)), max_size=6))
def test_forgotten_keys_are_never_expected(history: Sequence[tuple[list[int], set[int]]]) -> None:
    order: AccessOrder[int] = AccessOrder()
    gone: set[int] = set()
    for accesses, forgotten in history:
        for key in accesses:
            gone.discard(key)
            order.note(key)
            assert gone.isdisjoint(order.upcoming(50))
        order.forget(forgotten)
        gone |= forgotten
        assert gone.isdisjoint(order.upcoming(50))


@given(st.lists(keys, max_size=60), st.integers(0, 20))
def test_no_more_is_expected_than_was_asked_for_and_only_what_was_seen(accesses: list[int], count: int) -> None:
    order: AccessOrder[int] = AccessOrder()
    for key in accesses:
        order.note(key)
        expected = list(order.upcoming(count))
        assert len(expected) <= count
        assert set(expected) <= set(accesses)


@pytest.mark.parametrize("way", ["seen", "expected"])
def test_memory_is_bounded_however_long_it_runs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(_order, "_LONGEST", 100)
    order: AccessOrder[int] = AccessOrder()
    for round_ in range(50):
        fresh = range(round_ * 30, round_ * 30 + 30)
        if way == "seen":
            wrong_guesses(order, fresh)
        else:
            order.expect(fresh)
        assert len(order._log) <= 101
        assert len(order._last) <= 101
        assert len(order._last_pair) <= 101


def test_forgetting_the_distant_past_keeps_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "_LONGEST", 100)
    order = AccessOrder(EXPERT_A)
    assert wrong_guesses(order, EXPERT_A * 50) <= 2
