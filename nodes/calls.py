"""One run of one node body: what it may use, what it gives back, and what must not stay behind when it fails."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offload_core.errors import InputError, InsufficientMemoryError
from offload_core.session import Session

from .catalog import NODES
from .followed import FollowedObserver
from .progress import NodeObserver, describe_phase
from .results import NodeResult
from .state import PackState

log = logging.getLogger(__name__)
T = TypeVar("T")


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
    """Runs the body of a node. Errors and interrupts pass through as they are, but hold no values of the failed run."""
    return _guarded(state, observer, lambda call: NODES[node_id].run(call, **inputs))


def run_node_on_lists(
    node_id: str, state: PackState, observer: NodeObserver, inputs: Mapping[str, Sequence[Any]]
) -> NodeResult:
    """Runs a node that takes lists on a list for each input; every output is then a list, if it is one at all.

    There are as many jobs as the longest list has values; the last value of a shorter one serves for the rest. Raises
    InputError for a list without values, and what `run_node` does.
    """
    jobs = jobs_of(inputs)
    many = NODES[node_id].run_many
    if len(jobs) == 1 or many is None:
        results = [run_node(node_id, state, observer, jobs[-1])]
    else:
        results = _guarded(state, observer, lambda call: many(call, jobs))
    outputs = NODES[node_id].schema.outputs
    columns = zip(outputs, zip(*(result.values for result in results), strict=True), strict=True)
    values = tuple(list(column) if output.is_list else column[-1] for output, column in columns)
    return NodeResult(values, ui=merged_ui(results), shown=results[-1].shown)


def jobs_of(inputs: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The inputs of each run that lists of values stand for, as ComfyUI pairs them."""
    empty = [name for name, values in inputs.items() if not values]
    if empty:
        raise InputError(f"The input {empty[0]!r} is an empty list: there is nothing to do.")
    count = max(map(len, inputs.values()), default=1)
    return [{name: values[min(number, len(values) - 1)] for name, values in inputs.items()} for number in range(count)]


def merged_ui(results: Sequence[NodeResult]) -> dict[str, list[Any]]:
    """What several results show, one after another."""
    shown: dict[str, list[Any]] = {}
    for result in results:
        for kind, values in result.ui.items():
            shown.setdefault(kind, []).extend(values)
    return shown


def _guarded(state: PackState, observer: NodeObserver, act: Callable[[NodeCall], T]) -> T:
    """A host keeps the traceback of a failed run, and with it every local of its frames, for seconds."""
    followed, failure = FollowedObserver(observer, state), None
    call = NodeCall(state, followed)
    try:
        return act(call)
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
