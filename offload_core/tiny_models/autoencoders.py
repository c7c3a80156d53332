"""Tiny VAEs. Their scale factors differ from the usual 8, and their latent statistics from 0 and 1, on purpose."""

from typing import Any

from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan

from .weights import spread_around, with_weights

LATENT_CHANNELS = 4
WIDTHS = (8, 16, 16)  # three levels: one latent cell is 4 x 4 pixels
CELL_PIXELS = 4


def autoencoder_kl(name: str, widths: tuple[int, ...] = WIDTHS, **config: Any) -> AutoencoderKL:
    """Return an AutoencoderKL with 4 latent channels, of scale 4 with the usual three levels."""
    return with_weights(AutoencoderKL(**{**_kl_sizes(widths), **config}), name, gain=0.8)


def flow_autoencoder_kl(name: str, widths: tuple[int, ...] = WIDTHS, **config: Any) -> AutoencoderKL:
    """Return an AutoencoderKL as the flow models use it: shifted latents, no quant convolutions."""
    return autoencoder_kl(
        name,
        widths,
        scaling_factor=0.71,
        shift_factor=0.23,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=True,
        **config,
    )


def autoencoder_flux2(name: str) -> AutoencoderKLFlux2:
    """Return a FLUX.2 VAE of scale 4 whose batch norm has seen data that is neither centred nor of spread one."""
    vae: Any = with_weights(AutoencoderKLFlux2(**_kl_sizes(), batch_norm_eps=1e-3), name)
    channels = vae.bn.running_mean.numel()
    vae.bn.running_mean.copy_(vae.bn.running_mean.new_tensor(spread_around(0.2, channels, name + ".mean")))
    vae.bn.running_var.copy_(vae.bn.running_var.new_tensor(spread_around(1.6, channels, name + ".var")))
    return vae


def autoencoder_dc(name: str) -> AutoencoderDC:
    """Return a deep-compression autoencoder, in small: scale 8, the last level with linear attention."""
    widths, layers, scales = (8, 8, 16, 16), (1, 1, 1, 1), ((), (), (), (5,))
    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    vae = AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=layers,
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        scaling_factor=0.41407,
    )
    return with_weights(vae, name)


def autoencoder_qwen(name: str, channels: int = LATENT_CHANNELS, **config: Any) -> AutoencoderKLQwenImage:
    """Return a Qwen-Image VAE of scale 4, or as ``config`` says."""
    sizes: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}
    fixed = {"z_dim": channels, "num_res_blocks": 1, **_latent_statistics(name, channels)}
    return with_weights(AutoencoderKLQwenImage(**{**sizes, **config, **fixed}), name)


def autoencoder_wan(name: str) -> AutoencoderKLWan:
    """Return the Wan 2.1 video VAE, also of Wan 2.2 A14B: 8 x 8 pixels and 4 frames to a latent cell."""
    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": LATENT_CHANNELS, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    return with_weights(AutoencoderKLWan(**sizes, **_latent_statistics(name, LATENT_CHANNELS)), name)


def autoencoder_wan_5b(name: str) -> AutoencoderKLWan:
    """Return the video VAE of Wan 2.2 TI2V-5B: residual blocks over 2 x 2 pixel patches, scale 16 in all."""
    sizes: dict[str, Any] = {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 12,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
    }
    vae = AutoencoderKLWan(
        **sizes,
        **_latent_statistics(name, sizes["z_dim"]),
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    return with_weights(vae, name)


def _kl_sizes(widths: tuple[int, ...] = WIDTHS) -> dict:
    levels = len(widths)
    return {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "layers_per_block": 1,
        "latent_channels": LATENT_CHANNELS,
        "norm_num_groups": 4,
        "sample_size": 64,
    }


def _latent_statistics(name: str, channels: int) -> dict:
    return {
        "latents_mean": spread_around(0.1, channels, name + ".mean"),
        "latents_std": spread_around(1.5, channels, name + ".std"),
    }
