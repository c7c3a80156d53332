"""LoRA files, applied to the components of a phase right after they are loaded, or without weights for a trace."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._report_table import human_bytes
from ..checkpoint import content_mark, read_header
from ..devices import is_out_of_memory
from ..errors import ColdWeightError, InputError, ModelError, TraceError
from ..lora_header import is_other_kind, read_lora_header
from ._cold import make_added_cold
from ._differences import Difference, find_differences, split_factors, wear_difference
from ._dropped import dropped_names
from ._ports import attach_gate
from ._whole_differences import WholeDifference, find_whole, split_whole, wear_whole

if TYPE_CHECKING:
    import torch

    from ._scope import Phase


@dataclass(frozen=True)
class Lora:
    """A LoRA file and its strength (1.0 is as trained).

    fingerprint: of the file's content. encodes: whether it changes text encoders, so that embeddings depend on it.
    family: which models it seems to be for by its names, empty if they don't say. beside: whether it holds anything but
    pairs of matrices: LoHa, LoKr, whole differences.
    """

    path: str = field(repr=False)
    scale: float
    fingerprint: str = field(repr=False)
    encodes: bool = field(repr=False)
    family: str = field(default="", repr=False)
    beside: bool = field(default=False, repr=False)

    def file(self) -> Path:
        """The file, unless it changed since the handle was made (ModelError)."""
        file = Path(self.path)
        if not file.is_file() or content_mark(file) != self.fingerprint:
            raise ModelError(f"The LoRA {file.name} changed since the model was loaded. Load both again.")
        return file

    def seems_to_be_for(self) -> str:
        """The end of a sentence that refuses it, with a space before; empty if its names don't say."""
        return f" It seems to be for {self.family}." if self.family else ""


def as_loras(loras: Sequence[Any]) -> tuple[Lora, ...]:
    """LoRAs from paths, (path, scale) pairs, or those of a handle, in the order of their first mention.

    A file that is named twice is applied once, with the sum of its strengths; one whose strengths come to 0 isn't
    applied at all. Raises ModelError for a file that isn't a LoRA in safetensors.
    """
    found: dict[str, Lora] = {}
    for lora in map(_as_lora, loras):
        before = found.get(lora.fingerprint)
        found[lora.fingerprint] = lora if before is None else replace(before, scale=before.scale + lora.scale)
    return tuple(lora for lora in found.values() if lora.scale)


def _as_lora(item: Any) -> Lora:
    if isinstance(item, Lora):
        return item
    path, scale = item if isinstance(item, tuple) else (item, 1.0)
    if not isinstance(path, str | os.PathLike) or not isinstance(scale, int | float):
        raise InputError(f"A LoRA is a path or a (path, scale) pair, not {item!r}.")
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"There is no LoRA file {file.name} in {file.parent.name or '.'}.")
    if file.suffix != ".safetensors":
        raise ModelError(f"The LoRA {file.name} isn't a safetensors file; pickled weights aren't loaded. Convert it.")
    header = read_lora_header(file)
    mark = content_mark(file)
    beside = bool(header.factored or header.whole)
    return Lora(str(file.resolve()), float(scale), mark, header.encodes, header.family, beside)


@dataclass(frozen=True)
class _Weights:
    """A LoRA as diffusers reads it: weights by component, strengths that its format stores apart, and metadata.

    differences: what it holds beside pairs of matrices. lost: names in the file that came to nothing in the model.
    """

    adapter: str
    lora: Lora
    state: dict[str, Any]
    alphas: dict[str, Any] | None
    metadata: dict[str, Any] | None
    differences: tuple[Difference | WholeDifference, ...] = ()
    lost: tuple[str, ...] = ()

    def touches(self, component: str) -> bool:
        return self.pairs(component) or any(True for _ in self.differences_of(component))

    def pairs(self, component: str) -> bool:
        """Whether it has weights of a plain LoRA for a component."""
        return any(key.startswith(f"{component}.") for key in self.state)

    def differences_of(self, component: str) -> Iterator[Difference | WholeDifference]:
        return (one for one in self.differences if one.place.component == component)

    def elements(self, component: str) -> int:
        """Numbers in the adapters that it makes in a component."""
        mine = (key for key in self.state if key.startswith(f"{component}.") and not key.endswith("alpha"))
        pairs = sum(self.state[key].numel() for key in mine if "lora" in key.removeprefix(component))
        return pairs + sum(one.elements for one in self.differences_of(component))


@dataclass(frozen=True)
class _Change:
    """What the LoRAs of a phase do to one component. apply: puts them on. elements: numbers that it gets more."""

    apply: Callable[[Any], None]
    elements: int


def plan_loras(phase: Phase, owned: set[str]) -> None:
    """Arranges that each owned component that a LoRA names gets it when it is loaded, in memory that is kept for it."""
    for name, change in _changes(phase, owned).items():
        component = phase.components[name]
        apply = functools.partial(_apply_and_tell, change.apply, name, phase.notes)
        component.after_load = functools.partial(_one_by_one, [component.after_load, apply])
        component.added_bytes += change.elements * component.dtype.itemsize


