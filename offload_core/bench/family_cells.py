"""The cells of `phase-offload families`: each is a run of a tiny model, compared with the whole pipeline's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import BudgetError
from ..known import known_machine
from ..phases import Embeds, Handle, Latents, denoise, encode, load
from ..phases._roles import Role, models, role_of
from ..rates import rates_of
from ..session import Session, SilentObserver
from ..tiny_models import load_tiny, run_all
from .budgets import phase_activations, run_planned
from .decoded import decode_only, decoded_whole
from .family_cases import AskedCase, FamilyCase
from .family_loras import apply_whole, write_lora
from .foresight_cases import ROOMY_BYTES, SETTINGS, Foretold, Poll, Polled, failure

SEED = 5
#: Of the denoiser's weights: the budget of its phase, and what is tried in turn where a tiny model is too coarse.
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
#: A plan's budget as a multiple of the smallest that works: between nothing and all of the weights stay.
TIMES_LEAST = 1.3
#: Where weights go depends on how fast a machine is; the same one everywhere, so that rows repeat.
MACHINE = "rtx4060-8gb"
CHECKS = ("staged", "streamed", "planned", "lora", "cancelled")
PHASES = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class Cell:
    """What came of one check. mark: "yes", "no", or "-" where there is nothing to check. says: why, or a remark."""

    mark: str
    says: str = ""


YES = Cell("yes")


@dataclass(frozen=True)
class FamilyRow:
    """One family in one task. pipeline: the class that did it, empty if its model couldn't be made. cells:
    by the names of `CHECKS`."""

    family: str
    title: str
    task: str
    pipeline: str
    cells: dict[str, Cell]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def family_row(case: FamilyCase, home: Path, poll: Poll) -> FamilyRow:
    """Makes the model of a row in the folder `home` and runs every check. One that fails is a cell like any other."""
    row = FamilyRow(case.family, case.title, case.task, "", {})
    try:
        asked = case.made(home)
        handle = load(asked.folder, device="cpu", dtype="float32", settings=SETTINGS)
        row = replace(row, pipeline=handle.pipeline)
        run = _Run(asked, handle, home, poll)
    except Exception as error:
        return replace(row, cells=dict.fromkeys(CHECKS, Cell("no", failure(error))))
    checks: tuple[Callable[[], Cell], ...] = (run.staged, run.streamed, run.planned, run.lora, run.cancelled)
    for name, check in zip(CHECKS, checks, strict=True):
        poll()
        try:
            row.cells[name] = check()
        except Exception as error:
            row.cells[name] = Cell("no", failure(error))
    return row


class Stopped(BaseException):
    """An interrupt, as a host raises one."""


class _Run:
    """The whole pipeline beside its phases. `twin` is the pipeline, `expected` what it made."""

    def __init__(self, asked: AskedCase, handle: Handle, scratch: Path, poll: Poll) -> None:
        self.asked, self.handle, self.scratch, self.poll = asked, handle, scratch, poll
        self.twin = load_tiny(asked.folder, dtype=torch.float32)
        self.expected = self._whole()
        self.made: tuple[Embeds, Latents] | None = None
        self.polls: dict[str, int] = {}

    def staged(self) -> Cell:
        """Three phases give the bits of one run, and leave nothing behind."""
        session, observers = Session(), {name: _Polls(self.poll) for name in PHASES}
        session.observer = observers["encode"]
        embeds = encode(self.handle, **self.asked.call, session=session)
        session.observer = observers["denoise"]
        latents = _denoised(self.handle, embeds, session)
        session.observer = observers["decode"]
        decode_only(self.handle, latents, session)
        session.observer = Polled(self.poll)
        same = self._same(self.handle, latents, session)
        self.made = embeds, latents
        self.polls = {name: observer.count for name, observer in observers.items()}
        return _leaked(session) or (YES if same else _differs("one run"))

    def streamed(self) -> Cell:
        """The denoiser in a budget of less than it has weights gives the same bits."""
        embeds, _ = self._there()
        source = self.handle.source()
        weights = max(part.weight_bytes for _, part in models(source) if role_of(part) is Role.DENOISER)
        for share in SHARES:
            settings = replace(SETTINGS, device_memory=int(share * weights), activation_memory=0)
            session = Session(Polled(self.poll))
            try:
                latents = _denoised(replace(self.handle, settings=settings), embeds, session)
            except BudgetError:
                continue
            if not session.report.phases[-1].streamed_bytes:
                return Cell("no", "Nothing was streamed.")
            if not self._same(self.handle, latents, session):
                return _differs("the resident run")
            coarse = f"In {share:.0%}: the largest weights of so small a model don't fit into less."
            return _leaked(session) or (YES if share == SHARES[0] else Cell("yes", coarse))
        return Cell("no", f"It doesn't work in {SHARES[-1]:.0%} of its weights.")

    def planned(self) -> Cell:
        """No phase takes more than the plan says: what was booked for weights, and the activations as counted."""
        foretold = Foretold(self.asked, self.poll)
        rates = rates_of(known_machine(MACHINE))
        budget = int(foretold.plan(ROOMY_BYTES, rates).smallest_budget_bytes * TIMES_LEAST)
        plan = foretold.plan(budget, rates)
        activations = phase_activations(self.asked, self.poll)
        reports = run_planned(self.asked, plan, budget, self.poll)
        above = []
        for phase in plan.phases:
            booked = max(report.reserved_peak_bytes for report in reports if report.name == phase.name)
            measured = booked - phase.activation_peak_bytes + activations[phase.name]
            if measured > phase.device_peak_bytes:
                above.append(f"{phase.name} takes {measured:,} bytes and {phase.device_peak_bytes:,} are planned")
        return Cell("no", f"{'; '.join(above)}.") if above else YES

    def lora(self) -> Cell:
        """A LoRA on the denoiser changes the result as diffusers' `load_lora_weights` does."""
        if not hasattr(self.twin, "load_lora_weights"):
            return Cell("-", f"diffusers has no LoRA loader for {type(self.twin).__name__}.")
        embeds, _ = self._there()
        file = write_lora(self.twin, self.scratch / f"lora-{self.asked.case.family}-{self.handle.pipeline}.safetensors")
        try:
            apply_whole(self.twin, file)
        except Exception as error:
            return Cell(
                "-", f"diffusers' own load_lora_weights fails for {type(self.twin).__name__}: {failure(error)}."
            )
        try:
            changed = self._whole()
        finally:
            self.twin.unload_lora_weights()
        if _equal(changed, self.expected):
            return Cell("no", "The LoRA changes nothing in the whole pipeline.")
        session = Session(Polled(self.poll))
        handle = load(self.asked.folder, device="cpu", dtype="float32", settings=SETTINGS, loras=[file])
        latents = _denoised(handle, embeds, session)
        same = self._same(handle, latents, session, changed)
        return _leaked(session) or (YES if same else _differs("load_lora_weights"))

    def cancelled(self) -> Cell:
        """An interrupt in the middle of each phase gives everything back, and the next run is as if there was none."""
        embeds, latents = self._there()
        phases: dict[str, Callable[[Session], Any]] = {
            "encode": lambda session: encode(self.handle, **self.asked.call, session=session),
            "denoise": lambda session: _denoised(self.handle, embeds, session),
            "decode": lambda session: decode_only(self.handle, latents, session),
        }
        session = Session()
        for name, run in phases.items():
            session.observer = _Polls(self.poll, k=max(self.polls[name] // 2, 1))
            try:
                run(session)
            except Stopped:
                if session.report.phases[-1].name != name:
                    return Cell("no", f"The interrupt of {name} stopped {session.report.phases[-1].name}.")
            else:
                return Cell("no", f"An interrupt in {name} stops nothing.")
        session.observer = Polled(self.poll)
        again = _denoised(self.handle, embeds, session)
        return _leaked(session) or (YES if self._same(self.handle, again, session) else _differs("a run before"))

    def _whole(self) -> tuple[torch.Tensor, ...]:
        with _same_global_noise():
            return run_all(self.twin, seed=SEED, **self.asked.call)

    def _there(self) -> tuple[Embeds, Latents]:
        if self.made is None:
            raise RuntimeError("There is nothing to compare, because the three phases didn't run.")
        return self.made

    def _same(
        self, handle: Handle, latents: Latents, session: Session, expected: tuple[torch.Tensor, ...] | None = None
    ) -> bool:
        """Whether what `latents` are decoded to, sound included, is `expected`, bit for bit."""
        made = decoded_whole(handle, latents, session)
        return _equal(made, self.expected if expected is None else expected)


class _Polls(SilentObserver):
    """Counts how often a phase asks whether it should stop, and stops it at the k-th time if there is one."""

    def __init__(self, poll: Poll, k: int | None = None) -> None:
        self.count, self._poll, self._k = 0, poll, k

    def check_interrupt(self) -> None:
        self._poll()
        self.count += 1
        if self.count == self._k:
            raise Stopped


def _denoised(handle: Handle, embeds: Embeds, session: Session) -> Latents:
    with _same_global_noise():
        return denoise(handle, embeds, seed=SEED, session=session)


@contextlib.contextmanager
def _same_global_noise() -> Iterator[None]:
    """Seeds torch's own generator: a pipeline that draws from it (SD3 with a ControlNet) repeats itself only so."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _equal(these: tuple[torch.Tensor, ...], those: tuple[torch.Tensor, ...]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def _differs(what: str) -> Cell:
    return Cell("no", f"The bits differ from those of {what}.")


def _leaked(session: Session) -> Cell | None:
    """A cell that says which phase left bytes behind; None if none did."""
    for phase in session.report.phases:
        if phase.leaked_bytes:
            return Cell("no", f"{phase.leaked_bytes:,} bytes of {phase.name} are still held by something.")
    return None
