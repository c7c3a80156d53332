"""Builders of the tiny video pipelines that came last, and their rows. See `table`."""

from diffusers import (
    AutoencoderKLMochi,
    CogVideoXImageToVideoPipeline,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
    LTXConditionPipeline,
    MochiPipeline,
    MochiTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from ..known._tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer
from . import autoencoders, other_video_families, text_encoders, video_autoencoders
from .autoencoders import LATENT_CHANNELS
from .calls import BY_32, GUIDANCE, SHORT_TEXT, UNGUIDED, VIDEO, VIDEOS
from .family import Family
from .pictures import picture
from .video_families import FRAMES_PER_CELL
from .weights import denoiser, spread_around, with_weights

VISION_WIDTH = 16
MASK_CHANNELS = 64  # of 8 x 8 pixels each, as the pipeline has it
MOCHI_CHANNELS = 12  # as the pipeline has it
MOCHI_WIDTH = 32  # its group norms have 32 groups, whatever the width


def wan21() -> WanPipeline:
    """Return a Wan 2.1 pipeline: one denoiser for all steps."""
    return WanPipeline(**_wan("wan21"), transformer=_wan_transformer("wan21", LATENT_CHANNELS))


def wan21_i2v() -> WanImageToVideoPipeline:
    """Return a Wan 2.1 I2V pipeline: the denoiser sees the picture encoded by the VAE, and by a CLIP encoder."""
    seen = {"image_dim": VISION_WIDTH, "added_kv_proj_dim": 32}
    return WanImageToVideoPipeline(
        **_wan("wan21_i2v"),
        image_processor=CLIPImageProcessorPil(size=32, crop_size=32),
        image_encoder=_clip_vision("wan21_i2v.image_encoder"),
        transformer=_wan_transformer("wan21_i2v", 2 * LATENT_CHANNELS + FRAMES_PER_CELL, **seen),
    )


def wan_vace() -> WanVACEPipeline:
    """Return a Wan 2.1 VACE pipeline: blocks beside the denoiser's own read reference pictures, a video and a mask."""
    transformer = WanVACETransformer3DModel(
        **_wan_sizes(LATENT_CHANNELS),
        vace_layers=[0, 2],
        vace_in_channels=2 * LATENT_CHANNELS + MASK_CHANNELS,
    )
    return WanVACEPipeline(**_wan("wan_vace"), transformer=denoiser(transformer, "wan_vace.transformer"))


def ltx_condition() -> LTXConditionPipeline:
    """Return an LTX-Video 0.9.5 pipeline, which may be given frames of any place in the video."""
    parts = other_video_families.ltx_timestep().components
    return LTXConditionPipeline(**parts | {"scheduler": FlowMatchEulerDiscreteScheduler(shift_terminal=0.1)})


def cogvideox_i2v() -> CogVideoXImageToVideoPipeline:
    """Return a CogVideoX I2V pipeline: the denoiser has the encoded picture beside the noise."""
    made = other_video_families.cogvideox()
    sizes = {key: value for key, value in made.transformer.config.items() if not key.startswith("_")}
    transformer = type(made.transformer)(**sizes | {"in_channels": 2 * LATENT_CHANNELS})
    parts = made.components | {"transformer": with_weights(transformer, "cogvideox_i2v.transformer")}
    return CogVideoXImageToVideoPipeline(**parts)


def mochi() -> MochiPipeline:
    """Return a Mochi 1 pipeline."""
    transformer = MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        pooled_projection_dim=32,
        in_channels=MOCHI_CHANNELS,
        text_embed_dim=32,
        time_embed_dim=16,
        max_sequence_length=48,
    )
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=(MOCHI_WIDTH,) * 4,
        decoder_block_out_channels=(MOCHI_WIDTH,) * 4,
        latent_channels=MOCHI_CHANNELS,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
        latents_mean=spread_around(0.1, MOCHI_CHANNELS, "mochi.mean"),
        latents_std=spread_around(1.5, MOCHI_CHANNELS, "mochi.std"),
    )
    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=with_weights(vae, "mochi.vae", gain=0.7),
        text_encoder=text_encoders.t5_encoder("mochi.text_encoder"),
        tokenizer=t5_tokenizer(),
        transformer=denoiser(transformer, "mochi.transformer"),
    )


