"""Where components that a pipeline was built without run when it calls them after all.

An image to image or image to video pipeline encodes its picture in the middle of its call. If it was built with
`vae=None`, its VAE is a guest (`phases._guest`): it comes into the budget of the module that is attached, for that one
call. Under diffusers' group offload, or where a module was moved whole, there is no such budget, so a guest gets one of
its own for the time.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._report_table import human_bytes
from ..settings import OffloadSettings
from ..streaming import OffloadScope, for_a_while

if TYPE_CHECKING:
    from ..phases import Visit

log = logging.getLogger(__name__)


class PipelineHost:
    """Receives guests of a pipeline on `device`: in `scope` while modules are under offload there, else in one of their
    own by `settings`, which is closed after the visit. `visits` tells what they took."""

    def __init__(self, settings: OffloadSettings, device: torch.device, scope: OffloadScope | None = None) -> None:
        self.settings, self.device = settings, device
        self.visits: list[Visit] = []
        self._scope = weakref.ref(scope) if scope is not None else None

    @property
    def is_there(self) -> bool:
        """False once the modules that made it the host are under offload no more."""
        return self._scope is None or self._shared() is not None

    def _shared(self) -> OffloadScope | None:
        scope = self._scope() if self._scope is not None else None
        return scope if scope is not None and scope.in_use else None

    @contextlib.contextmanager
    def receive(self) -> Iterator[OffloadScope]:
        """The scope for one visit. Raises BudgetError or InputError for settings that can't be met."""
        shared = self._shared()
        if shared is not None:
            with for_a_while(shared):
                yield shared
            return
        own = OffloadScope(self.settings, self.device)
        try:
            yield own
        finally:
            own.close()

    def told(self, visit: Visit) -> None:
        self.visits.append(visit)
        log.info(
            "%s came for a call of %s (%s, %.2f s) and left again.",
            visit.component,
            visit.method or "forward",
            human_bytes(visit.weight_bytes),
            visit.seconds,
        )


def is_guest(module: nn.Module) -> bool:
    """Whether a module has its weights only while it is called."""
    if "_gate" not in vars(module):
        return False
    from ..phases import guest_of

    return guest_of(module) is not None
