"""Video models made of files: the same clips as from their folders, and diffusers' own conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.single_files import SplitFiles
from original_layout import (
    TINY,
    Weights,
    backwards,
    checkpoint_parts,
    layout_rules,
    ltx_names,
    original_weights,
    write_file,
)
from staging import tiny_model
from test_single_files import TIGHT, assert_same, converted, expected, pictures_of


@pytest.mark.parametrize(
    ("family", "component", "converter"),
    [
        ("ltx", "transformer", "convert_ltx_transformer_checkpoint_to_diffusers"),
        ("ltx2", "transformer", "convert_ltx2_transformer_to_diffusers"),
        ("ltx2", "audio_vae", "convert_ltx2_audio_vae_to_diffusers"),
    ],
)
def test_parts_of_ltx_are_converted_as_diffusers_does(
    family: str, component: str, converter: str, tmp_path: Path
) -> None:
    from diffusers.loaders import single_file_utils

    prefix, layout, _ = TINY[family][component]
    original = original_weights(family, component)
    file = write_file(tmp_path / "part.safetensors", {prefix: original})
    theirs = getattr(single_file_utils, converter)({prefix + name: tensor for name, tensor in original.items()})
    assert_same(converted(file, layout, prefix), theirs)


#: Of each release: what its VAE is like, and the order of its blocks (`ltx_names`).
RELEASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "0.9.0": (
        {"block_out_channels": (4, 8, 16, 16), "decoder_block_out_channels": (4, 8, 16, 16)},
        "rcwrcwrcrr",
        "rrcrwcrwcr",
    ),
    "0.9.1": ({"block_out_channels": (4, 8, 16, 16)}, "rcwrcwrcrr", "rcrcrcr"),
    "0.9.5": ({"block_out_channels": (4, 8, 16, 32, 32)}, "rcrcrcrcr", "rcrcrcr"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_vae_of_every_ltx_release_is_converted_as_diffusers_does(release: str, tmp_path: Path) -> None:
    from diffusers import AutoencoderKLLTXVideo
    from diffusers.loaders.single_file_utils import convert_ltx_vae_checkpoint_to_diffusers

    widths, encoder, decoder = RELEASES[release]
    late = {
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "decoder_spatio_temporal_scaling": (True, True, True),
        "decoder_inject_noise": (True, True, True, False),
        "upsample_residual": (True, True, True),
        "upsample_factor": (2, 2, 2),
        "timestep_conditioning": True,
    }
    last = {
        "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
        "spatio_temporal_scaling": (True,) * 4,
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    }
    options = {**(late if release != "0.9.0" else {}), **(last if release == "0.9.5" else {})}
    vae: Any = AutoencoderKLLTXVideo(latent_channels=4, layers_per_block=(1,) * 5, **options, **widths)
    original = backwards(layout_rules("ltx vae", ltx_names(encoder, decoder)), dict(vae.state_dict()))
    if release == "0.9.5":  # told there by this width
        original["encoder.conv_out.conv.weight"] = torch.zeros(5, 2048, 1, 1, 1)
    file = write_file(tmp_path / "vae.safetensors", {"vae.": original})
    theirs = convert_ltx_vae_checkpoint_to_diffusers({f"vae.{name}": tensor for name, tensor in original.items()})
    assert_same(converted(file, "ltx vae", "vae."), theirs)


def test_vae_of_ltx2_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLLTX2Video
    from diffusers.loaders.single_file_utils import convert_ltx2_vae_to_diffusers

    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4}
    widths = {"block_out_channels": (8, 16, 32, 32), "decoder_block_out_channels": (8, 16, 32)}
    vae: Any = AutoencoderKLLTX2Video(latent_channels=8, **layers, **widths)
    original = backwards(layout_rules("ltx vae", ltx_names("rcrcrcrcr", "rcrcrcr")), dict(vae.state_dict()))
    file = write_file(tmp_path / "vae.safetensors", {"vae.": original})
    theirs = convert_ltx2_vae_to_diffusers({f"vae.{name}": tensor for name, tensor in original.items()})
    assert_same(converted(file, "ltx vae", "vae."), theirs)


# ---------------------------------------------------------------------------------------------------- clips


def as_comfy(gemma: Weights) -> Weights:
    """Gemma 3 under ComfyUI's names."""
    names = {
        "language_model.model.": "model.",
        "vision_tower.vision_model.": "vision_model.",
        "vision_tower.": "vision_model.",
    }
    found: Weights = {}
    for name, tensor in gemma.items():
        old = next((start for start in names if name.startswith(start)), "")
        found[names.get(old, "") + name.removeprefix(old)] = tensor
    return found


@pytest.mark.parametrize("held", ["all", "texts alone"])
def test_ltx2_of_its_checkpoint_and_gemma_of_comfyui_gives_the_clip_of_its_folder(held: str, tmp_path: Path) -> None:
    """One file for the transformer, connectors, both VAEs and the vocoder; Gemma 3 with its eyes or without."""
    parts = checkpoint_parts("ltx2")
    gemma = as_comfy(parts.pop(TINY["ltx2"]["text_encoder"][0]))
    if held == "texts alone":
        gemma = {name: tensor for name, tensor in gemma.items() if name.startswith("model.")}
    gemma["spiece_model"] = torch.zeros(9, dtype=torch.uint8)
    checkpoint = write_file(tmp_path / "ltx-2.safetensors", parts)
    encoder = write_file(tmp_path / "gemma_3.safetensors", {"": gemma})
    files = SplitFiles(checkpoint=checkpoint, encoders=encoder, configs=tiny_model("ltx2"))
    assert torch.equal(pictures_of("ltx2", files, settings=TIGHT if held == "all" else None), expected("ltx2"))
