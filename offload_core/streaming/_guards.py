"""What may not be done to a module whose weights are managed, said in a sentence instead of going wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ManagedModuleError


class ApplyGuard:
    """Stands in for a managed module's `_apply`, through which `.to`, `.half`, `.cuda` and `.share_memory` go.

    A change of dtype is carried out without loading anything; a move is refused. It is told apart by what the function
    does to empty probes of two dtypes and to one of a picture's shape. module: what the calls give back. owner: who
    manages it.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        recast: Callable[[torch.dtype], None],
        module: weakref.ref[nn.Module] | None = None,
        owner: Any = None,
    ) -> None:
        self.name, self.device, self.recast, self.module, self.owner = name, device, recast, module, owner

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module | None:
        module = self.module() if self.module is not None else None
        probes = [_Probe.on(self.device, (0,), dtype) for dtype in (torch.float32, torch.float16)]
        image = _Probe.on(self.device, (1, 2, 1, 2), torch.float32)
        try:
            results, picture = [function(probe) for probe in probes], function(image)
        except _SharedMemoryAsked:
            self._refuse("put into shared memory")
        for result in results:
            if result.device != self.device:
                self._refuse(f"moved to {result.device}")
        if picture.stride() != image.stride():
            self._refuse("changed as a whole in this way")
        if all(result is probe for result, probe in zip(results, probes, strict=True)):
            return module
        dtypes = {result.dtype for result in results}
        if len(dtypes) > 1:
            self._refuse("changed as a whole in this way")
        self.recast(dtypes.pop())
        return module

    def _refuse(self, what: str) -> NoReturn:
        raise ManagedModuleError(
            f"{self.name} is under offload and can't be {what}: that would load all of its weights. Choose the "
            "execution device and dtype when loading, or call release() first."
        )


class _SharedMemoryAsked(Exception):  # noqa: N818
    pass


class _Probe(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> _Probe:
        with torch.inference_mode(False):
            return torch.empty(shape, device=device, dtype=dtype).as_subclass(_Probe)

    def share_memory_(self) -> Any:
        raise _SharedMemoryAsked


def is_managed(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_apply"), ApplyGuard)


def manager_of(module: nn.Module) -> Any:
    """The Managed of a module that is under offload itself (not only a part of it), None if it isn't."""
    guard = vars(module).get("_apply")
    owner = guard.owner if isinstance(guard, ApplyGuard) else None
    return owner if owner is not None and owner.root is not None and owner.root() is module else None


def check_free(module: nn.Module, name: str) -> None:
    """Raises ManagedModuleError if a module, or a part of it, is under this or another kind of offload already."""
    for path, part in module.named_modules():
        where = f"{name}.{path}" if path else name
        if is_managed(part):
            raise ManagedModuleError(f"{where} is under offload already. Call release() on its first offload.")
        if "_hf_hook" in vars(part):
            raise ManagedModuleError(
                f"{where} has a hook of accelerate ({type(part._hf_hook).__name__}), which moves its weights, too. "
                "Remove it (accelerate.hooks.remove_hook_from_module) and use one kind of offload."
            )
        hooks = getattr(vars(part).get("_diffusers_hook"), "hooks", {})
        moving = [hook for hook in hooks if any(word in hook for word in ("offload", "casting", "layer_execution"))]
        if moving:
            raise ManagedModuleError(
                f"{where} has the hook {moving[0]!r} of diffusers, which moves or casts its weights, too. "
                "Load the module anew without it and use one kind of offload."
            )
