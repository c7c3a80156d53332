"""Builders of further tiny picture pipelines."""

from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)

from ..known._tokenizers import gemma_tokenizer, qwen_tokenizer, t5_tokenizer
from . import autoencoders, text_encoders
from .autoencoders import LATENT_CHANNELS
from .image_families import PACKED_CHANNELS
from .weights import denoiser

LUMINA2_VAE_WIDTHS = (8, 8, 16, 16)  # the pipeline takes scale 8 for granted
KREA2_TEXT_LAYERS = (1, 2, 4)


def sana() -> SanaPipeline:
    """Return a Sana pipeline: Gemma 2 text, linear attention, deep-compression autoencoder."""
    tokenizer = gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=32,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoders.gemma2("sana.text_encoder", tokenizer),
        vae=autoencoders.autoencoder_dc("sana.vae"),
        transformer=denoiser(transformer, "sana.transformer"),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
        ),
    )


def lumina2() -> Lumina2Pipeline:
    """Return a Lumina-Image 2 pipeline."""
    tokenizer = gemma_tokenizer()
    transformer = Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(1024, 64, 64),
        cap_feat_dim=32,
    )
    return Lumina2Pipeline(
        transformer=denoiser(transformer, "lumina2.transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoders.flow_autoencoder_kl("lumina2.vae", LUMINA2_VAE_WIDTHS),
        text_encoder=text_encoders.gemma2("lumina2.text_encoder", tokenizer),
        tokenizer=tokenizer,
    )


def pixart_sigma() -> PixArtSigmaPipeline:
    """Return a PixArt-Sigma pipeline: the transformer also predicts a variance, which the pipeline drops."""
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=2 * LATENT_CHANNELS,
        num_layers=3,
        cross_attention_dim=32,
        sample_size=16,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=text_encoders.t5_encoder("pixart_sigma.text_encoder"),
        vae=autoencoders.autoencoder_kl("pixart_sigma.vae", scaling_factor=0.13025, force_upcast=False),
        transformer=denoiser(transformer, "pixart_sigma.transformer"),
        scheduler=DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02),
    )


def krea2() -> Krea2Pipeline:
    """Return a Krea 2 base pipeline: several layers of Qwen3-VL, fused in the transformer."""
    tokenizer = qwen_tokenizer()
    transformer = Krea2Transformer2DModel(
        in_channels=PACKED_CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=32,
        num_text_layers=len(KREA2_TEXT_LAYERS),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential"),
        vae=autoencoders.autoencoder_qwen("krea2.vae"),
        text_encoder=text_encoders.qwen3_vl("krea2.text_encoder", tokenizer),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "krea2.transformer"),
        text_encoder_select_layers=KREA2_TEXT_LAYERS,
        is_distilled=False,
    )
