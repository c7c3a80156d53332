"""One run of one node body: what it may use, what it gives back, and what must not stay behind when it fails."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload_core.errors import InsufficientMemoryError
from offload_core.session import Session

from .catalog import NODES
from .followed import FollowedObserver
from .progress import NodeObserver, describe_phase
from .results import NodeResult
from .state import PackState

log = logging.getLogger(__name__)


@dataclass
class NodeCall:
    """What a node body may use: the pack's state and, for this call alone, who listens and an engine session."""

    state: PackState
    observer: NodeObserver
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        state = self.state
        self.session = Session(
            observer=self.observer,
            prompt_cache=state.prompt_cache,
            warm=state.warm,
            memory_host=state.host.memory,
        )

    def say_how_it_went(self, *notes: str) -> None:
        """Shows the notes and what the last phase cost."""
        phases = self.session.report.phases
        lines = [describe_phase(phases[-1])] if phases else []
        for note in notes:
            log.warning("%s", note)
        self.observer.status("\n".join((*notes, *lines)))


def run_node(node_id: str, state: PackState, observer: NodeObserver, inputs: Mapping[str, Any]) -> NodeResult:
    """Runs the body of a node. Errors and interrupts pass through as they are, but hold no values of the failed run.

    A host keeps the traceback of a failed run, and with it every local of its frames, for seconds.
    """
    followed, failure = FollowedObserver(observer, state), None
    call = NodeCall(state, followed)
    try:
        return NODES[node_id].run(call, **inputs)
    except BaseException as error:
        failure = error
        forget_locals(error)
        if isinstance(error, InsufficientMemoryError):
            state.warm.release()
            state.host.make_room()
        raise
    finally:
        state.remember(call.session.report.phases)
        followed.ended(call.session.report.phases, failure)
        failure = None  # a reference cycle with this frame


def fingerprint(node_id: str, state: PackState, inputs: Mapping[str, Any]) -> Any:
    """A value that changes when a node must run again though its inputs are the same; None for nodes without one."""
    node = NODES.get(node_id)
    return node.fingerprint(state, **inputs) if node and node.fingerprint else None


def problem(node_id: str, state: PackState, inputs: Mapping[str, Any]) -> str | None:
    """Why a node can't run with these constants, as a sentence, or None. An input that is linked or missing is None."""
    node = NODES.get(node_id)
    return node.problem(state, **inputs) if node and node.problem else None


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
