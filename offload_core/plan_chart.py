"""A plan as a chart of memory over time. Import this only to draw: it brings matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from . import _charts as charts
from ._report_table import human_bytes, human_seconds
from .plan_table import plan_line
from .plan_timeline import MemoryTimeline, PhaseMemory, memory_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from .foresight import Foresight

WIDTH, HEIGHT, SCALE = 900, 400, 2.0  # pixels, and of a picture's for each

_LAYERS = (
    ("resident weights", charts.BLUE),
    ("streamed weights", charts.ORANGE),
    ("unused ring", charts.PALE_ORANGE),
    ("activations", charts.GREEN),
    ("compute waits", charts.RED),
)
_LEAST_SHARE = 0.17  # of the width, for a phase that takes next to no time
_FAR = 2.5  # a budget that is so many times the peak is told, not drawn
_LETTER = 7.0  # pixels of a small one, with some room


def plan_picture(foresight: Foresight) -> Image:
    """The chart of a plan as an RGB picture of 1800 x 800 pixels."""
    return charts.as_image(plan_figure(foresight), SCALE)


def plan_png(foresight: Foresight) -> bytes:
    """The chart of a plan as a PNG file of 1800 x 800 pixels."""
    return charts.as_png(plan_figure(foresight), SCALE)


def plan_svg(foresight: Foresight) -> bytes:
    """The chart of a plan as an SVG file. The same plan gives the same bytes."""
    return charts.as_svg(plan_figure(foresight))


def plan_figure(foresight: Foresight) -> Figure:
    """Memory on the execution device over time, 900 x 400 pixels: a panel for each phase, the budget as a line, and
    below each panel in which part of the time compute waits for weights.

    A panel is as wide as its phase is long, but wide enough to read; each has a time of its own, from 0.
    """
    timeline = memory_timeline(foresight)
    figure = charts.new_figure(WIDTH, HEIGHT)
    _say(figure, timeline, plan_line(foresight.plan))
    widths = _widths([phase.end_s - phase.start_s for phase in timeline.phases])
    shape: dict[str, Any] = {"width_ratios": widths, "height_ratios": [18, 1], "wspace": 0.025, "hspace": 0.05}
    grid = figure.add_gridspec(2, len(widths), left=0.075, right=0.985, top=0.715, bottom=0.125, **shape)
    peak = max((phase.peak_bytes for phase in timeline.phases), default=0)
    is_near = timeline.budget_bytes <= _FAR * peak
    top = 1.12 * max(peak, timeline.budget_bytes if is_near else 0, 1)
    panels = []
    for number, (phase, width) in enumerate(zip(timeline.phases, widths, strict=True)):
        axes, below = figure.add_subplot(grid[0, number]), figure.add_subplot(grid[1, number])
        _draw_memory(axes, phase, width, top)
        _draw_waits(below, phase, width)
        if is_near:
            _draw_budget(axes, phase, timeline.budget_bytes, top)
        if number:
            axes.tick_params(labelleft=False, left=False)
            axes.set_ylabel("")
        panels.append(axes)
    highest = max(range(len(panels)), key=lambda number: timeline.phases[number].peak_bytes)
    _mark_peak(panels[highest], timeline.phases[highest])
    _name_budget(panels, highest, timeline, is_near, top)
    return figure


def _say(figure: Figure, timeline: MemoryTimeline, line: str) -> None:
    title = f"{timeline.model} on {timeline.machine}"
    figure.text(0.012, 0.935, title, color=charts.INK, fontsize=12, fontweight="bold")
    figure.text(0.012, 0.875, line, color=charts.INK if timeline.fits else charts.RED, fontsize=9.5)
    patches = [Patch(facecolor=colour, label=label) for label, colour in _LAYERS]
    spacing = {"handlelength": 1.1, "handleheight": 0.9, "columnspacing": 1.6, "handletextpad": 0.5}
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "labelcolor": charts.QUIET, **spacing}
    figure.legend(handles=patches, loc="upper left", bbox_to_anchor=(0.004, 0.862), ncols=len(patches), **style)


def _widths(seconds: Sequence[float]) -> list[float]:
    """Pixels of panels that are as wide as phases are long; but a short one takes from those that are longer."""
    total = sum(seconds) or 1.0
    shares = [each / total for each in seconds]
    wide = sum(share for share in shares if share > _LEAST_SHARE)
    left = 1 - _LEAST_SHARE * sum(share <= _LEAST_SHARE for share in shares)
    return [0.9 * WIDTH * (share * left / wide if share > _LEAST_SHARE else _LEAST_SHARE) for share in shares]


def _draw_memory(axes: Axes, phase: PhaseMemory, width: float, top: float) -> None:
    charts.plain_axes(axes)
    samples = phase.samples.thinned(int(width), phase.end_s)
    weights = samples.resident_bytes
    heights = (weights, weights + samples.streamed_bytes, weights + samples.ring_bytes, samples.total_bytes)
    for height, (_, colour) in reversed(list(zip(heights, _LAYERS, strict=False))):
        _draw_steps(axes, samples.seconds, height, phase.end_s, colour)
    _set_span(axes, phase)
    charts.byte_axis(axes, top)
    axes.tick_params(labelbottom=False, bottom=False)
    lasting = human_seconds(phase.end_s - phase.start_s)
    axes.set_title(f"{phase.name}, {lasting}", loc="left", fontsize=9.5, color=charts.INK, pad=4)
    _name_components(axes, phase, width)


def _name_components(axes: Axes, phase: PhaseMemory, width: float) -> None:
    """Names of components that come one after another, where there is room for all."""
    scale = width / max(phase.end_s - phase.start_s, 1e-9)
    spans = phase.components
    if len(spans) < 2 or any((span.end_s - span.start_s) * scale < len(span.name) * _LETTER for span in spans):
        return
    for span in spans:
        if span is not spans[0]:
            axes.axvline(span.start_s, color=charts.PAPER, linewidth=1.2)
        middle = (span.start_s + span.end_s) / 2
        charts.label(axes, span.name, (middle, 0), (0, 5), ha="center", va="bottom")


def _draw_waits(axes: Axes, phase: PhaseMemory, width: float) -> None:
    charts.plain_axes(axes)
    axes.grid(False)
    samples = phase.samples.thinned(int(width), phase.end_s)
    _draw_steps(axes, samples.seconds, samples.waiting, phase.end_s, charts.RED)
    _set_span(axes, phase)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    charts.time_axis(axes, phase.start_s, phase.end_s, width)


def _draw_steps(axes: Axes, seconds: np.ndarray, heights: np.ndarray, end_s: float, colour: str) -> None:
    changed = np.flatnonzero(np.diff(heights, prepend=-1))
    if len(changed):
        axes.stairs(heights[changed], np.append(seconds[changed], end_s), fill=True, color=colour, linewidth=0)


def _set_span(axes: Axes, phase: PhaseMemory) -> None:
    axes.set_xlim(phase.start_s, max(phase.end_s, phase.start_s + 1e-9))


def _draw_budget(axes: Axes, phase: PhaseMemory, budget_bytes: int, top: float) -> None:
    axes.axhline(budget_bytes, color=charts.RED, linewidth=1.3, linestyle=(0, (5, 2)))
    if not phase.fits:
        axes.axhspan(budget_bytes, top, color=charts.RED, alpha=0.12, linewidth=0, zorder=0)


def _name_budget(panels: Sequence[Axes], highest: int, timeline: MemoryTimeline, is_near: bool, top: float) -> None:
    """In the last panel without the mark of the peak, if there is one."""
    text = f"budget {human_bytes(timeline.budget_bytes)}"
    axes = next((axes for number, axes in reversed(list(enumerate(panels))) if number != highest), panels[-1])
    right: dict[str, Any] = {"ha": "right", "color": charts.RED, "xycoords": axes.get_yaxis_transform()}
    if is_near:
        charts.label(axes, text, (1, timeline.budget_bytes), (-5, 4), va="bottom", **right)
    else:
        charts.label(axes, f"{text} \u2191", (1, top), (-5, -4), va="top", **right)


def _mark_peak(axes: Axes, phase: PhaseMemory) -> None:
    totals = phase.samples.total_bytes
    if not len(totals):
        return
    index = int(np.argmax(totals))
    x, y = float(phase.samples.seconds[index]), float(totals[index])
    share = (x - phase.start_s) / max(phase.end_s - phase.start_s, 1e-9)
    side, away = ("left", 7) if share < 0.2 else ("right", -7) if share > 0.8 else ("center", 0)
    axes.plot([x], [y], marker="o", markersize=4, color=charts.INK, clip_on=False)
    charts.label(axes, f"peak {human_bytes(int(y))}", (x, y), (away, -8), ha=side, va="top")
