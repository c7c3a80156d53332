"""Where a module's weights were before they were managed, and taking them back there.

The engine's masters are files or RAM. So a module that starts on an accelerator is taken to RAM once, and goes back
there when it is given up. What lies in RAM already isn't touched: it is restored with its storages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..devices import is_out_of_memory
from ..errors import InsufficientMemoryError

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Moved:
    """A tensor that was taken to RAM, and the device it was on."""

    tensor: torch.Tensor
    home: torch.device


class Homes:
    """Tensors of one module that were taken to RAM; `restore` takes them back."""

    def __init__(self, moved: list[_Moved], name: str) -> None:
        self._moved, self._name = moved, name

    def __bool__(self) -> bool:
        return bool(self._moved)

    def restore(self) -> None:
        """Takes everything back to its device, with ties and views as they were.

        Raises InsufficientMemoryError if there is no room; then all of it stays in RAM, where it can be used.
        """
        by_home: dict[torch.device, list[torch.Tensor]] = {}
        for moved in self._moved:
            by_home.setdefault(moved.home, []).append(moved.tensor)
        try:
            copies = [(tensors, _copies(tensors, home)) for home, tensors in by_home.items()]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemoryError(
                f"{self._name} was on {next(iter(by_home))} before, where there is no room for it now. It stays in RAM "
                "with all of its weights; free memory there and move it with .to()."
            ) from error
        for tensors, there in copies:
            _exchange(tensors, there)
        self._moved = []


def take_to_host(module: nn.Module, name: str) -> Homes:
    """Takes the plain parameters and buffers of `module` that are on an accelerator to RAM, each storage once.

    Tensors of classes of their own are left where they are. All copies are made before the first tensor is exchanged,
    so nothing has changed if there is no room in RAM.
    """
    homes = homes_of(module, name)
    tensors = [moved.tensor for moved in homes._moved]
    _exchange(tensors, _copies(tensors, _CPU))
    return homes


def homes_of(module: nn.Module, name: str) -> Homes:
    """Where the plain parameters and buffers of `module` are that aren't in RAM, for something else to move them."""
    tensors = (
        tensor
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None and tensor.device.type not in ("cpu", "meta") and is_plain(tensor)
    )
    found = {id(tensor): tensor for tensor in tensors}
    return Homes([_Moved(tensor, tensor.device) for tensor in found.values()], name)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no class of its own, and dense memory."""
    classes = (torch.Tensor, nn.Parameter, nn.Buffer)
    return type(tensor) in classes and tensor.layout is torch.strided and not tensor.is_quantized


def _copies(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """A tensor on `device` for each of these. Those that share a storage share one there, too."""
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        start, end = _span(tensor)
        first, last = spans.get(_storage(tensor), (start, end))
        spans[_storage(tensor)] = min(first, start), max(last, end)
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            key = _storage(tensor)
            first, last = spans[key]
            if key not in storages:
                raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                raw.set_(tensor.untyped_storage(), first, (last - first,), (1,))
                storages[key] = raw.to(device, copy=True).untyped_storage()
            offset = tensor.storage_offset() - first // tensor.element_size()
            copy = torch.empty(0, dtype=tensor.dtype, device=device)
            copies.append(copy.set_(storages[key], offset, tensor.shape, tensor.stride()))
    return copies


def _exchange(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage. The first is a multiple of 64, for all dtypes of views."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return first // 64 * 64, first
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first // 64 * 64, first + (int(last) + 1) * size
