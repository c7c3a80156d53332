"""What ran lately: prompts, their phases as foretold and as measured, and memory over time. Plain data, bounded.

The thread that runs the nodes writes it, a web server reads it: every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from offload_core.report import PhaseReport, RunReport
from offload_core.session import Held, Progress

KEPT_RUNS = 20
MOST_SAMPLES = 400
SAMPLE_INTERVAL_S = 0.1
DROPPED_KEYS = ("name", "notes", "predicted")  # of a phase's report: the entry has them already

Outcome = Literal["running", "done", "failed", "interrupted"]
Json = dict[str, Any]


@dataclass
class PhaseEntry:
    """One phase of a run. node: its id in the graph. began_s: seconds after the run began. loaded, steps: how far each
    of the two is, as (done, total). predicted: as in PhaseReport. retries: times that memory ran out and it went on."""

    node: str | None
    name: str
    began_s: float
    outcome: Outcome = "running"
    seconds: float = 0.0
    loaded: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (0, 0)
    held: Held | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    report: PhaseReport | None = None
    retries: int = 0
    error: str = ""

    def to_dict(self) -> Json:
        measured = asdict(self.report) if self.report else {}
        return {
            **{name: getattr(self, name) for name in ("node", "name", "outcome", "error", "retries")},
            **{name: round(getattr(self, name), 3) for name in ("began_s", "seconds")},
            **{name: list(getattr(self, name)) for name in ("loaded", "steps")},
            "held": asdict(self.held) if self.held else None,
            "predicted": self.predicted,
            "measured": {name: value for name, value in measured.items() if name not in DROPPED_KEYS},
            "notes": list(self.report.notes) if self.report else [],
        }


@dataclass
class Samples:
    """Memory over time. rows: seconds, bytes allocated on the device, bytes the phase reserved there, bytes of RAM that
    the process has. Never more than MOST_SAMPLES: when it is full, every second one goes and later ones are rarer."""

    rows: list[tuple[float, int, int, int]] = field(default_factory=list)
    interval_s: float = SAMPLE_INTERVAL_S

    def due(self, seconds: float) -> bool:
        return not self.rows or seconds - self.rows[-1][0] >= self.interval_s

    def add(self, seconds: float, device: int, reserved: int, host: int) -> None:
        if len(self.rows) >= MOST_SAMPLES:
            self.rows, self.interval_s = self.rows[::2], self.interval_s * 2
        self.rows.append((round(seconds, 3), device, reserved, host))


@dataclass
class Run:
    """One prompt. began: seconds since 1970, for people; start: on the clock that durations are measured with."""

    id: str
    began: float
    start: float
    phases: list[PhaseEntry] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)

    @property
    def outcome(self) -> Outcome:
        """The first of interrupted, failed and running that a phase is; else done."""
        outcomes = {phase.outcome for phase in self.phases}
        order: tuple[Outcome, ...] = ("interrupted", "failed", "running")
        return next((each for each in order if each in outcomes), "done")

    def to_dict(self, *, samples: bool) -> Json:
        end = max((phase.began_s + phase.seconds for phase in self.phases), default=0.0)
        answer: Json = {
            "id": self.id,
            "began": round(self.began, 3),
            "seconds": round(end, 3),
            "outcome": self.outcome,
            "phases": [phase.to_dict() for phase in self.phases],
        }
        return answer | {"samples": [list(row) for row in self.samples.rows]} if samples else answer


class RunHistory:
    """The last KEPT_RUNS prompts that had a phase.

    memory: bytes allocated on a device of that name, and bytes of RAM that this process has.
    """

    def __init__(self, memory: Callable[[str], tuple[int, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        self._lock = threading.Lock()
        self._runs: list[Run] = []

    def foretold(self, run_id: str, node: str | None, name: str, figures: Mapping[str, float]) -> Json:
        """A phase is about to begin, and this is its plan. Returns the run, with the new sample as its only one."""
        with self._lock:
            run, phase = self._open(run_id, node, name)
            phase.predicted = dict(figures)
            return self._with_sample(run, None)

    def progressed(self, run_id: str, node: str | None, event: Progress) -> Json | None:
        """A phase went on. Returns the run, with the new sample as its only one, or None if it isn't time for one."""
        with self._lock:
            run, phase = self._open(run_id, node, event.phase)
            seconds = self._clock() - run.start
            phase.seconds, phase.held = seconds - phase.began_s, event.held or phase.held
            if event.unit == "bytes":
                phase.loaded = (event.done, event.total)
            elif event.unit == "steps":
                phase.steps = (event.done, event.total)
            if not run.samples.due(seconds):
                return None
            return self._with_sample(run, phase.held)

    def retried(self, run_id: str, node: str | None) -> Json | None:
        """Memory ran out in the phase that is running, and it goes on with less. Returns the run."""
        with self._lock:
            run = self._find(run_id)
            phase = _running(run, node) if run else None
            if run is None or phase is None:
                return None
            phase.retries += 1
            return run.to_dict(samples=False)

    def ended(
        self,
        run_id: str,
        node: str | None,
        reports: Sequence[PhaseReport],
        outcome: Outcome = "done",
        error: str = "",
    ) -> Json | None:
        """A node is done. reports: of its phases, in order; the last one has the outcome. Returns the run, with the
        new sample as its only one; None if the node had no phase."""
        with self._lock:
            for report in reports:
                _, phase = self._open(run_id, node, report.name)
                phase.report, phase.outcome = report, "done"
                phase.seconds, phase.predicted = report.wall_s, phase.predicted or report.predicted
                phase.held = None
            found = self._find(run_id)
            ours = [phase for phase in found.phases if phase.node == node] if found else []
            if found is None or not ours:
                return None
            last = _running(found, node) or ours[-1]
            last.outcome, last.error, last.held = outcome, error, None
            return self._with_sample(found, Held(last.report.device, 0, 0) if last.report else None)

    def running(self) -> Json | None:
        """The run that is going on, with all its samples."""
        with self._lock:
            going = next((run for run in reversed(self._runs) if run.outcome == "running"), None)
            return going.to_dict(samples=True) if going else None

    def to_list(self) -> list[Json]:
        """All runs with their samples, the newest first."""
        with self._lock:
            return [run.to_dict(samples=True) for run in reversed(self._runs)]

    def report(self, run_id: str | None = None) -> RunReport | None:
        """The finished phases of a run, by default of the last one; None if there is no such run."""
        with self._lock:
            run = self._find(run_id) if run_id is not None else next(reversed(self._runs), None)
            return RunReport([phase.report for phase in run.phases if phase.report]) if run else None

    def _with_sample(self, run: Run, held: Held | None) -> Json:
        """The run with a new sample, which is the only one in the answer. held: None if nothing is reserved."""
        held = held or Held("cpu", 0, 0)
        device, host = self._memory(held.device)
        run.samples.add(self._clock() - run.start, device, held.device_bytes, host)
        return run.to_dict(samples=False) | {"samples": [list(run.samples.rows[-1])]}

    def _find(self, run_id: str) -> Run | None:
        return next((run for run in reversed(self._runs) if run.id == run_id), None)

    def _open(self, run_id: str, node: str | None, name: str) -> tuple[Run, PhaseEntry]:
        """The run, and its running phase of that node and name. Makes what isn't there."""
        run = self._find(run_id)
        if run is None:
            run = Run(run_id, time.time(), self._clock())
            self._runs = [*self._runs[1 - KEPT_RUNS :], run]
        phase = next(
            (each for each in run.phases if (each.node, each.name, each.outcome) == (node, name, "running")), None
        )
        if phase is None:
            phase = PhaseEntry(node, name, self._clock() - run.start)
            run.phases.append(phase)
        return run, phase


def _running(run: Run, node: str | None) -> PhaseEntry | None:
    return next((phase for phase in reversed(run.phases) if (phase.node, phase.outcome) == (node, "running")), None)
