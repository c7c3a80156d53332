"""A rough trace of a call that can't be traced: from the module's weights and the sizes of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .streaming import StreamedWeight
from .trace import Stretch, Trace, TracedWeight

# Of one token of a transformer, in widths: its state twice, queries, keys, values and their result, and four widths of
# the feed-forward layer twice. Real ones of the families here take 8 to 20 where a block is widest.
WIDTHS_A_TOKEN = 16


def estimated_trace(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> Trace:
    """What a call of a transformer may do: each of its weights once in the order of its modules, a product of each with
    every token, and activations of a stated number of widths a token.

    args, kwargs: of the call; its largest tensor has the tokens (all dimensions but the last). reason: why it can't be
    traced. The trace's `assumed` says that it is an estimate.
    """
    weights = dict.fromkeys(each._entry for each in module.parameters() if isinstance(each, StreamedWeight))
    tokens = max((_tokens(value) for value in (*args, *kwargs.values())), default=1)
    width = max((min(weight.shape) for weight in module.parameters() if weight.ndim == 2), default=1)
    itemsize = max((entry.layout.dtype.itemsize for entry in weights), default=4)
    peak = WIDTHS_A_TOKEN * tokens * width * itemsize
    stretches = tuple(
        Stretch((place,), 2 * tokens * _elements(entry), entry.nbytes + 2 * tokens * width * itemsize, 4, peak)
        for place, entry in enumerate(weights)
    )
    named = tuple(TracedWeight(entry.name, entry.nbytes) for entry in weights)
    assumed = f"its figures are a rough estimate, because it can't be traced ({reason})"
    return Trace(named, stretches, _largest(args, kwargs), assumed)


def _elements(entry: Any) -> int:
    return int(entry.nbytes // entry.layout.dtype.itemsize) if len(entry.layout.shape) > 1 else 0


def _tokens(value: Any) -> int:
    """Of a tensor of tokens or of a picture, whose last two dimensions are cells."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2:
        return 1
    return value.numel() // value.shape[1 if value.ndim > 3 else -1]


def _largest(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return max((value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), default=0)


def likely_result(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a denoiser would answer: a tensor like the first picture or sequence it was given, in a tuple; None if there
    is none."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    first = next((value for value in given if value.is_floating_point() and value.ndim > 2), None)
    return None if first is None else (torch.randn(first.shape, dtype=first.dtype),)
