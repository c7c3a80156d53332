"""Casts one after the other, as `module.to(dtype)` makes them, kept as the shortest list that gives the same values."""

from __future__ import annotations

import torch

from ._weight import Entry

_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}
# Dtypes that hold every value of another one, so that going there and back changes nothing.
_WIDER: dict[torch.dtype, set[torch.dtype]] = {
    **{dtype: {torch.float16, torch.bfloat16, torch.float32, torch.float64} for dtype in _EIGHT_BITS},
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


def through(entry: Entry, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The casts from an entry's master to `dtype`, by way of every lossy dtype that it went through before."""
    assert entry.master is not None
    return shortest(entry.master.dtype, (*entry.casts, dtype))


def shortest(stored: torch.dtype, casts: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    chain = [stored]
    for dtype in casts:
        if dtype == chain[-1]:
            continue
        chain.append(dtype)
        while len(chain) >= 3 and chain[-1] == chain[-3] and chain[-2] in _WIDER.get(chain[-1], set()):
            del chain[-2:]
        if len(chain) >= 3 and chain[-2] in _WIDER.get(chain[-3], set()):  # widened, then cast: the detour is exact
            del chain[-2]
        if len(chain) >= 2 and chain[-1] == chain[-2]:
            del chain[-1]
    return tuple(chain[1:])
