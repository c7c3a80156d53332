"""The tensors of a module under offload: where each is registered, and in which form it is there."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..inventory import Item
from ..ledger import Reservation
from ..packing import unpack_bytes
from ._plan import PartSize, WeightSize
from ._shape import Layout
from ._tensor_classes import TensorClass
from ._weight import Entry

_NORMS = ("norm", "Norm")


@dataclass
class Place:
    """Where a weight is registered. The module is held weakly: it keeps its guard, which keeps this."""

    owner: weakref.ref[nn.Module]
    key: str
    buffer: bool

    def put(self, tensor: Any) -> None:
        owner = self.owner()
        if owner is not None:
            (owner._buffers if self.buffer else owner._parameters)[self.key] = tensor

    def get(self) -> Any:
        owner = self.owner()
        return None if owner is None else (owner._buffers if self.buffer else owner._parameters).get(self.key)


@dataclass(eq=False)
class Part:
    """One tensor of the module. entries: one, or several for a weight of a class of its own.

    plain: its hot tensor is registered itself, without a wrapper. untouched: it stays the tensor it was.
    """

    item: Item
    rule: TensorClass
    places: list[Place]
    entries: list[Entry] = field(default_factory=list)
    plain: bool = False
    untouched: bool = False
    layer_home: torch.device | None = None
    shell: Any = None
    layout: Layout | None = None
    original: torch.Tensor | None = None
    replacement: Any = None
    reservation: Reservation | None = None

    def forget_module(self) -> None:
        """Lets go of the module and, unless it is kept as the original, of the tensor that it had."""
        self.item.places = ()
        self.item.tensor = None  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return self.item.names[0]

    @property
    def moves_with_layer(self) -> bool:
        """Whether a weight's layer keeps more of it than the weight: a second list (LSTM), scales (bitsandbytes)."""
        plain = type(self.item.tensor) in (torch.Tensor, nn.Parameter)
        return not self.entries and (not plain or any(isinstance(place.owner(), nn.RNNBase) for place in self.places))

    @property
    def is_widened(self) -> bool:
        """Whether it is cast to a wider dtype than it is stored in."""
        return any(entry.casts and entry.layout.dtype.itemsize >= self.item.dtype.itemsize for entry in self.entries)

    @property
    def is_resident(self) -> bool:
        return self.plain or any(entry.resident for entry in self.entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries) if self.entries else self.item.nbytes

    @property
    def is_norm(self) -> bool:
        return all(is_norm(place.owner()) for place in self.places)

    @property
    def is_lookup(self) -> bool:
        """Whether it is a table of rows that only embeddings use."""
        return self.rule.rule in ("plain", "packed") and all(
            isinstance(place.owner(), nn.Embedding) for place in self.places
        )


def is_norm(owner: Any) -> bool:
    """Whether a module is a norm, by its name: libraries have many of their own."""
    return any(word in type(owner).__name__ for word in _NORMS)


def part_sizes(module: nn.Module, packed: Mapping[str, int] | None = None) -> list[PartSize]:
    """The tensors of a module of plain weights (cold ones will do) as a plan sees them, in their order there.
    packed: by name, the bytes of those that will be packed."""
    groups = operator_groups(module, ())
    owners: dict[int, list[nn.Module]] = {}
    packed_bytes: dict[int, int] = {}
    named: dict[int, tuple[str, torch.Tensor, bool]] = {}
    for path, owner in module.named_modules():
        for tensors, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    named.setdefault(id(tensor), (name, tensor, is_buffer))
                    if packed and name in packed:
                        packed_bytes[id(tensor)] = packed[name]
                    owners.setdefault(id(tensor), []).append(owner)
    parts = []
    for identity, (name, tensor, is_buffer) in named.items():
        mine = owners[identity]
        stays = is_buffer or any(isinstance(owner, nn.RNNBase) for owner in mine)
        lookup = all(isinstance(owner, nn.Embedding) for owner in mine)
        nbytes = packed_bytes.get(identity, tensor.numel() * tensor.dtype.itemsize)
        size = WeightSize(name, nbytes, group_of(name, groups), lookup)
        parts.append(PartSize((size,), nbytes, stays, all(is_norm(owner) for owner in mine)))
    return parts


def unpacking_bytes(shapes: Mapping[str, tuple[Sequence[int], torch.dtype]], groups: dict[str, str]) -> int:
    """What unpacking the hungriest operator's weights takes of the device for a moment. shapes: of packed weights and
    the dtype of their values, by name."""
    together: Counter[str] = Counter()
    for name, (shape, dtype) in shapes.items():
        together[group_of(name, groups)] += unpack_bytes(shape, dtype)
    return max(together.values(), default=0)


def group_of(name: str, groups: dict[str, str]) -> str:
    """What the weights that one operator may need together have in common: their layer, or one that stands for it."""
    owner = name.rpartition(".")[0]
    return groups.get(owner, owner) or "."  # an operator may be the module itself


def is_recurrent(item: Item) -> bool:
    """Whether a weight belongs to an LSTM or GRU, which keeps its weights in a second list, too."""
    return any(isinstance(owner, nn.RNNBase) for owner, _ in item.places)


def operator_groups(module: nn.Module, compiled: Sequence[str]) -> dict[str, str]:
    """Module paths whose weights are taken together, by the path that stands for them all.

    A compiled block gets all of its weights at once. torch's own attention and encoder layers hand the weights of their
    children to one fused operator.
    """
    groups: dict[str, str] = {}
    for path, part in module.named_modules():
        fused = isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer)
        if path in groups or not (fused or path in compiled):
            continue
        for child, _ in part.named_modules(prefix=path):
            groups[child] = path or "the compiled module"
    return groups
