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
    component_weights,
    full_size_file,
    layout_rules,
    ltx_names,
    original_weights,
    split_files,
    write_file,
)
from staging import job, one_shot, tiny_model, words
from test_single_files import TIGHT, assert_same, converted, expected, pictures_of, refusal


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


def tiny_wan(kind: str) -> Any:
    """A tiny transformer of Wan that sees a picture, or of VACE, with weights."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 8, "ffn_dim": 24}
    if kind == "wan vace":
        return WanVACETransformer3DModel(**sizes, num_layers=2, in_channels=4, vace_layers=[0, 1], vace_in_channels=6)
    seen = {"image_dim": 12, "added_kv_proj_dim": 32, "pos_embed_seq_len": 6}
    return WanTransformer3DModel(**sizes, num_layers=2, in_channels=12, **seen)


@pytest.mark.parametrize("layout", ["wan", "wan vace"])
def test_wan_that_sees_is_converted_as_diffusers_does(layout: str, tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    weights = dict(tiny_wan(layout).state_dict())
    places = {name: weights.pop(name) for name in list(weights) if name.endswith("pos_embed")}  # not known there
    original = backwards(layout_rules(layout, {}), weights)
    file = write_file(tmp_path / "wan.safetensors", {"": original})
    assert_same(converted(file, layout), convert_wan_transformer_to_diffusers(dict(original)))
    assert_same(converted(write_file(file, {"": backwards(layout_rules(layout, {}), places)}), layout), places)


def test_one_denoiser_of_two_is_refused_with_the_name_of_the_model_that_has_one(tmp_path: Path) -> None:
    """Wan 2.1 14B looks like either denoiser of Wan 2.2 A14B."""
    parts = full_size_file(tmp_path / "wan.safetensors", "wan2.1-t2v-14b")
    message = refusal(SplitFiles(checkpoint=parts))
    assert "as denoiser_2" in message and "as the family (wan2.1-t2v-14b)" in message


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


@pytest.mark.parametrize("held", ["all", pytest.param("texts alone", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    "family",
    ["wan22_5b", pytest.param("ltx", marks=pytest.mark.slow), pytest.param("ltx_timestep", marks=pytest.mark.slow)],
)
def test_clip_of_one_file_is_that_of_its_folder(family: str, tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts(family))
    files = SplitFiles(checkpoint=file, configs=tiny_model(family))
    assert torch.equal(pictures_of(family, files), expected(family))


@pytest.mark.slow
def test_clip_from_a_picture_is_that_of_its_folder(tmp_path: Path) -> None:
    files = split_files("wan22_i2v_a14b", tmp_path)
    assert torch.equal(pictures_of("wan22_i2v_a14b", files), expected("wan22_i2v_a14b"))


@pytest.mark.slow
def test_wan_of_files_sees_through_its_clip_as_that_of_its_folder(tmp_path: Path) -> None:
    """Wan 2.1: CLIP's vision model is a file, and what prepares the picture for it is described."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    from offload_core.tiny_models import FAMILIES

    wan = FAMILIES["wan22_i2v_a14b"].build()
    torch.manual_seed(0)
    sight = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sight, image_size=32, patch_size=8)
    size = {"height": 32, "width": 32}
    transformer = type(wan.transformer).from_config(
        {**wan.transformer.config, "image_dim": 12, "added_kv_proj_dim": 32}
    )
    pipeline = WanImageToVideoPipeline(
        tokenizer=wan.tokenizer,
        text_encoder=wan.text_encoder,
        vae=wan.vae,
        scheduler=UniPCMultistepScheduler.from_config(wan.scheduler.config),
        transformer=transformer,
        image_encoder=CLIPVisionModel(config),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
    )
    folder = tmp_path / "folder"
    pipeline.save_pretrained(folder)
    parts = {
        "transformer": backwards(layout_rules("wan", {}), component_weights(folder / "transformer")),
        "vae": original_weights("wan22_i2v_a14b", "vae"),
        "text_encoder": original_weights("wan22_i2v_a14b", "text_encoder"),
        "image_encoder": {f"vision_model.{n}": t for n, t in component_weights(folder / "image_encoder").items()},
    }
    made = {name: write_file(tmp_path / f"{name}.safetensors", {"": weights}) for name, weights in parts.items()}
    encoders = (made["text_encoder"], made["image_encoder"])
    files = SplitFiles(denoiser=made["transformer"], encoders=encoders, vae=made["vae"], configs=folder)
    family = "wan22_i2v_a14b"
    call = {**words(family), **job(family, guided=True)}
    of_folder = one_shot(folder, dtype=torch.float32, seed=3, **call)[0]
    assert torch.equal(pictures_of(family, files), of_folder)
