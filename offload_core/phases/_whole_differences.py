"""Whole differences in a phase: a file that keeps what it adds to a layer's weight or bias as it is, not as factors.

Their names are LyCORIS' (`diff`, `diff_b` of its "full" kind, `w_norm`, `b_norm` of norms) and ComfyUI's, whose
extracted LoRAs have `diff` and `diff_b` beside pairs. Which layer a name means is found as for LoHa and LoKr.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..lycoris import whole_by_layer
from ._differences import Convert, Place, places_of
from ._dropped import kept_names

PARTS = ("weight", "bias")


@dataclass(frozen=True)
class WholeDifference:
    """What a file adds to the weight and the bias of one layer: tensors of their sizes, None where it adds nothing."""

    place: Place
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def elements(self) -> int:
        return sum(change.numel() for change in (self.weight, self.bias) if change is not None)


@dataclass(frozen=True)
class _Change:
    """A tensor that is added, and its name in the file."""

    name: str
    tensor: torch.Tensor


Layers = dict[str, dict[str, _Change]]  # by the layer's name in the file, and by "weight" or "bias"


def split_whole(state: dict[str, torch.Tensor], convert: Convert) -> Layers:
    """Takes the whole differences out of a file's weights, but for those that diffusers' converter makes something of
    (Wan's biases become biases of plain LoRAs). convert: see `find_differences`."""
    layers = whole_by_layer(state)
    count = sum(map(len, layers.values()))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    theirs = (kept_names(shapes, convert) or frozenset()) if 0 < count < len(state) else frozenset()
    taken: Layers = {}
    for layer, parts in layers.items():
        mine = {part: _Change(name, state.pop(name)) for part, name in parts.items() if name not in theirs}
        if mine:
            taken[layer] = mine
        if not any(name.startswith(f"{layer}.") and name != f"{layer}.alpha" for name in state):
            state.pop(f"{layer}.alpha", None)  # of no meaning without factors
    return taken


def find_whole(
    layers: Layers, components: Mapping[str, nn.Module], convert: Convert, file: Path
) -> tuple[tuple[WholeDifference, ...], tuple[str, ...]]:
    """The whole differences of a file, and the names of those that the model has no weight or bias for.

    Raises ModelError for one of another size than the weight or bias that it names.
    """
    places = places_of({name: _size(parts) for name, parts in layers.items()}, components, convert, file, takes_whole)
    found: list[WholeDifference] = []
    lost: dict[str, None] = {}
    for name, parts in layers.items():
        if name not in places:
            lost |= dict.fromkeys(change.name for change in parts.values())
        for place in places.get(name, ()):
            layer: Any = components[place.component].get_submodule(place.layer)
            changes: dict[str, torch.Tensor] = {}
            for part, change in parts.items():
                if getattr(layer, part, None) is None:
                    lost[change.name] = None
                    continue
                changes[part] = _rows(change.tensor, place)
                _check_size(changes[part], getattr(layer, part), part, place, file)
            if changes:
                found.append(WholeDifference(place, changes.get("weight"), changes.get("bias")))
    return tuple(found), tuple(lost)


def takes_whole(layer: nn.Module) -> bool:
    """Whether a layer has a weight, perhaps a bias, and nothing else of its own. A table is left out: it is only looked
    up in, and would be added up whole for each look."""
    own = {name for name, _ in layer.named_parameters()}
    return "weight" in own and own <= set(PARTS) and not isinstance(layer, nn.Embedding)


def _size(parts: Mapping[str, _Change]) -> tuple[int, int | None]:
    """Rows and columns of the weight that is changed; no columns where only the bias is."""
    if "weight" not in parts:
        return parts["bias"].tensor.shape[0], None
    shape = parts["weight"].tensor.shape
    return shape[0], math.prod(shape[1:])


def _rows(change: torch.Tensor, place: Place) -> torch.Tensor:
    return torch.cat([change[start:stop] for start, stop in place.rows]) if place.rows else change


def _check_size(change: torch.Tensor, now: torch.Tensor, part: str, place: Place, file: Path) -> None:
    if change.numel() != now.numel() or change.shape[0] != now.shape[0]:
        raise ModelError(
            f"The LoRA {file.name} doesn't fit {place.component} of this model: it changes the {part} of "
            f"{place.layer}, which is {list(now.shape)}, by {list(change.shape)}. It was made for a model with other "
            "sizes."
        )


class WithWholeDifference(nn.Module):
    """A layer that computes with its weight and bias changed.

    The change times the strength, in float32 and then in the dtype of the weight, is added to it anew in each call. The
    weight itself is never written, whether it is resident, streamed or packed.
    """

    def __init__(self, base_layer: nn.Module, of: WholeDifference, strength: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer, self.strength = base_layer, strength
        for part in PARTS:
            change: torch.Tensor | None = getattr(of, part)
            if change is not None:
                now: Any = getattr(base_layer, part)
                own = change.reshape(now.shape).to(now.device, dtype, copy=True)
                self.register_parameter(f"{part}_change", nn.Parameter(own, requires_grad=False))

    @property
    def real_layer(self) -> nn.Module:
        """The library's own layer inside."""
        return getattr(self.base_layer, "real_layer", self.base_layer)

    @property
    def weight(self) -> Any:
        return self._changed("weight")

    @property
    def bias(self) -> Any:
        return self._changed("bias")

    def _changed(self, part: str) -> Any:
        now: Any = getattr(self.base_layer, part, None)
        change = self._parameters.get(f"{part}_change")
        return now if change is None else now + (change.float() * self.strength).to(now.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        changed = {part: value for part in PARTS if (value := getattr(self, part)) is not None}
        return torch.func.functional_call(self.real_layer, changed, args, kwargs, tie_weights=False)


def wear_whole(module: nn.Module, of: WholeDifference, strength: float, dtype: torch.dtype) -> None:
    """Puts a difference right around the layer of a component that it names, inside of all other LoRAs."""
    parent, _, name = of.place.layer.rpartition(".")
    owner: Any = module.get_submodule(parent)
    while not isinstance(layer := owner.get_submodule(name), WithWholeDifference) and hasattr(layer, "base_layer"):
        owner, name = layer, "base_layer"
    setattr(owner, name, WithWholeDifference(layer, of, strength, dtype))
