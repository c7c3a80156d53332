"""What a run says while it runs: one short line for each step forward, and one for a finished phase."""

from __future__ import annotations

from collections.abc import Mapping

from offload_core._report_table import describe_prediction, describe_streaming, human_bytes
from offload_core.report import PhaseReport
from offload_core.session import Observer, Progress


class NodeObserver(Observer):
    """An engine observer that also has a status line, as a node has. This one is silent.

    node_id: the node's id in its graph, None where it isn't known.
    """

    wants_preview = False
    node_id: str | None = None

    def progress(self, event: Progress) -> None:
        pass

    def check_interrupt(self) -> None:
        pass

    def make_room(self) -> bool:
        return False

    def status(self, text: str) -> None:
        """Shows one line. A later line replaces it."""

    def foretold(self, phase: str, figures: Mapping[str, float]) -> None:
        """Told what a plan says of a phase (as in PhaseReport.predicted), before it begins."""


def describe_progress(event: Progress) -> str:
    """A line such as "loading 1.2 GiB of 3.4 GiB" or "step 3 of 20"."""
    if event.unit == "bytes":
        return f"loading {human_bytes(event.done)} of {human_bytes(event.total)}"
    if event.unit == "steps":
        return f"step {event.done} of {event.total}"
    return f"{event.stage} {event.done} of {event.total} {event.unit}"


def describe_phase(phase: PhaseReport) -> str:
    """A line such as "12.3 s, 3.4 GiB of weights, peak 5.0 GiB on cuda:0", then what it streamed, what
    was foretold, and its notes."""
    line = f"{phase.wall_s:.1f} s, {human_bytes(phase.weight_bytes)} of weights"
    if phase.device_peak_bytes:
        line += f", peak {human_bytes(phase.device_peak_bytes)} on {phase.device}"
    streamed = [describe_streaming(phase)] if phase.streamed_bytes else []
    foretold = [describe_prediction(phase)] if phase.predicted else []
    return "\n".join((line, *streamed, *foretold, *phase.notes))
