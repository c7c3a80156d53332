"""Where a weight's bytes lie in files that weren't made for it: under another name, as rows of a fused tensor, or in
several pieces.

Names and layouts differ between those who publish a model. A weight that is renamed is another (file, offset), rows of
a fused tensor are a part of its range, and halves that changed places are two ranges. So a conversion costs nothing: no
converted copy on disk or in RAM, and weights are streamed from the file as it is. Only a transposed matrix is turned
around on its way in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .checkpoint import short_path
from .errors import ModelError
from .file_reader import FileRange
from .packing import Packing, packed_shape, unpack

How = Literal["as stored", "transposed", "identity"]


@dataclass(frozen=True)
class StoredWeight:
    """One weight, as it is to be made from files.

    dtype: torch's name of the dtype it is stored in. shape: of the weight. pieces: byte ranges that make it one after
    the other, in memory order. how: "transposed", a matrix whose pieces hold the transpose, is read whole and turned
    around (in RAM, so it is for small ones); "identity", a square matrix that no file holds, has no pieces. packing:
    how the bytes become values, of which `dtype` is then; None if the bytes are the values.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[FileRange, ...]
    how: How = "as stored"
    packing: Packing | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that it takes as it is stored."""
        if self.packing is not None:
            return sum(piece.nbytes for piece in self.pieces)
        return math.prod(self.shape) * self.torch_dtype.itemsize


def read_stored(stored: StoredWeight) -> torch.Tensor:
    """A small weight as a tensor of its own in RAM, unpacked. Raises ModelError if a file is gone or too short."""
    if stored.how == "identity":
        return torch.eye(stored.shape[0], dtype=stored.torch_dtype)
    raw = bytearray()
    for piece in stored.pieces:
        try:
            with piece.path.open("rb") as file:
                file.seek(piece.offset)
                part = file.read(piece.nbytes)
        except OSError as error:
            what = f"{short_path(piece.path)} can't be read ({error.strerror})"
            raise ModelError(f"{what}. Put it back, or load the model again.") from None
        if len(part) != piece.nbytes:
            raise ModelError(f"{short_path(piece.path)} was cut short after it was loaded. Load the model again.")
        raw += part
    if stored.packing is not None:
        packed = torch.frombuffer(raw, dtype=torch.uint8).view(packed_shape(stored.shape, len(raw)))
        return unpack(stored.packing.kind, packed, read_scale(stored), stored.shape, stored.torch_dtype)
    flat = torch.frombuffer(raw, dtype=stored.torch_dtype)
    if stored.how == "transposed":
        return flat.view(*reversed(stored.shape)).t().contiguous()
    return flat.view(stored.shape)


def read_scale(stored: StoredWeight) -> torch.Tensor | float | None:
    """What a packed weight's values are multiplied by: a number, 1-D float32 in RAM for one a row, None for nothing."""
    scale = stored.packing.scale if stored.packing is not None else None
    if scale is None:
        return None
    numbers = read_stored(scale).float().reshape(-1)
    return numbers if numbers.numel() > 1 else float(numbers)
