"""The ledger grants no byte twice and none above a limit, and a refusal books nothing."""

from __future__ import annotations

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import BudgetError
from offload_core.ledger import Ledger, Reservation, Tier
from offload_core.limits import parse_budget

KINDS = ("resident", "ring", "staging")
steps = st.lists(
    st.tuples(st.sampled_from(["device", "host"]), st.sampled_from(KINDS), st.integers(0, 60), st.integers(0, 12)),
    max_size=60,
)


@given(steps, st.booleans(), st.integers(0, 150), st.integers(0, 150))
def test_any_sequence_of_reservations_agrees_with_a_plain_model(
    steps: list[tuple[Tier, str, int, int]], shared: bool, device: int, host: int
) -> None:
    ledger = Ledger(device=device, host=host, shared=shared)
    limits: dict[Tier, int] = {"device": device, "host": host}
    held: list[Reservation] = []
    peak: dict[Tier, int] = {"device": 0, "host": 0}

    def used(tier: Tier) -> int:
        return sum(each.nbytes for each in held if each.tier == tier or (shared and tier == "host"))

    def counted_in(tier: Tier) -> tuple[Tier, ...]:
        return ("device", "host") if shared and tier == "device" else (tier,)

    for tier, kind, nbytes, victim in steps:
        if victim < len(held):
            reservation = held.pop(victim)
            reservation.release()
            reservation.release()
        fits = all(used(each) + nbytes <= limits[each] for each in counted_in(tier))
        if fits:
            assert ledger.free(tier) >= nbytes
            held.append(ledger.reserve(tier, kind, nbytes))
        else:
            with pytest.raises(BudgetError):
                ledger.reserve(tier, kind, nbytes)
        for each in limits:
            peak[each] = max(peak[each], used(each))
            assert ledger.used(each) == used(each) <= limits[each]
            assert ledger.peak(each) == peak[each]
            assert ledger.free(each) == min(limits[other] - used(other) for other in counted_in(each))
            by_kind = ledger.by_kind(each)
            assert sum(by_kind.values()) == used(each)
            assert 0 not in by_kind.values()
    for reservation in held:
        reservation.release()
    assert ledger.by_kind("device") == ledger.by_kind("host") == {}


def test_shared_device_bytes_count_as_host_bytes_and_host_bytes_do_not_count_as_device_bytes() -> None:
    ledger = Ledger(device=100, host=120, shared=True)
    ledger.reserve("host", "staging", 50)
    ledger.reserve("device", "ring", 60)
    assert (ledger.used("device"), ledger.used("host")) == (60, 110)
    assert ledger.free("device") == 10
    with pytest.raises(BudgetError, match="host_memory"):
        ledger.reserve("device", "ring", 11)
    assert (ledger.used("device"), ledger.used("host")) == (60, 110)


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_a_refusal_names_the_weight_and_a_budget_that_would_have_held_it(limit: int, used: int, nbytes: int) -> None:
    used = min(used, limit)
    nbytes += limit - used
    ledger = Ledger(device=limit, host=0)
    ledger.reserve("device", "ring", used)
    with pytest.raises(BudgetError, match=r"transformer\.proj") as caught:
        ledger.reserve("device", "resident", nbytes, "transformer.proj")
    named = re.search(r"device_memory to at least ([\d.]+ ?\w*)\.$", str(caught.value))
    assert named
    enough = parse_budget(named[1], free=0, total=0, auto=0, name="device_memory")
    larger = Ledger(device=enough, host=0)
    larger.reserve("device", "ring", used)
    larger.reserve("device", "resident", nbytes)


def test_less_than_nothing_cannot_be_reserved() -> None:
    ledger = Ledger(device=10, host=10)
    with pytest.raises(ValueError, match="-1 bytes"):
        ledger.reserve("device", "ring", -1)
    assert ledger.used("device") == 0


def test_threads_together_never_pass_the_limit_and_lose_no_byte() -> None:
    ledger = Ledger(device=1000, host=1000, shared=True)
    over = []

    def work(nbytes: int) -> None:
        for _ in range(2000):
            try:
                reservation = ledger.reserve("device", "ring", nbytes)
            except BudgetError:
                continue
            if ledger.used("device") > 1000:
                over.append(nbytes)
            reservation.release()
            reservation.release()

    threads = [threading.Thread(target=work, args=(nbytes,)) for nbytes in (300, 400, 401, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over
    assert ledger.peak("device") <= 1000
    assert ledger.used("device") == ledger.used("host") == 0


def test_a_limit_is_raised_by_what_was_there_before_it_was_measured_and_lowered_again() -> None:
    ledger = Ledger(device=10, host=10)
    ledger.allow("host", 5)
    held = ledger.reserve("host", "masters", 15)
    with pytest.raises(BudgetError):
        ledger.reserve("host", "private", 1)
    held.release()
    ledger.allow("host", -5)
    assert ledger.free("host") == 10
