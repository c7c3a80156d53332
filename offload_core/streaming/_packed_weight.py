"""`PackedWeight`: a streamed weight whose hot copy is its packed bytes, unpacked for each operator that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ..errors import ManagedModuleError
from ..packing import unpack
from ._shape import Layout, normal_mode
from ._weight import Entry, StreamedWeight, aten, run


@dataclass(frozen=True)
class Packed:
    """What a packed weight is beside its bytes. kind, scale: see `packing.unpack`, on the execution device. layout: of
    the values."""

    kind: str
    scale: torch.Tensor | float | None
    layout: Layout

    def values(self, data: torch.Tensor) -> torch.Tensor:
        with normal_mode(), torch.no_grad():
            return unpack(self.kind, data, self.scale, self.layout.shape, self.layout.dtype)

    def rows(self, data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of a table: data (..., bytes of a row) to (..., width); indices: which ones they are."""
        width = self.layout.shape[1]
        scale = self.scale
        if isinstance(scale, torch.Tensor):
            scale = scale[indices.reshape(-1)]
        with normal_mode(), torch.no_grad():
            flat = data.reshape(-1, data.shape[-1])
            table = unpack(self.kind, flat, scale, (flat.shape[0], width), self.layout.dtype)
        return table.view(*data.shape[:-1], width)


class PackedWeight(StreamedWeight):
    """Has the shape and dtype of its values. It can't be written to: its master is packed, and values aren't."""

    _packed: Packed

    @staticmethod
    def make(entry: Entry, packed: Packed, device: torch.device) -> PackedWeight:
        weight = StreamedWeight.__new__(PackedWeight, entry, device, packed.layout)
        assert isinstance(weight, PackedWeight)
        weight._packed = packed
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], PackedWeight):
            result = special(func, args)
            if result is not None:
                return result
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        return run(func, args, kwargs)

    def recast(self, dtype: torch.dtype) -> None:
        """From now on its values are of another dtype."""
        packed = replace(self._packed, layout=self._packed.layout.with_dtype(dtype))
        shell = PackedWeight.make(self._entry, packed, self.device)
        torch.Tensor.data.__set__(self, shell)  # type: ignore[attr-defined]
        self._packed = packed

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not (isinstance(value, PackedWeight) and value._entry is self._entry):
            self._refuse_write()

    def set_(self, source: Any = None, *_: Any, **__: Any) -> Any:
        self._refuse_write()

    def _value(self, hot: torch.Tensor) -> torch.Tensor:
        return self._packed.values(hot)

    def _refuse_write(self) -> NoReturn:
        entry = self._entry
        if entry.cache is None:
            raise entry.cold_error()
        raise ManagedModuleError(
            f"The weight {entry.name} is packed ({self._packed.kind}) and can't be changed. "
            "Use the bfloat16 or float16 form of the model, or add to it (LoRA) instead of writing into it."
        )


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, PackedWeight):
                    each._refuse_write()


def _alias(func: Any, args: Sequence[Any]) -> Any:
    return PackedWeight.make(args[0]._entry, args[0]._packed, args[0].device)


def _embedding(func: Any, args: Sequence[Any]) -> Any:
    return _rows(args[0], args[1])


def _index_select(func: Any, args: Sequence[Any]) -> Any:
    weight, dim, indices = args
    return _rows(weight, indices) if dim in (0, -weight.ndim) and indices.ndim == 1 else None


def _rows(weight: PackedWeight, indices: Any) -> Any:
    """Rows of a table, of which only these are read and unpacked. None where unpacking all of it is what has to be."""
    entry = weight._entry
    if weight.ndim != 2 or not isinstance(indices, torch.Tensor):
        return None
    data = None
    if entry.hot is None:
        if entry.cache is None:
            raise entry.cold_error()
        data = entry.cache.gather(entry, indices)
    if data is None:
        data = aten.embedding.default(entry.hot_tensor(), indices)
    return weight._packed.rows(data, indices.to(weight.device))


_SPECIAL = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
}
