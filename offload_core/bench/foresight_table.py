"""The rows of `bench foresight` as plain text: a table for each part with a row for each family."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._report_table import human_bytes

if TYPE_CHECKING:
    from .activations import ActivationRow
    from .budgets import FitRow, PeakRow
    from .step_times import StepRow

WIDTH = 110
TARGETS = {
    "activations_equal": "activations equal to the byte",
    "activations_within_5_percent": "activations within 5 %",
    "activation_misses_explained": "missed activations explained",
    "device_peaks_within_3_percent": "peaks of phases within 3 %",
    "fits_right": "answers whether a job fits that are right",
    "step_time_median_error": "median error of the seconds of a step",
}


def render_activations(rows: Sequence[ActivationRow]) -> str:
    """How many peaks are equal, and the farthest; then every miss with its reason."""
    lines = []
    for family, all_here in _by_family(rows):
        here = [row for row in all_here if row.status != "left out"]
        sizes = len({row.size for row in here})
        equal, failed = sum(row.equal for row in here), sum(row.status == "failed" for row in here)
        largest = max((row.measured_bytes or 0 for row in here), default=0)
        lines.append((family, sizes, len(here), equal, failed, _far([row.ratio for row in here]), human_bytes(largest)))
    columns = ("family", "sizes", "peaks", "equal", "failed", "farthest", "largest")
    found = _table("Peaks of activations, foretold / counted", columns, lines)
    noted = [row for row in rows if not row.equal]
    return "\n".join([found, *dict.fromkeys(_noted(row) for row in noted)])


def _noted(row: ActivationRow) -> str:
    name = ".".join(filter(None, (row.component, row.entry))) or "all"
    if row.status == "left out":
        return f"{row.family} {name}: left out, {row.reason}."
    sizes = f"{row.predicted_bytes} foretold, {row.measured_bytes} counted"
    return f"{row.family} {row.size} {name}: {sizes}; {row.reason}."


def render_peaks(rows: Sequence[PeakRow]) -> str:
    """For each budget the ratio of the phase that is farthest from its plan."""
    times = sorted({row.times_least for row in rows})
    lines = []
    for family, here in _by_family(rows):
        cells = [_far([row.ratio for row in here if row.times_least == multiple]) for multiple in times]
        lines.append((family, here[0].size, *cells))
    columns = ("family", "size", *(f"x {multiple:g}" for multiple in times))
    found = _table("Peaks of phases, measured / planned, in multiples of the smallest budget", columns, lines)
    failed = [f"{row.family} x {row.times_least:g} {row.phase}: {row.reason}." for row in rows if row.reason]
    return "\n".join([found, *failed])


def render_fits(rows: Sequence[FitRow]) -> str:
    """How many answers are right; then every wrong one."""
    lines = []
    for family, here in _by_family(rows):
        fit, right = sum(row.fits is True for row in here), sum(row.right for row in here)
        lines.append((family, len(here), fit, right, len(here) - right))
    found = _table("Does it fit?", ("family", "cases", "fit", "right", "wrong"), lines)
    wrong = [
        f"{row.family} {row.size} budget {row.budget} ({row.budget_bytes:,} bytes): foretold "
        f"{'to fit' if row.predicted else 'not to fit'}, {'fits' if row.fits else row.reason}"
        for row in rows
        if not row.right
    ]
    return "\n".join([found, *wrong])


def render_steps(rows: Sequence[StepRow]) -> str:
    """Seconds of a step, foretold and measured."""
    lines: list[Sequence[Any]] = []
    for row in rows:
        if row.status == "failed":
            lines.append((row.family, row.size, "failed"))
            continue
        first, measured, ratio = _ms(row.predicted_s), _ms(row.measured_s), _number(row.ratio)
        sizes = (human_bytes(row.weight_bytes), human_bytes(row.streamed_bytes))
        second = (_ms(row.second_s), _number(row.second_ratio))
        others = "-" if row.others_cpus is None else f"{row.others_cpus:.1f}"
        lines.append((row.family, row.size, *sizes, first, measured, ratio, *second, others))
    columns = (
        "family", "size", "weights", "streamed", "foretold", "measured", "ratio", "foretold 2", "ratio 2", "others",
    )  # fmt: skip
    found = _table("Milliseconds of a step, measured / foretold", columns, lines)
    failed = [f"{row.family}: {row.reason}." for row in rows if row.reason]
    return "\n".join([found, *failed, "others: CPUs that other processes kept busy meanwhile."])


def render_summary(summary: dict[str, Any]) -> str:
    """The figure of each target beside what is aimed at."""
    lines = []
    for name, title in TARGETS.items():
        target = summary["targets"][name]
        aim = f"{'at most' if target['at_most'] else 'at least'} {100 * target['aim']:.0f} %"
        figure = "-" if target["figure"] is None else f"{100 * target['figure']:.1f} %"
        lines.append((title, figure, aim, {True: "yes", False: "no", None: "-"}[target["met"]]))
    return _table("Summary", ("figure", "found", "aim", "met"), lines)


def _by_family(rows: Sequence[Any]) -> Iterable[tuple[str, list[Any]]]:
    for family in dict.fromkeys(row.family for row in rows):
        yield family, [row for row in rows if row.family == family]


def _far(ratios: Sequence[float | None]) -> str:
    """The ratio that is farthest from one."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or not known:
        return "failed"
    return _number(max(known, key=lambda ratio: abs(ratio - 1)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _table(title: str, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for line in lines:
        table.add_row(*map(str, line))
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    return "\n".join([title, *(line.rstrip() for line in text.getvalue().splitlines() if line.strip())])
