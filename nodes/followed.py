"""Listens to a node beside its host: what the phases do goes into the history, and from there to who watches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload_core.errors import InsufficientMemoryError, OffloadError
from offload_core.report import PhaseReport
from offload_core.session import Progress

from .progress import NodeObserver
from .run_history import Outcome

if TYPE_CHECKING:
    from .state import PackState

EVENT = "phase_offload.event"
EVENT_INTERVAL_S = 0.2


class FollowedObserver(NodeObserver):
    """Passes everything on to the host's observer of the node, and keeps a note of it.

    Events of a run: "began" and "progress" (at most five a second), "retry" when memory ran out and the phase went on,
    "refused" when it couldn't, and "ended".
    """

    def __init__(self, observer: NodeObserver, state: PackState) -> None:
        self._observer, self._history, self._host = observer, state.history, state.host
        self._run = state.host.run_id()
        self._said_s = 0.0
        self.node_id, self.wants_preview = observer.node_id, observer.wants_preview

    def progress(self, event: Progress) -> None:
        self._observer.progress(event)
        run = self._history.progressed(self._run, self.node_id, event)
        if run is not None and time.monotonic() - self._said_s >= EVENT_INTERVAL_S:
            self._said_s = time.monotonic()
            self._say("progress", run)

    def check_interrupt(self) -> None:
        self._observer.check_interrupt()

    def make_room(self) -> bool:
        self._say("retry", self._history.retried(self._run, self.node_id))
        return self._observer.make_room()

    def status(self, text: str) -> None:
        self._observer.status(text)

    def foretold(self, phase: str, figures: Mapping[str, float]) -> None:
        self._say("began", self._history.foretold(self._run, self.node_id, phase, figures))

    def ended(self, reports: Sequence[PhaseReport], error: BaseException | None) -> None:
        """The node is done, with an error or without."""
        outcome: Outcome = "done"
        if error is not None:
            outcome = "interrupted" if self._host.is_interrupt(error) else "failed"
        said = "" if outcome != "failed" else str(error) if isinstance(error, OffloadError) else type(error).__name__
        run = self._history.ended(self._run, self.node_id, reports, outcome, said)
        self._say("refused" if isinstance(error, InsufficientMemoryError) else "ended", run)

    def _say(self, kind: str, run: dict[str, Any] | None) -> None:
        if run is not None:
            self._host.send(EVENT, {"kind": kind, "run": run})


def process_memory(device: str) -> tuple[int, int]:
    """Bytes that torch has allocated on the device of that name, and this process's resident set."""
    import torch

    from offload_core.devices import allocated_bytes, resident_bytes

    return allocated_bytes(torch.device(device)), resident_bytes()
