"""Builders of the tiny picture pipelines that came last, relatives of earlier ones first."""

from typing import Any

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DDIMScheduler,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxControlPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    StableDiffusion3InpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    UNet2DConditionModel,
)

from ..known._tokenizers import clip_tokenizer, llama_tokenizer, mistral_tokenizer, qwen_tokenizer, t5_tokenizer
from . import autoencoders, text_encoders
from .autoencoders import LATENT_CHANNELS
from .image_families import DYNAMIC_SHIFT, PACKED_CHANNELS, STABLE_DIFFUSION_NOISE, flow_sizes, sd3, unet_sizes
from .weights import denoiser

FLUX2_TEXT_LAYERS = 31  # the pipeline's default reads hidden states 10, 20 and 30
HIDREAM_VAE_WIDTHS = (8, 16)  # scale 2, because the pipeline makes 128 x 128 latent cells whatever size is asked for
IDEOGRAM4_TEXT_LAYERS = 36  # the pipeline reads 13 of them by number, the last one too
IDEOGRAM4_LAYERS_READ = 13
FILL_MASK_CHANNELS = 4 * autoencoders.CELL_PIXELS**2  # each pixel of the mask in a patch of 2 x 2 cells is a channel


def sd21() -> StableDiffusionPipeline:
    """Return a Stable Diffusion 2.1 pipeline: predicts velocity, linear projections, an OpenCLIP text encoder."""
    unet = UNet2DConditionModel(
        **unet_sizes(), cross_attention_dim=32, attention_head_dim=(2, 4), use_linear_projection=True
    )
    return StableDiffusionPipeline(
        vae=autoencoders.autoencoder_kl("sd21.vae", scaling_factor=0.18215, force_upcast=False),
        text_encoder=text_encoders.clip_text("sd21.text_encoder", act="gelu", layers=3),
        tokenizer=clip_tokenizer(pad_token="!"),
        unet=denoiser(unet, "sd21.unet"),
        scheduler=DDIMScheduler(
            **STABLE_DIFFUSION_NOISE, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl_refiner() -> StableDiffusionXLImg2ImgPipeline:
    """Return an SDXL refiner: one text encoder, the second, and an aesthetic score beside the sizes."""
    width = 24
    unet = UNet2DConditionModel(
        **unet_sizes(),
        cross_attention_dim=width,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=width + 5 * 8,
    )
    return StableDiffusionXLImg2ImgPipeline(
        vae=autoencoders.autoencoder_kl("sdxl.vae", scaling_factor=0.13025, force_upcast=False),
        text_encoder=None,
        text_encoder_2=text_encoders.clip_text("refiner.text_encoder_2", width, projected=True, act="gelu", layers=3),
        tokenizer=None,
        tokenizer_2=clip_tokenizer(pad_token="!"),
        unet=denoiser(unet, "refiner.unet"),
        scheduler=EulerDiscreteScheduler(**STABLE_DIFFUSION_NOISE, timestep_spacing="leading"),
        requires_aesthetics_score=True,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


def sd3_inpaint() -> StableDiffusion3InpaintPipeline:
    """Return an SD3.5 pipeline for inpainting, which allows 16 latent channels and no other number."""
    return StableDiffusion3InpaintPipeline(**sd3(channels=16).components)


def hidream() -> HiDreamImagePipeline:
    """Return a HiDream-I1 pipeline: four text encoders, and a mixture of experts in each block."""
    first, second, third = 16, 24, 32
    tokenizer = llama_tokenizer()
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[third, 32],
        text_emb_dim=first + second,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(8, 4, 4),
        llama_layers=[0, 3],
    )
    return HiDreamImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoders.flow_autoencoder_kl("hidream.vae", HIDREAM_VAE_WIDTHS),
        text_encoder=text_encoders.clip_text("hidream.text_encoder", first, projected=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoders.clip_text("hidream.text_encoder_2", second, projected=True, act="gelu"),
        tokenizer_2=clip_tokenizer(pad_token="!"),
        text_encoder_3=text_encoders.t5_encoder("hidream.text_encoder_3", third),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=text_encoders.llama_with_head("hidream.text_encoder_4", tokenizer),
        tokenizer_4=tokenizer,
        transformer=denoiser(transformer, "hidream.transformer"),
    )


def auraflow() -> AuraFlowPipeline:
    """Return an AuraFlow pipeline: joint blocks, then single ones, with register tokens before the text."""
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    return AuraFlowPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=text_encoders.umt5_encoder("auraflow.text_encoder"),
        vae=autoencoders.autoencoder_kl("auraflow.vae", scaling_factor=0.13025, force_upcast=False),
        transformer=denoiser(transformer, "auraflow.transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def flux_schnell() -> FluxPipeline:
    """Return a FLUX.1-schnell pipeline: no guidance embedded, no shift of the steps."""
    return FluxPipeline(
        **_flux_parts("flux_schnell", guidance=False) | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0)}
    )


def flux_fill() -> FluxFillPipeline:
    """Return a FLUX.1-Fill pipeline: the masked picture and the mask lie beside the latents."""
    return FluxFillPipeline(**_flux_parts("flux_fill", more_channels=PACKED_CHANNELS + FILL_MASK_CHANNELS))


def flux_kontext() -> FluxKontextPipeline:
    """Return a FLUX.1-Kontext pipeline: the picture's tokens come after those of the latents."""
    return FluxKontextPipeline(**_flux_parts("flux_kontext"))


def flux_control() -> FluxControlPipeline:
    """Return a FLUX.1 Canny or Depth pipeline: the control picture lies beside the latents."""
    return FluxControlPipeline(**_flux_parts("flux_control", more_channels=PACKED_CHANNELS))


def flux2_dev() -> Flux2Pipeline:
    """Return a FLUX.2-dev pipeline: Mistral text, guidance embedded. A tokenizer stands for its processor."""
    tokenizer = mistral_tokenizer()
    sizes = flow_sizes() | {"joint_attention_dim": 3 * 32}
    transformer = Flux2Transformer2DModel(**sizes, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True)
    return Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC_SHIFT),
        vae=autoencoders.autoencoder_flux2("flux2_dev.vae"),
        text_encoder=text_encoders.mistral3("flux2_dev.text_encoder", tokenizer, layers=FLUX2_TEXT_LAYERS),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "flux2_dev.transformer"),
    )


