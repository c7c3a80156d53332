"""Which weights of a component are packed: those that are so in their files, and those that are on their way in."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..model_source import ComponentSource
from ..packing import packed_row_bytes, rows_of
from ..stored_weight import StoredWeight
from ..streaming import operator_groups, unpacking_bytes
from ._roles import Role, role_of

# Layers that lose most by fewer bits: embeddings of patches, positions and time, the first and the last one. Those that
# diffusers leaves alone in its 8-bit layerwise casting are added (`_skip_layerwise_casting_patterns`), but for "norm":
# norms have no matrices, and the modulation that it means is a quarter of FLUX, and bears 8 bits with scales.
_FINE = r"embed|lm_head|norm_out|^(img_in|txt_in|proj_in|proj_out|conv_in|conv_out|final_layer|head)(\.|$)"
_LARGE = 1 << 16  # elements
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PackedWeights:
    """Of one component. nbytes: of its packed weights, by name. on_the_way_in: names of those that aren't so in
    their files. unpacking_bytes: what unpacking takes of the device for a moment. moved_bytes: what unpacking one reads
    and writes. saved_bytes: of weights, by what is packed on the way in."""

    nbytes: Mapping[str, int]
    on_the_way_in: Collection[str]
    unpacking_bytes: int
    moved_bytes: Mapping[str, int]
    saved_bytes: int

    def __bool__(self) -> bool:
        return bool(self.nbytes)


def packed_weights(
    module: nn.Module,
    source: ComponentSource,
    stored: Mapping[str, StoredWeight] | None,
    storage: str,
    dtypes: Mapping[str, torch.dtype],
) -> PackedWeights:
    """What is packed of a component whose weights needn't be there. storage: as for `load`. dtypes: that weights are
    computed in, by name."""
    named = dict(module.named_parameters(remove_duplicate=False))
    nbytes = {name: weight.nbytes for name, weight in (stored or {}).items() if weight.packing is not None}
    on_the_way_in = []
    if storage == "fp8" and role_of(source) in (Role.DENOISER, Role.ENCODER):
        for name in _coarse(module):
            if name not in nbytes:
                shape = named[name].shape
                on_the_way_in.append(name)
                nbytes[name] = rows_of(shape) * packed_row_bytes(math.prod(shape[1:]))
    rows_only = _looked_up(module)
    shapes = {
        name: (tuple(named[name].shape), dtypes.get(name, named[name].dtype))
        for name in nbytes
        if name in named and id(named[name]) not in rows_only
    }
    values = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    return PackedWeights(
        nbytes,
        on_the_way_in,
        unpacking_bytes(shapes, operator_groups(module, ())),
        moved_bytes={name: nbytes[name] + size for name, size in values.items()},
        saved_bytes=sum(values[name] - nbytes[name] for name in on_the_way_in),
    )


def _coarse(module: nn.Module) -> list[str]:
    """Names of the weights of large layers that bear fewer bits."""
    spared = [_FINE, *(getattr(module, "_skip_layerwise_casting_patterns", None) or ())]
    spared = [pattern for pattern in spared if pattern != "norm"]
    spared += [re.escape(name) for name in getattr(module, "_keep_in_fp32_modules", None) or ()]
    fine = re.compile("|".join(f"(?:{each})" for each in spared), re.IGNORECASE)
    tied = _tied(module)
    found = []
    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, _LAYERS) or not isinstance(weight, torch.Tensor) or fine.search(path):
            continue
        large = weight.numel() >= _LARGE
        if large and weight.dtype.is_floating_point and weight.dtype.itemsize > 1 and id(weight) not in tied:
            found.append(f"{path}.weight" if path else "weight")
    return found


def _looked_up(module: nn.Module) -> set[int]:
    """Tables that only embeddings use: their rows are unpacked, and never all of them."""
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    others = {
        id(parameter)
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding)
        for parameter in layer._parameters.values()
    }
    return tables - others


def _tied(module: nn.Module) -> set[int]:
    """Weights that have several names: other kinds of layers may use them."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied
