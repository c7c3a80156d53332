"""VAEs: AutoencoderKL, of Stable Diffusion, SDXL, SD3 and FLUX.1.

Sources: the names in the published files, which are those of https://github.com/CompVis/stable-diffusion
(ldm/modules/diffusionmodules/model.py), and diffusers' AutoencoderKL. Levels of the decoder are numbered from the
finest there, from the coarsest in diffusers; attention is made of 1 x 1 convolutions there, of linear layers here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import VAE_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, drop, keep, rename

_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2", "nin_shortcut": "conv_shortcut"}


def _original(shapes: Shapes) -> Iterator[Rule]:
    levels = count(shapes, "decoder.up.")
    for half in ("encoder", "decoder"):
        yield keep(f"{half}.conv_in.{{p}}")
        yield keep(f"{half}.conv_out.{{p}}")
        yield rename(f"{half}.norm_out.{{p}}", f"{half}.conv_norm_out.{{p}}")
        for number in (1, 2):
            yield from _resnet(f"{half}.mid.block_{number}", f"{half}.mid_block.resnets.{number - 1}")
        for old, new in _ATTENTION.items():
            yield rename(f"{half}.mid.attn_1.{old}.{{p}}", f"{half}.mid_block.attentions.0.{new}.{{p}}")
    for level in range(levels):
        down, up = f"encoder.down.{level}", f"decoder.up.{level}"
        yield from _resnet(f"{down}.block.{{n}}", f"encoder.down_blocks.{level}.resnets.{{n}}")
        yield rename(f"{down}.downsample.conv.{{p}}", f"encoder.down_blocks.{level}.downsamplers.0.conv.{{p}}")
        yield from _resnet(f"{up}.block.{{n}}", f"decoder.up_blocks.{levels - 1 - level}.resnets.{{n}}")
        yield rename(f"{up}.upsample.conv.{{p}}", f"decoder.up_blocks.{levels - 1 - level}.upsamplers.0.conv.{{p}}")
    yield keep("quant_conv.{p}")
    yield keep("post_quant_conv.{p}")
    yield rename("encoder.quant_conv.{p}", "quant_conv.{p}")  # FLUX.2's are inside its halves, and it has a norm
    yield rename("decoder.post_quant_conv.{p}", "post_quant_conv.{p}")
    yield keep("bn.{rest}")
    yield drop("model_ema.{rest}")
    yield drop("loss.{rest}")


def _resnet(old: str, new: str) -> Iterator[Rule]:
    for inner, name in _RESNET.items():
        yield rename(f"{old}.{inner}.{{p}}", f"{new}.{name}.{{p}}")


def _sizes(levels: str) -> Any:
    """Of `levels`, a template for a norm of the encoder's level {n}."""

    def sizes(config: Mapping[str, Any]) -> Sizes:
        widths, latent = config["block_out_channels"], config["latent_channels"]
        quant = (2 * latent, 2 * latent, 1, 1) if config.get("use_quant_conv", True) else None
        return {
            "encoder.conv_in.weight": (widths[0], config.get("in_channels", 3), 3, 3),
            "decoder.conv_in.weight": (widths[-1], latent, 3, 3),
            "quant_conv.weight": quant,
            levels.format(n=len(widths) - 1): (widths[-1],),
            levels.format(n=len(widths)): None,
        }

    return sizes


def _flux2_sizes(config: Mapping[str, Any]) -> Sizes:
    sizes = {name: shape for name, shape in _kl_sizes(config).items() if name != "quant_conv.weight"}
    return {**sizes, "bn.running_mean": (4 * config["latent_channels"],)}


_kl_sizes = _sizes("encoder.down.{n}.block.0.norm2.weight")

LAYOUTS = (
    PartLayout(
        name="kl, FLUX.2's",
        title="a FLUX.2 VAE",
        role="vae",
        classes=("AutoencoderKLFlux2",),
        prefixes=VAE_PREFIXES,
        needs=("encoder.down.0.block.0.conv1.weight", "decoder.up.0.block.0.conv1.weight", "bn.running_mean"),
        rules=_original,
        sizes=_flux2_sizes,
    ),
    PartLayout(
        name="kl",
        title="a VAE (AutoencoderKL)",
        role="vae",
        classes=("AutoencoderKL",),
        prefixes=VAE_PREFIXES,
        needs=(
            "encoder.down.0.block.0.conv1.weight",
            "decoder.up.0.block.0.conv1.weight",
            "decoder.mid.attn_1.q.weight",
        ),
        rules=_original,
        sizes=_kl_sizes,
        lacks=("bn.running_mean",),
    ),
    PartLayout(
        name="kl, as diffusers saves it",
        title="a VAE (AutoencoderKL)",
        role="vae",
        classes=("AutoencoderKL",),
        prefixes=VAE_PREFIXES,
        needs=(
            "encoder.down_blocks.0.resnets.0.conv1.weight",
            "decoder.up_blocks.0.resnets.0.conv1.weight",
            "decoder.mid_block.attentions.0.to_q.weight",
        ),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_sizes("encoder.down_blocks.{n}.resnets.0.norm2.weight"),
        lacks=("bn.running_mean",),
    ),
)
