"""A report as a chart: what was foretold of each phase beside what it took. Import this only to draw: it brings
matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from . import _charts as charts
from ._report_table import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from .report import PhaseReport

WIDTH, HEIGHT, SCALE = 900, 400, 2.0  # pixels, and of a picture's for each
MOST_PHASES = 12  # the last ones are drawn

_ROW = 0.36  # the height of a bar, in rows


def report_picture(phases: Sequence[PhaseReport]) -> Image:
    """The chart of a run's phases as an RGB picture of 1800 x 800 pixels."""
    return charts.as_image(report_figure(phases), SCALE)


def report_figure(phases: Sequence[PhaseReport]) -> Figure:
    """Two panels of 900 x 400 pixels together, a row for each phase: device memory that was reserved at most, and
    seconds, of which those of loading are in another colour. A pale bar below is what the plan foretold, where there
    was a plan. Of more than twelve phases the last are drawn.
    """
    figure = charts.new_figure(WIDTH, HEIGHT)
    drawn = list(phases)[-MOST_PHASES:]
    _say(figure, phases, len(drawn))
    if not drawn:
        return figure
    grid = figure.add_gridspec(1, 2, left=0.1, right=0.985, top=0.74, bottom=0.11, wspace=0.06)
    memory, seconds = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    took = [phase.reserved_peak_bytes for phase in drawn]
    foretold = [phase.predicted.get("device_peak_bytes") for phase in drawn]
    _draw(memory, "device memory", took, [], foretold, lambda value: human_bytes(int(value)))
    took_s, load_s = [phase.wall_s for phase in drawn], [min(phase.load_s, phase.wall_s) for phase in drawn]
    _draw(seconds, "time", took_s, load_s, [phase.predicted.get("seconds") for phase in drawn], human_seconds)
    memory.set_yticks(range(len(drawn)), [phase.name for phase in drawn], fontsize=9, color=charts.INK)
    seconds.set_yticks([])
    return figure


def _say(figure: Figure, phases: Sequence[PhaseReport], drawn: int) -> None:
    figure.text(0.012, 0.935, "What the phases took", color=charts.INK, fontsize=12, fontweight="bold")
    if phases:
        peak, total = max(phase.reserved_peak_bytes for phase in phases), sum(phase.wall_s for phase in phases)
        line = f"{human_bytes(peak)} of device memory at most, {human_seconds(total)} in all"
        if drawn < len(phases):
            line += f"; the last {drawn} of {len(phases)} phases are drawn"
    else:
        line = "No phase has run."
    figure.text(0.012, 0.875, line, color=charts.INK, fontsize=9.5)
    shown = (("taken", charts.BLUE), ("of it loading", charts.ORANGE), ("foretold", charts.FAINT))
    patches = [Patch(facecolor=colour, label=label) for label, colour in shown]
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(0.004, 0.862),
        ncols=len(patches),
        frameon=False,
        fontsize=8.5,
        labelcolor=charts.QUIET,
        handlelength=1.1,
        handleheight=0.9,
    )


def _draw(
    axes: Axes,
    title: str,
    took: Sequence[float],
    part: Sequence[float],
    foretold: Sequence[float | None],
    words: Callable[[float], str],
) -> None:
    """One panel: a bar of what was taken, `part` of it in another colour, and below it a pale one of what was
    foretold."""
    charts.plain_axes(axes)
    axes.grid(False)
    axes.set_title(title, loc="left", fontsize=9.5, color=charts.INK, pad=4)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)
    top = max([*took, *(value for value in foretold if value is not None)], default=0) or 1
    axes.set_xlim(0, top * 1.28)  # room for the words behind the longest bar
    axes.set_ylim(len(took) - 0.5, -0.5)
    for row, (mine, said) in enumerate(zip(took, foretold, strict=True)):
        place = row if said is None else row - _ROW / 2
        axes.barh(place, mine, _ROW, color=charts.BLUE)
        if part:
            axes.barh(place, part[row], _ROW, color=charts.ORANGE)
        _label(axes, words(mine), mine, place, charts.INK)
        if said is not None:
            axes.barh(row + _ROW / 2, said, _ROW, color=charts.FAINT)
            _label(axes, words(said), said, row + _ROW / 2, charts.QUIET)


def _label(axes: Axes, text: str, x: float, y: float, colour: str) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=colour)
