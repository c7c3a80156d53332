"""Tiny ControlNets and image encoders as files, in the names in which people have them."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from tempfile import mkdtemp

import torch
from diffusers import ControlNetModel
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from control_models import tiny_controlnet
from offload_core.single_files.layouts.controlnets import CONTROLNETS
from offload_core.tiny_models.running import load_tiny
from offload_core.tiny_models.weights import with_weights
from original_layout import Weights, backwards, component_weights, unet_names
from staging import tiny_model


def original_names(weights: Weights) -> Weights:
    """Of a tiny ControlNet for a UNet of two levels with one resnet each."""
    hints = sum(name.startswith("controlnet_cond_embedding.blocks.") for name in weights) // 2
    names = unet_names(4, 0, (2,)) | {f"input_hint_block.{2 * (hints + 1)}.weight": ()}
    return backwards(CONTROLNETS[0].rules(names), weights)


@functools.cache
def controlnet_file(name: str, dialect: str = "diffusers") -> Path:
    """The ControlNet of `tiny_controlnet` as a file. dialect: "diffusers", "original", or "pth", which names parts of a
    model."""
    weights = component_weights(tiny_controlnet(name))
    if dialect != "diffusers":
        prefix = "control_model." if dialect == "pth" else ""
        weights = {prefix + key: tensor for key, tensor in original_names(weights).items()}
    file = Path(mkdtemp(prefix=f"control-file-{name}-")) / f"{name}-{dialect}.safetensors"
    save_file(weights, file)
    return file


@functools.cache
def controlnet_of_eight_convolutions() -> Path:
    """The folder of a ControlNet for the tiny SD 1.5 whose picture goes through as many convolutions as in published
    ones: diffusers' converter knows no other number."""
    unet = load_tiny(tiny_model("sd15"), dtype=torch.float32).unet
    made = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 4, 8, 8))
    folder = Path(mkdtemp(prefix="control-eight-"))
    with_weights(made, "eight.controlnet").save_pretrained(folder)
    return folder


@functools.cache
def wide_image_encoder() -> Path:
    """A folder of a CLIP vision encoder as wide as ViT-L, by which its activation function is told, and small else."""
    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=16,
        image_size=32,
        patch_size=8,
        projection_dim=16,
        hidden_act="quick_gelu",
    )
    folder = Path(mkdtemp(prefix="wide-image-encoder-"))
    with_weights(CLIPVisionModelWithProjection(config), "wide.image_encoder").save_pretrained(folder)
    return folder


@functools.cache
def image_encoder_file() -> Path:
    """The same as a file."""
    file = Path(mkdtemp(prefix="image-encoder-file-")) / "clip_vision_l.safetensors"
    shutil.copy(wide_image_encoder() / "model.safetensors", file)
    return file
