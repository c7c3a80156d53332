"""What a file of weights holds, told by its header: names first, then whether the sizes are those of a config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import DTYPES, Header, read_header, short_path, show
from ..errors import ModelError
from ..gguf_file import SUFFIX, is_block_type, read_gguf_header
from .layout import PartLayout, Shapes
from .layouts import LAYOUTS
from .near_misses import NEAR_MISSES, OTHER_MODELS

_ARCHITECTURE = "general.architecture"  # in the metadata of GGUF files
_NO_PICKLE = "Such a file can run code when it is opened, and never is. Use the model's .safetensors file."
_PICKLES = (".ckpt", ".pt", ".pth", ".bin")
_SCALES = (".scale_weight", ".weight_scale", ".scale_input", ".comfy_quant")
_QUANTISED = {
    "F8_E4M3FNUZ": "fp8 (e4m3fnuz)",
    "F8_E5M2FNUZ": "fp8 (e5m2fnuz)",
    "F8_E8M0": "fp8 (e8m0)",
    "F4": "4-bit floats",
}


@dataclass(frozen=True)
class FoundPart:
    """A part of a model in a file: its layout, and the prefix that its names have there."""

    path: Path
    header: Header = field(repr=False)
    layout: PartLayout = field(repr=False)
    prefix: str

    @property
    def shapes(self) -> Shapes:
        start = len(self.prefix)
        tensors = self.header.tensors.items()
        return {name[start:]: entry.shape for name, entry in tensors if name.startswith(self.prefix)}

    def misfit(self, config: Mapping[str, Any]) -> str | None:
        """How its sizes differ from those that a config asks for, in words; None if they don't."""
        tensors = self.header.tensors
        for name, wanted in self.layout.sizes(config).items():
            entry = tensors.get(self.prefix + name)
            if wanted is None and entry is not None:
                return f"it has a tensor {name} too many"
            if wanted is not None and entry is None:
                return f"it has no tensor {name}"
            if wanted is not None and entry is not None and entry.shape != wanted:
                return f"its {name} has the shape {list(entry.shape)} instead of {list(wanted)}"
        return None

    def quantised(self) -> str | None:
        """What its weights are packed as, in words, if that is a kind that can't be unpacked."""
        below = [(name, entry) for name, entry in self.header.tensors.items() if name.startswith(self.prefix)]
        scaled = any(name.endswith(_SCALES) or name.endswith("scaled_fp8") for name, _ in below)
        if any("bitsandbytes" in name or name.endswith(".absmax") for name, _ in below):
            return "bitsandbytes 4-bit or 8-bit numbers"
        for name, entry in below:
            if entry.dtype in _QUANTISED:
                return f"{'scaled ' if scaled else ''}{_QUANTISED[entry.dtype]}"
            if entry.dtype not in DTYPES and not is_block_type(entry.dtype):
                return f"GGUF blocks of the type {entry.dtype}"
            if entry.dtype in ("I8", "U8", "I32") and name.endswith("weight"):
                return f"{'scaled ' if scaled else 'packed '}whole numbers ({entry.dtype})"
        return None


def open_file(path: str) -> tuple[Path, Header]:
    """A file by its absolute path, with its checked header.

    Raises ModelError for one that is missing, damaged, neither safetensors nor GGUF, or one of several shards.
    """
    if not path.strip() or "\0" in path:
        raise ModelError(f"{show(path)} names no file. Give the path of a .safetensors or .gguf file.")
    try:
        file = Path(os.path.abspath(Path(path).expanduser()))
    except RuntimeError:
        raise ModelError(f"{show(path, 250)} names a home folder that isn't there. Give the full path.") from None
    if file.suffix.lower() in _PICKLES:
        raise ModelError(f"{short_path(file)} is a {file.suffix} file. {_NO_PICKLE}")
    if re.search(r"-\d{5}-of-\d{5}\.(safetensors|gguf)$", file.name):
        raise ModelError(
            f"{short_path(file)} is one of several shards of a model. "
            "Give the folder of the whole model, or a file that holds all of it."
        )
    return file, read_gguf_header(file) if file.suffix.lower() == SUFFIX else read_header(file)


def find_parts(path: Path, header: Header) -> list[FoundPart]:
    """The known parts in a file, by their names alone."""
    return list(_parts(path, header))


def _parts(path: Path, header: Header) -> Iterator[FoundPart]:
    tensors, architecture = header.tensors, header.metadata.get(_ARCHITECTURE)
    for layout in LAYOUTS:
        if architecture in layout.unlike:
            continue
        for prefix in layout.prefixes:
            there = all(prefix + name in tensors for name in layout.needs)
            if there and not any(prefix + name in tensors for name in layout.lacks):
                yield FoundPart(path, header, layout, prefix)


def another_model(header: Header) -> str:
    """Which model that isn't known a file is, though it holds known parts, in words; empty if it doesn't look so."""
    return next((f"{miss.what}. {miss.advice}" for miss in OTHER_MODELS if miss.fits(header.tensors)), "")


def what_else(header: Header) -> str:
    """What a file in which no part was found is instead, in words, and what to do."""
    for miss in NEAR_MISSES:
        if miss.fits(header.tensors):
            return f"{miss.what}. {miss.advice}"
    architecture = header.metadata.get(_ARCHITECTURE)
    if any(architecture in layout.unlike for layout in LAYOUTS):
        return f"holds a model of the architecture {show(architecture)}, which isn't known here. Choose another file."
    names = ", ".join(show(name) for name in list(header.tensors)[:3])
    return f"holds no part of a model that is known here (its tensors are called {names}). Use a diffusers folder."
