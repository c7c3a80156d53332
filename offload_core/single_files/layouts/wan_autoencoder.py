"""The VAE of Wan 2.1, which Wan 2.2 A14B and Qwen-Image use, too (the latter trained anew).

Sources: the names in the published files, which are those of https://github.com/Wan-Video/Wan2.2
(wan/modules/vae2_1.py), and diffusers' AutoencoderKLWan and AutoencoderKLQwenImage. Blocks of both halves are numbered
through there; diffusers keeps that in the encoder and groups the decoder's into levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import VAE_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, keep, rename

_RESNET = {
    "residual.0.gamma": "norm1.gamma",
    "residual.2.{p}": "conv1.{p}",
    "residual.3.gamma": "norm2.gamma",
    "residual.6.{p}": "conv2.{p}",
    "shortcut.{p}": "conv_shortcut.{p}",
}


def outer_rules() -> Iterator[Rule]:
    """Of what isn't in a level, which Wan 2.2's has, too."""
    for half in ("encoder", "decoder"):
        yield rename(f"{half}.conv1.{{p}}", f"{half}.conv_in.{{p}}")
        for old, new in ((0, 0), (2, 1)):
            yield from resnet_rules(f"{half}.middle.{old}", f"{half}.mid_block.resnets.{new}")
        yield rename(f"{half}.middle.1.{{rest}}", f"{half}.mid_block.attentions.0.{{rest}}")
        yield rename(f"{half}.head.0.gamma", f"{half}.norm_out.gamma")
        yield rename(f"{half}.head.2.{{p}}", f"{half}.conv_out.{{p}}")
    yield rename("conv1.{p}", "quant_conv.{p}")
    yield rename("conv2.{p}", "post_quant_conv.{p}")


def _rules(shapes: Shapes) -> Iterator[Rule]:
    yield from outer_rules()
    yield from resnet_rules("encoder.downsamples.{n}", "encoder.down_blocks.{n}")
    yield rename("encoder.downsamples.{n}.{rest}", "encoder.down_blocks.{n}.{rest}")
    number = count(shapes, "decoder.upsamples.")
    ups = [n for n in range(number) if f"decoder.upsamples.{n}.resample.1.weight" in shapes]
    per_level = (ups[0] if ups else number) + 1
    for n in range(number):
        level, layer = divmod(n, per_level)
        here, block = f"decoder.upsamples.{n}", f"decoder.up_blocks.{level}"
        if n in ups:
            yield rename(f"{here}.{{rest}}", f"{block}.upsamplers.0.{{rest}}")
        else:
            yield from resnet_rules(here, f"{block}.resnets.{layer}")


def resnet_rules(old: str, new: str) -> Iterator[Rule]:
    """Of one resnet."""
    for inner, name in _RESNET.items():
        yield rename(f"{old}.{inner}", f"{new}.{name}")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    base, latent, widths = config["base_dim"], config["z_dim"], config["dim_mult"]
    return {
        "encoder.conv1.weight": (base, config.get("in_channels") or 3, 3, 3, 3),
        "decoder.conv1.weight": (base * widths[-1], latent, 3, 3, 3),
        "conv2.weight": (latent, latent, 1, 1, 1),
    }


LAYOUTS = (
    PartLayout(
        name="wan vae",
        title="a Wan 2.1 or Qwen-Image VAE",
        role="vae",
        classes=("AutoencoderKLWan", "AutoencoderKLQwenImage"),
        prefixes=VAE_PREFIXES,
        needs=("decoder.upsamples.0.residual.0.gamma", "encoder.conv1.weight", "conv2.weight"),
        rules=_rules,
        sizes=_sizes,
    ),
    PartLayout(
        name="wan vae, as diffusers saves it",
        title="a Wan 2.1 or Qwen-Image VAE",
        role="vae",
        classes=("AutoencoderKLWan", "AutoencoderKLQwenImage"),
        prefixes=VAE_PREFIXES,
        needs=("decoder.up_blocks.0.resnets.0.norm1.gamma", "encoder.conv_in.weight", "post_quant_conv.weight"),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=lambda config: {"post_quant_conv.weight": (config["z_dim"], config["z_dim"], 1, 1, 1)},
    ),
)
