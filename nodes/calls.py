"""One run of one node body: what it may use, what it gives back, and what must not stay behind when it fails."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload_core.errors import InsufficientMemoryError
from offload_core.session import Session

from .bodies import BODIES, FINGERPRINTS, PROBLEMS
from .progress import NodeObserver
from .results import NodeResult
from .state import PackState


@dataclass
class NodeCall:
    """What a node body may use: the pack's state and, for this call alone, who listens and an engine session."""

    state: PackState
    observer: NodeObserver
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = Session(observer=self.observer)


def run_node(node_id: str, state: PackState, observer: NodeObserver, inputs: Mapping[str, Any]) -> NodeResult:
    """Runs the body of a node. Errors and interrupts pass through as they are, but hold no values of the failed run.

    A host keeps the traceback of a failed run, and with it every local of its frames, for seconds.
    """
    call = NodeCall(state, observer)
    try:
        return BODIES[node_id](call, **inputs)
    except BaseException as error:
        forget_locals(error)
        if isinstance(error, InsufficientMemoryError):
            state.host.make_room()
        raise
    finally:
        state.remember(call.session.report.phases)


def fingerprint(node_id: str, state: PackState, inputs: Mapping[str, Any]) -> Any:
    """A value that changes when a node must run again though its inputs are the same; None for nodes without one."""
    function = FINGERPRINTS.get(node_id)
    return function(state, **inputs) if function else None


def problem(node_id: str, state: PackState, inputs: Mapping[str, Any]) -> str | None:
    """Why a node can't run with these constants, as a sentence, or None. An input that is linked or missing is None."""
    function = PROBLEMS.get(node_id)
    return function(state, **inputs) if function else None


def forget_locals(error: BaseException) -> None:
    """Clears the locals of all finished frames in the traceback of an error, and of the errors it came from."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
