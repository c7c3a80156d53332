"""Every storage of a component once: its parameters and buffers, their ties, and where their bytes lie in a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .errors import ManagedModuleError
from .file_backing import FileMapping, Span, find_file_ranges, read_mappings
from .file_reader import FileRange
from .stored_weight import StoredWeight

_ATTRIBUTE_DEPTH = 3
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)
Kind = Literal["parameter", "buffer"]
_Registered = tuple[str, nn.Module, str, Kind, torch.Tensor]
_MODULE_FIELDS = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class Item:
    """One tensor of a component, under all its names.

    names: dotted paths, the canonical one first. places: the module and key behind each name. tensor: the object under
    the first name. stride: in elements. nbytes: from the first to the last element; of a tensor without a storage of
    its own (a wrapper subclass), the bytes of its inner tensors. ranges: where exactly these bytes lie in a file, empty
    if in none. dense: the elements fill those bytes without gap or overlap, in some order of the dimensions.
    shares_storage: its bytes are also bytes of another item or of a tensor in a plain attribute, so that it can't be
    moved alone. opaque: it has no storage that could be looked at. stored: how it is made from files, for a tensor
    without memory that was named to `take_inventory`; `dtype` and `nbytes` are then those of the files.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    kind: Kind
    tensor: torch.Tensor = field(repr=False)
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    ranges: tuple[FileRange, ...] = ()
    dense: bool = True
    shares_storage: bool = False
    opaque: bool = False
    stored: StoredWeight | None = field(default=None, repr=False)


@dataclass
class Inventory:
    """What a component consists of.

    items: in the order of registration, the best first guess of the order of use. attributes: names of tensors in plain
    attributes (and lists, tuples and dicts in them) by module path, which no loader, cast or move knows of.
    overlapping: groups of items of which each shares bytes with another without being the same tensor.
    """

    items: list[Item]
    attributes: dict[str, tuple[str, ...]]
    overlapping: tuple[tuple[Item, ...], ...]


def take_inventory(
    module: nn.Module,
    files: Sequence[Path] = (),
    *,
    stored: Mapping[str, StoredWeight] | None = None,
    mappings: Callable[[], list[FileMapping] | None] = read_mappings,
) -> Inventory:
    """Lists the parameters and buffers of `module`, each storage once. No tensor is read, copied or changed.

    files: the component's weight files; a tensor that was cut from a mapping of one of them gets its range. stored: by
    name, how tensors without memory (cold weights) are made from files. mappings: how to learn what is mapped where
    (see `find_file_ranges`).

    Raises ManagedModuleError if a tensor has no value (it is on the meta device), and ModelError if a mapped file was
    cut short.
    """
    items: list[Item] = []
    by_identity: dict[Any, Item] = {}
    spans: dict[Item, Span] = {}
    registered = list(_registered(module))
    _refuse_without_value(module, registered)
    for name, owner, key, kind, tensor in registered:
        identity, span = _identify(tensor)
        item = by_identity.get(identity)
        if item is None:
            item = by_identity[identity] = _item(name, owner, key, kind, tensor, span)
            items.append(item)
            if span is not None:
                spans[item] = span
        else:
            item.names += (name,)
            item.places += ((owner, key),)
            if kind == "parameter":
                item.kind = kind

    on_host = [item for item in spans if item.tensor.device.type == "cpu"]
    for item, found in zip(on_host, find_file_ranges([spans[i] for i in on_host], files, mappings), strict=True):
        item.ranges = (found,) if found is not None else ()
    for item in items if stored is not None else ():
        _take_from_files(item, stored or {})

    overlapping = _overlapping(spans)
    attributes = dict(_attributes(module))
    held = [tensor for tensors in attributes.values() for _, tensor in tensors]
    for item in (*(item for group in overlapping for item in group), *_held_outside(items, spans, held)):
        item.shares_storage = True
    names = {path: tuple(name for name, _ in tensors) for path, tensors in attributes.items()}
    inventory = Inventory(items, names, overlapping)
    check_ownership(inventory, module)
    return inventory


def check_ownership(inventory: Inventory, module: nn.Module) -> None:
    """Proves that every parameter and buffer reachable from `module` belongs to exactly one item, and no item to none.

    It walks by another way than the inventory and compares what is registered now. Raises ManagedModuleError that names
    the first tensor with no owner, with two, or that was exchanged.
    """
    owners: dict[tuple[int, str], list[Item]] = defaultdict(list)
    for item in inventory.items:
        for place, key in item.places:
            if item not in owners[id(place), key]:
                owners[id(place), key].append(item)
    seen: dict[Any, Item] = {}
    for name, part in module.named_modules():
        tensors: dict[str, torch.Tensor | None] = {**part._buffers, **part._parameters}
        for key, tensor in tensors.items():
            if tensor is None:
                continue
            path = f"{name}.{key}" if name else key
            found = owners.pop((id(part), key), [])
            identity = _identify(tensor)[0]
            if len(found) != 1 or seen.setdefault(identity, found[0]) is not found[0]:
                raise _error(module, path, f"belongs to {len(found) or 'no'} items of its inventory instead of one")
            if identity != _identify(found[0].tensor)[0]:
                raise _error(module, path, "was exchanged after its inventory was taken")
    if owners:
        item = next(iter(owners.values()))[0]
        raise _error(module, item.names[0], "is in its inventory, but no longer in the module")


