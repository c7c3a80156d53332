"""How long the calls of a component take with its weights where a plan has them: replays on a machine's rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .simulate import Hardware, Load, Timeline, simulate
from .streaming import StreamPlan
from .trace import Trace

if TYPE_CHECKING:
    from .plan import ComponentJob, Limits, Rates

INLINE_BYTES = 1 << 20  # weights up to this size are read by whoever needs them


@dataclass(frozen=True)
class ReplayedCall:
    """A kind of call of a component: what it does, how often it is made, seconds of a pass whose weights are all there,
    and the replay of a few passes. The first pass brings what stays."""

    trace: Trace
    times: int
    compute_s: float
    replay: Timeline


def replay_calls(
    component: ComponentJob, weights: StreamPlan, ring: int, limits: Limits, rates: Rates, *, record: bool = False
) -> Iterator[ReplayedCall]:
    """Each kind of a component's calls, replayed in three passes with `weights` where the plan has them.

    ring: bytes of the phase's ring, which components share. record: keep the events.
    """
    large = [size for part in component.parts for size in part.sizes if not part.stays and not size.lookup_only]
    small = weights.small_bytes > component.added_bytes + component.unpacking_bytes
    sizes = {
        size.name: int(size.nbytes * component.stored)
        for size in large
        if not (small and size.nbytes < limits.resident_below)
    }
    resident = frozenset(sizes) if weights.whole else weights.resident
    rate = tier(weights.streamed_bytes, component, limits, rates)[1]
    hardware = hardware_of(rate, rates)
    for trace, times in component.calls:
        loads = loads_of(component, trace, rates, streams=not weights.whole)
        ring_bytes = max(int(ring * component.stored) + 1, hungriest(loads, sizes, resident))
        replay = simulate(loads, sizes, resident=resident, ring_bytes=ring_bytes, hardware=hardware, record=record)
        yield ReplayedCall(trace, times, sum(load.seconds for load in loads), replay)


def hardware_of(bytes_per_s: float, rates: Rates) -> Hardware:
    """How weights arrive that come at this rate."""
    return Hardware(bytes_per_s, rates.read_s, rates.shares_compute, INLINE_BYTES)


def loads_of(component: ComponentJob, trace: Trace, rates: Rates, *, streams: bool) -> list[Load]:
    """A call's stretches with the names that weights have in the component, and their seconds. streams: whether some of
    them are streamed. A packed weight is read and its values are written before an operator reads them."""
    access_s = rates.access_s if streams else 0.0
    names = [weight.name.removeprefix(f"{component.name}.") for weight in trace.weights]
    loads = []
    for stretch in trace.stretches:
        used = tuple(names[place] for place in stretch.weights)
        unpacked = sum(component.unpacked.get(name, 0) for name in used) / rates.memory_bytes_per_s
        loads.append(Load(used, rates.compute_s(stretch, component.dtype) + access_s * len(used) + unpacked))
    return loads


def hungriest(loads: Sequence[Load], sizes: dict[str, int], resident: frozenset[str]) -> int:
    """Bytes that the stretch with the most streamed weights needs together."""
    streamed = [[sizes[name] for name in load.weights if name in sizes and name not in resident] for load in loads]
    return max((sum(nbytes) for nbytes in streamed), default=0)


def tier(streamed_bytes: int, component: ComponentJob, limits: Limits, rates: Rates) -> tuple[str, float]:
    """Where streamed weights come from in later passes, and how fast."""
    link = rates.link_bytes_per_s or float("inf")
    room = max(limits.host_bytes - (limits.device_bytes if limits.on_cpu else 0) - limits.staging_bytes, 0)
    streamed = streamed_bytes * component.stored
    if not streamed:
        return "none", min(link, rates.disk_bytes_per_s)
    fast, slow = min(link, rates.cached_bytes_per_s), min(link, rates.disk_bytes_per_s)
    share = min(room / streamed, 1.0)
    if share >= 1:
        return "ram", fast
    return ("disk" if share < 0.05 else "ram and disk"), 1 / (share / fast + (1 - share) / slow)
