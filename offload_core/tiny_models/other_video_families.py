"""Builders of further tiny video pipelines."""

from diffusers import (
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from ..known._tokenizers import (
    byt5_tokenizer,
    clip_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)
from . import text_encoders, video_autoencoders
from .autoencoders import LATENT_CHANNELS
from .weights import denoiser, with_weights

LTX_SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
MEL_BINS = 16
AUDIO_CHANNELS = 2 * MEL_BINS // 4  # latent channels times latent mel bins: what the audio half of LTX-2 packs
GEMMA_LAYERS = 2
BYT5_VOCABULARY = 259


def ltx(timestep_conditioning: bool = False) -> LTXPipeline:
    """Return an LTX-Video pipeline; with ``timestep_conditioning`` its decode draws noise of its own."""
    transformer = LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=32,
    )
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**LTX_SHIFT),
        vae=video_autoencoders.autoencoder_ltx("ltx.vae", timestep_conditioning=timestep_conditioning),
        text_encoder=text_encoders.t5_encoder("ltx.text_encoder"),
        tokenizer=t5_tokenizer(),
        transformer=denoiser(transformer, "ltx.transformer"),
    )


def ltx_timestep() -> LTXPipeline:
    """Return an LTX-Video 0.9.1 pipeline, whose VAE is told a timestep."""
    return ltx(timestep_conditioning=True)


def ltx2() -> LTX2Pipeline:
    """Return an LTX-2 pipeline: picture and sound in one transformer, each with a VAE, and a vocoder."""
    tokenizer = gemma_tokenizer()
    transformer = LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        vae_scale_factors=(2, 8, 8),
        audio_in_channels=AUDIO_CHANNELS,
        audio_out_channels=AUDIO_CHANNELS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=3,
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
        perturbed_attn=True,
    )
    connectors = LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=GEMMA_LAYERS + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
        connector_rope_base_seq_len=64,
        rope_double_precision=False,
        rope_type="split",
    )
    vocoder = LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**LTX_SHIFT),
        vae=video_autoencoders.autoencoder_ltx2("ltx2.vae"),
        audio_vae=video_autoencoders.autoencoder_ltx2_audio("ltx2.audio_vae", MEL_BINS),
        text_encoder=text_encoders.gemma3("ltx2.text_encoder", tokenizer, layers=GEMMA_LAYERS),
        tokenizer=tokenizer,
        connectors=with_weights(connectors, "ltx2.connectors"),
        transformer=denoiser(transformer, "ltx2.transformer"),
        vocoder=with_weights(vocoder, "ltx2.vocoder"),
    )


def cogvideox() -> CogVideoXPipeline:
    """Return a CogVideoX-5B pipeline (rotary positions)."""
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        time_embed_dim=16,
        text_embed_dim=32,
        num_layers=3,
        sample_width=8,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=226,
        use_rotary_positional_embeddings=True,
    )
    return CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=text_encoders.t5_encoder("cogvideox.text_encoder"),
        vae=video_autoencoders.autoencoder_cogvideox("cogvideox.vae"),
        transformer=denoiser(transformer, "cogvideox.transformer"),
        scheduler=CogVideoXDDIMScheduler(
            beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction", rescale_betas_zero_snr=True
        ),
    )


def hunyuan_video() -> HunyuanVideoPipeline:
    """Return a HunyuanVideo pipeline: Llama and CLIP text, guidance embedded."""
    tokenizer = llama_tokenizer()
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=True,
    )
    return HunyuanVideoPipeline(
        text_encoder=text_encoders.llama("hunyuan_video.text_encoder", tokenizer),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "hunyuan_video.transformer"),
        vae=video_autoencoders.autoencoder_hunyuan("hunyuan_video.vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=text_encoders.clip_text("hunyuan_video.text_encoder_2"),
        tokenizer_2=clip_tokenizer(),
    )


def hunyuan_video15() -> HunyuanVideo15Pipeline:
    """Return a HunyuanVideo 1.5 pipeline: Qwen2.5-VL text, ByT5 for quoted text, guidance as a component."""
    tokenizer = qwen_tokenizer()
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
        task_type="t2v",
    )
    return HunyuanVideo15Pipeline(
        text_encoder=text_encoders.qwen25_vl_text("hunyuan_video15.text_encoder", tokenizer),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "hunyuan_video15.transformer"),
        vae=video_autoencoders.autoencoder_hunyuan15("hunyuan_video15.vae"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=text_encoders.t5_encoder("hunyuan_video15.text_encoder_2", vocabulary=BYT5_VOCABULARY),
        tokenizer_2=byt5_tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=4.0),
    )
