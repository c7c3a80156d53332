"""Whether phases stay where a plan puts them: their peaks at several budgets, and whether a job fits at all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..errors import BudgetError
from ..phases import Embeds, Handle, Latents, decode, denoise, encode, load
from ..phases._denoise import collect_latents, denoise_ports
from ..phases._encode import encode_call, encode_ports, force_guidance, one_negative_each
from ..phases._handle import model_defaults
from ..phases._plain import from_plain
from ..phases._ports import PhaseDone, Port, Records, RunPort, StopPort
from ..phases._records import plain_call
from ..phases._scope import OpenPhase, Phase
from ..plan import Plan, Rates
from ..report import PhaseReport
from ..session import Session
from .decoded import decode_only
from .foresight_cases import ROOMY_BYTES, SETTINGS, AnyCase, Case, Foretold, Poll, Polled, failure
from .live_bytes import LiveBytes

PHASES = ("encode", "denoise", "decode")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PeakRow:
    """One phase in one budget. times_least: the budget as a multiple of the smallest that works. planned_bytes: of
    device memory at most, for weights, ring and activations. measured_bytes: the most that was booked for weights and
    ring in a run, and the activations as they were counted. status: "ok" or "failed"."""

    family: str
    size: str
    times_least: float
    budget_bytes: int
    phase: str
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    status: str = "ok"
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured to planned; None where there is nothing to compare."""
        return self.measured_bytes / self.planned_bytes if self.measured_bytes and self.planned_bytes else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class FitRow:
    """One job in one budget. predicted: whether the plan says that it fits. fits: whether it does; None if that
    couldn't be found out. reason: the error of the phase that didn't fit, or of a failure."""

    family: str
    size: str
    budget: str
    budget_bytes: int
    predicted: bool | None = None
    fits: bool | None = None
    status: str = "ok"
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.status == "ok" and self.predicted == self.fits

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


# --------------------------------------------------------------------------------------------- peaks of a phase


def peak_rows(
    case: Case, foretold: Foretold, activations: dict[str, int], times: Sequence[float], rates: Rates, poll: Poll
) -> list[PeakRow]:
    """Runs the three phases with a plan for each multiple of the smallest budget. activations: see
    `phase_activations`; what a phase reserves for them is the plan's own figure and would prove nothing."""
    least = foretold.plan(ROOMY_BYTES, rates).smallest_budget_bytes
    rows: list[PeakRow] = []
    for multiple in times:
        budget = int(least * multiple)
        plan = foretold.plan(budget, rates)
        where = PeakRow(case.family, str(case.size), multiple, budget, "")
        try:
            reports = run_planned(case, plan, budget, poll)
        except Exception as error:
            rows += _failed_peaks(where, error)
            continue
        for planned in plan.phases:
            reserved = max(report.reserved_peak_bytes for report in reports if report.name == planned.name)
            measured = reserved - planned.activation_peak_bytes + activations[planned.name]
            row = replace(where, phase=planned.name, planned_bytes=planned.device_peak_bytes, measured_bytes=measured)
            rows.append(row)
    return rows


def failed_peaks(case: Case, times: Sequence[float], error: Exception) -> list[PeakRow]:
    """The rows of a case of which nothing could be foretold."""
    wheres = [PeakRow(case.family, str(case.size), multiple, 0, "") for multiple in times]
    return [row for where in wheres for row in _failed_peaks(where, error)]


def _failed_peaks(where: PeakRow, error: Exception) -> list[PeakRow]:
    return [replace(where, phase=name, status="failed", reason=failure(error)) for name in PHASES]


def run_planned(case: AnyCase, plan: Plan, budget: int, poll: Poll) -> list[PhaseReport]:
    """Runs the three phases with a plan in its budget. Returns their reports."""
    session = Session(Polled(poll))
    handle = _handle(case, budget)
    embeds = encode(handle, **case.call, session=session, plan=plan)
    latents = denoise(handle, embeds, session=session, plan=plan)
    decode_only(handle, latents, session, plan)
    return session.report.phases


def _handle(case: AnyCase, budget: int, activations: int | str = "auto") -> Handle:
    settings = replace(SETTINGS, device_memory=budget, activation_memory=activations)
    return load(case.folder, device="cpu", dtype="float32", settings=settings)


# ------------------------------------------------------------------------------------------------ does it fit


