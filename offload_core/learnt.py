"""What runs teach about plans: kept per machine and family, so that the next plan of such a job is nearer.

A phase's seconds are corrected by a factor on its compute and by what it takes beside weights and compute (building
modules, tokenizing). On an accelerator the bytes of activations are corrected by what its allocator counted. The file
is `learnt.json` in the cache folder; the last runs count, older ones are forgotten.
"""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .plan import Correction, PhaseJob, PhasePlan, Rates
from .rates import machine_key
from .report import PhaseReport
from .small_files import cache_folder, read_json, write_json

REMEMBERED = 5  # runs
_COMPUTE_RANGE, _ACTIVATION_RANGE = (0.02, 50.0), (0.5, 4.0)  # outside of these something else was measured


class Learnt:
    """Corrections of one machine. rates: with which its plans are made; with others they would mean something else."""

    def __init__(self, device: torch.device, rates: Rates, *, file: Path | None = None) -> None:
        mark = hashlib.sha256(repr(sorted(asdict(rates).items(), key=str)).encode()).hexdigest()[:12]
        self.file = file or cache_folder() / "learnt.json"
        self._machine = f"{machine_key(device)} rates {mark}"

    def of(self, family: str, phase: str, dtype: str) -> Correction:
        """What is known of such a phase; no correction if nothing is."""
        kept = read_json(self.file).get(self._machine)
        runs = kept.get(_name(family, phase, dtype)) if isinstance(kept, dict) else None
        return _summed(runs) if isinstance(runs, list) else Correction()

    def add(self, family: str, dtype: str, plan: PhasePlan, used: Correction, report: PhaseReport) -> None:
        """Learns from a run that followed `plan`, which was made with the correction `used`."""
        run = lesson(plan, used, report)
        if run is None:
            return
        everything = read_json(self.file)
        kept = everything.setdefault(self._machine, {})
        if not isinstance(kept, dict):
            kept = everything[self._machine] = {}
        name = _name(family, plan.name, dtype)
        runs = kept.get(name)
        kept[name] = [*(runs if isinstance(runs, list) else []), asdict(run)][-REMEMBERED:]
        write_json(self.file, everything, indent=2)


def corrected(job: PhaseJob, learnt: Learnt | None, family: str) -> PhaseJob:
    """The job with what is known of such jobs."""
    return job if learnt is None else replace(job, correction=learnt.of(family, job.name, dtype_of(job)))


def dtype_of(job: PhaseJob) -> str:
    """Of the component that computes most."""
    flops = {c.dtype: sum(trace.flops * times for trace, times in c.calls) for c in job.components}
    return max(flops, key=lambda dtype: flops[dtype], default="")


def _name(family: str, phase: str, dtype: str) -> str:
    return f"{family} {phase} {dtype}"


def lesson(plan: PhasePlan, used: Correction, report: PhaseReport) -> Correction | None:
    """What one run says of `plan`, which was made with the correction `used`; None if it ran too little."""
    planned = sum(component.compute_s * component.times for component in plan.components) / used.compute
    passes = sum(component.times for component in plan.components)
    forward = report.step_s * plan.steps if report.step_s and plan.steps else sum(report.forward_s.values())
    if not planned or not passes or forward <= report.stall_s:
        return None
    activations = used.activations
    if report.device_peak_bytes:
        weights = report.reserved_peak_bytes - plan.activation_peak_bytes
        stated = plan.activation_peak_bytes / used.activations
        activations = _within((report.device_peak_bytes - weights) / stated, _ACTIVATION_RANGE)
    waited = sum((component.pass_s - component.compute_s) * component.times for component in plan.components)
    compute = _within((forward - max(report.stall_s, 0.0)) / planned, _COMPUTE_RANGE)
    beside = report.wall_s - plan.load_s - compute * planned - waited
    return Correction(compute, max(beside, 0.0), activations)


def _summed(runs: list[Any]) -> Correction:
    """Of several runs: the usual time, and the most memory."""
    try:
        each = [Correction(**{name: float(value) for name, value in run.items()}) for run in runs]
    except (TypeError, ValueError, AttributeError):
        return Correction()
    if not each:
        return Correction()
    return Correction(
        _within(statistics.median(run.compute for run in each), _COMPUTE_RANGE),
        max(statistics.median(run.overhead_s for run in each), 0.0),
        _within(max(run.activations for run in each), _ACTIVATION_RANGE),
    )


def _within(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return min(max(value, low), high)
