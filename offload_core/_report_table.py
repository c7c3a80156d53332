"""A run report as a table of plain text: one row per phase, one row of totals, then what ran and what is notable."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import PhaseReport

WIDTH = 110
COLUMNS = ("phase", "device", "wall", "load", "weights", "read", "device peak", "host peak", "leaked")

_NO_BUDGET = 1 << 60  # more than any device has: the scope's way to say that it doesn't know


def render(phases: Sequence[PhaseReport]) -> str:
    """The table, at most 110 characters wide, without colours and without a newline at the end.

    Under it stand, for each phase, what ran, what was streamed (if anything was) and the notes. In the last row
    seconds, weights, bytes read and leaked bytes are sums, and the two peaks are maxima.
    """
    if not phases:
        return "No phase has run."
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("phase", "device") else "right")
    for phase in phases:
        table.add_row(*_cells(phase))
    table.add_section()
    table.add_row(*_totals(phases))

    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    lines = [line for line in lines if line]
    for phase in phases:
        if phase.forwards:
            lines.append(f"{phase.name} ran " + ", ".join(f"{name} {count}x" for name, count in phase.forwards.items()))
        if phase.streamed_bytes:
            lines.append(f"{phase.name} {describe_streaming(phase)}")
        if phase.predicted:
            lines.append(f"{phase.name} {describe_prediction(phase)}")
        lines += [f"{phase.name}: {note}" for note in phase.notes]
    return "\n".join(lines)


def describe_prediction(phase: PhaseReport) -> str:
    """What was foretold and what came: ``took 5.2 GiB of device memory (5.3 GiB foretold) and 41 s (38 s foretold)``.

    The memory is what the phase reserved for weights and activations at most.
    """
    foretold = phase.predicted
    memory = f"{human_bytes(phase.reserved_peak_bytes)} of device memory"
    expected = human_bytes(int(foretold["device_peak_bytes"]))
    seconds = f"{human_seconds(phase.wall_s)} ({human_seconds(foretold['seconds'])} foretold)"
    return f"took {memory} ({expected} foretold) and {seconds}"


def describe_streaming(phase: PhaseReport) -> str:
    """What a phase streamed: ``streamed 12.3 GiB of weights within 6.0 GiB on cuda:0 and waited 0.80 s for them``.

    The bytes are counted again each time a weight is brought. A budget that the driver couldn't tell isn't named.
    """
    within = phase.device_budget_bytes
    budget = f"within {human_bytes(within)} " if 0 < within < _NO_BUDGET else ""
    waited = human_seconds(phase.stall_s)
    streamed = human_bytes(phase.streamed_bytes)
    return f"streamed {streamed} of weights {budget}on {phase.device} and waited {waited} for them"


def human_bytes(count: int) -> str:
    """A number of bytes with a binary unit: ``0``, ``812 B``, ``7.8 MiB``, ``22.2 GiB``."""
    if count < 1024:
        return f"{count} B" if count else "0"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Seconds for a table: ``0.08 s``, ``74.2 s``, ``12:05 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min"


def _cells(phase: PhaseReport) -> list[str]:
    return [
        phase.name,
        phase.device,
        human_seconds(phase.wall_s),
        human_seconds(phase.load_s),
        human_bytes(phase.weight_bytes),
        human_bytes(phase.bytes_read),
        human_bytes(phase.device_peak_bytes) if phase.device_peak_bytes else "-",
        human_bytes(phase.host_peak_bytes),
        human_bytes(phase.leaked_bytes),
    ]


def _totals(phases: Sequence[PhaseReport]) -> list[str]:
    device_peak = max(phase.device_peak_bytes for phase in phases)
    return [
        "all",
        "",
        human_seconds(sum(phase.wall_s for phase in phases)),
        human_seconds(sum(phase.load_s for phase in phases)),
        human_bytes(sum(phase.weight_bytes for phase in phases)),
        human_bytes(sum(phase.bytes_read for phase in phases)),
        human_bytes(device_peak) if device_peak else "-",
        human_bytes(max(phase.host_peak_bytes for phase in phases)),
        human_bytes(sum(phase.leaked_bytes for phase in phases)),
    ]
