"""What a plan counts for components that are stored quantised: packed bytes, and room to unpack a weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..quantised import FORMATS, UNPACKING_BYTES, method_of, packed_sizes
from ..streaming import PartSize, part_sizes
from ._components import Component


def component_sizes(component: Component) -> tuple[PartSize, ...]:
    """The weights of a component that isn't loaded, as a plan sees them. Those that the files hold packed count as
    they are packed; of a format that doesn't stream they stay."""
    plain = tuple(component.part_sizes())
    method = method_of(component.source)
    if method is None:
        return plain
    packed = packed_sizes(component.source, [part.sizes[0].name for part in plain])
    return tuple(_packed(part, packed.get(part.sizes[0].name), FORMATS[method].streams) for part in plain)


def unpacking(components: Iterable[Component]) -> tuple[int, tuple[str, ...]]:
    """Bytes beside the traced activations while the largest quantised weight is unpacked, and a sentence for each
    component that has any. The trace is of the module with plain weights, so this is an estimate."""
    most, sentences = 0, []
    for component in components:
        if not component.quantised:
            continue
        parts = part_sizes(component.module)
        packed = packed_sizes(component.source, [part.sizes[0].name for part in parts])
        weights = {name: weight.numel() for name, weight in component.module.named_parameters() if name in packed}
        nbytes = UNPACKING_BYTES * max(weights.values(), default=0)
        if nbytes:
            most = max(most, nbytes)
            sentences.append(f"{component.source.name}: {nbytes:,} bytes to unpack a quantised weight are an estimate")
    return most, tuple(sentences)


def _packed(part: PartSize, tensors: dict[str, int] | None, streams: bool) -> PartSize:
    if tensors is None:
        return part
    nbytes = sum(tensors.values())
    if not streams:
        return PartSize((), nbytes, stays=True, is_norm=part.is_norm)
    first = part.sizes[0]
    sizes = tuple(replace(first, name=name, nbytes=count) for name, count in tensors.items())
    return replace(part, sizes=sizes, nbytes=nbytes)
