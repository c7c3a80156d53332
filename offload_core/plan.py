"""What a job will take, phase by phase, before anything is loaded: a pure function of traces, sizes, budgets and rates.

Where weights lie is decided by the same functions that the engine uses (`streaming.plan_parts`), so the two can't
disagree. How long it takes is a replay of that (`simulate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ._call_replays import INLINE_BYTES, hardware_of, hungriest, loads_of, replay_calls, tier
from ._report_table import human_bytes
from .errors import BudgetError
from .placement import Placement
from .simulate import simulate, waiting
from .streaming import PartSize, StreamPlan, WeightSize, plan_parts
from .trace import Stretch, Trace

# On an accelerator beside the activations themselves: what its libraries keep to work in, and blocks that are rounded
# up or lie between others. Stated, not measured on a GPU.
WORKSPACE_BYTES, FRAGMENTED_SHARE = 64 << 20, 0.05
_ENOUGH = 1 << 50


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    flops: of large products, per second, by dtype. memory_bytes_per_s: of operators that read and write memory.
    operator_s: seconds that each operator takes beside that. disk_bytes_per_s, cached_bytes_per_s: of reads of weights
    from disk and from the page cache. link_bytes_per_s: to the execution device; None if that is the CPU. read_s:
    seconds that each read of a weight takes beside its bytes. access_s: seconds that each use of a weight takes more in
    a component that streams. shares_compute: see `simulate.Hardware`. source: where the figures are from.
    """

    flops: dict[str, float]
    memory_bytes_per_s: float
    operator_s: float
    disk_bytes_per_s: float
    cached_bytes_per_s: float
    link_bytes_per_s: float | None = None
    read_s: float = 5e-5
    access_s: float = 5e-6
    shares_compute: float = 0.0
    source: str = ""

    def slower(self, factor: float) -> Rates:
        """The same machine where computing takes `factor` times as long."""
        flops = {dtype: rate / factor for dtype, rate in self.flops.items()}
        memory = self.memory_bytes_per_s / factor
        operator, access = self.operator_s * factor, self.access_s * factor
        return replace(self, flops=flops, memory_bytes_per_s=memory, operator_s=operator, access_s=access)

    def compute_s(self, stretch: Stretch, dtype: str) -> float:
        """Seconds of a stretch whose weights are there."""
        rate = self.flops.get(dtype) or min(self.flops.values())
        moved = stretch.moved_bytes / self.memory_bytes_per_s
        return stretch.flops / rate + moved + stretch.operators * self.operator_s


@dataclass(frozen=True)
class ComponentJob:
    """What a phase does with one component. calls: (trace, how often). stored: bytes in the file per byte that runs.
    alone: whether other components of its class make room for it and it for them (Wan's experts). added_bytes: of the
    LoRAs that it gets, which aren't in `parts` and stay on the device. unpacking_bytes: what unpacking an operator's
    weights takes of the device; of the components of a phase the hungriest one's is kept for all. unpacked: of packed
    weights, by name, the bytes that unpacking moves. saved_bytes: by those that are packed on their way in."""

    name: str
    dtype: str
    parts: tuple[PartSize, ...] = field(repr=False)
    calls: tuple[tuple[Trace, int], ...] = field(repr=False)
    stored: float = 1.0
    alone: bool = False
    added_bytes: int = 0
    unpacking_bytes: int = 0
    unpacked: Mapping[str, int] = field(default_factory=dict, repr=False)
    saved_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.added_bytes

    @property
    def times(self) -> int:
        return sum(times for _, times in self.calls)


@dataclass(frozen=True)
class Correction:
    """What runs of such a phase taught about its plan. compute: its seconds by so much; overhead_s: seconds beside
    weights and compute; activations: their bytes on an accelerator by so much."""

    compute: float = 1.0
    overhead_s: float = 0.0
    activations: float = 1.0