def kandinsky5() -> Kandinsky5T2VPipeline:
    """Return a Kandinsky 5 pipeline: Qwen2.5-VL and CLIP text, the VAE of HunyuanVideo."""
    tokenizer = qwen_tokenizer()
    transformer = Kandinsky5Transformer3DModel(
        in_visual_dim=LATENT_CHANNELS,
        in_text_dim=32,
        in_text_dim2=32,
        time_dim=16,
        out_visual_dim=LATENT_CHANNELS,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=3,
        axes_dims=(4, 6, 6),
    )
    return Kandinsky5T2VPipeline(
        transformer=denoiser(transformer, "kandinsky5.transformer"),
        vae=video_autoencoders.autoencoder_hunyuan("kandinsky5.vae"),
        text_encoder=text_encoders.qwen25_vl("kandinsky5.text_encoder", tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=text_encoders.clip_text("kandinsky5.text_encoder_2"),
        tokenizer_2=clip_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def _wan(name: str) -> dict:
    """Return what all Wan 2.1 pipelines have beside their denoiser."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": text_encoders.umt5_encoder(f"{name}.text_encoder"),
        "vae": autoencoders.autoencoder_wan(f"{name}.vae"),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    }


def _wan_sizes(in_channels: int) -> dict:
    return {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": in_channels,
        "out_channels": LATENT_CHANNELS,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "rope_max_seq_len": 64,
    }


def _wan_transformer(name: str, in_channels: int, **more: int) -> WanTransformer3DModel:
    return denoiser(WanTransformer3DModel(**_wan_sizes(in_channels), **more), f"{name}.transformer")


def _clip_vision(name: str) -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    return with_weights(CLIPVisionModel(config), name)


FOX = picture("fox")

MORE_VIDEO_ROWS = (
    Family("wan21", wan21, VIDEO | SHORT_TEXT | UNGUIDED, GUIDANCE, count_argument=VIDEOS, title="Wan 2.1"),
    Family(
        "wan21_i2v",
        wan21_i2v,
        VIDEO | SHORT_TEXT | UNGUIDED | {"image": FOX},
        GUIDANCE,
        count_argument=None,
        oddities=(
            "two encoders see the picture: the VAE, and CLIP, of which the layer before the last is read",
            "two videos of one prompt raise in the transformer: the picture is encoded once",
        ),
        title="Wan 2.1 I2V",
        task="image to video",
    ),
    Family(
        "wan_vace",
        wan_vace,
        VIDEO | SHORT_TEXT | UNGUIDED | {"reference_images": FOX},
        GUIDANCE,
        count_argument=None,
        oddities=(
            "the reference is a latent frame before the video's own, and cut off before the decode",
            "makes one video of a prompt",
        ),
        title="Wan 2.1 VACE",
        task="reference to video",
    ),
    Family(
        "ltx_condition",
        ltx_condition,
        VIDEO | BY_32 | SHORT_TEXT | UNGUIDED | {"image": picture("fox", 64, 96), "decode_timestep": 0.05},
        GUIDANCE,
        count_argument=None,
        oddities=("decode draws noise from the same generator after the last step",),
        title="LTX-Video 0.9.5",
        task="image to video",
    ),
    Family(
        "cogvideox_i2v",
        cogvideox_i2v,
        VIDEO | UNGUIDED | {"num_frames": 9, "image": FOX},
        GUIDANCE,
        count_argument=None,
        oddities=("makes one video whatever num_videos_per_prompt says",),
        title="CogVideoX I2V",
        task="image to video",
    ),
    Family(
        "mochi",
        mochi,
        VIDEO | SHORT_TEXT | UNGUIDED | {"num_frames": 7},
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=("6 frames to a latent one: 7 frames are two of them",),
        title="Mochi 1",
    ),
    Family(
        "kandinsky5",
        kandinsky5,
        VIDEO | UNGUIDED | {"max_sequence_length": 1000},
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=("the first 128 tokens of the template are cut off by number; here they are letters of it",),
        title="Kandinsky 5",
    ),
)