def _registered(module: nn.Module) -> Iterator[_Registered]:
    """Every name of every parameter and buffer (name, owner, key, kind, tensor); shared modules under each name."""
    for path, part in _walk(module, "", ()):
        prefix = f"{path}." if path else ""
        kinds: tuple[tuple[Kind, dict[str, Any]], ...] = (("parameter", part._parameters), ("buffer", part._buffers))
        for kind, tensors in kinds:
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + key, part, key, kind, tensor


def _walk(module: nn.Module, path: str, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Like named_modules(remove_duplicate=False), but a module that contains itself doesn't send it round forever."""
    if any(module is other for other in above):
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, (*above, module))


def _identify(tensor: torch.Tensor) -> tuple[Any, Span | None]:
    """What is equal for two objects only if they are the same tensor, and the memory it has, if that can be told."""
    span = _span(tensor)
    if span is None:
        return id(tensor), None
    own_class = None if type(tensor) in _PLAIN_CLASSES else type(tensor)
    return (tensor.device, span.start, tuple(tensor.shape), tensor.stride(), tensor.dtype, own_class), span


def _span(tensor: torch.Tensor) -> Span | None:
    """The memory of a tensor; None for one that has none, or none that can be looked at."""
    if hasattr(tensor, "__tensor_flatten__"):
        return None
    try:
        start = tensor.untyped_storage().data_ptr()
        nbytes = _span_bytes(tensor.shape, tensor.stride(), tensor.dtype.itemsize)
    except Exception:  # sparse, quantised and foreign tensors each refuse with an error class of their own
        return None
    if not start or not nbytes:
        return None
    return Span(start + int(tensor.storage_offset()) * tensor.dtype.itemsize, nbytes, tensor.dtype, tensor)


def _span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * itemsize


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _item(
    name: str,
    owner: nn.Module,
    key: str,
    kind: Kind,
    tensor: torch.Tensor,
    span: Span | None,
) -> Item:
    shape = tuple(tensor.shape)
    strided = tensor.layout == torch.strided
    stride = tuple(tensor.stride()) if strided else ()
    return Item(
        names=(name,),
        places=((owner, key),),
        kind=kind,
        tensor=tensor,
        shape=shape,
        stride=stride,
        dtype=tensor.dtype,
        nbytes=span.nbytes if span is not None else _opaque_bytes(tensor),
        dense=strided and (0 in shape or _is_dense(shape, stride)),
        opaque=span is None and tensor.numel() > 0,
    )


def _take_from_files(item: Item, stored: Mapping[str, StoredWeight]) -> None:
    found = next((stored[name] for name in item.names if name in stored), None)
    if found is not None and item.opaque:
        item.stored, item.ranges, item.dtype, item.nbytes = found, found.pieces, found.torch_dtype, found.nbytes
        item.opaque = False


def _opaque_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_opaque_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.dtype.itemsize


def _refuse_without_value(module: nn.Module, registered: list[_Registered]) -> None:
    empty = [name for name, _, _, _, tensor in registered if nn.parameter.is_lazy(tensor) or tensor.is_meta]
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise ManagedModuleError(
            f"{empty[0]}{more} of {type(module).__name__} has no value: it is on the meta device or not initialised. "
            "Load the component's weights before you manage it."
        )


def _overlapping(spans: dict[Item, Span]) -> tuple[tuple[Item, ...], ...]:
    """Groups of items whose memory overlaps, directly or by way of another item."""
    groups: list[list[Item]] = []
    last_device, end = None, 0
    for item in sorted(spans, key=lambda item: (str(item.tensor.device), spans[item].start)):
        span, device = spans[item], item.tensor.device
        if device == last_device and span.start < end:
            groups[-1].append(item)
            end = max(end, span.end)
        else:
            groups.append([item])
            last_device, end = device, span.end
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _held_outside(items: list[Item], spans: dict[Item, Span], held: list[torch.Tensor]) -> list[Item]:
    """Items whose memory or object is also in a plain attribute, which would keep the old bytes alive."""
    objects = {id(tensor) for tensor in held}
    found = [(tensor.device, span) for tensor in held if (span := _span(tensor)) is not None]
    return [
        item
        for item in items
        if id(item.tensor) in objects
        or (item in spans and any(_overlap(item.tensor.device, spans[item], *other) for other in found))
    ]


def _overlap(device: torch.device, span: Span, other_device: torch.device, other: Span) -> bool:
    return device == other_device and span.start < other.end and other.start < span.end


def _attributes(module: nn.Module) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    for path, part in module.named_modules():
        found = [
            pair
            for name, value in vars(part).items()
            if name not in _MODULE_FIELDS
            for pair in _tensors_in(name, value, _ATTRIBUTE_DEPTH)
        ]
        if found:
            yield path, found


def _tensors_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", inner, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", inner, depth - 1)


def _error(module: nn.Module, name: str, what: str) -> ManagedModuleError:
    return ManagedModuleError(
        f"{name} of {type(module).__name__} {what}, so moving it could lose data. "
        "Don't change the module while it is managed; if you didn't, please report this."
    )
