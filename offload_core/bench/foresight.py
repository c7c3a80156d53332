"""The command ``bench foresight``: what is foretold of jobs beside what happens when they run, on the CPU.

Every family of a fixed list, by its tiny model: peaks of activations at three sizes, peaks of phases in five budgets,
whether jobs fit, and the seconds of a step. A failure is a row like any other and counts as a miss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _picture_files as files
from .foresight_cases import FAMILIES, Case, Foretold, Size, chosen, failure, tiny_folder

if TYPE_CHECKING:
    from .._console import Terminal
    from ..plan import Rates
    from .activations import ActivationRow
    from .budgets import FitRow, PeakRow
    from .step_times import StepRow


@dataclass(frozen=True)
class Extent:
    """How much of it is run. sizes: of a family, for activations. fit_sizes: of these, for the question whether a job
    fits, in `fit_budgets` (see `budgets.fit_rows`). times_least: budgets for peaks, in smallest ones. mid_size: whether
    a larger model is timed, too."""

    sizes: int = 3
    fit_sizes: int = 2
    fit_budgets: tuple[str, ...] = ("+0", "-1", "0.9", "1.3")
    times_least: tuple[float, ...] = (1.0, 1.15, 1.5, 2.5, 5.0)
    mid_size: bool = True


QUICK = Extent(sizes=1, fit_sizes=1, fit_budgets=("+0", "-1"), times_least=(1.0, 1.5), mid_size=False)


@dataclass
class Rows:
    """All that was found."""

    activations: list[ActivationRow] = field(default_factory=list)
    device_peaks: list[PeakRow] = field(default_factory=list)
    fits: list[FitRow] = field(default_factory=list)
    step_times: list[StepRow] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench foresight``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and the summary here")
    parser.add_argument("--families", metavar="A,B", help=f"some of: {', '.join(FAMILIES)}")
    parser.add_argument("--quick", action="store_true", help="one size, two budgets, and no model of middle size")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Runs the benchmark, shows tables on stdout and progress on stderr. Raises InputError for an unknown family."""
    families = chosen(args.families.split(",") if args.families else None)
    if args.json is not None:
        files.check_writable(args.json)
    from . import foresight_table as table
    from .foresight_summary import summarise
    from .offload import machine

    with tempfile.TemporaryDirectory(prefix="phase-offload-bench-") as home:
        rows, rates = _Bench(terminal, Path(home), QUICK if args.quick else Extent()).run(families)
    summary = summarise(rows)
    for part in (
        table.render_activations(rows.activations),
        table.render_peaks(rows.device_peaks),
        table.render_fits(rows.fits),
        table.render_steps(rows.step_times),
        table.render_summary(summary),
    ):
        terminal.say(part + "\n")
    if args.json is not None:
        found = {part: [row.to_dict() for row in vars(rows)[part]] for part in vars(rows)}
        result = {"machine": machine(), "rates": vars(rates), **found, "summary": summary}
        files.write_files([(args.json, files.text_writer(json.dumps(result, indent=2) + "\n"))])
        terminal.say(f"Wrote {args.json}")


class _Bench:
    """One run of the command."""

    def __init__(self, terminal: Terminal, home: Path, extent: Extent) -> None:
        self._terminal, self._home, self._extent = terminal, home, extent
        self._poll = terminal.check_interrupt
        self._rows = Rows()

    def run(self, families: dict[str, tuple[Size, ...]]) -> tuple[Rows, Rates]:
        import torch

        from ..rates import measured_rates

        self._terminal.note("measuring this machine's rates, if they aren't known yet")
        rates = measured_rates(torch.device("cpu"))
        for number, (family, sizes) in enumerate(families.items(), 1):
            self._terminal.note(f"{number} of {len(families)}: {family}")
            self._family(family, sizes[: self._extent.sizes], rates)
        if self._extent.mid_size:
            self._mid_size(rates)
        return self._rows, rates

    def _family(self, family: str, sizes: Sequence[Size], rates: Rates) -> None:
        from .activations import activation_rows

        folder = tiny_folder(family, self._home)
        for index, size in enumerate(sizes):
            case, fits = Case(family, size, folder), index < self._extent.fit_sizes
            foretold = self._foretold(case, tiles=fits)
            self._terminal.note(f"  {size}: activations")
            self._rows.activations += activation_rows(case, self._poll, foretold)
            if fits:
                self._budgets(case, foretold, rates, peaks=index == 0)
        self._steps([Case(family, size, folder) for size in FAMILIES[family][:2]], family, rates)

    def _budgets(self, case: Case, foretold: Foretold | Exception, rates: Rates, *, peaks: bool) -> None:
        from . import budgets

        times, words = self._extent.times_least if peaks else (), self._extent.fit_budgets
        self._terminal.note(f"  {case.size}: peaks in {len(times)} budgets, does it fit in {len(words)}")
        try:
            plans, truth = _there(foretold), budgets.Truth(case, self._poll)
            peaks_found = budgets.peak_rows(case, plans, truth.activations, times, rates, self._poll)
            fits_found = budgets.fit_rows(case, plans, truth, words, rates)
        except Exception as error:
            peaks_found, fits_found = budgets.failed_peaks(case, times, error), budgets.failed_fits(case, words, error)
        self._rows.device_peaks += peaks_found
        self._rows.fits += fits_found

    def _steps(self, cases: Sequence[Case], name: str, rates: Rates) -> None:
        """A row for the last of two sizes; the first one teaches."""
        from .step_times import StepRow, lesson_of, step_row, timed_case

        first, case = (timed_case(each) for each in cases)
        self._terminal.note(f"  {case.size}: seconds of a step")
        try:
            taught = lesson_of(first, Foretold(first, self._poll), rates, self._poll)
            row = step_row(case, name, Foretold(case, self._poll), rates, self._poll, taught)
            self._rows.step_times.append(row)
        except Exception as error:
            self._rows.step_times.append(StepRow(name, str(case.size), status="failed", reason=failure(error)))

    def _mid_size(self, rates: Rates) -> None:
        from .step_times import MID_SIZE, mid_size_cases

        self._terminal.note(f"{MID_SIZE}: making the model")
        self._steps(mid_size_cases(self._home), MID_SIZE, rates)

    def _foretold(self, case: Case, *, tiles: bool = False) -> Foretold | Exception:
        try:
            return Foretold(case, self._poll, tiles=tiles)
        except Exception as error:
            return error


def _there(foretold: Foretold | Exception) -> Foretold:
    """What was foretold; raises the error if nothing could be."""
    if isinstance(foretold, Exception):
        raise foretold
    return foretold
