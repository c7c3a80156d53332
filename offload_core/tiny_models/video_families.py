"""Builders of the tiny Wan pipelines."""

from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel

from ..known._tokenizers import t5_tokenizer
from . import autoencoders, text_encoders
from .autoencoders import LATENT_CHANNELS
from .weights import denoiser

FIVE_B_CHANNELS = 12
FRAMES_PER_CELL = 4


def wan22_a14b() -> WanPipeline:
    """Return a Wan 2.2 A14B pipeline: one expert for the steps above boundary_ratio, another for those below."""
    return WanPipeline(**_two_experts("wan22_a14b", LATENT_CHANNELS), boundary_ratio=0.875)


def wan22_i2v_a14b() -> WanImageToVideoPipeline:
    """Return a Wan 2.2 I2V A14B pipeline: the experts also see the encoded picture and a mask of known frames."""
    seen = 2 * LATENT_CHANNELS + FRAMES_PER_CELL
    return WanImageToVideoPipeline(**_two_experts("wan22_i2v_a14b", seen), boundary_ratio=0.9)


def wan22_5b() -> WanPipeline:
    """Return a Wan 2.2 TI2V-5B pipeline: one denoiser, a timestep for each token, a VAE of scale 16."""
    return WanPipeline(
        **_wan_text("wan22_5b"),
        vae=autoencoders.autoencoder_wan_5b("wan22_5b.vae"),
        transformer=_wan_transformer("wan22_5b.transformer", FIVE_B_CHANNELS, FIVE_B_CHANNELS),
        transformer_2=None,
        scheduler=_wan_scheduler(flow_shift=5.0),
        expand_timesteps=True,
    )


def _two_experts(name: str, in_channels: int) -> dict:
    return {
        **_wan_text(name),
        "vae": autoencoders.autoencoder_wan(f"{name}.vae"),
        "transformer": _wan_transformer(f"{name}.transformer", in_channels, LATENT_CHANNELS),
        "transformer_2": _wan_transformer(f"{name}.transformer_2", in_channels, LATENT_CHANNELS),
        "scheduler": _wan_scheduler(flow_shift=3.0),
    }


def _wan_text(name: str) -> dict:
    return {"tokenizer": t5_tokenizer(), "text_encoder": text_encoders.umt5_encoder(f"{name}.text_encoder")}


def _wan_scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


def _wan_transformer(name: str, in_channels: int, out_channels: int) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=out_channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=64,
    )
    return denoiser(transformer, name)
