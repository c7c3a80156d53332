"""LoRA files for tests, made of the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from staging import tiny_model


def make_lora(
    name: str, component: str, file: Path, targets: list[str], alpha: int = 2, rank: int = 2, **options: Any
) -> Path:
    """A LoRA with random weights for a component of a tiny model, as diffusers saves one. options: of its config."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    module = getattr(pipeline, component)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights=False, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.add_adapter(config)
    layers = {f"{component}_lora_layers": get_peft_model_state_dict(module)}
    metadata = {f"{component}_lora_adapter_metadata": config.to_dict()}
    pipeline.save_lora_weights(file.parent, **layers, **metadata, weight_name=file.name)
    return file


def encoder_loras_work() -> bool:
    """Whether the installed peft is new enough for transformers, which apply those of text encoders."""
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True