@dataclass(frozen=True)
class PhaseJob:
    """A phase as a plan sees it. steps: of the denoiser, 0 elsewhere. tile: pixels of the VAE's tiles, if it tiles.
    assumed: what its traces took for granted, as sentences."""

    name: str
    activation_bytes: int
    components: tuple[ComponentJob, ...]
    steps: int = 0
    tile: int | None = None
    assumed: tuple[str, ...] = ()
    correction: Correction = Correction()


@dataclass(frozen=True)
class ComponentPlan:
    """One component in a phase. first_s, pass_s: seconds of its first pass, which brings what stays, and of later ones;
    compute_s: of a pass whose weights are all there. tier: where streamed weights come from. ring_bytes: of the phase's
    ring while it runs. beside_bytes: of weights of earlier components that are still there. added_bytes: of its LoRAs,
    which are in `weight_bytes` and in `weights.small_bytes`, too."""

    name: str
    weights: StreamPlan
    weight_bytes: int
    times: int
    first_s: float
    pass_s: float
    compute_s: float
    tier: str
    ring_bytes: int
    beside_bytes: int
    added_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.first_s + (self.times - 1) * self.pass_s if self.times else 0.0


@dataclass(frozen=True)
class PhasePlan:
    """What a phase will take. Bytes and seconds.

    device_peak_bytes: weights, ring and activations on the execution device at most. host_peak_bytes: what it takes of
    RAM, without the page cache. smallest_budget_bytes: of device memory, with which it works at all. load_s: until
    everything that stays is there, beyond the compute of that pass. step_s: of a step of the denoiser, of a pass
    elsewhere. fits: whether it works in the budget; if not, the other figures are for the smallest budget that does.
    """

    name: str
    fits: bool
    weight_bytes: int
    resident_bytes: int
    streamed_bytes: int
    ring_bytes: int
    activation_peak_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    smallest_budget_bytes: int
    load_s: float
    step_s: float
    seconds: float
    components: tuple[ComponentPlan, ...]
    tile: int | None = None
    steps: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a job will take. budget_bytes: of device memory. hints: what would help most, the best first."""

    phases: tuple[PhasePlan, ...]
    budget_bytes: int
    hints: tuple[str, ...] = ()

    def phase(self, name: str) -> PhasePlan | None:
        """The plan of the phase of that name, None if there is none."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

    @property
    def smallest_budget_bytes(self) -> int:
        """The least device memory with which every phase works."""
        return max((phase.smallest_budget_bytes for phase in self.phases), default=0)

    @property
    def device_peak_bytes(self) -> int:
        return max((phase.device_peak_bytes for phase in self.phases), default=0)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True)
class Limits:
    """What a plan may take. on_cpu: the CPU executes, so both are RAM. staging_bytes: of the readers' buffers. align:
    of hot copies in the ring. read_threads: none means that nothing is fetched ahead. resident_limit: see
    `make_plan`."""

    device_bytes: int
    host_bytes: int
    on_cpu: bool = False
    resident_below: int = 1 << 20
    read_threads: int = 2
    staging_bytes: int = 12 << 20
    align: int = 64
    resident_limit: int | None = None


def predicted_figures(phase: PhasePlan) -> dict[str, float]:
    """What a report shows of a plan beside what was measured."""
    return {
        "device_peak_bytes": phase.device_peak_bytes,
        "streamed_bytes": sum(c.weights.streamed_bytes * c.times for c in phase.components),
        "seconds": phase.seconds,
        "step_s": phase.step_s if phase.steps else 0.0,
    }


def activations_on(activation_bytes: int, limits: Limits, factor: float = 1.0) -> int:
    """Bytes that activations take of the execution device, with what goes with them there. factor: what runs taught."""
    if limits.on_cpu:
        return activation_bytes
    return int((activation_bytes * (1 + FRAGMENTED_SHARE) + WORKSPACE_BYTES) * factor)


