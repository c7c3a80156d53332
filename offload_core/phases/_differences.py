"""LoHa and LoKr in a phase: which layers of the model a file's names mean, and layers that add a difference.

diffusers converts names of plain LoRAs only. So each layer of the file stands in as a plain LoRA of rank 1 whose matrix
`up` counts its rows: what comes out of diffusers' own converter says which layer of the library it became, and which
rows of the source it is where one matrix of the file is several layers there (a fused q, k and v).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..lycoris import FACTORS, changed_shape, difference, factors_by_layer, scale_of

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
Size = tuple[int, int | None]  # rows and columns of a weight, a kernel counted in the columns; None: of any number

# What stands before the path of a layer, and whose it is; "" is the denoiser. The first that fits decides.
_PREFIXES: tuple[tuple[str, str], ...] = (
    ("lora_unet_", ""),
    ("lora_transformer_", ""),
    ("lycoris_", ""),
    ("diffusion_model.", ""),
    ("base_model.model.", ""),
    ("transformer.", ""),
    ("unet.", ""),
    ("lora_te_", "text_encoder"),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lora_te3_", "text_encoder_3"),
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("text_encoder_3.", "text_encoder_3"),
    ("", ""),
)


@dataclass(frozen=True)
class Place:
    """A layer of a component. rows: which rows of the file's difference are its weight's, as (start, stop) in their
    order; empty for all of them."""

    component: str
    layer: str
    rows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Difference:
    """What a file does to one layer: its factors and the scale that belongs to them."""

    place: Place
    factors: dict[str, torch.Tensor]
    scale: float

    @property
    def elements(self) -> int:
        return sum(factor.numel() for factor in self.factors.values())


def split_factors(state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Takes the factors of LoHa and LoKr out of a file's weights; returns them by the layer's name in the file, with
    its alpha. What is left in `state` are pairs of a plain LoRA."""
    layers = factors_by_layer(state)
    return {
        layer: {what: state.pop(name) for what, name in names.items() if what != "dora_scale"}
        for layer, names in layers.items()
    }


def find_differences(
    layers: dict[str, dict[str, torch.Tensor]], components: Mapping[str, nn.Module], convert: Convert, file: Path
) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """The differences of a file, and the layers of it that the model doesn't have.

    components: of the pipeline, without weights or with. convert: diffusers' converter of a plain LoRA. Raises
    ModelError for a difference that has another size than the layer that it names.
    """
    shapes = {name: {k: tuple(t.shape) for k, t in f.items() if k in FACTORS} for name, f in layers.items()}
    places = places_of({name: changed_shape(of) for name, of in shapes.items()}, components, convert, file, _takes)
    found = []
    for name, tensors in layers.items():
        alpha = float(tensors["alpha"]) if "alpha" in tensors else None
        factors = {what: tensor for what, tensor in tensors.items() if what in FACTORS}
        for place in places.get(name, ()):
            found.append(Difference(place, factors, scale_of(shapes[name], alpha)))
    return tuple(found), tuple(name for name in layers if name not in places)


def places_of(
    sizes: Mapping[str, Size],
    components: Mapping[str, nn.Module],
    convert: Convert,
    file: Path,
    takes: Callable[[nn.Module], bool],
) -> dict[str, list[Place]]:
    """The layers of the model that names of a file mean, by these names; those that mean none are left out.

    sizes: of the weights that they change. takes: which layers can have such a change. Raises ModelError for a name
    that says a layer of another size.
    """
    paths = _Paths(components, "unet" if "unet" in components else "transformer", takes)
    places = {name: [place] for name in sizes if (place := paths.named(name)) and paths.fits(place, sizes[name])}
    for ends in ((".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight")):
        missing = {name: size for name, size in sizes.items() if name not in places}
        places |= dict(_converted(missing, ends, convert, paths))
    for name, size in sizes.items():
        if name not in places and (place := paths.named(name)) is not None:
            by = f"a matrix of {size}" if size[1] is not None else f"{size[0]} numbers"
            raise ModelError(
                f"The LoRA {file.name} doesn't fit {place.component} of this model: it changes {place.layer} by {by}. "
                "It was made for a model with other sizes."
            )
    return places


class _Paths:
    """Layers of components by the ways in which files spell them."""

    def __init__(self, components: Mapping[str, nn.Module], denoiser: str, takes: Callable[[nn.Module], bool]) -> None:
        self.components, self.denoiser, self.takes = components, denoiser, takes
        self._flat: dict[str, dict[str, str]] = {}

    def named(self, name: str) -> Place | None:
        """The layer that a name says outright: a path of the library, with dots or underscores, after a prefix."""
        for prefix, whose in _PREFIXES:
            component = whose or self.denoiser
            if name.startswith(prefix) and component in self.components:
                flat, rest = self._flat_paths(component), name.removeprefix(prefix).replace(".", "_")
                path = flat.get(rest) or (flat.get(rest.removeprefix("text_model_")) if whose else None)
                if path:
                    return Place(component, path)
        return None

    def _flat_paths(self, component: str) -> dict[str, str]:
        """Paths by their spelling without dots; those that would be spelt alike are left out."""
        if component not in self._flat:
            paths = [path for path, part in self.components[component].named_modules() if self.takes(part)]
            spelt = [path.replace(".", "_") for path in paths]
            pairs = zip(spelt, paths, strict=True)
            self._flat[component] = {flat: path for flat, path in pairs if spelt.count(flat) == 1}
        return self._flat[component]

    def fits(self, place: Place, size: Size) -> bool:
        """Whether there is such a layer, with a weight as large as a difference of this size (or these rows of it)."""
        if place.component not in self.components:
            return False
        try:
            layer: Any = self.components[place.component].get_submodule(place.layer)
        except AttributeError:
            return False
        rows = sum(stop - start for start, stop in place.rows) or size[0]
        if not self.takes(layer):
            return False
        return size[1] in (None, math.prod(layer.weight.shape[1:])) and layer.weight.shape[0] == rows


