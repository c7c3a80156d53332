"""How many bytes of tensors are alive, found out from torch's own reference counts: the counter that a trace is checked
against. It shares no code with `trace.py`, and it looks instead of listening: after each operator it goes through every
storage it knows and asks whether that is still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is active, on real tensors.

    A storage is made by an operator that returns it without having been given it, so views, operators in place and
    `out=` make none. It counts with its size, whatever part of it a view shows, until torch itself has given it up.
    `torch.tensor([...])` makes its storage before any operator and then hands it to `lift_fresh`: that counts, too.

    What a kernel allocates for itself and frees before it returns is seen by no such counter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.live_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, which a weak reference keeps taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = set() if func is _FROM_NUMBERS else {ref.cdata for ref, _ in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for ref, nbytes in _storages(result):
            if ref.cdata in self._alive or ref.cdata not in given:
                self._alive[ref.cdata] = (ref, nbytes)  # again, if it was resized
        self.recount()
        return result

    def recount(self) -> int:
        """Bytes alive now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.live_bytes = sum(nbytes for _, nbytes in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return self.live_bytes

    def restart(self) -> int:
        """Bytes alive now; the peak is counted anew from here."""
        self.peak_bytes = 0
        return self.recount()


_FROM_NUMBERS = torch.ops.aten.lift_fresh.default


def _storages(value: Any) -> Iterator[tuple[StorageWeakRef, int]]:
    """The storages behind the tensors among an operator's arguments or results, with their sizes."""
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()
