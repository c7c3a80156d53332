"""Which weights of a LoRA file diffusers' converters drop without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..lora_header import rank_axis

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def dropped_names(shapes: Mapping[str, tuple[int, ...]], convert: Convert) -> tuple[str, ...]:
    """Names of a file that are in nothing that `convert` returns; empty if that can't be told."""
    kept = kept_names(shapes, convert)
    return () if kept is None else tuple(name for name in shapes if not name.endswith("alpha") and name not in kept)


def kept_names(shapes: Mapping[str, tuple[int, ...]], convert: Convert) -> frozenset[str] | None:
    """Names of a file, but for alphas, that are in what `convert` returns; None if that can't be told.

    shapes: of the file's weights. The converter is asked with stand-ins of rank 1 that hold one number each, their own,
    and with alphas of 1, so that nothing is scaled. Where it returns something that it computed, it can't be told what
    of.
    """
    names = [name for name in shapes if not name.endswith("alpha")]
    numbers = {name: float(number) for number, name in enumerate(names, start=2)}
    state = {name: _stand_in(name, shape, numbers.get(name, 1.0)) for name, shape in shapes.items()}
    try:
        came = {_number(tensor) for key, tensor in convert(state).items() if not key.endswith("alpha")}
    except (ValueError, KeyError, IndexError, AttributeError, AssertionError, NotImplementedError, RuntimeError):
        return None
    if not came <= set(numbers.values()):
        return None
    return frozenset(name for name, number in numbers.items() if number in came)


def _stand_in(name: str, shape: tuple[int, ...], number: float) -> torch.Tensor:
    small, axis = list(shape), rank_axis(name)
    if axis is not None and axis < len(small):
        small[axis] = 1
    return torch.full((), number, dtype=torch.float64).expand(small)


def _number(tensor: torch.Tensor) -> float:
    """What a stand-in holds; 0 if it holds several numbers."""
    if tensor.numel() == 0 or not bool((tensor == tensor.flatten()[0]).all()):
        return 0.0
    return float(tensor.flatten()[0])
