"""A LoRA for any pipeline: small random matrices for a few layers of its denoiser, in the layout that peft saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANK = 2
LAYERS = 4  # of a denoiser that are changed
DENOISERS = ("transformer", "unet")
# What attention calls its products, where it has some of its own; layers like these are what LoRAs are trained for.
ATTENTION = ("to_q", "to_k", "to_v", "to_qkv", "qkv")


def write_lora(pipeline: Any, file: Path) -> Path:
    """Writes a LoRA for the pipeline's denoiser to `file`, the same one each time, and returns its path.

    Its keys are "transformer.LAYER.lora_A.weight" and so on (or "unet."), which diffusers reads for every pipeline that
    takes LoRAs.
    """
    from safetensors.torch import save_file

    name = next(name for name in DENOISERS if getattr(pipeline, name, None) is not None)
    random = torch.Generator("cpu").manual_seed(0)
    weights = {}
    for path, layer in _layers(getattr(pipeline, name)):
        down = torch.randn(RANK, layer.in_features, generator=random) / layer.in_features**0.5
        weights[f"{name}.{path}.lora_A.weight"] = down
        weights[f"{name}.{path}.lora_B.weight"] = torch.randn(layer.out_features, RANK, generator=random)
    save_file(weights, file)
    return file


def apply_whole(pipeline: Any, file: Path) -> None:
    """Puts a LoRA on a pipeline that is loaded whole, as its user would."""
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="tiny")


def _layers(denoiser: nn.Module) -> list[tuple[str, nn.Linear]]:
    products = [(path, layer) for path, layer in denoiser.named_modules() if type(layer) is nn.Linear]
    attention = [(path, layer) for path, layer in products if path.rpartition(".")[2] in ATTENTION]
    return (attention or list(_of_blocks(products)))[:LAYERS]


def _of_blocks(products: list[tuple[str, nn.Linear]]) -> Iterator[tuple[str, nn.Linear]]:
    """Layers of the blocks that repeat: those with a number in their name."""
    return ((path, layer) for path, layer in products if any(part.isdigit() for part in path.split(".")))
