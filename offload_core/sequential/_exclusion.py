"""Who is on the device: components that take turns on one engine scope, under one ledger.

A component that takes its turn has its rivals rest first: their hot copies are dropped, which copies nothing, because
the master of each weight stayed where it was (its file, or the module's own tensor in RAM). Changed weights are the
exception, and the engine sees those. A turn is taken by whoever calls the component's `forward`, or by the first of
its weights that is used and isn't there, so methods such as `vae.decode` and borrowed parts need no hook.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..devices import empty_cache
from ..errors import BudgetError, InputError, ManagedModuleError
from ..limits import Machine
from ..settings import OffloadSettings
from ..streaming import Homes, OffloadScope, hot_bytes, keep_on_host, rest, take_to_host, wake
from ._dtensor import ShardedComponent, is_sharded

log = logging.getLogger(__name__)

_MARK = "_phase_offload_turns"  # in a module's __dict__: its member
DEFAULTS = OffloadSettings(resident_below=0)  # small weights take turns, too


class Component(Protocol):
    """A module that can be on the device or rest. `release` gives it back as it was; both may be called twice."""

    @property
    def awake(self) -> bool: ...

    @property
    def device_bytes(self) -> int: ...

    def wake(self) -> None: ...

    def rest(self) -> None: ...

    def release(self) -> None: ...


@dataclass(eq=False)
class Member:
    """A component among those that take turns. rivals: who rests before it runs. users: hooks that name it a rival."""

    name: str
    module: weakref.ref[nn.Module]
    component: Component
    exclusion: Exclusion
    rivals: list[Member] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    has_hook: bool = False
    released: bool = False


def member_of(module: nn.Module) -> Member | None:
    """What a module takes turns as, None if it isn't managed."""
    found: Member | None = vars(module).get(_MARK)
    return found


class StreamedComponent:
    """A component on the streaming engine. While it is awake, as much of it as fits the budget stays on the device."""

    def __init__(self, module: nn.Module, name: str, scope: OffloadScope, homes: Homes, *, pin_memory: bool) -> None:
        self.name, self._scope = name, scope
        self._managed = scope.attach(module, name=name, files=None, homes=homes, was_there=True)
        try:
            rest(self._managed)
            scope.cache.empty_ring()
            if pin_memory:
                keep_on_host(self._managed)
        except BaseException:
            self.release()
            raise

    @property
    def awake(self) -> bool:
        return not (self._managed.resting or self._managed.released)

    @property
    def device_bytes(self) -> int:
        return hot_bytes(self._managed)

    def wake(self) -> None:
        wake(self._managed)

    def rest(self) -> None:
        rest(self._managed)

    def release(self) -> None:
        self._managed.release(restore=True)