def plan_job(phases: Iterable[Iterable[PhaseJob]], limits: Limits, rates: Rates) -> Plan:
    """A plan for a job. phases: for each phase the ways to do it, the one to be preferred first (a VAE whole, then in
    tiles): the first that fits is taken, and no further one is asked for."""
    plans, jobs = [], []
    for ways in phases:
        for number, job in enumerate(ways):
            plan = _plan_phase(job, limits, rates)
            if number and job.tile:
                budget = human_bytes(limits.device_bytes)
                tiled = f"The picture is decoded in tiles of {job.tile} pixels: whole, it doesn't fit {budget}."
                plan = replace(plan, reasons=(tiled, *plan.reasons))
            if plan.fits:
                break
        plans.append(plan)
        jobs.append(job)
    return Plan(tuple(plans), limits.device_bytes, tuple(_hints(plans, jobs, limits, rates)))


def smallest_budget(job: PhaseJob, limits: Limits) -> int:
    """The least device memory with which a phase works. By bisection: what works with some room works with more."""
    low, high = 0, sum(component.weight_bytes + 2 * limits.align for component in job.components)
    high += max((component.unpacking_bytes for component in job.components), default=0)
    while low < high:
        middle = (low + high) // 2
        held = _Held(middle, limits)
        try:
            for component in job.components:
                held.add(component)
            high = middle
        except BudgetError:
            low = middle + 1
    return activations_on(job.activation_bytes, limits, job.correction.activations) + high


def _place(
    component: ComponentJob, added: int, room: int, limits: Limits, ring: int, others: int
) -> tuple[StreamPlan, list[bool]]:
    def ahead(sizes: Any) -> bool:
        return limits.read_threads > 0 and any(size.nbytes > INLINE_BYTES for size in sizes)

    return plan_parts(
        component.parts,
        resident_below=limits.resident_below,
        ahead=ahead,
        added_bytes=added,
        available=room,
        ring_there=ring,
        ring_for_others=others,
        resident_limit=limits.resident_limit,
        align=limits.align,
        name=component.name,
    )


def _plan_phase(job: PhaseJob, limits: Limits, rates: Rates, *, choose: bool = True) -> PhasePlan:
    """choose: look for resident weights that make a pass faster than those that the engine would choose."""
    rates = rates.slower(job.correction.compute)
    least = smallest_budget(job, limits)
    fits = least <= limits.device_bytes
    activations = activations_on(job.activation_bytes, limits, job.correction.activations)
    room = max(limits.device_bytes, least) - activations
    components: list[ComponentPlan] = []
    held = _Held(room, limits, rates if choose else None)
    for component in job.components:
        weights = held.add(component)
        components.append(_timed(component, weights, held, limits, rates))
    seconds = sum(component.seconds for component in components) + job.correction.overhead_s
    passes = sum(component.times * component.pass_s for component in components)
    load = sum(max(component.first_s - component.pass_s, 0.0) for component in components if component.times)
    count = job.steps or 1
    unpacking = max((component.unpacking_bytes for component in job.components), default=0)  # in what stays, once
    return PhasePlan(
        name=job.name,
        fits=fits,
        weight_bytes=sum(component.weight_bytes for component in components),
        resident_bytes=sum(c.weights.resident_bytes + c.weights.small_bytes for c in components) - unpacking,
        streamed_bytes=sum(c.weights.streamed_bytes for c in components),
        ring_bytes=held.ring,
        activation_peak_bytes=activations,
        device_peak_bytes=activations + held.peak,
        host_peak_bytes=limits.staging_bytes + (activations + held.peak if limits.on_cpu else 0),
        smallest_budget_bytes=least,
        load_s=load,
        step_s=passes / count,
        seconds=seconds,
        components=tuple(components),
        tile=job.tile,
        steps=job.steps,
        reasons=tuple(_reasons(job, components, held, fits, limits)),
    )


