"""A replay on stated hardware gives the times that one finds with paper and pencil."""

from __future__ import annotations

import itertools
import random

import pytest

from offload_core.simulate import Hardware, Load, simulate, waiting

SLOW = Hardware(bytes_per_s=1.0)


def chain(*seconds: float) -> list[Load]:
    """Stretches that use one weight each: w0, w1, ..."""
    return [Load((f"w{index}",), time) for index, time in enumerate(seconds)]


def sizes(*nbytes: int) -> dict[str, int]:
    return {f"w{index}": size for index, size in enumerate(nbytes)}


def test_everything_resident_is_read_once_and_then_only_computed() -> None:
    timeline = simulate(chain(3, 3), sizes(2, 2), resident={"w0", "w1"}, ring_bytes=0, hardware=SLOW)
    assert timeline.pass_s == (2 + 3 + 3, 6, 6)  # the second is read while the first is used
    assert timeline.read_bytes == 4 and timeline.peak_bytes == 4
    assert timeline.stall_s == 2


def test_a_ring_of_one_weight_reads_and_computes_in_turn() -> None:
    timeline = simulate(chain(3, 3), sizes(2, 2), resident=(), ring_bytes=2, hardware=SLOW)
    assert timeline.pass_s == (10, 10, 10)
    assert timeline.peak_bytes == 2


def test_a_ring_of_two_weights_hides_reads_behind_compute() -> None:
    timeline = simulate(chain(3, 3), sizes(2, 2), resident=(), ring_bytes=4, hardware=SLOW, passes=4)
    assert timeline.pass_s[0] == 8
    assert timeline.step_s == 6


def test_slow_reads_set_the_pace() -> None:
    timeline = simulate(chain(1, 1, 1), sizes(2, 2, 2), resident=(), ring_bytes=100, hardware=SLOW, passes=5)
    assert timeline.pass_s[1:] == (6, 6, 6, 6)


def test_each_read_has_a_price_of_its_own_and_takes_from_compute_what_it_is_said_to() -> None:
    late = Hardware(bytes_per_s=1.0, read_s=1.0)
    assert simulate(chain(3, 3), sizes(2, 2), resident=(), ring_bytes=2, hardware=late).step_s == 12
    shared = Hardware(bytes_per_s=1.0, shares_compute=0.5)
    alone = simulate(chain(10, 10), sizes(2, 2), resident=(), ring_bytes=4, hardware=SLOW)
    together = simulate(chain(10, 10), sizes(2, 2), resident=(), ring_bytes=4, hardware=shared)
    assert together.step_s == alone.step_s + 2 * 2 * 0.5


def test_weights_of_one_operator_come_together_or_are_refused_by_name() -> None:
    loads = [Load(("w0", "w1"), 1.0)]
    assert simulate(loads, sizes(2, 3), resident=(), ring_bytes=5, hardware=SLOW).pass_s[0] == 6
    with pytest.raises(ValueError, match=r"w0, w1 take 5 bytes together; the ring has 4\."):
        simulate(loads, sizes(2, 3), resident=(), ring_bytes=4, hardware=SLOW)


def test_events_tell_the_same_story() -> None:
    timeline = simulate(chain(3, 3), sizes(2, 2), resident=(), ring_bytes=4, hardware=SLOW, record=True)
    assert sum(e.end - e.start for e in timeline.events if e.kind == "stall") == pytest.approx(timeline.stall_s)
    reads = [event for event in timeline.events if event.kind == "read"]
    assert all(first.end <= then.start for first, then in itertools.pairwise(reads))  # one reader
    assert max(event.end for event in timeline.events if event.kind == "compute") == pytest.approx(timeline.seconds)


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_takes_what_it_must_and_never_more_than_everything_in_turn(seed: int) -> None:
    pick = random.Random(seed)
    count = pick.randrange(2, 9)
    loads = chain(*(pick.uniform(0.1, 3) for _ in range(count)))
    nbytes = sizes(*(pick.randrange(1, 9) for _ in range(count)))
    resident = {name for name in nbytes if pick.random() < 0.4}
    streamed = sum(size for name, size in nbytes.items() if name not in resident)
    compute = sum(load.seconds for load in loads)
    before = float("inf")
    for ring in range(8, 40, 4):
        timeline = simulate(loads, nbytes, resident=resident, ring_bytes=ring, hardware=SLOW, passes=6)
        assert timeline.peak_bytes <= ring + sum(nbytes[name] for name in resident)
        steady = sum(timeline.pass_s[1:]) / 5
        assert max(compute, streamed * 4 / 5) - 1e-9 <= steady <= compute + streamed + 1e-9
        assert timeline.seconds <= before + 1e-9  # a larger ring never takes longer
        before = timeline.seconds


@pytest.mark.parametrize("seed", range(20))
def test_stretches_that_cannot_wait_may_be_joined(seed: int) -> None:
    pick = random.Random(seed)
    loads = chain(*(pick.uniform(0.1, 3) for _ in range(12)))
    nbytes = sizes(*(pick.randrange(1, 9) for _ in range(12)))
    resident = {name for name in nbytes if pick.random() < 0.6}
    joined = waiting(loads, nbytes, resident)
    assert sum(load.seconds for load in joined) == pytest.approx(sum(load.seconds for load in loads))
    assert len(joined) <= 2 * (len(nbytes) - len(resident)) + 1
    whole, less = (
        simulate(each, nbytes, resident=resident, ring_bytes=12, hardware=SLOW, passes=8) for each in (loads, joined)
    )
    assert less.pass_s[-2] == pytest.approx(whole.pass_s[-2])
