"""Packed weights in a file's header: blocks of GGUF, and 8-bit floats with the scales that belong to them.

Names of scales are ComfyUI's: beside `X.weight` in 8 bits `X.scale_weight` (with a marker `scaled_fp8` in the file) or
`X.weight_scale` (with `X.comfy_quant` or an entry in the file's metadata); values are the stored ones times the scale.
`scale_input` and `input_scale` are for products of 8-bit numbers; here products are of the unpacked values.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from ..checkpoint import DTYPES, Header, TensorEntry, short_path, show
from ..errors import ModelError
from ..gguf_file import is_block_type
from ..packing import FLOAT8, rows_of

_SCALES = ("scale_weight", "weight_scale")
_BESIDE = ("scale_input", "input_scale", "comfy_quant")
_MARKER = "scaled_fp8"
_COMPUTED_IN = ("BF16", "F16")  # where no such weight says it: the first
_ADVICE = "Use a file with one scale a weight or a row, or the bfloat16 file of the model."


class PackedEntries:
    """Those below `prefix`. beside: full names of what goes with them and is no weight itself. dtype: torch's name of
    the dtype that packed weights are computed in: what most of the file's other weights are.

    Raises ModelError if a scale is missing, or of a form that isn't known: a weight without its scale is a wrong one.
    """

    def __init__(self, path: Path, header: Header, prefix: str) -> None:
        self._path = path
        names = {name: entry for name, entry in header.tensors.items() if name.startswith(prefix)}
        self.beside = {name for name in names if name.rpartition(".")[2] in (*_SCALES, *_BESIDE, _MARKER)}
        kinds = {name: _kind(entry.dtype) for name, entry in names.items() if name not in self.beside}
        self._kinds = {name: kind for name, kind in kinds.items() if kind is not None}
        self._scales: dict[str, tuple[str, TensorEntry]] = {}
        if not self._kinds:
            self.beside = set()
            return
        plain = Counter[str]()
        eight_bits = set(self._kinds.values()) <= FLOAT8.keys()  # GGUF keeps some of any model in float16
        for name, entry in names.items():
            if eight_bits and entry.dtype in _COMPUTED_IN and name not in self.beside:
                plain[entry.dtype] += entry.nbytes
        self.dtype = DTYPES[max(_COMPUTED_IN, key=lambda dtype: plain[dtype])][1] or ""
        self._find_scales(names)

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def kind_of(self, name: str) -> str:
        """Of its packing, see `packing.Packing`."""
        return self._kinds[name]

    def scale_of(self, name: str) -> tuple[str, TensorEntry] | None:
        """The full name and place of what a weight is multiplied by: one number, or one for each row. None: nothing."""
        return self._scales.get(name)

    def _find_scales(self, names: dict[str, TensorEntry]) -> None:
        about = {name.rpartition(".")[0] for name in self._kinds if name.endswith(".weight")}
        for name, entry in names.items():
            layer, _, last = name.rpartition(".")
            if layer in about and "scale" in last and last not in (*_SCALES, *_BESIDE):
                raise self._error(f"{show(layer)} has a {show(last)}, a scale of a kind that isn't known")
            weight = f"{layer}.weight"
            if last in _SCALES and weight in self._kinds:
                self._scales[weight] = (name, self._checked(weight, names[weight], name, entry))
        scaled = self._scales or any(name.rpartition(".")[2] == _MARKER for name in self.beside)
        lacking = [
            name
            for name in self._kinds
            if scaled and name.endswith(".weight") and len(names[name].shape) > 1 and name not in self._scales
        ]
        if lacking:
            more = f" and {len(lacking) - 1} more weights" if len(lacking) > 1 else ""
            raise self._error(f"the scale of {show(lacking[0])}{more} is missing")

    def _checked(self, weight: str, entry: TensorEntry, name: str, scale: TensorEntry) -> TensorEntry:
        count = math.prod(scale.shape)
        if scale.dtype not in ("F32", "F16", "BF16") or count not in (1, rows_of(entry.shape)):
            what = (
                f"{show(name)} has {count} numbers of {scale.dtype} for {rows_of(entry.shape)} rows of {show(weight)}"
            )
            raise self._error(what)
        return scale

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{short_path(self._path)} holds 8-bit weights, and {what}. {_ADVICE}")


def _kind(dtype: str) -> str | None:
    """Of the packing of a header's dtype; None for plain numbers, and for what can't be unpacked."""
    if is_block_type(dtype):
        return dtype
    known = DTYPES.get(dtype, (0, None))[1]
    return known if known in FLOAT8 else None
