"""Tiny models that are made of blocks: one of a family that exists only so, others with their classic index hidden."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline

from offload_core.known._tokenizers import qwen_tokenizer, t5_tokenizer
from offload_core.tiny_models import autoencoders, text_encoders
from offload_core.tiny_models.autoencoders import LATENT_CHANNELS
from offload_core.tiny_models.running import align
from offload_core.tiny_models.weights import denoiser, with_weights
from staging import tiny_model

SEED = 3


def as_blocks(name: str, folder: Path) -> Path:
    """The tiny model of a family with only the index of its blocks, as downloads have it: it names a hub."""
    shutil.copytree(tiny_model(name), folder)
    ModularPipeline.from_pretrained(str(folder)).save_config(folder)
    index = folder / "modular_model_index.json"
    index.write_text(index.read_text().replace(str(folder), "somebody/some-model"))
    (folder / "model_index.json").unlink()
    return folder


@functools.cache
def tiny_anima() -> Path:
    """A family that diffusers has as blocks only: Qwen3, a text conditioner, a Cosmos transformer, Qwen-Image's VAE."""
    tokenizer = qwen_tokenizer()
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=32,
        adaln_lora_dim=8,
        max_size=(8, 32, 32),
        concat_padding_mask=False,  # it needs torchvision
        extra_pos_embed_type=None,
    )
    conditioner = diffusers.AnimaTextConditioner(
        source_dim=32, target_dim=32, model_dim=32, num_layers=2, num_attention_heads=2, min_sequence_length=16
    )
    parts = {
        "tokenizer": tokenizer,
        "t5_tokenizer": t5_tokenizer(),
        "text_encoder": text_encoders.qwen3("anima.text_encoder", tokenizer).model,
        "text_conditioner": with_weights(conditioner, "anima.text_conditioner"),
        "transformer": denoiser(transformer, "anima.transformer"),
        "vae": autoencoders.autoencoder_qwen("anima.vae"),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return _saved(parts, "AnimaModularPipeline", "AnimaAutoBlocks")


@functools.cache
def tiny_helios() -> Path:
    """A video model that makes its latents chunk by chunk, and decodes each chunk for itself."""
    transformer = diffusers.HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_dim=(8, 4, 4),
    )
    parts = {
        "tokenizer": t5_tokenizer(),
        "text_encoder": text_encoders.umt5_encoder("helios.text_encoder"),
        "transformer": denoiser(transformer, "helios.transformer"),
        "vae": autoencoders.autoencoder_wan("helios.vae"),
        "scheduler": diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], gamma=1 / 3),
    }
    return _saved(parts, "HeliosModularPipeline", "HeliosAutoBlocks")


def _saved(parts: dict[str, Any], pipeline: str, blocks: str) -> Path:
    """A folder as a hub has it: its index names the hub, and its components lie beside it."""
    folder = Path(mkdtemp(prefix="tiny-blocks-"))
    index: dict[str, Any] = {"_class_name": pipeline, "_blocks_class_name": blocks}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        kind = [type(part).__module__.partition(".")[0], type(part).__name__]
        spec = {"type_hint": kind, "pretrained_model_name_or_path": "somebody/some-model", "subfolder": name}
        index[name] = [*kind, {**spec, "variant": None, "revision": None}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    return folder


def whole(model: Path, call: dict[str, Any], scale: float | None) -> torch.Tensor:
    """The modular pipeline in one piece, resident."""
    pipe = ModularPipeline.from_pretrained(str(model))
    pipe.load_components([name for name in pipe.component_names if (model / name).is_dir()])
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    pipe.update_components(**guiders(pipe, scale))
    return picture(run(pipe, call))


def guiders(pipe: Any, scale: float | None) -> dict[str, Any]:
    return {n: ClassifierFreeGuidance(scale) for n in pipe.component_names if n.startswith("guider")}


def seeded() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(SEED)


def run(pipe: Any, call: dict[str, Any], state: Any = None) -> Any:
    """Gives a pipeline those arguments that it takes."""
    given = {"generator": seeded(), "output_type": "pt", **call}
    pipe.set_progress_bar_config(disable=True)
    return pipe(state=state, **{key: value for key, value in given.items() if key in pipe.blocks.input_names})


def picture(state: Any) -> torch.Tensor:
    return torch.as_tensor(state.get("images") if state.get("images") is not None else state.get("videos")).float()
