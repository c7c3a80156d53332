"""Memory of a planned job over time: what lies on the execution device at each moment, phase by phase.

It is the replay that a plan's seconds are from (`_call_replays`), and the activations of the traces. A component's
first pass is replayed as it is, later ones are all like the second. Pure: plain arrays that a chart can draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ._call_replays import ReplayedCall, replay_calls
from .plan import activations_on

if TYPE_CHECKING:
    from .foresight import Foresight
    from .plan import ComponentJob, ComponentPlan, Limits, PhaseJob, PhasePlan, Rates

SAMPLES = 2000  # of a phase at most
_PASS_SAMPLES = 16  # of a pass at least, before those of a phase are thinned


@dataclass(frozen=True, eq=False)
class Samples:
    """What holds from each moment to the next. One-dimensional arrays of one length.

    seconds: the moments, ascending. resident_bytes: of weights that stay. streamed_bytes: of weights in the ring, from
    the begin of their read to the end of their use. ring_bytes: of the ring itself, which is never smaller.
    activation_bytes: at most. waiting: the share of the time in which compute waits for weights, 0 to 1.
    """

    seconds: np.ndarray
    resident_bytes: np.ndarray
    streamed_bytes: np.ndarray
    ring_bytes: np.ndarray
    activation_bytes: np.ndarray
    waiting: np.ndarray

    @property
    def total_bytes(self) -> np.ndarray:
        return self.resident_bytes + self.ring_bytes + self.activation_bytes

    def thinned(self, count: int, end_s: float) -> Samples:
        """At most `count` samples: of those that are close together, the one with the largest total. end_s: until when
        the last one holds."""
        if len(self.seconds) <= count:
            return self
        start_s = self.seconds[0]
        bins = np.minimum((self.seconds - start_s) / (end_s - start_s) * count, count - 1).astype(int)
        first = np.flatnonzero(np.diff(bins, prepend=-1))  # of each group
        order = np.lexsort((self.total_bytes, bins))  # in each group, the largest is the last
        largest = order[np.append(first[1:], len(bins)) - 1]
        lasting = np.diff(self.seconds, append=end_s)
        waited, lasted = (np.add.reduceat(each, first) for each in (lasting * self.waiting, lasting))
        return Samples(
            self.seconds[first],
            self.resident_bytes[largest],
            self.streamed_bytes[largest],
            self.ring_bytes[largest],
            self.activation_bytes[largest],
            waited / np.maximum(lasted, 1e-12),
        )


@dataclass(frozen=True)
class Span:
    """Something between two moments of a job, in seconds."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class PhaseMemory:
    """A phase of a job. start_s, end_s: of the job. components: when each one runs. planned_peak_bytes: what the plan
    says; the samples don't exceed it. samples: in seconds of the job."""

    name: str
    start_s: float
    end_s: float
    fits: bool
    planned_peak_bytes: int
    components: tuple[Span, ...]
    samples: Samples

    @property
    def peak_bytes(self) -> int:
        """Of the samples."""
        return int(self.samples.total_bytes.max(initial=0))


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """A job. budget_bytes: of device memory. model, machine: their names, for people."""

    phases: tuple[PhaseMemory, ...]
    budget_bytes: int
    model: str
    machine: str

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

    @property
    def end_s(self) -> float:
        return self.phases[-1].end_s if self.phases else 0.0


def memory_timeline(foresight: Foresight) -> MemoryTimeline:
    """The memory on the execution device while a planned job runs. It ends when the plan says that the job does.

    The ring counts as taken from when the first component needs it, full or not. Activations are those of the stretch
    that runs, with what the pipeline holds around the call; how much that is is known at the phase's peak, and taken
    for the same at all times. Calls of several kinds (with and without guidance) alternate. A phase that doesn't fit is
    shown as it is planned: in the smallest budget in which it does.
    """
    phases: list[PhaseMemory] = []
    for traced, plan in zip(foresight.traces, foresight.plan.phases, strict=True):
        start_s = phases[-1].end_s if phases else 0.0
        phases.append(_phase(traced.job, plan, start_s, foresight.limits, foresight.rates))
    return MemoryTimeline(tuple(phases), foresight.plan.budget_bytes, foresight.model, foresight.machine)


