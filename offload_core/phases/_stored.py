"""Components whose weights are made from files that weren't written for them: names matched, weights promised."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..checkpoint import show
from ..errors import ModelError
from ..model_source import ComponentSource
from ..stored_weight import StoredWeight
from ._cold import cold_like

# What releases of transformers call one module: (in the files of one, in another). CLIPTextModel was flattened in 5.6;
# the language part of vision models moved in 4.52.
_MOVED = (
    ("text_model.", ""),
    ("vision_model.", ""),
    ("model.", "model.language_model."),
    ("visual.", "model.visual."),
    ("model.", ""),
)


def bind_stored(module: nn.Module, source: ComponentSource) -> dict[str, StoredWeight]:
    """How each parameter and saved buffer of a module is made from the component's files, by its name in the module.

    Raises ModelError if one isn't in the files, or has another shape there.
    """
    stored = source.stored or {}
    bound: dict[str, StoredWeight] = {}
    missing: list[str] = []
    seen: dict[int, str] = {}
    for name, tensor in _saved(module):
        found = stored.get(name) or next((stored[old] for old in _other_names(name) if old in stored), None)
        if found is None:
            optional = name.endswith(".num_batches_tracked") or name.startswith(source.absent)  # only training reads it
            if id(tensor) not in seen and not optional:
                missing.append(name)
            continue
        if tuple(tensor.shape) != found.shape and _squeezed(tensor.shape) != _squeezed(found.shape):
            what = f"{show(name)} of its {source.name} has the shape {list(found.shape)}"
            raise _unfit(source, f"{what} where {source.class_name} needs {list(tensor.shape)}")
        bound[name], seen[id(tensor)] = found, name
    missing = [name for name in missing if not _tied(module, name, seen)]
    if missing:
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise _unfit(source, f"it lacks {show(missing[0])}{more} of its {source.name} ({source.class_name})")
    return bound


def promise_stored(module: nn.Module, bound: Mapping[str, StoredWeight], name: str, device: torch.device) -> None:
    """Swaps the tensors of `bound` for cold ones, for `attach` to be told of. Ties stay, and `requires_grad`."""
    ties: dict[int, nn.Parameter] = {}
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in ties:
                    cold = cold_like(parameter, f"{name}.{prefix}{key}", device)
                    ties[id(parameter)] = nn.Parameter(cold, requires_grad=parameter.requires_grad)
                child._parameters[key] = ties[id(parameter)]
        for key, buffer in child._buffers.items():
            if buffer is not None and prefix + key in bound:
                child._buffers[key] = cold_like(buffer, f"{name}.{prefix}{key}", device)


def _saved(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters under all their names, and buffers that belong into a file."""
    found: list[tuple[str, torch.Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                found.append((f"{path}.{key}" if path else key, buffer))
    return found


def _other_names(name: str) -> list[str]:
    names = []
    for old, new in _MOVED:
        names += [old + name.removeprefix(new)] if name.startswith(new) else []
        names += [new + name.removeprefix(old)] if name.startswith(old) else []
    return names


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution of one pixel and a linear layer have the same bytes."""
    return tuple(size for size in shape if size != 1)


def _tied(module: nn.Module, name: str, seen: Mapping[int, str]) -> bool:
    owner, _, key = name.rpartition(".")
    tensor = module.get_submodule(owner)._parameters.get(key)
    return tensor is not None and id(tensor) in seen


def _unfit(source: ComponentSource, what: str) -> ModelError:
    files = " and ".join(sorted({show(path.name) for path in source.weight_files}))
    return ModelError(
        f"{files} doesn't fit its configs: {what}. "
        "Choose the files of one model, or give a folder with the configs of this one."
    )