class Truth:
    """Whether a job fits a budget, found out without a plan.

    A phase fits if it runs to its end in the budget while the engine keeps as much of it for activations as an
    independent counter found them to take in that phase (`phase_activations`). The CPU's allocator enforces no budget,
    so activations have to be kept free like this: what the phase reserves and what its activations really take are then
    both within the budget, the first because the ledger refuses everything beyond it. Nothing of a plan or a trace goes
    into this: the engine places the weights by itself.
    """

    def __init__(self, case: Case, poll: Poll) -> None:
        """Runs the phases once with room for everything. Raises what they raise."""
        self._case, self._poll = case, poll
        handle = _handle(case, ROOMY_BYTES)
        self.activations = phase_activations(case, poll)
        self._embeds: Embeds = encode(handle, **case.call, session=self._session())
        self._latents: Latents = denoise(handle, self._embeds, session=self._session())

    def refusal(self, budget: int) -> str:
        """A phase that doesn't fit and why; nothing if all do. The one with most activations is asked first."""
        for name in sorted(PHASES, key=lambda name: -self.activations[name]):
            if self.activations[name] >= budget:
                return f"{name}: its activations alone take {self.activations[name]:,} bytes."
            session = self._session()
            try:
                self._run(name, _handle(self._case, budget, self.activations[name] or "0"), session)
            except BudgetError as error:
                return f"{name}: {error}"
            assert session.report.phases[-1].reserved_peak_bytes <= budget
        return ""

    def _run(self, name: str, handle: Handle, session: Session) -> None:
        if name == "encode":
            encode(handle, **self._case.call, session=session)
        elif name == "denoise":
            denoise(handle, self._embeds, session=session)
        else:
            decode(handle, self._latents, "pt", tiling="off", session=session)

    def _session(self) -> Session:
        return Session(Polled(self._poll))


def fit_rows(case: Case, foretold: Foretold, truth: Truth, budgets: Sequence[str], rates: Rates) -> list[FitRow]:
    """Asks the plan and the truth about budgets, each in words: a multiple of the smallest that the plan says works
    ("0.9"), or that and some bytes ("-1")."""
    least = foretold.plan(ROOMY_BYTES, rates).smallest_budget_bytes
    sizes = {words: least + int(words) if words[0] in "+-" else int(least * float(words)) for words in budgets}
    rows = []
    for words, size in sizes.items():
        where = FitRow(case.family, str(case.size), words, size, foretold.plan(size, rates).fits)
        try:
            refusal = truth.refusal(size)
            rows.append(replace(where, fits=not refusal, reason=refusal))
        except Exception as error:
            rows.append(_failed_fit(where, error))
    return rows


def failed_fits(case: Case, budgets: Sequence[str], error: Exception) -> list[FitRow]:
    """The rows of a case of which nothing could be foretold."""
    return [_failed_fit(FitRow(case.family, str(case.size), words, 0), error) for words in budgets]


def _failed_fit(where: FitRow, error: Exception) -> FitRow:
    return replace(where, status="failed", reason=failure(error))


def phase_activations(case: AnyCase, poll: Poll) -> dict[str, int]:
    """Bytes that the activations of each phase take at most, counted by `LiveBytes` on real tensors.

    The phases are run as `encode`, `denoise` and `decode` run them, but all weights are there before the count begins:
    so nothing that it sees is a weight. A decode is counted up to the VAE's result; what follows takes less.
    """
    handle = _handle(case, ROOMY_BYTES)
    source = handle.source()
    call = case.call
    prompt, negative = call.pop("prompt"), call.pop("negative_prompt", None)
    call = one_negative_each({**model_defaults(source), **encode_call(source, prompt, negative, call)})
    records = Records()
    found: dict[str, int] = {}

    def opened(name: str, ports: dict[str, Port] | None, owned: set[str]) -> OpenPhase:
        return OpenPhase(handle, source, name, Session(Polled(poll)), ports, owned)

    ports = encode_ports(source, records, CPU)
    owned = {name for name, port in ports.items() if not isinstance(port, StopPort)}
    run = from_plain(plain_call(force_guidance(source, call)), CPU)  # pipelines write into their lists
    with opened("encode", ports, owned) as phase:
        found["encode"] = _counted(phase, run)
        records.settle()
    ports = denoise_ports(source, records, CPU)
    owned = {name for name, port in ports.items() if isinstance(port, RunPort)}
    with opened("denoise", ports, owned) as phase:
        found["denoise"] = _counted(phase, from_plain(plain_call(call), CPU))
        latents = collect_latents(handle, source, phase, ports, call, 0)
    with opened("decode", None, {latents.component}) as phase:
        vae: Any = phase.components[latents.component]
        vae.load()
        with LiveBytes() as count:
            args, kwargs = from_plain(latents.decode, CPU)
            vae.module.decode(*args, **kwargs)
        found["decode"] = count.peak_bytes
    return found


def _counted(phase: Phase, call: dict[str, Any]) -> int:
    for component in phase.components.values():
        if component.gate.before_run is not None:
            component.load()
    with LiveBytes() as count, contextlib.suppress(PhaseDone):
        phase.pipeline(**call, generator=torch.Generator("cpu").manual_seed(0))
    return count.peak_bytes
