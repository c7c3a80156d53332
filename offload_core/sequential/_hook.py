"""vLLM-Omni's hooks by their own names: a component's `forward` takes its turn, and its rivals make room.

The hook only says when; who is on the device, and what is copied, is `_exclusion`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from ..devices import resolve_device
from ..errors import InputError
from ..settings import OffloadSettings
from ._dtensor import is_sharded
from ._exclusion import Exclusion, Member, member_of

log = logging.getLogger(__name__)

HOOK_NAME = "sequential_offload"


class SequentialOffloadHook(ModelHook):
    """Before a module's forward, `offload_targets` leave the device and the module may use it.

    device: where modules run. pin_memory: see `apply_sequential_offload`. use_hsdp: modules may have DTensor weights.

    It works registered on a module (`HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)`) or
    called by hand. Modules are managed from the hook's first use on, and are given back as they were when the hook is
    removed. If `forward` raises, or is interrupted, the module leaves the device, too.
    """

    _HOOK_NAME = HOOK_NAME

    def __init__(
        self,
        offload_targets: list[nn.Module],
        device: torch.device,
        pin_memory: bool = True,
        use_hsdp: bool = False,
    ) -> None:
        super().__init__()
        self.offload_targets = offload_targets
        self.device = resolve_device(device)
        self.pin_memory = pin_memory
        self.use_hsdp = use_hsdp
        self._rivals: list[Member] = []
        self._joined: weakref.WeakSet[Member] = weakref.WeakSet()
        self._own_forward: Any = None
        self._before_fsdp: Any = None
        self.made_registry = False

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._join(module)
        self._own_forward = vars(module).get("forward")
        _member(module).has_hook = True
        if is_sharded(module):
            # FSDP gathers in a hook of its own that runs before `forward`, and so before `pre_forward`.
            self._before_fsdp = module.register_forward_pre_hook(self._wake_first, prepend=True)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the device the module's. Returns `args` and `kwargs` as they are.

        Raises BudgetError if the module's largest operator doesn't fit the device.
        """
        self._join(module)
        member = _member(module)
        member.exclusion.take_turn(member)
        return args, kwargs

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.fn_ref.original_forward(*args, **kwargs)
        except BaseException:
            self._put_away(module)
            raise

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        if self._before_fsdp is not None:
            self._before_fsdp.remove()
        left: Any = vars(module).get("forward")
        if self._own_forward is None and getattr(left, "__func__", None) is type(module).forward:
            del vars(module)["forward"]  # the registry leaves the class's own, as an attribute, after its last hook
        member = member_of(module)
        try:
            if member is not None:
                member.exclusion.release(member)
        finally:
            for rival in self._rivals:
                rival.users.discard(id(self))
                if not (rival.users or rival.has_hook):
                    rival.exclusion.release(rival)
            self._rivals = []
        return module

    def _wake_first(self, module: nn.Module, args: Any) -> None:
        self.pre_forward(module)

    def _join(self, module: nn.Module) -> None:
        """Has the module and its targets take turns, with those of them that do already."""
        member = member_of(module)
        if member is not None and member in self._joined:
            return
        together = list({id(each): each for each in (module, *self.offload_targets)}.values())
        known = [there for each in together if (there := member_of(each)) is not None]
        new = [each for each in together if member_of(each) is None]
        exclusion = self._exclusion(new, known)
        if new:
            exclusion.add(named(new))
        self._rivals = [_member(target) for target in self.offload_targets if target is not module]
        for rival in self._rivals:
            rival.users.add(id(self))
        member = _member(module)
        member.rivals = list(self._rivals)
        self._joined.add(member)

    def _exclusion(self, new: Sequence[nn.Module], known: Sequence[Member]) -> Exclusion:
        """That of the modules which take turns already, or one of its own."""
        if not known:
            return open_exclusion(new, self.device, pin_memory=self.pin_memory, use_hsdp=self.use_hsdp)
        there = known[0].exclusion
        if there.device != self.device:
            raise InputError(
                f"{known[0].name} takes turns on {there.device}, and a hook wants it on {self.device}. Use one device "
                "for modules that take turns."
            )
        if there.pin_memory != self.pin_memory:
            log.info(
                "pin_memory=%s: accepted, no effect because %s takes turns with pin_memory=%s already.",
                self.pin_memory,
                known[0].name,
                there.pin_memory,
            )
        there.use_hsdp |= self.use_hsdp
        return there

    def _put_away(self, module: nn.Module) -> None:
        """After an error. One of its own must not hide that."""
        member = member_of(module)
        try:
            if member is not None:
                member.exclusion.put_away(member)
        except Exception:
            log.exception("%s could not leave %s after an error in its forward", type(module).__name__, self.device)


def apply_sequential_offload(
    dit_modules: list[nn.Module],
    encoder_modules: list[nn.Module],
    device: torch.device,
    pin_memory: bool = True,
    use_hsdp: bool = False,
) -> None:
    """Has DiTs and encoders take turns on `device`: before a DiT runs, encoders and the other DiTs leave it; before an
    encoder runs, the DiTs do. Encoders may be there together.

    pin_memory: copies go through pinned memory, and weights read from files stay there as far as RAM allows; without
    it they go through ordinary memory. use_hsdp: modules may have DTensor weights (FSDP2), which move as a whole.

    Every way into a module works, not only `forward`. A module that is larger than the device is streamed. Weights
    report `device` as theirs all the time; `.to(device)` on them does nothing, `.to("cpu")` is refused by name.

    Raises InputError (a module in both lists, DTensors without `use_hsdp`), ManagedModuleError (a module under offload
    already), BudgetError (the largest operator doesn't fit), DeviceError. All modules are unchanged then.
    """
    dits, encoders = list(dit_modules), list(encoder_modules)
    names = named([*dits, *encoders])
    rivals = rivals_of(dits, encoders)
    install(names, rivals, device, pin_memory=pin_memory, use_hsdp=use_hsdp)


