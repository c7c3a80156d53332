"""The rows of `bench seeds` as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._report_table import human_bytes, human_seconds
from .seed_ways import SEED_WAYS
from .table import BUSY_NEIGHBOURS

if TYPE_CHECKING:
    from .seeds import SeedRow

WIDTH = 150
COLUMNS = (
    "way", "set-up", "encode", "denoise", "decode", "total", "resident", "private", "device", "same picture",
)  # fmt: skip


def render(rows: Sequence[SeedRow]) -> str:
    """A row per way, then the reasons of those that didn't run. Memory is what came after the imports."""
    lines = [_table(COLUMNS, map(_cells, rows))]
    lines += [f"{SEED_WAYS[row.way].title}: {row.status}, {row.reason}" for row in rows if not row.ok]
    if any(row.others_cpus is not None and row.others_cpus > BUSY_NEIGHBOURS for row in rows):
        lines.append("Other processes kept the CPUs busy meanwhile: times are rough.")
    return "\n".join(lines)


def _cells(row: SeedRow) -> list[str]:
    title = SEED_WAYS[row.way].title
    if not row.ok:
        return [title, row.status] + [""] * (len(COLUMNS) - 2)
    times = (row.setup_s, row.encode_s, row.denoise_s, row.decode_s, row.total_s)
    resident = _more(row.resident_peak_bytes, row.baseline_resident_bytes)
    private = _more(row.private_peak_bytes, row.baseline_private_bytes)
    same = {True: "bits", False: "no", None: ""}[row.same_picture]
    return [title, *map(_seconds, times), resident, private, _bytes(row.device_peak_bytes), same]


def render_swap(swap: dict[str, Any]) -> str:
    """A swap of the sequential backend beside one that copies back. Without seconds where there is no link."""
    if swap["status"] != "ok":
        return f"Swap: {swap['status']}, {swap['reason']}"
    lines = []
    for name, title in (("ours", "sequential offload here"), ("copy_back", "a swap that copies back")):
        way = swap[name]
        lines.append([title, _bytes(way["bytes_in"]), _bytes(way["bytes_back"]), _seconds(way["swap_s"])])
    if swap["link"]:
        return _table(("swap", "to the device", "back to RAM", "seconds"), lines)
    table = _table(("swap", "to the device", "back to RAM"), [line[:3] for line in lines])
    return (
        f"{table}\nThe CPU has no link: ours reads the model's file again and keeps none of it, the other copies from "
        "RAM to RAM and keeps all of it there. Their seconds can't be compared."
    )


def _more(peak: int | None, baseline: int | None) -> str:
    return "" if peak is None or baseline is None else human_bytes(max(0, peak - baseline))


def _bytes(value: int | None) -> str:
    return "" if value is None else human_bytes(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else human_seconds(max(0.0, value))


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for line in lines:
        table.add_row(*line)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
