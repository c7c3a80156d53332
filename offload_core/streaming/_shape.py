"""How a weight lies in memory: everything that must survive the trip to the device and back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Layout:
    """dtype, shape, stride (in elements) and storage offset (in elements, as the original reports it).

    Only dense layouts are streamed: the elements fill their span without gap or overlap, in any order of dimensions.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def count(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def rows_lie_together(self) -> bool:
        """Whether this is a table whose rows are contiguous, one after the other."""
        return len(self.shape) == 2 and self.stride == (self.shape[1], 1) and self.shape[1] > 0

    def with_dtype(self, dtype: torch.dtype) -> Layout:
        return Layout(dtype, self.shape, self.stride, self.offset)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this layout at the start of `storage`."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, self.shape, self.stride)


def normal_mode() -> Any:
    """A scope in which tensors are made as outside of inference mode; they are used in both."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's elements fill their span without gap or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, in order, as a 1-D uint8 tensor that shares its storage."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, start, (tensor.numel() * tensor.element_size(),), (1,))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order, sharing its storage."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,)
    )
