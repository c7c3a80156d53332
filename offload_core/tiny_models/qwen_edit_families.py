"""Builders of the tiny Qwen-Image pipelines whose text encoder sees the picture, or whose picture has layers.

They bring every picture to an area of about a million pixels before the VAE encodes it, so the VAE makes few and large
cells of it and is thin. Qwen's own processor needs torchvision, even for pictures; one of another model that does the
same to them stands for it.
"""

from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImageTransformer2DModel,
)
from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ..known._tokenizers import qwen_tokenizer
from . import autoencoders, text_encoders
from .autoencoders import LATENT_CHANNELS
from .weights import denoiser

SEEN_PIXELS = 56 * 56  # of a picture, by the text encoder: four tokens or so
HALVINGS = 5  # a latent cell is 32 x 32 pixels
LAYERED_CHANNELS = 8  # the pipeline takes a picture with as many channels as latents have for latents


def qwen_image_edit() -> QwenImageEditPipeline:
    """Return a Qwen-Image-Edit pipeline."""
    return QwenImageEditPipeline(**_parts("qwen_image_edit"))


def qwen_image_edit_plus() -> QwenImageEditPlusPipeline:
    """Return a Qwen-Image-Edit-2509 pipeline, which takes several pictures."""
    return QwenImageEditPlusPipeline(**_parts("qwen_image_edit_plus"))


def qwen_image_layered() -> QwenImageLayeredPipeline:
    """Return a Qwen-Image-Layered pipeline, which takes a picture with transparency apart."""
    options = {"use_additional_t_cond": True, "use_layer3d_rope": True}
    return QwenImageLayeredPipeline(**_parts("qwen_image_layered", LAYERED_CHANNELS, picture_channels=4, **options))


def _parts(name: str, channels: int = LATENT_CHANNELS, picture_channels: int = 3, **options: Any) -> dict[str, Any]:
    """The components. channels: of latents. options: of the transformer."""
    tokenizer = qwen_tokenizer(extra_special_tokens={"image_token": "<|image_pad|>"})
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * channels,
        out_channels=channels,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        **options,
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, time_shift_type="exponential", shift_terminal=0.02
        ),
        "vae": _vae(f"{name}.vae", channels, picture_channels),
        "text_encoder": text_encoders.qwen25_vl(f"{name}.text_encoder", tokenizer),
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "transformer": denoiser(transformer, f"{name}.transformer"),
    }


def _vae(name: str, channels: int, picture_channels: int) -> AutoencoderKLQwenImage:
    return autoencoders.autoencoder_qwen(
        name,
        channels,
        base_dim=4,
        dim_mult=[1] * HALVINGS + [2],
        temperal_downsample=[False] * (HALVINGS - 1) + [True],
        input_channels=picture_channels,
    )


def _processor(tokenizer: PreTrainedTokenizerBase) -> PaddleOCRVLProcessor:
    size = {"shortest_edge": SEEN_PIXELS, "longest_edge": SEEN_PIXELS}
    return PaddleOCRVLProcessor(image_processor=Qwen2VLImageProcessorPil(size=size), tokenizer=tokenizer)