def _takes(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _converted(
    sizes: dict[str, Size], ends: tuple[str, str], convert: Convert, paths: _Paths
) -> Iterator[tuple[str, list[Place]]]:
    """What diffusers makes of layers of these names, if plain LoRAs end with `ends`."""
    names = list(sizes)
    state = {}
    for number, (name, (rows, columns)) in enumerate(sizes.items(), start=1):
        state[name + ends[0]] = torch.full((1, columns or 1), float(number), dtype=torch.float64)
        state[name + ends[1]] = torch.arange(1, rows + 1, dtype=torch.float64)[:, None]
        if ends[0] == ".lora_down.weight":  # some converters ask for it; with rank 1 nothing is scaled
            state[f"{name}.alpha"] = torch.ones((), dtype=torch.float64)
    try:
        became = convert(state) if state else {}
    except (ValueError, KeyError, IndexError, AttributeError, AssertionError, NotImplementedError, RuntimeError):
        if len(names) > 1:  # one name that it doesn't know may keep it from all others
            for name in names:
                yield from _converted({name: sizes[name]}, ends, convert, paths)
        return
    places: dict[str, list[Place]] = {}
    for key, down in became.items():
        path, is_down, _ = key.partition(".lora_A")
        up = became.get(key.replace(".lora_A", ".lora_B"))
        if is_down and up is not None and (source := _read_number(down)) in range(1, len(names) + 1):
            name, (component, _, layer) = names[source - 1], path.partition(".")
            runs = _runs(up[:, 0].tolist())
            place = Place(component, layer, runs if runs != ((0, sizes[name][0]),) else ())
            if paths.fits(place, sizes[name]):
                places.setdefault(name, []).append(place)
    for name, found in places.items():
        if _covers(found, sizes[name][0]):
            yield name, found


def _read_number(down: torch.Tensor) -> int:
    """Which layer of the file a stand-in's matrix is; 0 if the converter made something else of it."""
    same = down.shape[0] == 1 and bool((down == down[0, 0]).all())
    return int(down[0, 0]) if same else 0


def _runs(counted: list[float]) -> tuple[tuple[int, int], ...]:
    """Rows that count from 1, as stretches (start, stop) of rows that count from 0."""
    runs: list[tuple[int, int]] = []
    for _, run in itertools.groupby(enumerate(counted), key=lambda item: item[1] - item[0]):
        rows = [int(row) for _, row in run]
        runs.append((rows[0] - 1, rows[-1]))
    return tuple(runs)


def _covers(places: Iterable[Place], rows: int) -> bool:
    """Whether each row of the file's matrix came to some layer: a part alone would be another change."""
    taken: set[int] = set()
    for place in places:
        taken.update(*(range(start, stop) for start, stop in place.rows or ((0, rows),)))
    return len(taken) == rows


class WithDifference(nn.Module):
    """A layer that adds, to what it returns, what a difference of its weight makes of the same input.

    Its own weight is never touched, whether it is resident, streamed or packed.
    """

    def __init__(self, base_layer: nn.Module, of: Difference, strength: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight: Any = base_layer.weight
        self.shape, self.rows, self.scale = tuple(weight.shape), of.place.rows, of.scale * strength
        self.factors = tuple(of.factors)
        for name, factor in of.factors.items():
            own = factor.to(weight.device, dtype, copy=True)  # in the file it may begin at an odd address
            self.register_parameter(name, nn.Parameter(own, requires_grad=False))

    @property
    def real_layer(self) -> nn.Module:
        """The library's own layer inside."""
        return getattr(self.base_layer, "real_layer", self.base_layer)

    @property
    def weight(self) -> Any:
        """Some models look at the dtype of a layer's weight."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        change = difference({name: getattr(self, name) for name in self.factors})
        if self.rows:
            change = torch.cat([change[start:stop] for start, stop in self.rows])
        change = (change * self.scale).to(x.dtype).view(self.shape)
        real: Any = self.real_layer
        more = nn.functional.linear(x, change) if isinstance(real, nn.Linear) else real._conv_forward(x, change, None)
        return result + more.to(result.dtype)


def wear_difference(module: nn.Module, of: Difference, strength: float, dtype: torch.dtype) -> None:
    """Puts a difference on the layer of a component that it names, beside the LoRAs that are there already."""
    parent, _, name = of.place.layer.rpartition(".")
    owner: Any = module.get_submodule(parent)
    while not hasattr(layer := owner.get_submodule(name), "real_layer") and hasattr(layer, "base_layer"):
        owner, name = layer, "base_layer"  # peft's
    setattr(owner, name, WithDifference(layer, of, strength, dtype))
