"""Tiny model folders whose components are quantised, as the libraries' own loaders and `save_pretrained` make them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload_core.tiny_models import save_tiny

os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")  # read when sdnq is imported; the engine refuses it otherwise

FAMILY = "flux"
_EVERY_LAYER = {"minimum_allowed_numel": 256, "minimum_allowed_channel_size": 16}  # SDNQ leaves small ones plain


def _torchao(library: str, config: str) -> Any:
    from torchao import quantization

    return _configs(library).TorchAoConfig(getattr(quantization, config)())


def _bitsandbytes(library: str, kind: str) -> Any:
    if kind == "int8":
        return _configs(library).BitsAndBytesConfig(load_in_8bit=True)
    compute = {"bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_type": kind.removesuffix("-double")}
    return _configs(library).BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=kind.endswith("double"), **compute
    )


def _quanto(library: str, weights: str) -> Any:
    if library == "diffusers":
        return _configs(library).QuantoConfig(weights_dtype=weights)
    return _configs(library).QuantoConfig(weights=weights)


def _sdnq(_: str, weights: str) -> Any:
    from sdnq import SDNQConfig

    return SDNQConfig(weights_dtype=weights, use_svd=weights == "uint4", group_size=16, **_EVERY_LAYER)


def _configs(library: str) -> Any:
    import diffusers
    import transformers

    return {"diffusers": diffusers, "transformers": transformers}[library]


CONFIGS: dict[str, tuple[str, Callable[[str, str], Any], str]] = {
    "torchao-int8": ("torchao", _torchao, "Int8WeightOnlyConfig"),
    "torchao-float8": ("torchao", _torchao, "Float8WeightOnlyConfig"),
    "bnb-nf4": ("bitsandbytes", _bitsandbytes, "nf4"),
    "bnb-nf4-double": ("bitsandbytes", _bitsandbytes, "nf4-double"),
    "bnb-fp4": ("bitsandbytes", _bitsandbytes, "fp4"),
    "bnb-int8": ("bitsandbytes", _bitsandbytes, "int8"),
    "quanto-int8": ("optimum.quanto", _quanto, "int8"),
    "quanto-float8": ("optimum.quanto", _quanto, "float8"),
    "quanto-int4": ("optimum.quanto", _quanto, "int4"),
    "sdnq-int8": ("sdnq", _sdnq, "int8"),
    "sdnq-uint4": ("sdnq", _sdnq, "uint4"),
}


def save_quantised(
    kind: str, directory: Path, components: tuple[str, ...] = ("transformer",), family: str = FAMILY
) -> Path:
    """Writes the tiny model of a family in bfloat16, with some components quantised, and returns the folder."""
    save_tiny(family, directory, torch.bfloat16)
    for name in components:
        requantise(kind, directory / name)
    return directory


def requantise(kind: str, folder: Path) -> None:
    """Replaces the component in a folder by one that its library quantised while it loaded it."""
    config = json.loads((folder / "config.json").read_text())
    library = "diffusers" if "_class_name" in config else "transformers"
    class_name = config["_class_name"] if library == "diffusers" else config["architectures"][0]
    _, make, argument = CONFIGS[kind]
    cls = getattr(_configs(library), class_name)
    module = cls.from_pretrained(
        folder, torch_dtype=torch.bfloat16, quantization_config=make(library, argument), device_map=None
    )
    shutil.rmtree(folder)
    module.save_pretrained(folder)
