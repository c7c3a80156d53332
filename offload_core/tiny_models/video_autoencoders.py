"""Tiny VAEs of the video families other than Wan, and of LTX-2's sound."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
)
from torch import nn

from .autoencoders import LATENT_CHANNELS
from .weights import spread_around, with_weights


def autoencoder_ltx(name: str, *, timestep_conditioning: bool = False) -> AutoencoderKLLTXVideo:
    """Return an LTX-Video VAE: 16 x 16 pixels and 4 frames to a latent cell; it may ask for a decode timestep."""
    vae = AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 16, 16, 16),
        # one width throughout: with timestep conditioning diffusers cannot run a decoder block that changes it
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=timestep_conditioning,
        patch_size=4,
        scaling_factor=0.9,
    )
    return _with_latent_buffers(with_weights(vae, name, gain=0.7), name)


def autoencoder_ltx2(name: str) -> AutoencoderKLLTX2Video:
    """Return an LTX-2 video VAE: 8 x 8 pixels and 2 frames to a latent cell."""
    vae = AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=4,
        scaling_factor=0.9,
    )
    return _with_latent_buffers(with_weights(vae, name), name)


def autoencoder_ltx2_audio(name: str, mel_bins: int = 16) -> AutoencoderKLLTX2Audio:
    """Return an LTX-2 sound VAE: two channels of a mel spectrogram, 4 x 4 cells to a latent one."""
    vae = AutoencoderKLLTX2Audio(
        base_channels=8,
        ch_mult=(1, 1, 2),
        num_res_blocks=1,
        resolution=32,
        latent_channels=2,
        mel_bins=mel_bins,
        norm_type="pixel",
        causality_axis="height",
    )
    return _with_latent_buffers(with_weights(vae, name), name)


def autoencoder_cogvideox(name: str) -> AutoencoderKLCogVideoX:
    """Return a CogVideoX VAE: 8 x 8 pixels and 4 frames to a latent cell, as the pipeline assumes."""
    vae = AutoencoderKLCogVideoX(
        **_kl_sizes("CogVideoXDownBlock3D", "CogVideoXUpBlock3D"),
        norm_num_groups=4,
        sample_height=48,
        sample_width=64,
        scaling_factor=0.7,
    )
    return with_weights(vae, name, gain=0.7)


def autoencoder_hunyuan(name: str) -> AutoencoderKLHunyuanVideo:
    """Return a HunyuanVideo VAE: 8 x 8 pixels and 4 frames to a latent cell."""
    vae = AutoencoderKLHunyuanVideo(
        **_kl_sizes("HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D"), norm_num_groups=4, scaling_factor=0.476986
    )
    return with_weights(vae, name)


def autoencoder_hunyuan15(name: str) -> AutoencoderKLHunyuanVideo15:
    """Return a HunyuanVideo 1.5 VAE: 16 x 16 pixels and 4 frames to a latent cell."""
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=16,
        temporal_compression_ratio=4,
        scaling_factor=0.8,
    )
    return with_weights(vae, name)


def _kl_sizes(down_block: str, up_block: str) -> dict:
    return {
        "latent_channels": LATENT_CHANNELS,
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": (down_block,) * 4,
        "up_block_types": (up_block,) * 4,
        "layers_per_block": 1,
    }


def _with_latent_buffers(vae: Any, name: str) -> nn.Module:
    """Set the statistics that the LTX VAEs keep as buffers, which are 0 and 1 after construction."""
    for buffer, centre in ((vae.latents_mean, 0.1), (vae.latents_std, 1.5)):
        numbers = spread_around(centre, buffer.numel(), f"{name}.{centre}")
        buffer.copy_(torch.tensor(numbers).reshape(buffer.shape))
    return vae
