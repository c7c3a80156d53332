"""A rough trace of a call that can't be traced: from the module's weights and the sizes of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .streaming import StreamedWeight
from .trace import Stretch, Trace, TracedWeight
from .traced_values import tensors_in

# Of one token of a transformer, in widths, at the peak: state, queries, keys, values, the feed-forward layer. Ten known
# models take 12 (PixArt, Chroma) to 24 (FLUX.2 klein), by their traces.
WIDTHS_A_TOKEN = 24


def estimated_trace(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> Trace:
    """What a call of a transformer may do: each of its weights once in the order of its modules, a product of each with
    every token, and activations of a stated number of widths a token.

    args, kwargs: of the call; the tensor with the most tokens counts. reason: why it can't be
    traced. The trace's `assumed` says that it is an estimate.
    """
    weights = dict.fromkeys(each._entry for each in module.parameters() if isinstance(each, StreamedWeight))
    given = list(tensors_in((args, kwargs)))
    tokens = max((_tokens(tensor, module) for tensor in given), default=1)
    width = max((min(weight.shape) for weight in module.parameters() if weight.ndim == 2), default=1)
    itemsize = max((entry.layout.dtype.itemsize for entry in weights), default=4)
    peak = WIDTHS_A_TOKEN * tokens * width * itemsize
    stretches = tuple(
        Stretch((place,), 2 * tokens * _elements(entry), entry.nbytes + 2 * tokens * width * itemsize, 4, peak)
        for place, entry in enumerate(weights)
    )
    named = tuple(TracedWeight(entry.name, entry.nbytes) for entry in weights)
    assumed = f"its figures are a rough estimate, because it can't be traced ({reason})"
    return Trace(named, stretches, max((tensor.nbytes for tensor in given), default=0), assumed)


def _elements(entry: Any) -> int:
    return int(entry.nbytes // entry.layout.dtype.itemsize) if len(entry.layout.shape) > 1 else 0


def _tokens(tensor: torch.Tensor, module: nn.Module) -> int:
    """Of a sequence (..., tokens, width), or of the cells of a picture or video, some of which are a token together."""
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return 1
    if tensor.ndim == 2 or (tensor.ndim == 3 and tensor.shape[-1] > tensor.shape[0]):
        return tensor.numel() // tensor.shape[-1]
    config: Any = getattr(module, "config", None)
    channels = getattr(config, "in_channels", None) or tensor.shape[1]
    patch = getattr(config, "patch_size", None) or min(getattr(config, "all_patch_size", ()), default=1)
    cells = math.prod(patch) if isinstance(patch, list | tuple) else patch**2
    return max(tensor.numel() // (channels * cells), 1)


def likely_result(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a denoiser would answer: a tensor like the first picture or sequence it was given, in a tuple; None if there
    is none."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    first = next((value for value in given if value.is_floating_point() and value.ndim > 2), None)
    return None if first is None else (torch.randn(first.shape, dtype=first.dtype),)
