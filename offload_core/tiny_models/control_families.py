"""Builders of tiny picture pipelines with a ControlNet: those of the families, and one component more."""

import inspect
from typing import Any

from diffusers import (
    ControlNetModel,
    FluxControlNetModel,
    FluxControlNetPipeline,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    SanaControlNetModel,
    SanaControlNetPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)

from . import image_families, other_image_families
from .autoencoders import WIDTHS
from .weights import with_weights

HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}


def sd15_control() -> StableDiffusionControlNetPipeline:
    """Return a Stable Diffusion 1.5 pipeline with a ControlNet, which sees the picture's pixels."""
    parts = image_families.sd15().components
    return StableDiffusionControlNetPipeline(
        **parts, controlnet=_beside_unet(parts["unet"], "sd15.controlnet"), requires_safety_checker=False
    )


def sdxl_control() -> StableDiffusionXLControlNetPipeline:
    """Return an SDXL pipeline with a ControlNet."""
    parts = image_families.sdxl().components
    return StableDiffusionXLControlNetPipeline(
        **parts, controlnet=_beside_unet(parts["unet"], "sdxl.controlnet"), add_watermarker=False
    )


def sd3_control() -> StableDiffusion3ControlNetPipeline:
    """Return an SD3.5 pipeline with a ControlNet, which sees the picture's latents."""
    parts = image_families.sd3().components
    config = _shared(SD3ControlNetModel, parts["transformer"]) | {"num_layers": 1}
    controlnet = SD3ControlNetModel(**config)  # its from_transformer changes the transformer's own config
    return StableDiffusion3ControlNetPipeline(**parts, controlnet=with_weights(controlnet, "sd3.controlnet"))


def flux_control_net() -> FluxControlNetPipeline:
    """Return a FLUX.1 pipeline with a ControlNet."""
    parts = image_families.flux().components
    controlnet = FluxControlNetModel.from_transformer(
        parts["transformer"], num_layers=1, num_single_layers=1, load_weights_from_transformer=False, **HEADS
    )
    return FluxControlNetPipeline(**parts, controlnet=with_weights(controlnet, "flux.controlnet"))


def qwen_image_control() -> QwenImageControlNetPipeline:
    """Return a Qwen-Image pipeline with a ControlNet."""
    parts = image_families.qwen_image().components
    controlnet = QwenImageControlNetModel.from_transformer(
        parts["transformer"], num_layers=1, load_weights_from_transformer=False, **HEADS
    )
    return QwenImageControlNetPipeline(**parts, controlnet=with_weights(controlnet, "qwen_image.controlnet"))


def sana_control() -> SanaControlNetPipeline:
    """Return a Sana pipeline with a ControlNet."""
    parts = other_image_families.sana().components
    controlnet = SanaControlNetModel(**_shared(SanaControlNetModel, parts["transformer"]) | {"num_layers": 1})
    return SanaControlNetPipeline(**parts, controlnet=with_weights(controlnet, "sana.controlnet"))


def _shared(controlnet: type, transformer: Any) -> dict[str, Any]:
    """Of a transformer's config, what a class of ControlNets takes, too."""
    names = inspect.signature(controlnet).parameters
    return {name: value for name, value in transformer.config.items() if name in names}


def _beside_unet(unet: Any, name: str) -> ControlNetModel:
    """A ControlNet for a UNet; it brings pixels to the size of latents as the VAE does."""
    controlnet = ControlNetModel.from_unet(
        unet, load_weights_from_unet=False, conditioning_embedding_out_channels=WIDTHS
    )
    return with_weights(controlnet, name)
