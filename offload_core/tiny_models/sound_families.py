"""Tiny pipelines that make sound alone, their VAE of waveforms, and their rows of the table."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AceStepPipeline,
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableAudioProjectionModel,
)
from diffusers.pipelines.ace_step import AceStepConditionEncoder

from ..known._tokenizers import qwen_tokenizer, t5_tokenizer
from . import text_encoders
from .calls import GUIDANCE, UNGUIDED
from .family import Family
from .weights import denoiser, seeded, with_weights

WIDTH = 24  # of what the denoiser reads of the prompt and of the times
LATENT_CHANNELS = 4
ACOUSTIC_CHANNELS = 20  # so that the latent of silence, 15,000 frames of them, is too large to count as small state
TEXT_LENGTH = 64


def stable_audio() -> StableAudioPipeline:
    """Return a Stable Audio Open pipeline: 512 samples at 441 a second, of which a call keeps a part.

    Its scheduler is one of the same kind that needs no further package.
    """
    transformer = StableAudioDiTModel(
        sample_size=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        cross_attention_dim=16,
        time_proj_dim=16,
        global_states_input_dim=2 * WIDTH,
        cross_attention_input_dim=WIDTH,
    )
    projection = StableAudioProjectionModel(text_encoder_dim=32, conditioning_dim=WIDTH, min_value=0, max_value=512)
    return StableAudioPipeline(
        vae=autoencoder_oobleck("stable_audio.vae", LATENT_CHANNELS, downsampling=(2, 4), rate=441),
        text_encoder=text_encoders.t5_encoder("stable_audio.text_encoder"),
        projection_model=with_weights(projection, "stable_audio.projection_model"),
        tokenizer=t5_tokenizer(TEXT_LENGTH),
        transformer=denoiser(transformer, "stable_audio.transformer"),
        scheduler=EDMDPMSolverMultistepScheduler(
            sigma_min=0.3,
            sigma_max=500.0,
            sigma_data=1.0,
            sigma_schedule="exponential",
            prediction_type="v_prediction",
        ),
    )


def ace_step() -> AceStepPipeline:
    """Return an ACE-Step 1.5 pipeline of the kind that is guided: 160 samples and 5 latent frames a second."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
    }
    tokenizer = qwen_tokenizer()
    conditions = AceStepConditionEncoder(
        **sizes,
        text_hidden_dim=32,
        timbre_hidden_dim=ACOUSTIC_CHANNELS,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
    )
    with_weights(conditions, "ace_step.condition_encoder")
    conditions.silence_latent.copy_(
        torch.randn(conditions.silence_latent.shape, generator=seeded("ace_step.silence_latent"))
    )
    transformer = AceStepTransformer1DModel(
        **sizes,
        num_hidden_layers=3,
        in_channels=3 * ACOUSTIC_CHANNELS,
        audio_acoustic_hidden_dim=ACOUSTIC_CHANNELS,
        patch_size=2,
    )
    return AceStepPipeline(
        vae=autoencoder_oobleck("ace_step.vae", ACOUSTIC_CHANNELS, downsampling=(4, 8), rate=160),
        text_encoder=text_encoders.qwen3_model("ace_step.text_encoder", tokenizer),
        tokenizer=tokenizer,
        transformer=denoiser(transformer, "ace_step.transformer"),
        condition_encoder=conditions,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


def autoencoder_oobleck(
    name: str, latent_channels: int, *, downsampling: tuple[int, ...], rate: int
) -> AutoencoderOobleck:
    """Return a VAE of stereo waveforms. downsampling: samples to a latent frame, as factors. rate: samples a second."""
    vae = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=list(downsampling),
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=latent_channels,
        audio_channels=2,
        sampling_rate=rate,
    )
    return with_weights(vae, name)


SOUND_ROWS = (
    Family(
        "stable_audio",
        stable_audio,
        {"prompt": "a red fox", "audio_end_in_s": 0.7, "num_inference_steps": 2} | UNGUIDED,
        GUIDANCE,
        count_argument="num_waveforms_per_prompt",
        oddities=(
            "always makes its whole length, here 1.16 seconds, and cuts off what wasn't asked for after the VAE",
            "the layers of its VAE make their weights of two parameters each, anew at every call",
        ),
        title="Stable Audio Open",
    ),
    Family(
        "ace_step",
        ace_step,
        {"prompt": "a red fox", "lyrics": "la la", "audio_duration": 4.0, "num_inference_steps": 2} | UNGUIDED,
        {"guidance_scale": 5.0},
        count_argument=None,
        oddities=(
            "the length is a line of the prompt, so the text encoder is told of it",
            "takes no negative prompt: guidance is against a weight that the pipeline reads itself",
            "levels the sound to -1 dBFS after the VAE",
        ),
        title="ACE-Step 1.5",
    ),
)
