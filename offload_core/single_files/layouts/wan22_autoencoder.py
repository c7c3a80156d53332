"""The VAE of Wan 2.2 5B, whose cells are 16 x 16 pixels.

Sources: the names in the published files, which are those of https://github.com/Wan-Video/Wan2.2
(wan/modules/vae2_2.py), and diffusers' AutoencoderKLWan (scripts/convert_wan_to_diffusers.py, `convert_vae_22`). Levels
are the same here and there; a level's last block there is its resampling one, which has a name of its own here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import VAE_PREFIXES, PartLayout, Shapes, Sizes, count
from ..rules import Rule, rename
from .wan_autoencoder import outer_rules, resnet_rules


def _rules(shapes: Shapes) -> Iterator[Rule]:
    yield from outer_rules()
    for half, old, new, resampler in (
        ("encoder", "downsamples", "down_blocks", "downsampler"),
        ("decoder", "upsamples", "up_blocks", "upsampler"),
    ):
        for level in range(count(shapes, f"{half}.{old}.")):
            here, there = f"{half}.{old}.{level}.{old}", f"{half}.{new}.{level}"
            last = count(shapes, f"{here}.") - 1
            for inner in ("resample", "time_conv"):
                yield rename(f"{here}.{last}.{inner}.{{rest}}", f"{there}.{resampler}.{inner}.{{rest}}")
            yield from resnet_rules(f"{here}.{{n}}", f"{there}.resnets.{{n}}")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    latent, widths = config["z_dim"], config["dim_mult"]
    pixels = config.get("in_channels") or 3
    return {
        "encoder.conv1.weight": (config["base_dim"], pixels, 3, 3, 3),
        "decoder.conv1.weight": ((config.get("decoder_base_dim") or config["base_dim"]) * widths[-1], latent, 3, 3, 3),
        "conv2.weight": (latent, latent, 1, 1, 1),
    }


LAYOUTS = (
    PartLayout(
        name="wan 2.2 vae",
        title="a Wan 2.2 VAE",
        role="vae",
        classes=("AutoencoderKLWan",),
        prefixes=VAE_PREFIXES,
        needs=("decoder.upsamples.0.upsamples.0.residual.0.gamma", "encoder.conv1.weight", "conv2.weight"),
        rules=_rules,
        sizes=_sizes,
    ),
)
