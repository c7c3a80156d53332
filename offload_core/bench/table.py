"""The rows and ratios of the benchmark as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from .._report_table import human_bytes, human_seconds
from .job import Row
from .ways import WAYS

WIDTH = 150
COLUMNS = (
    "way", "load", "set-up", "first", "step", "x floor", "stall",
    "private", "group peak", "disk", "read/step", "same", "others",
)  # fmt: skip
#: Above this many busy CPUs of other processes a row's times are marked.
BUSY_NEIGHBOURS = 0.25


def render(case_title: str, rows: Sequence[Row], floor_s: float | None) -> str:
    """One case: a row per way, then the reasons of those that didn't run."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(*_cells(row, floor_s))
    text = io.StringIO()
    Console(file=text, width=WIDTH, no_color=True, color_system=None, force_terminal=False, highlight=False).print(
        table
    )
    lines = [case_title, *(line.rstrip() for line in text.getvalue().splitlines() if line.strip())]
    lines += [f"{WAYS[row.way].title}: {row.status}, {row.reason}" for row in rows if not row.ok]
    if any(row.others_cpus is not None and row.others_cpus > BUSY_NEIGHBOURS for row in rows):
        lines.append("others: CPUs that other processes kept busy meanwhile; times of such rows are rough.")
    return "\n".join(lines)


def _cells(row: Row, floor_s: float | None) -> list[str]:
    title = WAYS[row.way].title
    if not row.ok:
        return [title, row.status] + [""] * (len(COLUMNS) - 2)
    ratio = f"{row.step_s / floor_s:.2f}" if floor_s and row.step_s else ""
    same = {(True, True): "bits", (True, False): "sum", (False, False): "no"}.get(
        (bool(row.same_sum), bool(row.same_bits)), ""
    )
    return [
        title,
        _seconds(row.load_s),
        _seconds(row.setup_s),
        _seconds(row.first_step_s),
        _seconds(row.step_s),
        ratio,
        _seconds(row.stall_s_per_step),
        _bytes(row.private_peak_bytes),
        _bytes(row.group_peak_bytes),
        _bytes(row.extra_disk_bytes),
        _bytes(row.read_bytes_per_step),
        same if row.same_sum is not None else "-",
        "-" if row.others_cpus is None else f"{row.others_cpus:.1f}",
    ]


def render_micro(micro: dict[str, Any]) -> str:
    """The cost of one access and the ratios of the tiny step."""
    if micro.get("status") != "ok":
        return f"One weight access: {micro.get('status')}, {micro.get('reason')}"
    access = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in micro["access_us"].items())
    ratios = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in micro["tiny_ratio"].items())
    lines = [f"One weight access, microseconds: {access}", f"A step of a tiny model, x resident: {ratios}"]
    return "\n".join(lines + [f"{name.replace('_', ' ')}: {why}" for name, why in micro["reasons"].items()])


def render_floor(floor: dict[str, Any]) -> str:
    """What the floor is made of."""
    if floor.get("status") != "ok":
        return f"Floor: {floor.get('status')}, {floor.get('reason')}"
    rates = [human_bytes(int(floor[name])) + "/s" for name in ("read_alone", "read_beside", "cached_beside")]
    return (
        f"Resident step {human_seconds(floor['compute_s'])}; reads {rates[0]} alone, {rates[1]} beside compute, "
        f"{rates[2]} from the page cache beside compute"
    )


def render_summary(summary: dict[str, Any]) -> str:
    """The headline ratios, a line per case."""
    names = {
        "ours_to_floor": "floor",
        "ours_to_best_peer": "best peer",
        "ours_to_resident": "resident",
        "private_growth_to_budget": "budget (private memory)",
        "group_peak_to_limit": "limit (peak charge)",
    }
    lines = []
    for case, values in summary["cases"].items():
        said = [f"{values[key]:.2f} x {name}" for key, name in names.items() if values.get(key) is not None]
        disk = values.get("ours_extra_disk_bytes")
        if said:
            lines.append(f"phase-offload, {case}: {', '.join(said)}, extra disk {human_bytes(disk or 0)}")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else human_seconds(value)


def _bytes(value: int | None) -> str:
    return "-" if value is None else human_bytes(value)