def _apply_and_tell(apply: Callable[[Any], None], name: str, notes: list[str], module: Any) -> None:
    before = _nbytes(module)
    apply(module)
    note = f"{name} got {human_bytes(_nbytes(module) - before)} of LoRA weights, which stay."
    if note not in notes:  # an expert may be loaded again
        notes.append(note)


def _one_by_one(changes: list[Callable[[Any], None] | None], module: Any) -> None:
    for change in changes:
        if change is not None:
            change(module)


def trace_loras(phase: Phase, owned: set[str]) -> dict[str, int]:
    """Applies the LoRAs to owned components that aren't loaded, so that they can be traced with them. Returns the bytes
    that each of these gets.

    What is added has no memory either, as if it were the component's own: blocks that differ in nothing but the numbers
    of their LoRA are alike. Raises what the phase would, and TraceError for a LoRA that is made of the model's weights.
    """
    added = {}
    for name, change in _changes(phase, owned).items():
        component = phase.components[name]
        module = component.module
        before = _nbytes(module)
        try:
            change.apply(module)
        except ColdWeightError as error:
            raise TraceError(
                f"The LoRAs of {name} can't be applied without its weights, so it can't be traced."
            ) from error
        _forget_names(module)
        attach_gate(module, component.gate)  # to what was added
        make_added_cold(module, name, phase.device)
        added[name] = _nbytes(module) - before
    return added


def _nbytes(module: Any) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _forget_names(module: Any) -> None:
    """peft notes in each layer what it is called, and no two blocks would be alike."""
    for part in module.modules():
        noted = vars(part).get("kwargs")
        if isinstance(noted, dict):
            noted.pop("target_name", None)


def _changes(phase: Phase, owned: set[str]) -> dict[str, _Change]:
    """By component, for those of `owned` that a LoRA names."""
    if not phase.handle.loras:
        return {}
    cls = type(phase.pipeline)
    if not hasattr(cls, "lora_state_dict"):
        raise InputError(f"{cls.__name__} can't load LoRAs. Load the model without them.")
    loras = [_read(phase, f"phase_offload_{i}", lora) for i, lora in enumerate(phase.handle.loras)]
    for weights in loras:
        if not any(weights.touches(name) for name in phase.components):
            raise ModelError(
                f"The LoRA {Path(weights.lora.path).name} is for another kind of model: none of its weights belongs to "
                f"a component of {cls.__name__} ({', '.join(phase.components)}).{weights.lora.seems_to_be_for()}"
            )
    phase.notes += [note for weights in loras if (note := _unused_note(weights, phase, owned))]
    changes = {}
    for name in owned & phase.components.keys():
        mine = [weights for weights in loras if weights.touches(name)]
        if mine:
            apply = functools.partial(_apply, cls, name, mine, phase.components[name].dtype)
            changes[name] = _Change(apply, sum(w.elements(name) for w in mine))
    return changes


def _unused_note(weights: _Weights, phase: Phase, owned: set[str]) -> str:
    """A sentence on those of its weights for this phase that the model has no layer for; empty if there is none.

    Weights for a component that the model lacks are told by the phase of the denoiser.
    """
    layers = {name: {path for path, _ in phase.components[name].module.named_modules()} for name in owned}
    unused = list(weights.lost) if phase.name == "denoise" else []
    for key in weights.state:
        component, _, path = key.partition(".")
        layer, is_pair, _ = path.partition(".lora_")
        if component in layers:
            if is_pair and layer not in layers[component]:
                unused.append(key)
        elif component not in phase.components and phase.name == "denoise":
            unused.append(key)
    if not unused:
        return ""
    some = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
    return (
        f"The LoRA {Path(weights.lora.path).name} fits this model in part: {len(unused)} of its "
        f"{len(weights.state) + len(weights.differences) + len(weights.lost)} weights were not used ({some})."
    )


def _read(phase: Phase, adapter: str, lora: Lora) -> _Weights:
    file, pipeline = lora.file(), phase.pipeline
    if lora.beside and (weights := _with_differences(phase, adapter, lora)) is not None:
        return weights
    weights = _as_weights(adapter, lora, _converted(pipeline, lora, str(file.parent), weight_name=file.name))
    if phase.name != "denoise":  # the only one that tells
        return weights
    shapes = {name: entry.shape for name, entry in read_header(file).tensors.items()}
    return replace(weights, lost=dropped_names(shapes, functools.partial(_converted_alone, pipeline)))


