"""Modules without their weights, and whatever else must be forgotten so that a module holds no memory.

A meta tensor is no safe stand-in: on CPU `linear`, `conv2d` and `matmul` with a meta weight return uninitialised memory
without an error, and a shape-(1,) placeholder broadcasts. A cold StreamedWeight can't be computed with at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..streaming import Layout, StreamedWeight, cold_weight, is_cold, is_streamed


def cold_like(real: torch.Tensor, name: str, device: torch.device, dtype: torch.dtype | None = None) -> StreamedWeight:
    """A cold twin of `real`; `dtype` replaces a floating dtype only."""
    kept = dtype if dtype is not None and real.is_floating_point() else real.dtype
    stride = real.stride() if real.layout is torch.strided else torch.empty(real.shape, device="meta").stride()
    return cold_weight(Layout(kept, real.shape, tuple(stride)), name, device)


def make_cold(
    module: nn.Module, prefix: str, device: torch.device, dtype: torch.dtype | None = None, *, buffers: bool
) -> None:
    """Swaps every parameter of `module` (and every buffer, if asked) for a cold one named `prefix.path`. Ties stay, and
    the names of those that are cold already."""
    ties: dict[nn.Parameter, nn.Parameter] = {}
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                if parameter not in ties:
                    name = ".".join(part for part in (prefix, path, key) if part)
                    cold = cold_like(parameter, parameter._entry.name if is_cold(parameter) else name, device, dtype)
                    ties[parameter] = nn.Parameter(cold, requires_grad=False)
                child._parameters[key] = ties[parameter]
        for key, buffer in child._buffers.items() if buffers else ():
            if buffer is not None:
                name = ".".join(part for part in (prefix, path, key) if part)
                child._buffers[key] = cold_like(buffer, name, device)


def make_added_cold(module: nn.Module, prefix: str, device: torch.device) -> None:
    """Swaps parameters with memory, which a cold module was given later (LoRA), for cold ones."""
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is not None and not is_streamed(parameter):
                cold = cold_like(parameter, ".".join(part for part in (prefix, path, key) if part), device)
                # Kept as it is: torch's matmul asks for it before it decides what to allocate.
                child._parameters[key] = nn.Parameter(cold, requires_grad=parameter.requires_grad)


def real_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor with memory that `module` holds: parameters, buffers, and tensors kept in plain attributes."""
    for child in module.modules():
        for value in vars(child).values():
            for tensor in _tensors_in(value):
                if not is_streamed(tensor) and tensor.device.type != "meta":
                    yield tensor


def scrub_attributes(module: nn.Module) -> None:
    """Forgets tensors that modules keep outside their parameters and buffers (rotary tables, feature caches)."""
    for child in module.modules():
        for key, value in vars(child).items():
            if key not in ("_parameters", "_buffers", "_modules") and any(True for _ in _tensors_in(value)):
                vars(child)[key] = None


def forget_method_caches(module: nn.Module) -> None:
    """Empties caches that classes keep across instances (`lru_cache` on a method, plain or wrapped)."""
    for cls in {base for child in module.modules() for base in type(child).__mro__}:
        for member in vars(cls).values():
            cells = getattr(member, "__closure__", None) or ()
            for holder in (member, *(cell.cell_contents for cell in cells if _is_filled(cell))):
                clear = getattr(holder, "cache_clear", None)
                if callable(clear):
                    clear()


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:
        return False


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth + 1)