class Exclusion:
    """Components that take turns on one device. The last one that is released takes the engine's scope with it.

    pin_memory: whether copies go through pinned memory, where weights from files also stay as far as `host_memory`
    goes. use_hsdp: whether components may have DTensor weights.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        pin_memory: bool = True,
        use_hsdp: bool = False,
        settings: OffloadSettings | None = None,
    ) -> None:
        self.device, self.pin_memory, self.use_hsdp = device, pin_memory, use_hsdp
        self._settings = replace(settings or DEFAULTS, execution_device=str(device))
        self._scope: OffloadScope | None = None
        self._members: dict[str, Member] = {}
        self._lock = threading.RLock()

    def add(self, modules: Mapping[str, nn.Module]) -> list[Member]:
        """Takes modules in, all at rest; either all of them or none. Their keys name them in messages.

        Raises InputError for DTensor weights without `use_hsdp`, ManagedModuleError, BudgetError.
        """
        for name, module in modules.items():
            if member_of(module) is not None:
                raise ManagedModuleError(
                    f"{name} is under sequential offload already. Remove that first (remove_sequential_offload)."
                )
            if is_sharded(module) and not self.use_hsdp:
                raise InputError(
                    f"{name} has DTensor weights, which move shard by shard. Pass use_hsdp=True for modules that FSDP2 "
                    "sharded."
                )
        added: list[Member] = []
        homes: dict[str, Homes] = {}
        with self._lock:
            try:
                for name, module in modules.items():
                    if not is_sharded(module):
                        homes[name] = take_to_host(module, name)
                if any(homes.values()):
                    empty_cache(self.device)  # "auto" is what is free now
                for name, module in modules.items():
                    added.append(self._add(self._unused(name), module, homes.pop(name, None)))
            except BaseException:
                self._take_back(added, homes.values())
                raise
        return added

    def take_turn(self, member: Member) -> None:
        """Has the rivals of a component rest, then wakes it. Its weights come when they are used, DTensors at once.

        If both it and those that aren't its rivals don't fit, these rest, too. Raises BudgetError if it doesn't fit
        alone; everything rests then.
        """
        with self._lock:
            for rival in member.rivals:
                rival.exclusion.put_away(rival)
            if member.released or member.component.awake:
                return
            assert self._scope is not None
            self._scope.cache.empty_ring()
            try:
                member.component.wake()
            except BudgetError:
                others = [other for other in self._members.values() if other.component.awake]
                if not others:
                    raise
                for other in others:
                    other.component.rest()
                self._scope.cache.empty_ring()
                member.component.wake()
            log.debug("%s is on %s, %s rest", member.name, self.device, [rival.name for rival in member.rivals])

    def put_away(self, member: Member) -> None:
        """Takes a component off the device."""
        with self._lock:
            if not member.released and member.component.awake:
                member.component.rest()
                if self._scope is not None:
                    self._scope.cache.empty_ring()

    def release(self, member: Member) -> None:
        """Gives a component back as it was. May be called twice."""
        with self._lock:
            if member.released:
                return
            member.released = True
            module = member.module()
            if module is not None:
                vars(module).pop(_MARK, None)
            del self._members[member.name]
            try:
                member.component.release()
            finally:
                self._close_if_empty()

    @property
    def device_budget_bytes(self) -> int:
        """The most that the components take on the device together."""
        return self._scope.ledger.limits["device"] if self._scope is not None else 0

    def members(self) -> list[Member]:
        return list(self._members.values())

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights on the device by component, buffers and other weights that never leave it included."""
        return {name: member.component.device_bytes for name, member in self._members.items()}

    def _add(self, name: str, module: nn.Module, homes: Homes | None) -> Member:
        scope = self._open()
        component: Component
        try:
            if homes is None:
                component = ShardedComponent(module, name, self.device, scope.ledger)
            else:
                component = StreamedComponent(module, name, scope, homes, pin_memory=self.pin_memory)
        except BaseException:
            if homes is not None:
                homes.restore()
            raise
        member = Member(name, weakref.ref(module), component, self)
        self._members[name] = member
        vars(module)[_MARK] = member
        return member

    def _take_back(self, added: Iterable[Member], homes: Iterable[Homes]) -> None:
        """After an error, which one of its own must not hide."""
        steps: list[Callable[[], None]] = [partial(self.release, member) for member in added]
        steps += [each.restore for each in homes]
        for step in (*steps, self._close_if_empty):
            try:
                step()
            except Exception:
                log.exception("A module could not be given back as it was after another one was refused")

    def _open(self) -> OffloadScope:
        if self._scope is None:
            machine = Machine() if self.pin_memory else _Unpinned()
            self._scope = OffloadScope(self._settings, self.device, machine=machine)
            self._scope.cache.before_fetch = _TurnOfOwner(weakref.ref(self))
        return self._scope

    def _turn_of(self, owner: str) -> None:
        member = self._members.get(owner)
        if member is not None and not member.component.awake:
            self.take_turn(member)

    def _close_if_empty(self) -> None:
        if not self._members and self._scope is not None:
            scope, self._scope = self._scope, None
            scope.close()

    def _unused(self, name: str) -> str:
        return name if name not in self._members else self._unused(f"{name}'")


class _Unpinned(Machine):
    """A machine that gives no pinned memory."""

    def pinned_limit(self) -> int:
        return 0


@dataclass(frozen=True)
class _TurnOfOwner:
    """What the cache calls before it fetches: the component that needs a weight takes its turn."""

    exclusion: weakref.ref[Exclusion]

    def __call__(self, entries: Sequence[Any]) -> None:
        exclusion = self.exclusion()
        if exclusion is not None:
            for owner in {entry.owner for entry in entries}:
                exclusion._turn_of(owner)