def _with_differences(phase: Phase, adapter: str, lora: Lora) -> _Weights | None:
    """A file of LoHa or LoKr or whole differences, perhaps with plain pairs. None if diffusers takes all of it."""
    from safetensors.torch import load_file

    file = lora.file()
    state = load_file(file)
    modules = {name: component.module for name, component in phase.components.items()}
    convert = functools.partial(_converted_alone, phase.pipeline)
    layers = split_factors(state)
    whole = split_whole(state, convert)
    if not layers and not whole:
        return None
    factored, lost = find_differences(layers, modules, convert, file)
    added, without = find_whole(whole, modules, convert, file)
    others = tuple(name for name in state if is_other_kind(name))
    for name in others:
        del state[name]
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    dropped = dropped_names(shapes, convert) if state else ()
    pairs = _converted(phase.pipeline, lora, state) if state else {}
    found = _as_weights(adapter, lora, pairs)
    return replace(found, differences=(*factored, *added), lost=(*lost, *without, *others, *dropped))


def _as_weights(adapter: str, lora: Lora, read: Any) -> _Weights:
    state, *rest = read if isinstance(read, tuple) else (read,)
    alphas = rest[0] if len(rest) == 2 else None
    return _Weights(adapter, lora, state, alphas, rest[-1] if rest else None)


def _converted(pipeline: Any, lora: Lora, weights: str | dict[str, Any], **options: Any) -> Any:
    try:
        return _ask_diffusers(pipeline, weights, **options)
    except (ValueError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"The LoRA {Path(lora.path).name} can't be read as one for {type(pipeline).__name__} ({error}). It is for "
            f"another kind of model, or in a form that diffusers doesn't know.{lora.seems_to_be_for()}"
        ) from error


def _converted_alone(pipeline: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights of plain LoRAs under the names that peft gives them."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    read = _ask_diffusers(pipeline, weights)
    state: dict[str, Any] = read[0] if isinstance(read, tuple) else read
    names = {key: key.replace(".processor.", ".") for key in state}
    converted: dict[str, Any] = convert_unet_state_dict_to_peft({names[key]: value for key, value in state.items()})
    return converted


def _ask_diffusers(pipeline: Any, weights: str | dict[str, Any], **options: Any) -> Any:
    options |= {"local_files_only": True, "return_lora_metadata": True}
    if hasattr(pipeline, "unet"):
        options["unet_config"] = pipeline.unet.config  # names of blocks in other dialects depend on it
    return pipeline.lora_state_dict(weights, **options)


def _is_encoder(module: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _apply(cls: Any, name: str, loras: list[_Weights], dtype: torch.dtype, module: Any) -> None:
    """Pairs first: peft wraps layers of the library's own classes alone."""
    pairs = [weights for weights in loras if weights.pairs(name)]
    if pairs:
        (_apply_to_encoder if _is_encoder(module) else _apply_to_denoiser)(cls, name, pairs, module)
    for weights in loras:
        for one in weights.differences_of(name):
            if isinstance(one, WholeDifference):
                wear_whole(module, one, weights.lora.scale, dtype)
            else:
                wear_difference(module, one, weights.lora.scale, dtype)


def _apply_to_denoiser(cls: Any, name: str, loras: list[_Weights], module: Any) -> None:
    if not hasattr(module, "load_lora_adapter"):
        raise InputError(f"The LoRA has weights for {name}, and {type(module).__name__} can't take them.")
    for weights in loras:
        alphas = {"network_alphas": weights.alphas} if weights.alphas else {"metadata": weights.metadata}
        with _fitting(weights, name):
            module.load_lora_adapter(dict(weights.state), prefix=name, adapter_name=weights.adapter, **alphas)
    module.set_adapters([weights.adapter for weights in loras], [weights.lora.scale for weights in loras])


def _apply_to_encoder(cls: Any, name: str, loras: list[_Weights], module: Any) -> None:
    from diffusers.utils import set_weights_and_activate_adapters

    if not hasattr(cls, "load_lora_into_text_encoder"):
        raise InputError(f"The LoRA has weights for {name}, and {cls.__name__} can't apply them.")
    _check_peft(name)
    for weights in loras:
        with _fitting(weights, name):
            cls.load_lora_into_text_encoder(
                dict(weights.state),
                network_alphas=weights.alphas,
                text_encoder=module,
                prefix=name,
                adapter_name=weights.adapter,
                metadata=None if weights.alphas else weights.metadata,
            )
    set_weights_and_activate_adapters(
        module, [weights.adapter for weights in loras], [weights.lora.scale for weights in loras]
    )


@contextlib.contextmanager
def _fitting(weights: _Weights, component: str) -> Iterator[None]:
    """Says of a LoRA that the libraries can't apply that it doesn't fit."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        name = Path(weights.lora.path).name
        raise ModelError(
            f"The LoRA {name} doesn't fit {component} of this model: it was made for one with other layers or "
            f"sizes.{weights.lora.seems_to_be_for()}"
        ) from error


def _check_peft(name: str) -> None:
    """transformers asks for a newer peft than diffusers does to change an encoder, and says so in its own words."""
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        raise InputError(
            f"The LoRA has weights for {name}, and the installed transformers needs peft {MIN_PEFT_VERSION} or newer "
            "to apply them. Install it, or use a LoRA of the denoiser alone."
        ) from None
