"""Builders of the tiny picture pipelines. Each follows the layout of the published folder, in miniature."""

from typing import Any

import torch
from diffusers import (
    ChromaPipeline,
    ChromaTransformer2DModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig, CLIPImageProcessor

from ..known._tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer
from . import autoencoders, text_encoders
from .autoencoders import LATENT_CHANNELS
from .weights import denoiser, seeded, with_weights

PACKED_CHANNELS = 4 * LATENT_CHANNELS  # a 2 x 2 patch of the latent
STABLE_DIFFUSION_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
DYNAMIC_SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
SAFETY_THRESHOLD = 0.59  # at this cosine seed 0 passes and seed 3 is blacked out, with room on both sides
KLEIN_TEXT_LAYERS = 28  # the pipeline's default reads hidden states 9, 18 and 27


def sd15() -> StableDiffusionPipeline:
    """Return a Stable Diffusion 1.5 pipeline without a safety checker."""
    unet = UNet2DConditionModel(
        **unet_sizes(), cross_attention_dim=32, attention_head_dim=2, transformer_layers_per_block=1
    )
    return StableDiffusionPipeline(
        vae=autoencoders.autoencoder_kl("sd15.vae", scaling_factor=0.18215, force_upcast=False),
        text_encoder=text_encoders.clip_text("sd15.text_encoder"),
        tokenizer=clip_tokenizer(),
        unet=denoiser(unet, "sd15.unet"),
        scheduler=DDIMScheduler(**STABLE_DIFFUSION_NOISE, clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sd15_safety() -> StableDiffusionPipeline:
    """Return Stable Diffusion 1.5 with a safety checker that passes some pictures and blacks out others."""
    pipeline = sd15()
    pipeline.register_modules(
        safety_checker=_safety_checker("sd15.safety_checker"),
        feature_extractor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    )
    pipeline.register_to_config(requires_safety_checker=True)
    return pipeline


def sdxl(force_upcast: bool = False) -> StableDiffusionXLPipeline:
    """Return an SDXL pipeline; with ``force_upcast`` a float16 run decodes in float32."""
    first, second = 16, 24  # widths of the two text encoders, which the UNet sees side by side
    unet = UNet2DConditionModel(
        **unet_sizes(),
        cross_attention_dim=first + second,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=second + 6 * 8,
    )
    return StableDiffusionXLPipeline(
        vae=autoencoders.autoencoder_kl("sdxl.vae", scaling_factor=0.13025, force_upcast=force_upcast),
        text_encoder=text_encoders.clip_text("sdxl.text_encoder", first),
        text_encoder_2=text_encoders.clip_text("sdxl.text_encoder_2", second, projected=True, act="gelu", layers=3),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(pad_token="!"),
        unet=denoiser(unet, "sdxl.unet"),
        scheduler=EulerDiscreteScheduler(**STABLE_DIFFUSION_NOISE, timestep_spacing="leading"),
        add_watermarker=False,
    )


def sdxl_fp16_force_upcast() -> StableDiffusionXLPipeline:
    """Return the SDXL pipeline whose VAE asks to be run in float32."""
    return sdxl(force_upcast=True)


def sd3(channels: int = LATENT_CHANNELS) -> StableDiffusion3Pipeline:
    """Return an SD3.5 pipeline: three text encoders, one block with dual attention. channels: of latents."""
    first, second, joint = 16, 24, 48
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=joint,
        caption_projection_dim=32,
        pooled_projection_dim=first + second,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=denoiser(transformer, "sd3.transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoders.flow_autoencoder_kl("sd3.vae", latent_channels=channels),
        text_encoder=text_encoders.clip_text("sd3.text_encoder", first, projected=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoders.clip_text("sd3.text_encoder_2", second, projected=True, act="gelu", layers=3),
        tokenizer_2=clip_tokenizer(pad_token="!"),
        text_encoder_3=text_encoders.t5_encoder("sd3.text_encoder_3", joint),
        tokenizer_3=t5_tokenizer(),
    )


def flux() -> FluxPipeline:
    """Return a FLUX.1-dev pipeline (guidance embedded)."""
    transformer = FluxTransformer2DModel(
        **flow_sizes(), axes_dims_rope=(4, 6, 6), pooled_projection_dim=32, guidance_embeds=True
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC_SHIFT),
        vae=autoencoders.flow_autoencoder_kl("flux.vae"),
        text_encoder=text_encoders.clip_text("flux.text_encoder"),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoders.t5_encoder("flux.text_encoder_2"),
        tokenizer_2=t5_tokenizer(),
        transformer=denoiser(transformer, "flux.transformer"),
    )


def flux2_klein() -> Flux2KleinPipeline:
    """Return a FLUX.2 klein base pipeline: not distilled, so classifier-free guidance is real."""
    tokenizer, width = qwen_tokenizer(), 16
    sizes = flow_sizes() | {"joint_attention_dim": 3 * width}
    transformer = Flux2Transformer2DModel(**sizes, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC_SHIFT),
        vae=autoencoders.autoencoder_flux2("flux2_klein.vae"),
        text_encoder=text_encoders.qwen3("flux2_klein.text_encoder", tokenizer, layers=KLEIN_TEXT_LAYERS, width=width),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "flux2_klein.transformer"),
        is_distilled=False,
    )


def chroma() -> ChromaPipeline:
    """Return a Chroma pipeline: T5 only, modulation from one small approximator."""
    transformer = ChromaTransformer2DModel(
        **flow_sizes(),
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=autoencoders.flow_autoencoder_kl("chroma.vae"),
        text_encoder=text_encoders.t5_encoder("chroma.text_encoder"),
        tokenizer=t5_tokenizer(),
        transformer=denoiser(transformer, "chroma.transformer"),
    )


def z_image() -> ZImagePipeline:
    """Return a Z-Image pipeline."""
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoders.flow_autoencoder_kl("z_image.vae"),
        text_encoder=text_encoders.qwen3("z_image.text_encoder", tokenizer, layers=3),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "z_image.transformer"),
    )


def qwen_image() -> QwenImagePipeline:
    """Return a Qwen-Image pipeline."""
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=PACKED_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, time_shift_type="exponential", shift_terminal=0.02
        ),
        vae=autoencoders.autoencoder_qwen("qwen_image.vae"),
        text_encoder=text_encoders.qwen25_vl("qwen_image.text_encoder", tokenizer),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "qwen_image.transformer"),
    )


def _safety_checker(name: str) -> StableDiffusionSafetyChecker:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        vision_config=tower | {"image_size": 32, "patch_size": 8, "projection_dim": 16},
        text_config=tower | {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1},
        projection_dim=16,
    )
    checker: Any = with_weights(StableDiffusionSafetyChecker(config), name)
    checker.concept_embeds.copy_(torch.randn(checker.concept_embeds.shape, generator=seeded(name + ".concepts")))
    checker.concept_embeds_weights.fill_(SAFETY_THRESHOLD)
    checker.special_care_embeds_weights.fill_(1.0)
    return checker


def unet_sizes() -> dict[str, Any]:
    """Return the sizes of the UNets: two levels, the second with attention."""
    return {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "norm_num_groups": 8,
    }


def flow_sizes() -> dict[str, Any]:
    """Return the sizes that FLUX.1, FLUX.2 and Chroma share: two double blocks and three single ones."""
    return {
        "in_channels": PACKED_CHANNELS,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
    }