def ernie_image() -> ErnieImagePipeline:
    """Return an Ernie-Image pipeline without its prompt enhancer."""
    tokenizer = llama_tokenizer()
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=3,
        ffn_hidden_size=64,
        in_channels=PACKED_CHANNELS,
        out_channels=PACKED_CHANNELS,
        text_in_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    return ErnieImagePipeline(
        transformer=denoiser(transformer, "ernie_image.transformer"),
        vae=autoencoders.autoencoder_flux2("ernie_image.vae"),
        text_encoder=text_encoders.mistral3_model("ernie_image.text_encoder", tokenizer),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        pe=None,
        pe_tokenizer=None,
    )


def ovis_image() -> OvisImagePipeline:
    """Return an Ovis-Image pipeline."""
    tokenizer = qwen_tokenizer()
    transformer = OvisImageTransformer2DModel(**flow_sizes(), out_channels=PACKED_CHANNELS, axes_dims_rope=(4, 6, 6))
    return OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC_SHIFT),
        vae=autoencoders.flow_autoencoder_kl("ovis_image.vae"),
        text_encoder=text_encoders.qwen3("ovis_image.text_encoder", tokenizer).model,
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "ovis_image.transformer"),
    )


def ideogram4() -> Ideogram4Pipeline:
    """Return an Ideogram 4 pipeline: a second transformer for the unguided half, and 13 layers of Qwen3-VL."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = mistral_tokenizer().chat_template  # its messages are lists of parts, too

    def transformer(name: str) -> Any:
        model = Ideogram4Transformer2DModel(
            in_channels=PACKED_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=64,
            adaln_dim=16,
            llm_features_dim=IDEOGRAM4_LAYERS_READ * 32,
            mrope_section=(4, 2, 2),
        )
        return denoiser(model, name)

    return Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoders.autoencoder_flux2("ideogram4.vae"),
        text_encoder=text_encoders.qwen3_vl("ideogram4.text_encoder", tokenizer, layers=IDEOGRAM4_TEXT_LAYERS),
        tokenizer=tokenizer,
        transformer=transformer("ideogram4.transformer"),
        unconditional_transformer=transformer("ideogram4.unconditional_transformer"),
    )


def _flux_parts(name: str, *, guidance: bool = True, more_channels: int = 0) -> dict[str, Any]:
    """The components of a FLUX.1 pipeline. more_channels: that the transformer sees beside the latents."""
    sizes = flow_sizes() | {"in_channels": PACKED_CHANNELS + more_channels, "out_channels": PACKED_CHANNELS}
    transformer = FluxTransformer2DModel(
        **sizes, axes_dims_rope=(4, 6, 6), pooled_projection_dim=32, guidance_embeds=guidance
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(**DYNAMIC_SHIFT),
        "vae": autoencoders.flow_autoencoder_kl("flux.vae"),
        "text_encoder": text_encoders.clip_text("flux.text_encoder"),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": text_encoders.t5_encoder("flux.text_encoder_2"),
        "tokenizer_2": t5_tokenizer(),
        "transformer": denoiser(transformer, f"{name}.transformer"),
    }
