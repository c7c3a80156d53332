"""Tiny ControlNets and IP-Adapters of the tiny models, made for tests."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from offload_core.tiny_models.running import load_tiny
from offload_core.tiny_models.weights import seeded, with_weights
from staging import tiny_model

CONTROLLED: dict[str, type[DiffusionPipeline]] = {
    "sd15": StableDiffusionControlNetPipeline,
    "sdxl": StableDiffusionXLControlNetPipeline,
    "flux": FluxControlNetPipeline,
}
IMAGE_WIDTH, IMAGE_TOKENS = 16, 4


@functools.cache
def tiny_controlnet(name: str) -> Path:
    """A ControlNet for a tiny model, in a folder of its own, whose every layer counts."""
    pipeline = load_tiny(tiny_model(name), dtype=torch.float32)
    if name == "flux":
        wanted = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope")
        sizes = {key: pipeline.transformer.config[key] for key in (*wanted, "pooled_projection_dim", "guidance_embeds")}
        made: Any = FluxControlNetModel(**sizes, num_layers=1, num_single_layers=1)
    else:
        channels = {"conditioning_embedding_out_channels": (4, 8, 16)}  # halved twice, as the tiny VAE does
        made = ControlNetModel.from_unet(pipeline.unet, **channels, load_weights_from_unet=False)
    folder = Path(mkdtemp(prefix=f"tiny-controlnet-{name}-")) / "controlnet"
    with_weights(made, f"{name}.controlnet", gain=0.5).save_pretrained(folder)
    return folder


@functools.cache
def tiny_image_encoder() -> Path:
    """A CLIP vision encoder, as IP-Adapters come with."""
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=IMAGE_WIDTH,
    )
    folder = Path(mkdtemp(prefix="tiny-image-encoder-")) / "image_encoder"
    with_weights(CLIPVisionModelWithProjection(config), "ip.image_encoder").save_pretrained(folder)
    return folder


@functools.cache
def tiny_ip_adapter(name: str) -> Path:
    """An IP-Adapter for a tiny model, with the names and shapes of the published files."""
    pipeline = load_tiny(tiny_model(name), dtype=torch.float32)
    shapes: dict[str, tuple[int, ...]] = {}
    if name == "flux":
        model = pipeline.transformer
        width, reads = model.inner_dim, model.config.joint_attention_dim
        for block in range(len(model.transformer_blocks)):
            for side in "kv":
                layer = f"double_blocks.{block}.processor.ip_adapter_double_stream_{side}_proj"
                shapes |= {f"{layer}.weight": (width, reads), f"{layer}.bias": (width,)}
        head = "ip_adapter_proj_model"
    else:
        model, reads = pipeline.unet, pipeline.unet.config.cross_attention_dim
        for index, key in enumerate(model.attn_processors):
            if key.endswith("attn2.processor"):
                width = model.get_submodule(key.removesuffix(".processor")).inner_dim
                shapes |= {f"ip_adapter.{index}.to_{side}_ip.weight": (width, reads) for side in "kv"}
        head = "image_proj"
    shapes |= {f"{head}.proj.weight": (IMAGE_TOKENS * reads, IMAGE_WIDTH), f"{head}.proj.bias": (IMAGE_TOKENS * reads,)}
    shapes |= {f"{head}.norm.{part}": (reads,) for part in ("weight", "bias")}
    weights = {key: torch.randn(shape, generator=seeded(f"{name}.{key}")) * 0.3 for key, shape in shapes.items()}
    file = Path(mkdtemp(prefix=f"tiny-ip-adapter-{name}-")) / "ip-adapter.safetensors"
    save_file(weights, file)
    return file