def remove_sequential_offload(modules: list[nn.Module]) -> None:
    """Takes modules out: device, storages and `forward` are what they were before, with the edits made since.

    A module that has no sequential offload is left alone. All modules are tried; the first error is raised after that.
    """
    failed: BaseException | None = None
    for module in modules:
        try:
            unhook(module)
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


@contextlib.contextmanager
def sequential_offload_component(module: nn.Module) -> Iterator[nn.Module]:
    """A block in which a component has its turn; it leaves the device at the end, by any exit.

    For methods other than `forward`, which bring weights by themselves but don't know when the last one is done. Raises
    BudgetError if the module's largest operator doesn't fit the device.
    """
    member = member_of(module)
    if member is None:
        log.info("%s: accepted, no effect because it takes no turns with others.", type(module).__name__)
        yield module
        return
    member.exclusion.take_turn(member)
    try:
        yield module
    finally:
        member.exclusion.put_away(member)


def rivals_of(dits: Sequence[nn.Module], encoders: Sequence[nn.Module]) -> dict[int, list[nn.Module]]:
    """Who leaves the device before a module (by id) runs."""
    rivals = {id(dit): [*encoders, *(other for other in dits if other is not dit)] for dit in dits}
    return rivals | {id(encoder): list(dits) for encoder in encoders}


def install(
    modules: dict[str, nn.Module],
    rivals: dict[int, list[nn.Module]],
    device: torch.device | str,
    *,
    pin_memory: bool,
    use_hsdp: bool,
    settings: OffloadSettings | None = None,
) -> Exclusion:
    """One exclusion of all `modules` (by name), with a hook on each that has rivals or DTensors. All or nothing."""
    exclusion = open_exclusion(
        list(modules.values()), resolve_device(device), pin_memory=pin_memory, use_hsdp=use_hsdp, settings=settings
    )
    members = exclusion.add(modules)
    hooked: list[nn.Module] = []
    try:
        for module in modules.values():
            if id(module) not in rivals and not is_sharded(module):
                continue  # its weights say when they are used; shards can't
            targets = rivals.get(id(module), [])
            hooked.append(module)
            _register(module, SequentialOffloadHook(targets, exclusion.device, pin_memory, use_hsdp))
    except BaseException:
        give_back(hooked, members)
        raise
    return exclusion


def _register(module: nn.Module, hook: SequentialOffloadHook) -> None:
    hook.made_registry = "_diffusers_hook" not in vars(module)
    try:
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK_NAME)
    except BaseException:
        if hook.made_registry:
            vars(module).pop("_diffusers_hook", None)
        raise


def give_back(hooked: Iterable[nn.Module], members: Iterable[Member]) -> None:
    """Removes hooks and releases members, all of them whatever fails; then raises the first error."""
    failed: BaseException | None = None
    steps: list[Callable[[], None]] = [partial(unhook, module) for module in hooked]
    steps += [partial(member.exclusion.release, member) for member in members]
    for step in steps:
        try:
            step()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


def unhook(module: nn.Module) -> None:
    """Removes a module's hook, whatever its name, and the registry if it came with the hook and nothing else is in it;
    then gives the module back, if its hook was called by hand and never registered."""
    registry: HookRegistry | None = vars(module).get("_diffusers_hook")
    hooks = dict(registry.hooks) if registry is not None else {}
    mine = {name: hook for name, hook in hooks.items() if isinstance(hook, SequentialOffloadHook)}
    try:
        if registry is not None:
            for name in mine:
                registry.remove_hook(name, recurse=False)
    finally:
        if any(hook.made_registry for hook in mine.values()) and mine.keys() == hooks.keys():
            vars(module).pop("_diffusers_hook", None)
    member = member_of(module)
    if member is not None:
        member.exclusion.release(member)


def open_exclusion(
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    pin_memory: bool,
    use_hsdp: bool,
    settings: OffloadSettings | None = None,
) -> Exclusion:
    """An exclusion, with a word in the log on each argument that has no effect for these modules."""
    if pin_memory and device.type == "cpu":
        log.info("pin_memory=True: accepted, no effect because the CPU executes and nothing goes over a link.")
    if use_hsdp and not any(is_sharded(module) for module in modules):
        log.info("use_hsdp=True: accepted, no effect because no module has DTensor weights.")
    if use_hsdp and pin_memory and any(is_sharded(module) for module in modules):
        log.info("pin_memory=True: accepted, no effect on DTensor weights because FSDP2 keeps the memory they had.")
    return Exclusion(device, pin_memory=pin_memory, use_hsdp=use_hsdp, settings=settings)


def named(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Modules by their class's name, numbered where several have the same. Raises InputError for one that is twice."""
    names: dict[str, nn.Module] = {}
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InputError(f"{module!r} isn't a torch.nn.Module, so it can't be offloaded. Pass modules only.")
        if any(module is other for other in names.values()):
            raise InputError(
                f"A {type(module).__name__} is listed twice. List each module once, as a DiT or as an encoder."
            )
        kind = type(module).__name__
        number = sum(1 for name in names if name.partition(" ")[0] == kind)
        names[f"{kind} {number + 1}" if number else kind] = module
    return names


def _member(module: nn.Module) -> Member:
    member = member_of(module)
    assert member is not None
    return member
