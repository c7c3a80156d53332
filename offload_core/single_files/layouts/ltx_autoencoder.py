"""The VAEs of LTX-Video 0.9 and LTX-2, for pictures.

Sources: the names in the published files, which are those of https://github.com/Lightricks/LTX-Video
(ltx_video/models/autoencoders/causal_video_autoencoder.py), and diffusers' AutoencoderKLLTXVideo and
AutoencoderKLLTX2Video. Blocks are numbered through there: runs of resnets, resampling, and single resnets that widen.
diffusers groups them into levels, which differ from release to release, but follow from the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..layout import VAE_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, drop, keep, rename


def _rules(shapes: Shapes) -> Iterator[Rule]:
    yield from _encoder(shapes)
    yield from _decoder(shapes)
    yield rename("decoder.last_time_embedder.{rest}", "decoder.time_embedder.{rest}")
    yield rename("decoder.last_scale_shift_table", "decoder.scale_shift_table")
    yield rename("per_channel_statistics.mean-of-means", "latents_mean")
    yield rename("per_channel_statistics.std-of-means", "latents_std")
    yield drop("per_channel_statistics.{rest}")
    yield keep("encoder.{rest}")
    yield keep("decoder.{rest}")


def _encoder(shapes: Shapes) -> Iterator[Rule]:
    """A level begins with its run of resnets; the last run is in the middle."""
    level, last = -1, count(shapes, "encoder.down_blocks.") - 1
    for number in range(last + 1):
        here = f"encoder.down_blocks.{number}"
        kind = _kind(shapes, here)
        level += kind == "run"
        yield from _block(kind, here, "encoder.mid_block" if number == last else f"encoder.down_blocks.{level}")


def _decoder(shapes: Shapes) -> Iterator[Rule]:
    """A level ends with its run of resnets; the first run is in the middle."""
    level = 0
    for number in range(count(shapes, "decoder.up_blocks.")):
        here = f"decoder.up_blocks.{number}"
        kind = _kind(shapes, here)
        yield from _block(kind, here, "decoder.mid_block" if number == 0 else f"decoder.up_blocks.{level}")
        level += number > 0 and kind == "run"


def _kind(shapes: Shapes, block: str) -> str:
    if any(name.startswith(f"{block}.res_blocks.") for name in shapes):
        return "run"
    return "widening" if f"{block}.conv1.conv.weight" in shapes else "resampling"


def _block(kind: str, here: str, there: str) -> Iterator[Rule]:
    """Of one block there, which is a part of the level `there` here."""
    encodes = here.startswith("encoder")
    if kind == "resampling":
        yield rename(f"{here}.{{rest}}", f"{there}.{'downsamplers' if encodes else 'upsamplers'}.0.{{rest}}")
    elif kind == "widening":
        yield from _resnet(here, f"{there}.{'conv_out' if encodes else 'conv_in'}")
    else:
        yield from _resnet(f"{here}.res_blocks.{{n}}", f"{there}.resnets.{{n}}")
        yield rename(f"{here}.time_embedder.{{rest}}", f"{there}.time_embedder.{{rest}}")


def _resnet(here: str, there: str) -> Iterator[Rule]:
    yield rename(f"{here}.conv_shortcut.{{p}}", f"{there}.conv_shortcut.conv.{{p}}")
    yield rename(f"{here}.norm3.norm.{{p}}", f"{there}.norm3.{{p}}")
    yield rename(f"{here}.{{rest}}", f"{there}.{{rest}}")


def _sizes(timestep: str) -> Callable[[Mapping[str, Any]], Sizes]:
    """Of `timestep`, the name of what tells the decoder the timestep in those that are told."""

    def sizes(config: Mapping[str, Any]) -> Sizes:
        latent, widths, wide = (
            config["latent_channels"],
            config["block_out_channels"],
            config["decoder_block_out_channels"],
        )
        pixels = config["in_channels"] * config["patch_size"] ** 2
        told = 2 * wide[0] // config["upsample_factor"][0]
        return {
            "encoder.conv_out.conv.weight": (latent + 1, widths[-1], 3, 3, 3),
            "decoder.conv_in.conv.weight": (wide[-1], latent, 3, 3, 3),
            "decoder.conv_out.conv.weight": (pixels, wide[0] // config["upsample_factor"][0], 3, 3, 3),
            timestep: (told, 256) if config["timestep_conditioning"] else None,
        }

    return sizes


LAYOUTS = (
    PartLayout(
        name="ltx vae",
        title="an LTX-Video or LTX-2 VAE",
        role="vae",
        classes=("AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video"),
        prefixes=VAE_PREFIXES,
        needs=(
            "encoder.down_blocks.0.res_blocks.0.conv1.conv.weight",
            "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight",
            "per_channel_statistics.mean-of-means",
        ),
        rules=_rules,
        sizes=_sizes("decoder.last_time_embedder.timestep_embedder.linear_1.weight"),
    ),
    PartLayout(
        name="ltx vae, as diffusers saves it",
        title="an LTX-Video or LTX-2 VAE",
        role="vae",
        classes=("AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video"),
        prefixes=VAE_PREFIXES,
        needs=(
            "encoder.down_blocks.0.resnets.0.conv1.conv.weight",
            "decoder.mid_block.resnets.0.conv1.conv.weight",
            "latents_mean",
        ),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_sizes("decoder.time_embedder.timestep_embedder.linear_1.weight"),
    ),
)
