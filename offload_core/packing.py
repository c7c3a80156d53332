"""Packed weights: stored in fewer bytes than they are computed with, and unpacked where an operator uses them.

So a weight takes its packed bytes on disk, in RAM, on the link and on the device, and its full size only while one
operator runs. Everything that a packed row needs is in the row or beside the weight, and goes wherever the weight goes.

8-bit floats are worked out in float32 and rounded once, to the dtype that the weight is computed in; blocks of GGUF as
diffusers works them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .gguf_file import unpack_blocks

if TYPE_CHECKING:
    from .stored_weight import StoredWeight

FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: e4m3 with one float32 scale at the end of each row: what weights become that are packed on the way in.
FLOAT8_ROWS = "float8_e4m3fn with row scales"

_SCALE_BYTES = 4
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CHUNK_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Packing:
    """How the bytes of a weight become its values.

    kind: a name of `FLOAT8`, `FLOAT8_ROWS`, or a block type of GGUF ("Q4_K"). scale: what values are multiplied by, in
    float32 or another float dtype: one number, or one per row of the weight.
    """

    kind: str
    scale: StoredWeight | None = None


def rows_of(shape: Sequence[int]) -> int:
    """Rows of a weight as it is packed: those of a matrix, one of a vector."""
    return shape[0] if len(shape) > 1 else 1


def packed_shape(shape: Sequence[int], nbytes: int) -> tuple[int, int]:
    """(rows, bytes of a row) of a packed weight of `shape` in `nbytes`."""
    rows = rows_of(shape)
    return rows, nbytes // max(rows, 1)


def unpack(
    kind: str, data: torch.Tensor, scale: torch.Tensor | float | None, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A weight's values, on the device of `data`.

    data: (rows, bytes of a row) uint8. scale: one number, or float32 with one for each of the rows, or None. The result
    is contiguous, of `shape` and `dtype`. Beside it there are at most a few MB of intermediates at a time.
    """
    values = torch.empty(tuple(shape), dtype=dtype, device=data.device)
    if not values.numel():
        return values
    table = values.view(data.shape[0], -1)
    if kind == FLOAT8_ROWS:
        table.copy_(data[:, :-_SCALE_BYTES].view(torch.float8_e4m3fn))
        scale = data[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    elif kind in FLOAT8:
        table.copy_(data.view(FLOAT8[kind]))
    else:
        unpack_blocks(kind, data, table)
    if isinstance(scale, torch.Tensor):
        _scale_rows(table, scale.reshape(-1, 1))
    elif scale is not None:
        table.mul_(scale)  # by a number, not a tensor of one: that would be rounded to the dtype first
    return values


def _scale_rows(table: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiplies rows in place: every product in float32, rounded once. 8-bit floats are exact in each wider dtype."""
    step = max(_CHUNK_ELEMENTS // table.shape[1], 1)
    for start in range(0, table.shape[0], step):
        part = table[start : start + step]
        torch.mul(part, scale[start : start + step], out=part)


def unpack_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The most that unpacking a weight takes beside its packed bytes: its values, and intermediates of a few MB."""
    count = math.prod(shape)
    return count * dtype.itemsize + 3 * 4 * min(count, _CHUNK_ELEMENTS + count // max(rows_of(shape), 1))


def pack_rows(values: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix (rows, width), of any float dtype, as `FLOAT8_ROWS`: (rows, width + 4) uint8.

    The largest number of a row becomes the largest that e4m3 has, so that small weights don't drown in its subnormals.
    """
    values = values.float()
    scale = values.abs().amax(dim=1, keepdim=True) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    eight = (values / scale).to(torch.float8_e4m3fn)
    return torch.cat([eight.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def packed_row_bytes(width: int) -> int:
    """Bytes of a row of `FLOAT8_ROWS` that has `width` numbers."""
    return width + _SCALE_BYTES
