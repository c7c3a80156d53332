"""Where a module was before something else than this engine moved it: diffusers' group offload, or `.to(device)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..streaming._homes import homes_of, is_plain
from ..streaming._shape import as_bytes


@dataclass(frozen=True)
class _Kept:
    """A tensor in RAM, where it is registered, and its memory: nothing more than it is, if that is a mapped file."""

    tensors: dict[str, Any]
    key: str
    tensor: torch.Tensor
    data: torch.Tensor


class Whereabouts:
    """The tensors of a module with their devices and, for those in RAM, their memory; `restore` puts them back.

    As long as this is kept, memory that was in RAM is, too, as a master is under this engine. Tensors of classes of
    their own (quantised ones) aren't among them.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._homes = homes_of(module, name)
        self._kept = [
            _Kept(tensors, key, tensor, tensor.data)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and tensor.device.type == "cpu" and is_plain(tensor)
        ]

    def restore(self) -> None:
        """Puts every tensor back that is still registered, with the edits made to it. May be called twice.

        Raises InsufficientMemoryError if a device has no room for what was there; that stays in RAM then.
        """
        with torch.inference_mode(False), torch.no_grad():
            for kept in self._kept:
                now = kept.tensors.get(kept.key)
                if now is not None and now is not kept.tensor and not isinstance(now, nn.Parameter):
                    kept.tensors[kept.key] = kept.tensor  # `.to()` makes another buffer
                if now is None or kept.tensors[kept.key] is not kept.tensor:
                    continue
                kept.tensor.data = kept.data if _are_equal(now, kept.data) else now.detach().to("cpu")
        self._kept = []
        self._homes.restore()


def _are_equal(now: torch.Tensor, before: torch.Tensor) -> bool:
    if now.data_ptr() == before.data_ptr() and now.device == before.device:
        return True
    if (now.shape, now.stride(), now.dtype) != (before.shape, before.stride(), before.dtype):
        return False
    there = now.detach().to("cpu")
    return there.stride() == before.stride() and torch.equal(_bytes(there), _bytes(before))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor if tensor.is_contiguous() else tensor.contiguous())
