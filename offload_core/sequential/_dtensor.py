"""Components whose weights are DTensors (FSDP2, called HSDP on a 2-D mesh): they move as a whole, shard by shard.

They can't run on the streaming engine. FSDP gathers from the local shard that it noted itself and exchanges the
registered parameters around each forward, so nothing may stand in for a parameter. Assigning `param.data` doesn't reach
a DTensor's local shard at all. So shards are exchanged the way that FSDP2 offers: by the module's own `_apply`, after
which it notes the new ones.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..ledger import Ledger, Reservation

log = logging.getLogger(__name__)

Move = Callable[[torch.Tensor, torch.device, bool], torch.Tensor]
_CPU = torch.device("cpu")


def is_sharded(module: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is a DTensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")  # not loaded: then there are none
    return dtensor is not None and any(isinstance(tensor, dtensor.DTensor) for _, tensor in _tensors(module))


def fresh_copy(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    """A copy on `device` with memory of its own, also where the tensor is there already."""
    return tensor.to(device, non_blocking=non_blocking, copy=True)


class ShardedComponent:
    """A module with DTensor weights that is whole on the device or not at all.

    The host master of a shard is what the module had itself, or one copy in RAM where that was on an accelerator.
    `wake` gives every weight a fresh shard on `device`; mesh and placements stay. `rest` puts the masters back; only a
    shard that was changed since is copied to its master. non_blocking: how shards are sent. move: what copies a shard
    (tensor, device, non_blocking).
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        device: torch.device,
        ledger: Ledger,
        *,
        non_blocking: bool = False,
        move: Move = fresh_copy,
    ) -> None:
        self.name, self.device, self.awake = name, device, False
        self._module = weakref.ref(module)
        self._ledger, self._non_blocking, self._move = ledger, non_blocking, move
        self._reservation: Reservation | None = None
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._masters: dict[str, torch.Tensor] = {}
        self._homes: dict[str, torch.device] = {}
        with torch.inference_mode(False), torch.no_grad():
            self._take(module)

    @property
    def nbytes(self) -> int:
        """Bytes of this process's shards."""
        return sum({id(master): master.nbytes for master in self._masters.values()}.values())

    @property
    def device_bytes(self) -> int:
        return self.nbytes if self.awake else 0

    def wake(self) -> None:
        """Sends every shard to the device. If that fails, the module is as it was."""
        self._reservation = self._ledger.reserve("device", "sharded", self.nbytes, self.name)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._put(self._moved(lambda path: self.device, self._non_blocking))
                self._seen = {path: _state(tensor) for path, tensor in self._registered()}
        except BaseException:
            self.awake = True
            self._back_to_masters()
            raise
        self.awake = True

    def rest(self) -> None:
        """Takes the shards off the device. What was changed there is written to the masters."""
        if not self.awake:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._reshard()
            for path, tensor in self._registered():
                if path in self._masters and _state(tensor) != self._seen.get(path):
                    log.debug("%s.%s was changed on %s; its master gets the new values", self.name, path, self.device)
                    self._masters[path].copy_(_local(tensor))
        self._back_to_masters()

    def release(self) -> None:
        """Rests, and takes the shards of a module that was on an accelerator back there."""
        self.rest()
        if any(home.type != "cpu" for home in self._homes.values()):
            with torch.inference_mode(False), torch.no_grad():
                self._put(self._moved(self._homes.__getitem__, False))
        self._masters, self._seen = {}, {}

    def _take(self, module: nn.Module) -> None:
        self._reshard()
        by_tensor: dict[int, torch.Tensor] = {}
        for path, tensor in _tensors(module):
            local = _local(tensor).detach()
            if id(tensor) not in by_tensor:
                by_tensor[id(tensor)] = local if local.device == _CPU else self._move(local, _CPU, False)
            self._masters[path], self._homes[path] = by_tensor[id(tensor)], local.device
        if any(home.type != "cpu" for home in self._homes.values()):
            self._put(self._masters)

    def _reshard(self) -> None:
        """Has FSDP register the shards: after a forward its root has whole weights registered."""
        module = self._module()
        for part in module.modules() if module is not None else ():
            reshard: Any = getattr(part, "reshard", None)
            if callable(reshard):
                reshard()

    def _moved(self, where: Callable[[str], torch.device], non_blocking: bool) -> dict[str, torch.Tensor]:
        """Every master's copy, ties once. All of them are made before the first is used."""
        copies: dict[int, torch.Tensor] = {}
        for path, master in self._masters.items():
            if id(master) not in copies:
                copies[id(master)] = self._move(master, where(path), non_blocking)
        return {path: copies[id(master)] for path, master in self._masters.items()}

    def _back_to_masters(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._put(self._masters)
        self.awake = False
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()

    def _put(self, locals_: dict[str, torch.Tensor]) -> None:
        """Exchanges the memory behind the registered tensors. A parameter stays the object it is."""
        module = self._module()
        if module is None:
            return
        there = {id(tensor): (tensor, locals_[path]) for path, tensor in _tensors(module) if path in locals_}

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            found = there.get(id(tensor))
            return tensor if found is None else _with_local(tensor, found[1])

        module._apply(exchange)

    def _registered(self) -> Iterator[tuple[str, torch.Tensor]]:
        module = self._module()
        return iter(()) if module is None else _tensors(module)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _with_local(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, with the same mesh and placements, over another local shard."""
    if not hasattr(tensor, "_local_tensor"):
        return local
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": local}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What changes when a shard is written to: operators on a DTensor count on it and not on its local shard."""
    local = _local(tensor)
    return tensor._version, local._version, local.untyped_storage()._cdata
