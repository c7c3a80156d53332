"""A phase node's plan: told in one line before anything is loaded, followed by the phase, and compared with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offload_core.errors import TraceError

if TYPE_CHECKING:
    import offload_core

    from .calls import NodeCall

log = logging.getLogger(__name__)


def foreseen_of_several(
    call: NodeCall,
    foresee: Callable[..., offload_core.Foresight],
    asked: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> offload_core.Plan | None:
    """The plan to run several jobs of one phase by: of the one that computes with most memory. None if there is none to
    go by. asked: the arguments and keyword arguments of `foresee` for each. Runs of several jobs teach nothing."""
    call.observer.status("looking ahead, nothing is loaded yet")
    plans = []
    for args, kwargs in asked:
        try:
            plans.append(foresee(*args, session=call.session, **kwargs).plan)
        except TraceError as error:
            log.info("No plan: %s", error)
            return None
    plan = max(plans, key=lambda each: each.phases[0].activation_peak_bytes)
    if not all(each.fits for each in plans):
        log.warning("A job of this list doesn't fit by its plan. It is tried all the same.")
        return None
    return plan


@contextlib.contextmanager
def foreseen(
    call: NodeCall, foresee: Callable[..., offload_core.Foresight], *args: Any, **kwargs: Any
) -> Iterator[offload_core.Plan | None]:
    """The plan to run by, while the phase runs; None if there is none to go by. A run without an error teaches the
    next plan."""
    from offload_core.plan import predicted_figures
    from offload_core.plan_table import plan_line

    call.observer.status("looking ahead, nothing is loaded yet")
    try:
        found = foresee(*args, session=call.session, **kwargs)
    except TraceError as error:
        log.info("No plan: %s", error)
        yield None
        return
    call.observer.status(plan_line(found.plan))
    if not found.plan.fits:
        log.warning("%s It is tried all the same.", plan_line(found.plan))
    for phase in found.plan.phases:
        call.observer.foretold(phase.name, predicted_figures(phase))
    yield found.plan if found.plan.fits else None
    found.learn(call.session.report)
