"""Counts the memory of tensors while code runs, on real tensors or on fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .streaming import StreamedWeight
from .traced_values import tensors_in

# torch.tensor([...]) makes its storage first, and only then there is an operator.
NEW_TENSOR = torch.ops.aten.lift_fresh.default


class MemoryCount(TorchDispatchMode):
    """Counts the storages that operators make while it is active: bytes now, and at most.

    Every storage is counted once, from the operator that made it to the death of its last alias. What was there before
    isn't counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = self._high = 0
        self._known: dict[int, Any] = {}  # by address: of storages that are alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not NEW_TENSOR:
            self.leave_out(tensors_in((args, kwargs)))
        result = func(*args, **kwargs)
        self.made(result)
        return result

    def made(self, result: Any) -> int:
        """Counts the storages of what an operator returned. Returns the bytes of the new ones."""
        new = 0
        for tensor in tensors_in(result):
            new += self._count(tensor, counted=True)
        if new:
            self.live_bytes += new
            self._high = max(self._high, self.live_bytes)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return new

    def high_bytes(self) -> int:
        """The most since this was asked last."""
        high, self._high = self._high, self.live_bytes
        return high

    def reach(self, nbytes: int) -> None:
        """Counts as if so many bytes had been alive for a moment."""
        self._high, self.peak_bytes = max(self._high, nbytes), max(self.peak_bytes, nbytes)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Says that the storages of these that aren't counted are none of the activations."""
        for tensor in tensors:
            self._count(tensor, counted=False)

    def _count(self, tensor: torch.Tensor, *, counted: bool) -> int:
        if isinstance(tensor, StreamedWeight) or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counted else 0
        if key in self._known:
            return 0
        self._known[key] = weakref.finalize(storage, self._died, key, nbytes)
        self._known[key].atexit = False
        return nbytes

    def _died(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.live_bytes -= nbytes

    def forget(self) -> None:
        """Stops watching: nothing of this outlives it."""
        for end in list(self._known.values()):
            end.detach()
        self._known.clear()
