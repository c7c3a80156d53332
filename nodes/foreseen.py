"""A phase node's plan: told in one line before anything is loaded, followed by the phase, and compared with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from offload_core.errors import TraceError

if TYPE_CHECKING:
    import offload_core

    from .calls import NodeCall

log = logging.getLogger(__name__)


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
