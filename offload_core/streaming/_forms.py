"""The forms of a weight under offload: its entries in the cache, their masters, and what is in the module for it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..inventory import Item
from ..packing import FLOAT8_ROWS, packed_row_bytes, packed_shape, rows_of
from ..stored_weight import read_scale
from ._dtypes import shortest
from ._masters import FileMaster, HostMaster, Master, RowPacker, stored_master
from ._packed_weight import Packed, PackedWeight
from ._parts import Part, Place, is_recurrent
from ._shape import Layout, as_bytes
from ._streamed_class import StreamedClass
from ._tensor_classes import TensorClass, bytes_beside, classify, shell_of
from ._weight import Entry, StreamedWeight, cold_weight

if TYPE_CHECKING:
    from ._scope import OffloadScope

# The dtypes that a floating weight is cast through, by its name and stored dtype; the last is the one it runs in.
DtypeRule = Callable[[str, torch.dtype], tuple[torch.dtype, ...]]


class Forms:
    """Makes the forms of one module's weights.

    keep_grad: weights require grad if they did before; else none do. was_there: what lies in RAM did so already when
    the budgets were measured, so that it needs no part of an "auto" one. pack: names of weights that are packed on
    their way in.
    """

    def __init__(
        self, scope: OffloadScope, name: str, *, keep_grad: bool, was_there: bool, pack: Collection[str]
    ) -> None:
        self.scope, self.name, self._keep_grad, self._pack = scope, name, keep_grad, pack
        self._allowed_bytes = 0  # of RAM that was taken before the budget was measured
        self._allows = was_there and scope.settings.host_memory == "auto"

    def rule_of(self, item: Item) -> TensorClass:
        """How a weight is handled. Raises ManagedModuleError for a class that has no rule."""
        packed = item.stored is not None and item.stored.packing is not None
        if packed or any(each in self._pack for each in item.names):
            return TensorClass("packed", "packed", "fewer bytes than it is computed with")
        if item.stored is not None:
            return TensorClass("StoredWeight", "plain", "dense bytes in files")
        return classify(item.tensor, f"{self.name}.{item.names[0]}")

    def part(self, item: Item, rule: TensorClass, dtype_of: DtypeRule | None) -> Part:
        """A tensor of the module with its entries in the cache, none of them with a master yet."""
        places = [
            Place(weakref.ref(owner), key, key in owner._buffers and key not in owner._parameters)
            for owner, key in item.places
        ]
        part = Part(item, rule, places)
        tensor = item.tensor
        stride = item.stride if len(item.stride) == len(item.shape) else torch.empty(item.shape, device="meta").stride()
        part.layout = Layout(item.dtype, torch.Size(item.shape), stride)
        if rule.rule == "resident" or item.shares_storage or not item.dense or is_recurrent(item):
            part.untouched = tensor.device == self.scope.device
            if part.moves_with_layer and not is_recurrent(item):
                item.nbytes += bytes_beside(tensor)
            return part
        if rule.rule == "inner":
            assert rule.take_apart is not None
            part.shell = _shell(tensor, f"{self.name}.{item.names[0]}")
            for inner, plain in rule.take_apart(tensor).items():
                layout = Layout.of(plain)
                name = f"{item.names[0]}.{inner}"
                part.entries.append(Entry((name,), layout, None, self.scope.cache, owner=self.name))
            return part
        asked = dtype_of(item.names[0], item.dtype) if dtype_of and item.dtype.is_floating_point else ()
        casts = shortest(item.dtype, asked)
        target = casts[-1] if casts else item.dtype
        if (
            tensor.device == self.scope.device
            and target == item.dtype
            and not (item.ranges or item.stored)
            and item.kind == "buffer"
        ):
            part.untouched = True
            return part
        if rule.rule == "packed":
            stride = torch.empty(item.shape, device="meta").stride()
            part.layout = Layout(target, torch.Size(item.shape), stride)
            layout = Layout(torch.uint8, torch.Size(shape := _packed_shape(item)), (shape[1], 1))
            part.entries.append(Entry(item.names, layout, None, self.scope.cache, owner=self.name))
            return part
        layout = Layout.of(tensor).with_dtype(target)
        part.entries.append(Entry(item.names, layout, None, self.scope.cache, casts=casts, owner=self.name))
        return part

    def give_masters(self, part: Part) -> None:
        """Says where the bytes of a part's entries come from. Raises BudgetError if RAM is short for private ones."""
        if part.rule.rule == "inner":
            assert part.rule.take_apart is not None
            for entry, tensor in zip(part.entries, part.rule.take_apart(part.item.tensor).values(), strict=True):
                entry.master = self._master(part, entry, tensor)
        else:
            part.entries[0].master = self._master(part, part.entries[0], part.item.tensor)

    def _master(self, part: Part, entry: Entry, tensor: torch.Tensor) -> Master:
        if part.rule.rule == "packed" and (part.item.stored is None or part.item.stored.packing is None):
            source = self._source_master(part, entry, tensor)
            return RowPacker(source, rows_of(part.item.shape), math.prod(part.item.shape[1:]))
        return self._source_master(part, entry, tensor)

    def _source_master(self, part: Part, entry: Entry, tensor: torch.Tensor) -> Master:
        item = part.item
        if item.stored is not None:
            return stored_master(item.stored, self.scope.file, self.scope.warm)
        if item.ranges and part.rule.rule != "inner":
            where = item.ranges[0]
            return FileMaster(self.scope.file(where.path), where, item.dtype, self.scope.warm)
        if self._allows and tensor.device.type == "cpu":
            self.scope.ledger.allow("host", tensor.nbytes)
            self._allowed_bytes += tensor.nbytes
        reservation = self.scope.ledger.reserve("host", "masters", tensor.nbytes, entry.name)
        try:
            host = tensor.detach()
            if host.device.type != "cpu":
                host = Layout.of(host).over(as_bytes(host).cpu().untyped_storage())
        except BaseException:
            reservation.release()
            raise
        return HostMaster(host, reservation)

    def plain_tensor(self, part: Part) -> torch.Tensor:
        """What stands for a weight that is hot and stays so."""
        hot = [entry.hot for entry in part.entries]
        if part.rule.rule == "inner":
            assert part.rule.rebuild is not None
            prefix = len(part.name) + 1
            inner = {entry.names[0][prefix:]: tensor for entry, tensor in zip(part.entries, hot, strict=True)}
            return part.rule.rebuild(part.shell, inner)  # type: ignore[arg-type]
        tensor = hot[0] if part.rule.rule != "packed" else self._packed_weight(part)
        assert tensor is not None
        if part.item.kind == "buffer":
            return tensor
        return nn.Parameter(tensor, requires_grad=self._keep_grad and part.item.tensor.requires_grad)

    def wrapper(self, part: Part) -> Any:
        """What stands for a weight that is brought when it is used."""
        if part.rule.rule == "inner":
            return StreamedClass.make(part.shell, part.rule, part.entries, part.name, self.scope.device)
        packed = part.rule.rule == "packed"
        weight = self._packed_weight(part) if packed else StreamedWeight(part.entries[0], self.scope.device)
        return nn.Parameter(weight, requires_grad=self._keep_grad and part.item.tensor.requires_grad)

    def cold(self, part: Part) -> Any:
        """What stands for a weight that was given back."""
        if isinstance(part.replacement, StreamedWeight):
            return part.replacement
        assert part.layout is not None
        cold = cold_weight(part.layout, f"{self.name}.{part.name}", self.scope.device)
        return cold if part.item.kind == "buffer" else nn.Parameter(cold, requires_grad=False)

    def _packed_weight(self, part: Part) -> PackedWeight:
        stored = part.item.stored
        packing = stored.packing if stored is not None else None
        scale = read_scale(stored) if stored is not None else None
        if isinstance(scale, torch.Tensor):
            scale = scale.to(self.scope.device)
        assert part.layout is not None
        form = Packed(packing.kind if packing is not None else FLOAT8_ROWS, scale, part.layout)
        return PackedWeight.make(part.entries[0], form, self.scope.device)

    def close(self) -> None:
        """Takes back what the budget of RAM was raised by."""
        if self._allowed_bytes:
            self.scope.ledger.allow("host", -self._allowed_bytes)
            self._allowed_bytes = 0


def _packed_shape(item: Item) -> tuple[int, int]:
    """(rows, bytes of a row) of a weight as it is packed."""
    if item.stored is not None and item.stored.packing is not None:
        return packed_shape(item.shape, item.stored.nbytes)
    return rows_of(item.shape), packed_row_bytes(math.prod(item.shape[1:]))


def _shell(tensor: torch.Tensor, name: str) -> Any:
    """A weight's shell, which never requires grad; the weight itself is left as it was."""
    required = tensor.requires_grad
    tensor.requires_grad_(False)
    try:
        return shell_of(tensor, name)
    finally:
        tensor.requires_grad_(required)
