"""The chart of a plan says what the plan says, reads at 900 x 400 pixels, and is the same file each time."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from offload_core import _charts as charts
from offload_core.foresight import Foresight
from offload_core.plan_chart import plan_figure, plan_picture, plan_png, plan_svg
from test_plan_timeline import component, foreseen

MIB = 1 << 20


def job(budget: int = 60 * MIB) -> Foresight:
    """One phase that takes next to no time, one that streams for half a minute, one of activations."""
    return foreseen(
        [component(2 * MIB)],
        [component(*[8 * MIB] * 8, times=4, flops=10_000, peaks=[4 * MIB] * 8)],
        [component(MIB, peaks=(30 * MIB,))],
        device=budget,
        activations=30 * MIB,
        bytes_per_s=8 * MIB,
    )


def words(svg: bytes) -> str:
    """What an SVG says: its letters are shapes, with the text of each in a comment."""
    return "\n".join(re.findall("<!-- (.+?) -->", svg.decode("utf-8")))


def lines_at(foresight: Foresight, height: float) -> int:
    """In how many panels a line goes across at this height."""
    lines = [line for axes in plan_figure(foresight).axes for line in axes.lines]
    return sum(np.all(np.asarray(line.get_ydata()) == height) and len(line.get_ydata()) == 2 for line in lines)


def test_the_chart_names_model_machine_phases_peak_and_budget() -> None:
    said = words(plan_svg(job()))
    assert "a model on a machine" in said
    assert "Plan: streams 56.0 MiB of weights, peaks at 53.0 MiB of 60.0 MiB" in said
    assert {"peak 53.0 MiB", "budget 60.0 MiB"} <= set(said.splitlines())
    assert all(f"phase {number}, " in said for number in range(3))
    assert "resident weights" in said and "activations" in said
    assert {"MiB", "s"} <= set(said.splitlines())


def test_a_job_that_does_not_fit_says_so_and_is_drawn_above_its_budget() -> None:
    short = job(budget=32 * MIB)
    assert "This doesn't fit 32.0 MiB of device memory; it needs" in words(plan_svg(short))
    assert lines_at(short, 32 * MIB) == 3
    top = plan_figure(short).axes[0].get_ylim()[1]
    assert top > short.plan.device_peak_bytes > 32 * MIB


def test_a_budget_far_above_the_peak_is_told_and_does_not_flatten_the_chart() -> None:
    wide = job(budget=1 << 40)
    assert "budget 1.0 TiB" in words(plan_svg(wide))
    assert lines_at(wide, 1 << 40) == 0
    assert plan_figure(wide).axes[0].get_ylim()[1] < 1.5 * wide.plan.device_peak_bytes


def test_a_short_phase_has_a_panel_wide_enough_to_read() -> None:
    shares = [axes.get_position().width for axes in plan_figure(job()).axes[::2]]
    assert shares[1] > shares[0] > 0.1 and shares[2] > 0.1


def test_pictures_have_a_background_of_their_own_and_the_size_that_is_said() -> None:
    picture = Image.open(io.BytesIO(plan_png(job())))
    assert (picture.mode, picture.size) == ("RGB", (1800, 800))
    assert picture.getpixel((0, 0)) == picture.getpixel((1799, 799)) == (255, 255, 255)
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(plan_picture(job())))
    svg = plan_svg(job()).decode("utf-8")
    assert 'viewBox="0 0 648 288"' in svg  # points: 900 x 400 pixels
    assert "fill: #ffffff" in svg


def test_the_same_plan_gives_the_same_files_and_settings_of_matplotlib_are_left_alone() -> None:
    before: dict[str, Any] = dict(matplotlib.rcParams)
    assert plan_svg(job()) == plan_svg(job())
    assert plan_png(job()) == plan_png(job())
    assert dict(matplotlib.rcParams) == before
    assert len(plan_svg(job())) < 500_000


@pytest.mark.parametrize(
    ("top", "unit", "marks"),
    [(7.9 * (1 << 30), "GiB", ["0", "2", "4", "6"]), (1700 * MIB, "MiB", ["0", "400", "800", "1200", "1600"])],
)
def test_bytes_are_marked_in_the_unit_that_reads(top: float, unit: str, marks: list[str]) -> None:
    axes = charts.new_figure(400, 400).add_subplot()
    charts.byte_axis(axes, top)
    size = {"GiB": 1 << 30, "MiB": MIB}[unit]
    assert axes.get_ylabel() == unit and axes.get_ylim() == (0, top)
    shown = [tick for tick in axes.get_yticks() if tick <= top]
    assert [axes.yaxis.get_major_formatter()(tick) for tick in shown] == marks
    assert shown == [float(mark) * size for mark in marks]


@pytest.mark.parametrize(
    ("lasting", "unit", "marks"),
    [(1.25, "s", ["0", "0.5", "1"]), (230, "min", ["0", "1", "2", "3"]), (100, "s", ["0", "50"])],
)
def test_time_is_marked_in_seconds_or_minutes_and_not_at_the_very_end(
    lasting: float, unit: str, marks: list[str]
) -> None:
    axes = charts.new_figure(200, 400).add_subplot()
    charts.time_axis(axes, 10, 10 + lasting, 180)
    assert axes.get_xlabel() == unit
    assert [label.get_text() for label in axes.get_xticklabels()] == marks