class _Held:
    """The device memory of a phase as its components come one after another, as the engine's scope hands it out
    (`OffloadScope.make_room`). With `rates`, resident weights are chosen by what a pass takes."""

    def __init__(self, room: int, limits: Limits, rates: Rates | None = None) -> None:
        self.room, self.limits, self.rates = room, limits, rates
        self.ring = self.peak = 0
        self._unpacking = 0  # bytes in which weights are unpacked; all components use the same
        self._forget()

    def _forget(self) -> None:
        self._fixed, self._kept = self._unpacking, 0  # bytes that stay, and of resident weights that could be streamed
        self._could_go: list[list[WeightSize]] = []  # these by component, the largest last
        self._groups: Counter[tuple[int, str]] = Counter()  # streamed bytes of what operators need together
        self._largest = 0

    def add(self, component: ComponentJob) -> StreamPlan:
        if component.alone:
            self._forget()
        added = component.added_bytes + max(component.unpacking_bytes - self._unpacking, 0)
        wanted = component.weight_bytes - component.added_bytes + added
        self._unpacking = max(self._unpacking, component.unpacking_bytes)
        for number, could_go in enumerate(self._could_go):
            while could_go and wanted + self._ring_missing() > self._free():
                self._kept -= could_go[-1].nbytes
                self._stream(number, could_go.pop())
        if wanted + self._ring_missing() > self._free():
            self.ring = 0
        weights, small = _place(component, added, self._free(), self.limits, self.ring, self._largest)
        limit = self.limits.resident_limit
        if self.rates is not None and weights.ring_bytes and component.times > 1 and limit is None:
            weights = _cheapest(component, weights, small, self.limits, self.rates, self._largest)
        self.ring = max(self.ring, weights.ring_bytes)
        self._fixed += weights.small_bytes
        number, could_go = len(self._could_go), []
        for size in (
            s for part, is_small in zip(component.parts, small, strict=True) if not is_small for s in part.sizes
        ):
            if not (weights.whole or size.name in weights.resident):
                self._stream(number, size)
            elif size.nbytes >= max(self.limits.resident_below, 1):
                could_go.append(size)
                self._kept += size.nbytes
            else:
                self._fixed += size.nbytes
        self._could_go.append(sorted(could_go, key=lambda size: size.nbytes))
        self.peak = max(self.peak, self.room - self._free())
        return weights

    def _stream(self, number: int, size: WeightSize) -> None:
        if not size.lookup_only:
            key = (number, size.group or size.name)
            self._groups[key] += -(-size.nbytes // self.limits.align) * self.limits.align
            self._largest = max(self._largest, self._groups[key])

    def _ring_missing(self) -> int:
        return self._largest + self.limits.align if self._largest > self.ring else 0

    @property
    def weight_bytes(self) -> int:
        """Of all weights that stay."""
        return self._fixed + self._kept

    def _free(self) -> int:
        return self.room - self.weight_bytes - (self.ring + self.limits.align if self.ring else 0)


def _cheapest(
    component: ComponentJob, weights: StreamPlan, small: Sequence[bool], limits: Limits, rates: Rates, others: int
) -> StreamPlan:
    """The engine's own placement, or one that a replay finds to be faster."""
    large = [part for part, is_small in zip(component.parts, small, strict=True) if not is_small]
    sizes = [size for part in large for size in part.sizes if not size.lookup_only]
    trace, _ = max(component.calls, key=lambda call: call[0].flops)
    loads = loads_of(component, trace, rates, streams=True)
    nbytes = {size.name: int(size.nbytes * component.stored) for size in sizes}
    total = sum(size.nbytes for size in sizes)

    def cost(resident: frozenset[str], ring: int) -> float:
        streamed = sum(size.nbytes for size in sizes if size.name not in resident)
        rate = tier(streamed, component, limits, rates)[1]
        ring = max(int(ring * component.stored) + 1, hungriest(loads, nbytes, resident))
        hardware = hardware_of(rate, rates)
        waits = waiting(loads, nbytes, resident)
        return simulate(waits, nbytes, resident=resident, ring_bytes=ring, hardware=hardware).step_s

    room = weights.available_bytes - weights.small_bytes - limits.align
    search = Placement(sizes, room, cost, align=limits.align, least_ring=others)
    start = frozenset(weights.resident)
    resident, ring = search.search(start)
    if resident == start:
        return weights
    kept = sum(size.nbytes for size in sizes if size.name in resident)
    return replace(weights, resident=resident, resident_bytes=kept, streamed_bytes=total - kept, ring_bytes=ring)


def _timed(component: ComponentJob, weights: StreamPlan, held: _Held, limits: Limits, rates: Rates) -> ComponentPlan:
    first = passes = compute = 0.0
    for index, call in enumerate(replay_calls(component, weights, held.ring, limits, rates)):
        compute += call.compute_s * call.times
        passes += call.replay.step_s * call.times
        if index == 0:
            small_s = weights.small_bytes * component.stored / rates.disk_bytes_per_s
            first = call.replay.pass_s[0] + small_s - call.replay.step_s
    times = max(component.times, 1)
    return ComponentPlan(
        component.name,
        weights,
        component.weight_bytes,
        component.times,
        passes / times + max(first, 0.0),
        passes / times,
        compute / times,
        tier(weights.streamed_bytes, component, limits, rates)[0],
        ring_bytes=held.ring,
        beside_bytes=held.weight_bytes - weights.small_bytes - weights.resident_bytes,
        added_bytes=component.added_bytes,
    )


def _reasons(job: PhaseJob, components: Sequence[ComponentPlan], held: _Held, fits: bool, limits: Limits) -> list[str]:
    budget = human_bytes(limits.device_bytes)
    reasons = []
    if not fits:
        least = human_bytes(smallest_budget(job, limits))
        reasons.append(f"{job.name} doesn't fit {budget}: it needs {least} at least.")
    reasons += job.assumed
    reasons += [
        f"{component.name} is packed to 8 bits on its way in, which saves {human_bytes(component.saved_bytes)}."
        for component in job.components
        if component.saved_bytes
    ]
    activations = activations_on(job.activation_bytes, limits, job.correction.activations)
    for component in components:
        weights = component.weights
        if component.added_bytes:
            reasons.append(f"{component.name} has {human_bytes(component.added_bytes)} of LoRA weights, which stay.")
        if weights.whole:
            reasons.append(f"{component.name} stays resident: all of its {human_bytes(component.weight_bytes)} fit.")
            continue
        reasons.append(
            f"{component.name} streams {human_bytes(weights.streamed_bytes)} of its "
            f"{human_bytes(component.weight_bytes)} from {component.tier} in each pass, because "
            f"{human_bytes(activations)} of {budget} go to activations."
        )
        if component.pass_s > 1.05 * component.compute_s:
            wait = 100 * (1 - component.compute_s / component.pass_s)
            reasons.append(f"{component.name} waits for its weights {wait:.0f} % of the time.")
    return reasons


def _hints(plans: Sequence[PhasePlan], jobs: Sequence[PhaseJob], limits: Limits, rates: Rates) -> list[str]:
    """What would help most: found by planning again with it."""
    if all(phase.fits for phase in plans) and not any(phase.streamed_bytes for phase in plans):
        return []
    hints: list[tuple[float, str]] = []
    now = sum(phase.seconds for phase in plans)
    short = [phase for phase in plans if not phase.fits]
    if short:
        least = max(phase.smallest_budget_bytes for phase in short)
        hints.append((float("inf"), f"Raise device_memory to {human_bytes(least)} or more."))
        worst = max(short, key=lambda phase: phase.smallest_budget_bytes)
        if worst.activation_peak_bytes > limits.device_bytes // 2:
            hints.append((1e9, f"Use a smaller size: {worst.name} needs most of the memory for activations."))
    else:
        more = replace(limits, device_bytes=limits.device_bytes + (1 << 30))
        before, after = (
            sum(_plan_phase(job, given, rates, choose=False).seconds for job in jobs) for given in (limits, more)
        )
        gain = before - after
        if gain > 0.02 * now:
            hints.append((gain, f"1 GiB more of device memory would save {gain:.1f} of {now:.1f} s."))
    wide = [c for job in jobs for c in job.components if c.dtype == "float32" and c.weight_bytes > 1 << 30]
    for component in wide:
        saved = human_bytes(component.weight_bytes // 2)
        hints.append((now / 3, f"{component.name} runs in float32: bfloat16 would take {saved} less."))
    return [hint for _, hint in sorted(hints, reverse=True)]
