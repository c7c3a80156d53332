"""The memory of a plan over time is what the plan says: no moment exceeds a phase's peak, and the end is the plan's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from offload_core.foresight import Foresight, foresee_job
from offload_core.phases import PhaseTrace
from offload_core.plan import ComponentJob, Limits, PhaseJob, Rates, plan_job
from offload_core.plan_timeline import SAMPLES, MemoryTimeline, Samples, memory_timeline
from offload_core.settings import OffloadSettings
from offload_core.streaming import PartSize, WeightSize
from offload_core.trace import Stretch, Trace, TracedWeight
from staging import job, tiny_model, words

# A product takes a second for each thousand operations, a weight one for each thousand bytes.
RATES = Rates({"float32": 1000}, 1e30, 0.0, disk_bytes_per_s=1000, cached_bytes_per_s=1000, read_s=0, access_s=0)


def component(
    *nbytes: int, times: int = 3, flops: int = 1000, name: str = "transformer", peaks: Sequence[int] = ()
) -> ComponentJob:
    """A chain of operators with a weight each, and activations of so many bytes, or 100."""
    names = [f"w{index}" for index in range(len(nbytes))]
    parts = [PartSize((WeightSize(n, size, n),), size) for n, size in zip(names, nbytes, strict=True)]
    weights = tuple(TracedWeight(f"{name}.{n}", size) for n, size in zip(names, nbytes, strict=True))
    peaks = peaks or [100] * len(nbytes)
    stretches = tuple(Stretch((index,), flops, 0, 1, peak) for index, peak in enumerate(peaks))
    return ComponentJob(name, "float32", tuple(parts), ((Trace(weights, stretches, 0), times),))


def foreseen(
    *phases: Sequence[ComponentJob],
    device: int,
    on_cpu: bool = True,
    activations: int = 100,
    bytes_per_s: float = 1000,
) -> Foresight:
    jobs = [PhaseJob(f"phase {number}", activations, tuple(each)) for number, each in enumerate(phases)]
    limits = Limits(device, 1 << 30, on_cpu=on_cpu, resident_below=0, align=1)
    rates = replace(RATES, disk_bytes_per_s=bytes_per_s, cached_bytes_per_s=bytes_per_s)
    plan = plan_job([[each] for each in jobs], limits, rates)
    return Foresight(plan, tuple(PhaseTrace(each, ()) for each in jobs), limits, rates, "a model", "a machine")


def check_against_plan(timeline: MemoryTimeline, foresight: Foresight) -> None:
    for phase, planned in zip(timeline.phases, foresight.plan.phases, strict=True):
        samples = phase.samples
        assert phase.peak_bytes <= planned.device_peak_bytes == phase.planned_peak_bytes
        assert 0 < len(samples.seconds) <= SAMPLES
        assert (np.diff(samples.seconds) >= 0).all()
        assert samples.seconds[0] == phase.start_s and samples.seconds[-1] <= phase.end_s
        assert (samples.streamed_bytes <= samples.ring_bytes).all()
        assert ((samples.waiting >= 0) & (samples.waiting <= 1 + 1e-9)).all()
        # The same seconds, added up pass by pass instead of multiplied: equal but for rounding.
        assert phase.end_s - phase.start_s == pytest.approx(planned.seconds, rel=1e-9)
    assert timeline.end_s == pytest.approx(foresight.plan.seconds, rel=1e-9)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "card"])
@pytest.mark.parametrize("seed", range(12))
def test_no_moment_exceeds_the_planned_peak_and_the_job_ends_when_planned(seed: int, on_cpu: bool) -> None:
    pick = random.Random(seed)
    phases = []
    for _ in range(2):
        components = []
        for number in range(pick.randrange(1, 4)):
            nbytes = [pick.randrange(100, 3000) for _ in range(pick.randrange(1, 12))]
            peaks = [pick.randrange(0, 5000) for _ in nbytes]
            times, flops = pick.choice([1, 2, 7]), pick.choice([10, 1000, 5000])
            made = component(*nbytes, times=times, flops=flops, name=f"part_{number}", peaks=peaks)
            if pick.random() < 0.5:  # with and without guidance
                other = component(*nbytes, flops=flops // 2, name=made.name, peaks=[peak // 2 for peak in peaks])
                made = replace(made, calls=made.calls + other.calls, alone=pick.random() < 0.3)
            components.append(made)
        phases.append(components)
    least = foreseen(*phases, device=1, on_cpu=on_cpu, activations=6000).plan.smallest_budget_bytes
    for device in (least // 2, least, least + 5000, least + (1 << 20)):
        foresight = foreseen(*phases, device=device, on_cpu=on_cpu, activations=6000)
        timeline = memory_timeline(foresight)
        assert timeline.fits == foresight.plan.fits == (device >= least)
        check_against_plan(timeline, foresight)


@pytest.mark.parametrize("name", ["flux", pytest.param("wan22_a14b", marks=pytest.mark.slow)])
def test_so_it_is_for_real_pipelines_that_stream(name: str) -> None:
    asked = {**words(name), **job(name, guided=True)}
    prompt, negative = asked.pop("prompt"), asked.pop("negative_prompt", None)
    settings = OffloadSettings(execution_device="cpu", device_memory="1MiB", host_memory="1GiB", resident_below=1024)
    rates = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
    found = foresee_job(tiny_model(name), prompt, negative, settings=settings, rates=rates, **asked)
    timeline = memory_timeline(found)
    check_against_plan(timeline, found)
    assert any(phase.samples.streamed_bytes.any() for phase in timeline.phases)


def test_resident_weights_come_in_the_first_pass_while_compute_waits_for_them() -> None:
    """Two weights of a second each; each is used for a second; activations of 100 bytes, then of 50."""
    foresight = foreseen([component(1000, 1000, times=2, peaks=(100, 50))], device=10_000, activations=110)
    (phase,) = memory_timeline(foresight).phases
    samples = phase.samples
    assert samples.seconds.tolist() == [0, 1, 2, 3, 4]
    assert samples.resident_bytes.tolist() == [1000, 2000, 2000, 2000, 2000]
    assert samples.activation_bytes.tolist() == [110, 110, 60, 110, 60]  # ten lie around the call
    assert samples.waiting.tolist() == [1, 0, 0, 0, 0]
    assert phase.end_s == 5 and phase.peak_bytes == phase.planned_peak_bytes


def test_a_streamed_weight_is_there_from_its_read_to_the_end_of_its_use() -> None:
    """The room is for one weight at a time, so each is read when the one before has been used."""
    foresight = foreseen([component(1000, 900, times=2)], device=1000 + 100 + 1)
    assert foresight.plan.phases[0].resident_bytes == 0
    (phase,) = memory_timeline(foresight).phases
    samples = phase.samples
    assert samples.seconds.tolist() == pytest.approx([0, 1, 2, 2.9, 3.9, 4.9, 5.9, 6.8])
    assert samples.streamed_bytes.tolist() == [1000, 1000, 900, 900] * 2
    assert samples.waiting.tolist() == [1, 0] * 4
    assert set(samples.ring_bytes) == {1001}  # with what aligns it
    assert phase.peak_bytes == phase.planned_peak_bytes


def test_experts_that_take_turns_replace_each_other_and_other_components_stay() -> None:
    first, second = (component(2000, 2000, name=name) for name in ("high", "low"))
    beside = memory_timeline(foreseen([first, second], device=20_000)).phases[0]
    assert beside.samples.resident_bytes[-1] == 8000
    alone = foreseen([replace(first, alone=True), replace(second, alone=True)], device=20_000)
    (phase,) = memory_timeline(alone).phases
    assert phase.samples.resident_bytes.max() == 4000
    high, low = phase.components
    assert (high.name, low.name, low.end_s) == ("high", "low", phase.end_s)
    at = np.searchsorted(phase.samples.seconds, low.start_s)
    assert phase.samples.resident_bytes[at - 1 : at + 1].tolist() == [4000, 2000]


def test_what_does_not_fit_is_shown_in_the_budget_that_it_needs() -> None:
    timeline = memory_timeline(foreseen([component(1000, 1000)], [component(5000)], device=2500))
    assert [phase.fits for phase in timeline.phases] == [True, False]
    assert timeline.phases[1].peak_bytes > timeline.budget_bytes


def test_a_thousand_steps_are_few_samples_with_the_same_peak() -> None:
    peaks = [random.Random(7).randrange(5000) for _ in range(300)]
    foresight = foreseen([component(*[100] * 300, times=1000, peaks=peaks)], device=40_000, activations=5000)
    (phase,) = memory_timeline(foresight).phases
    assert len(phase.samples.seconds) <= SAMPLES
    assert phase.peak_bytes == phase.planned_peak_bytes


@pytest.mark.parametrize("seed", range(5))
def test_thinning_keeps_the_largest_moment_as_it_was_and_the_time_waited(seed: int) -> None:
    pick = np.random.default_rng(seed)
    seconds = np.cumsum(pick.exponential(size=5000))
    end_s = seconds[-1] + 1
    columns = [pick.integers(0, 1 << 40, 5000) for _ in range(4)]
    samples = Samples(seconds, *columns, pick.random(5000))
    few = samples.thinned(100, end_s)
    assert len(few.seconds) <= 100 and few.seconds[0] == seconds[0]
    largest, kept = samples.total_bytes.argmax(), few.total_bytes.argmax()
    assert few.resident_bytes[kept] == samples.resident_bytes[largest]
    assert few.total_bytes[kept] == samples.total_bytes[largest]
    waited = (np.diff(samples.seconds, append=end_s) * samples.waiting).sum()
    assert (np.diff(few.seconds, append=end_s) * few.waiting).sum() == pytest.approx(waited)
