"""A guest: a component that has its weights only while it is called.

Outside of a call it is a stand-in: class, config, small buffers, weights that aren't there. A call of it, of a method
that pipelines use (`encode`, `decode`) or of one of its parts brings the weights from the model's files into somebody's
budget, and the end of that call, by any exit, gives them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..model_source import ComponentSource
from ..streaming import OffloadScope, StreamPlan
from ._components import Component, Usage


@dataclass(frozen=True)
class Visit:
    """One call of a guest. method: what was called, "" for the component itself, else its method or part.

    weight_bytes: of all its weights. device_bytes: the most of them that were on the device at once. load_s: seconds
    until they could be used. seconds: of the whole call.
    """

    component: str
    method: str
    weight_bytes: int
    device_bytes: int
    load_s: float
    seconds: float


class Host(Protocol):
    """Whose budget a guest comes into."""

    def receive(self) -> AbstractContextManager[OffloadScope]:
        """Where one visit takes place; entered before it, left after it."""

    def told(self, visit: Visit) -> None:
        """What a visit took, at its end."""


class Guest:
    """A component of a model folder as `module`. Without a host a call of it raises ColdWeightError.

    The module refers to its guest, as the guest does to the module; there is nothing large in the circle.
    """

    def __init__(self, source: ComponentSource, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the component can't be made of its config."""
        self.device, self.usage = device, Usage()
        self.host: Host | None = None
        self._component = Component(source, dtype, self)
        self._component.use(_GuestPort(self), owned=False)
        self._made_in = _dtype_of(self.module)
        self._scope: OffloadScope | None = None

    @property
    def module(self) -> nn.Module:
        return self._component.module

    def visit(self, host: Host, method: str, run: Callable[[], Any]) -> Any:
        """What `run` gives, with the weights there. Raises BudgetError, ModelError, and what `run` raises."""
        started, nbytes = time.perf_counter(), 0
        component = self._component
        with host.receive() as scope:
            self._scope = scope
            try:
                self._load()
                loaded = time.perf_counter()
                assert component.managed is not None
                nbytes, device_bytes = component.managed.weight_bytes, component.managed.plan.device_bytes
                return run()
            finally:
                with torch.inference_mode(False), torch.no_grad():
                    component.release()
                self._scope = None
                if nbytes:
                    ended = time.perf_counter()
                    seconds = {"load_s": loaded - started, "seconds": ended - started}
                    host.told(Visit(component.source.name, method, nbytes, device_bytes, **seconds))

    def _load(self) -> None:
        """Loads what the stand-in stands for: in the dtype that it was given meanwhile, with switches (tiling) as they
        were set on it, and without a draw from torch's global generator."""
        component, module = self._component, self.module
        switches = {
            name: value
            for name, value in vars(module).items()
            if type(value) in (bool, int, float) and not name.startswith("_")
        }
        now, rng = _dtype_of(module), torch.get_rng_state()
        component.recast = now if now != self._made_in else None
        try:
            component.load()
        finally:
            torch.set_rng_state(rng)
        vars(module).update(switches)

    # What a component asks of the phase it is in; see `_components.Memory`.

    def scope(self) -> OffloadScope:
        assert self._scope is not None
        return self._scope

    def poll(self, arrived: int) -> None: ...

    def planned(self, name: str) -> StreamPlan | None:
        return None

    def won_t_arrive(self, nbytes: int) -> None: ...


class _GuestPort:
    """Has a call from outside be a visit."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        guest = self.guest
        if guest.host is None:
            return run(*args, **kwargs)

        def loaded() -> Any:
            # A part of the stand-in isn't the part that was loaded in its place.
            now = run if module is guest.module else guest.module.get_submodule(name)
            return now(*args, **kwargs)

        return guest.visit(guest.host, name, loaded)


def guest_of(module: Any) -> Guest | None:
    """The guest whose module this is, None if it is an ordinary one."""
    port = getattr(vars(module).get("_gate"), "port", None) if isinstance(module, nn.Module) else None
    return port.guest if isinstance(port, _GuestPort) and port.guest.module is module else None


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    return next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
