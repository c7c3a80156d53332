"""What calls of models take and give: tensors in containers, outputs and objects; shapes that stand for them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEERING_BYTES = 64 << 10  # integers and booleans up to this size, and ...


@dataclass(frozen=True)
class Shape:
    """What is kept of a tensor in a result: enough to make one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def noise(self) -> torch.Tensor:
        """Noise, because pipelines divide by a result's norm or deviation; ones where it holds no floats."""
        result = torch.ones(self.shape, dtype=self.dtype, device=self.device)
        is_float = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return result.normal_(generator=torch.Generator(self.device).manual_seed(0)) if is_float else result


def shapes_of(result: Any) -> Any:
    """A result with shapes in place of its tensors: one and the same for tensors that are one (a last hidden state)."""
    found: dict[Any, Shape] = {}

    def shape_of(tensor: torch.Tensor) -> Shape:
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        return found.setdefault(place, Shape.of(tensor))

    return mapped(result, torch.Tensor, shape_of)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result: in containers, and in objects' attributes."""
    found: list[torch.Tensor] = []
    mapped(value, torch.Tensor, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    yield from found


def mapped(value: Any, kind: type, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """`value` with everything of `kind` in it changed: in lists, tuples, dicts, outputs, and objects that hold tensors
    (a VAE's distribution)."""
    if isinstance(value, kind):
        return change(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | type) or depth > 8:
        return value
    if isinstance(value, dict):
        items = {name: mapped(item, kind, change, depth + 1) for name, item in value.items()}
        return type(value)(**items) if dataclasses.is_dataclass(value) else items
    if isinstance(value, list | tuple):
        members = [mapped(item, kind, change, depth + 1) for item in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if type(value).__module__.startswith(("diffusers.", "transformers.")) and not isinstance(value, nn.Module):
        changed = copy.copy(value)
        for name, item in vars(value).items():
            vars(changed)[name] = mapped(item, kind, change, depth + 1)
        return changed
    return value


def signature(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """What of a call's arguments decides its trace: shapes and dtypes, and the values of masks and lengths. Not those
    of token ids and of single numbers (timesteps)."""

    def of(tensor: torch.Tensor) -> Any:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        masks = whole and tensor.numel() > 1 and tensor.nbytes <= STEERING_BYTES and int(tensor.max()) <= 1
        return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}{tensor.tolist() if masks else ''}"

    return hashlib.sha256(repr(mapped([list(args), dict(kwargs)], torch.Tensor, of)).encode()).hexdigest()