def _phase(job: PhaseJob, plan: PhasePlan, start_s: float, limits: Limits, rates: Rates) -> PhaseMemory:
    peaks = [trace.peak_bytes for component in job.components for trace, _ in component.calls]
    around = job.activation_bytes - max(peaks, default=0)  # what the pipeline itself holds
    passes = sum(component.times for component in job.components)
    rates = rates.slower(job.correction.compute)
    pieces: list[Samples] = [_nothing(start_s)] if job.correction.overhead_s else []
    spans: list[Span] = []
    end_s = start_s + job.correction.overhead_s  # modules are built, texts are read
    for component, planned in zip(job.components, plan.components, strict=True):
        begin_s = end_s
        taken = functools.partial(activations_on, limits=limits, factor=job.correction.activations)
        for samples, seconds in _passes(component, planned, around, limits, rates, taken):
            few = samples.thinned(max(SAMPLES // passes, _PASS_SAMPLES), seconds)
            pieces.append(replace(few, seconds=few.seconds + end_s))
            end_s += seconds
        spans.append(Span(component.name, begin_s, end_s))
    joined = _joined(pieces).thinned(SAMPLES, end_s)
    return PhaseMemory(job.name, start_s, end_s, plan.fits, plan.device_peak_bytes, tuple(spans), joined)


def _passes(
    job: ComponentJob,
    plan: ComponentPlan,
    around: int,
    limits: Limits,
    rates: Rates,
    taken: Callable[[int], int],
) -> Iterator[tuple[Samples, float]]:
    """The passes of a component one after another, each from 0, with their seconds. taken: by activations, of what they
    are by themselves."""
    calls = list(replay_calls(job, plan.weights, plan.ring_bytes, limits, rates, record=True))
    replays = [_replayed(call, job, plan, around, limits, taken) for call in calls]
    turns = sorted((turn / call.times, kind) for kind, call in enumerate(calls) for turn in range(call.times))
    for number, (_, kind) in enumerate(turns):
        first_s, step_s = calls[kind].replay.pass_s[0], calls[kind].replay.step_s
        if number:
            yield _between(replays[kind], first_s, first_s + step_s), step_s
            continue
        seconds = step_s + plan.first_s - plan.pass_s
        samples, before_s = _between(replays[kind], 0.0, first_s), seconds - first_s
        if before_s > 1e-9 * seconds:  # small weights are read; less is rounding
            later = replace(samples, seconds=samples.seconds + before_s)
            samples = _joined([_waiting_before(samples), later])
        yield samples, seconds


def _replayed(
    call: ReplayedCall,
    job: ComponentJob,
    plan: ComponentPlan,
    around: int,
    limits: Limits,
    taken: Callable[[int], int],
) -> Samples:
    """All passes of a replay."""
    events = call.replay.events
    nbytes = {size.name: size.nbytes for part in job.parts for size in part.sizes}  # of hot copies
    reads = [event for event in events if event.kind == "read"]
    stalls = [event for event in events if event.kind == "stall"]
    ends = np.array([event.end for event in events if event.kind == "compute"])
    streams = {event.what for event in reads if event.stretch >= len(call.trace.stretches)}  # again in the second pass
    kept = [(event.start, nbytes[event.what]) for event in reads if event.what not in streams]
    brought = [(event.start, nbytes[event.what]) for event in reads if event.what in streams]
    dropped = [(ends[event.stretch], -nbytes[event.what]) for event in reads if event.what in streams]
    waits = [(event.start, 1) for event in stalls] + [(event.end, -1) for event in stalls]

    seconds = np.unique([0.0, *ends, *(moment for moment, _ in [*kept, *brought, *waits])])
    stays = plan.weights.small_bytes + plan.weights.resident_bytes + plan.beside_bytes
    unread = sum(size for _, size in kept)
    running = np.minimum(np.searchsorted(ends, seconds, side="right"), len(ends) - 1) % len(call.trace.stretches)
    activations = [taken(around + stretch.peak_bytes) for stretch in call.trace.stretches]
    ring = plan.ring_bytes + limits.align if plan.ring_bytes else 0
    return Samples(
        seconds,
        stays - unread + _summed(kept, seconds),
        np.minimum(_summed(brought + dropped, seconds), ring),  # bytes in the file may be fewer than on the device
        np.full(len(seconds), ring),
        np.array(activations)[running],
        _summed(waits, seconds).astype(float),
    )


def _summed(changes: Sequence[tuple[float, int]], seconds: np.ndarray) -> np.ndarray:
    """The sum of all changes up to each moment."""
    changes = sorted(changes)
    sums = np.cumsum([0, *(change for _, change in changes)])
    return sums[np.searchsorted([moment for moment, _ in changes], seconds, side="right")]


def _between(samples: Samples, start_s: float, end_s: float) -> Samples:
    """What holds between two moments, from 0."""
    first = np.searchsorted(samples.seconds, start_s, side="right") - 1
    part = _each(samples, lambda values: values[first : np.searchsorted(samples.seconds, end_s)])
    return replace(part, seconds=np.maximum(part.seconds - start_s, 0.0))


def _nothing(moment_s: float) -> Samples:
    return Samples(np.array([moment_s]), *(np.zeros(1) for _ in fields(Samples)[1:]))


def _waiting_before(samples: Samples) -> Samples:
    """As at their begin, with compute waiting."""
    begin = _each(samples, lambda values: values[:1])
    return replace(begin, waiting=np.ones_like(begin.waiting))


def _joined(pieces: Sequence[Samples]) -> Samples:
    names = [field.name for field in fields(Samples)]
    return Samples(*(np.concatenate([np.empty(0), *(getattr(piece, name) for piece in pieces)]) for name in names))


def _each(samples: Samples, change: Callable[[np.ndarray], np.ndarray]) -> Samples:
    return Samples(*(change(getattr(samples, field.name)) for field in fields(samples)))
