"""What charts have in common: a figure with its own background, axes of bytes and of seconds, files and pictures of it.

Matplotlib's objects are used without pyplot, and none of its settings is changed. It is imported here and nowhere else
but where charts are drawn, so import this module only to draw.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

# Told apart by people who see colours otherwise, too (Okabe and Ito's palette, with lighter kin).
BLUE, ORANGE, PALE_ORANGE, GREEN, RED = "#3b7fb5", "#e69f00", "#f8e0ae", "#7cb98d", "#c8401d"
PAPER, INK, QUIET, FAINT = "#ffffff", "#222222", "#666666", "#dddddd"

Point = tuple[float, float]

_DPI = 100
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SVG_ID = re.compile(r'(?<=\bid=")[a-z][0-9a-f]{10}(?=")')


def new_figure(width: int, height: int) -> Figure:
    """An empty figure of so many pixels, on white whatever page it comes to lie on."""
    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=PAPER)


def as_image(figure: Figure, scale: float = 1.0) -> Image:
    """The figure as RGB. scale: pixels for each of its own, in both directions."""
    from PIL import Image

    figure.set_dpi(_DPI * scale)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    return Image.frombuffer("RGBA", (width, height), canvas.buffer_rgba()).convert("RGB")


def as_png(figure: Figure, scale: float = 1.0) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    as_image(figure, scale).save(file, format="PNG", optimize=True)
    return file.getvalue()


def as_svg(figure: Figure) -> bytes:
    """The figure as an SVG file. The same figure gives the same bytes: no date, and ids that are counted."""
    file = io.BytesIO()
    figure.set_dpi(_DPI)
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue().decode("utf-8")
    for number, name in enumerate(dict.fromkeys(_SVG_ID.findall(text))):
        text = text.replace(name, f"id{number}")
    return text.encode("utf-8")


def byte_axis(axes: Axes, top: float) -> None:
    """Lets the vertical axis go from 0 to `top` bytes and marks it a few times, in the largest unit that fits twice."""
    size, unit = next((each for each in _UNITS if top >= 2 * each[0]), (1, "bytes"))
    axes.set_yticks([tick * size for tick in MaxNLocator(nbins=5, integer=True).tick_values(0, top / size)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axes.set_ylabel(unit, color=QUIET, fontsize=9)
    axes.set_ylim(0, top)


def time_axis(axes: Axes, start_s: float, end_s: float, width: float) -> None:
    """Marks the horizontal axis from 0 at `start_s`, in seconds, or minutes from two on. width: of the axes, in pixels;
    marks don't come close to each other or to its end, where other axes may begin."""
    size, unit = (60, "min") if end_s - start_s >= 120 else (1, "s")
    lasting = (end_s - start_s) / size
    ticks = MaxNLocator(nbins=max(int(width / 45), 1), steps=[1, 2, 5, 10]).tick_values(0, lasting)
    ticks = [tick for tick in ticks if tick == 0 or 0 < tick <= lasting * (1 - 14 / width)]
    axes.set_xticks([start_s + tick * size for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(unit, color=QUIET, fontsize=9, labelpad=1)


def label(
    axes: Axes, text: str, at: Point, offset: Point, *, ha: str, va: str, color: str = INK, **options: Any
) -> None:
    """A short text so many points away from a point of the axes, on a piece of paper so that it reads on anything."""
    box = {"boxstyle": "round,pad=0.25", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85}
    away: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "ha": ha, "va": va}
    axes.annotate(text, at, **away, fontsize=8.5, color=color, bbox=box, **options)


def plain_axes(axes: Axes) -> None:
    """Axes with faint lines across and nothing that says nothing."""
    axes.set_facecolor(PAPER)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, labelsize=9, length=2.5, color=FAINT)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(QUIET)
        spine.set_linewidth(0.6)
