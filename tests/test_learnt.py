"""A run teaches the next plan: its seconds and, on an accelerator, its activations come nearer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import offload_core as po
from offload_core.foresight import Foresight
from offload_core.learnt import Learnt, corrected
from offload_core.plan import Correction, Limits, PhaseJob, PhasePlan, Rates, plan_job
from offload_core.report import PhaseReport, RunReport
from test_plan import component, phase

CPU = torch.device("cpu")
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7, read_s=0)
LIMITS = Limits(device_bytes=1 << 30, host_bytes=1 << 30, on_cpu=True, resident_below=0)
CARD = replace(LIMITS, on_cpu=False)


def job(steps: int = 4) -> PhaseJob:
    return replace(phase(component(2000, 3000, times=steps, flops=100_000_000)), steps=steps)


def plan_of(job: PhaseJob, limits: Limits = LIMITS) -> PhasePlan:
    return plan_job([[job]], limits, RATES).phases[0]


def a_run(plan: PhasePlan, step_s: float, beside_s: float, device_peak: int = 0) -> PhaseReport:
    """A run that took so long per step and beside the steps."""
    wall = step_s * plan.steps + beside_s
    return PhaseReport(
        plan.name, wall, 0.0, 0, device_peak, 0, 0, 0,
        forwards={"transformer": plan.steps}, forward_s={"transformer": step_s * plan.steps}, step_s=step_s,
        reserved_peak_bytes=plan.device_peak_bytes, predicted={"seconds": plan.seconds},
    )  # fmt: skip


def test_the_second_plan_of_a_job_says_what_the_first_run_took(tmp_path: Path) -> None:
    learnt = Learnt(CPU, RATES, file=tmp_path / "learnt.json")
    first = plan_of(corrected(job(), learnt, "Flux"))
    run = a_run(first, step_s=3 * first.step_s, beside_s=1.5)
    learnt.add("Flux", "float32", first, Correction(), run)
    again = Learnt(CPU, RATES, file=tmp_path / "learnt.json")
    second = plan_of(corrected(job(), again, "Flux"))
    assert second.seconds == pytest.approx(run.wall_s, rel=0.01)
    assert second.step_s == pytest.approx(run.step_s, rel=0.01)
    longer = plan_of(corrected(job(steps=8), again, "Flux"))  # what is beside the steps doesn't grow with them
    assert longer.seconds == pytest.approx(8 * run.step_s + 1.5, rel=0.01)
    for unlike in (plan_of(corrected(job(), again, "Wan")), plan_of(job())):
        assert unlike == first


def test_runs_that_follow_a_corrected_plan_keep_the_correction_where_it_is(tmp_path: Path) -> None:
    learnt = Learnt(CPU, RATES, file=tmp_path / "learnt.json")
    seconds = 5 * plan_of(job()).step_s
    for _ in range(8):
        asked = corrected(job(), learnt, "Flux")
        plan = plan_of(asked)
        learnt.add("Flux", "float32", plan, asked.correction, a_run(plan, seconds, 0.2))
    correction = learnt.of("Flux", "denoise", "float32")
    assert correction.compute == pytest.approx(5, rel=0.01)
    assert correction.overhead_s == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("share", [0.8, 1.3])
def test_the_allocators_peak_corrects_activations_on_an_accelerator_by_the_most_that_was_seen(
    share: float, tmp_path: Path
) -> None:
    learnt = Learnt(CPU, RATES, file=tmp_path / "learnt.json")
    plan = plan_of(job(), CARD)
    weights = plan.device_peak_bytes - plan.activation_peak_bytes
    for part in (share, share - 0.1):
        peak = int(weights + part * plan.activation_peak_bytes)
        learnt.add("Flux", "float32", plan, Correction(), a_run(plan, plan.step_s, 0.0, peak))
    found = plan_of(corrected(job(), learnt, "Flux"), CARD)
    assert found.activation_peak_bytes == pytest.approx(share * plan.activation_peak_bytes, rel=0.001)
    assert found.smallest_budget_bytes - plan.smallest_budget_bytes == pytest.approx(
        (share - 1) * plan.activation_peak_bytes, rel=0.001
    )


@pytest.mark.parametrize("content", ["", "[]", '{"MACHINE": 3}', '{"MACHINE": {"Flux denoise float32": [{"x": 1}]}}'])
def test_a_damaged_file_teaches_nothing_and_is_written_anew(content: str, tmp_path: Path) -> None:
    file = tmp_path / "learnt.json"
    learnt = Learnt(CPU, RATES, file=file)
    file.write_text(content.replace("MACHINE", learnt._machine), "utf-8")
    assert learnt.of("Flux", "denoise", "float32") == Correction()
    plan = plan_of(job())
    learnt.add("Flux", "float32", plan, Correction(), a_run(plan, 2 * plan.step_s, 0.0))
    assert learnt.of("Flux", "denoise", "float32").compute >= 1.0


def test_a_run_without_the_plan_or_on_another_machine_teaches_nothing(tmp_path: Path) -> None:
    traced = po.phases.PhaseTrace(job(), ())
    plan = plan_job([[traced.job]], LIMITS, RATES)
    learnt = Learnt(CPU, RATES, file=tmp_path / "learnt.json")
    run = a_run(plan.phases[0], 1.0, 0.0)
    Foresight(plan, (traced,), LIMITS, RATES, "model", "machine", "Flux").learn(RunReport([run]))
    found = Foresight(plan, (traced,), LIMITS, RATES, "model", "machine", "Flux", learnt)
    found.learn(RunReport([replace(run, predicted={})]))
    found.learn(RunReport([replace(run, name="encode")]))
    assert not learnt.file.exists()
    found.learn(RunReport([run]))
    assert learnt.file.exists()
    assert (
        Learnt(CPU, replace(RATES, operator_s=1.0), file=learnt.file).of("Flux", "denoise", "float32") == Correction()
    )
