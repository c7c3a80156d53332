"""Further layouts beside diffusers' own conversions, whose fixed widths the files are given here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core as po
from offload_core.single_files import SplitFiles
from original_layout import (
    backwards,
    checkpoint_parts,
    component_weights,
    layout_rules,
    lumina_names,
    original_weights,
    unet_names,
    write_file,
)
from staging import one_shot
from test_single_files import TIGHT, assert_same, converted


def test_auraflow_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers import AuraFlowTransformer2DModel
    from diffusers.loaders.single_file_utils import convert_auraflow_transformer_checkpoint_to_diffusers

    sizes: dict[str, Any] = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12}
    layers = {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "pos_embed_max_size": 16}
    model: Any = AuraFlowTransformer2DModel(**sizes, **layers, caption_projection_dim=16)
    original = backwards(layout_rules("auraflow", {}), dict(model.state_dict()))
    file = write_file(tmp_path / "auraflow.safetensors", {"model.": original})
    theirs = convert_auraflow_transformer_checkpoint_to_diffusers(dict(original))
    assert_same(converted(file, "auraflow", "model."), theirs)


def test_lumina_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_lumina2_to_diffusers

    original = original_weights("lumina2", "transformer")
    for name in original:
        if ".qkv." in name:
            original[name] = torch.randn(2304 + 2 * 768, 2)
    original["layers.0.attention.out.weight"] = torch.randn(2, 2304)
    original["norm_final.weight"] = torch.randn(2)
    file = write_file(tmp_path / "lumina.safetensors", {"": original})
    assert_same(converted(file, "lumina-2"), convert_lumina2_to_diffusers(dict(original)))


def test_hunyuan_video_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_hunyuan_video_transformer_to_diffusers

    original = original_weights("hunyuan_video", "transformer")
    for name, tensor in original.items():
        if ".linear1." in name:
            original[name] = torch.randn(7 * 3072, *[2] * (tensor.dim() - 1))
    file = write_file(tmp_path / "hunyuan.safetensors", {"": original})
    theirs = convert_hunyuan_video_transformer_to_diffusers(dict(original))
    assert_same(converted(file, "hunyuan-video"), theirs)


def test_rows_of_lumina_are_dealt_by_the_number_of_its_heads() -> None:
    (rule,) = [
        rule
        for rule in layout_rules("lumina-2", lumina_names(96, 160))
        if rule.source.startswith("layers.{n}.attention.qkv")
    ]
    assert rule.shares == (96, 32, 32)


@pytest.mark.slow
def test_inpainting_checkpoint_gives_the_picture_of_its_folder(tmp_path: Path) -> None:
    """Its UNet takes nine channels: noise, the mask, and what the mask leaves alone."""
    from diffusers import StableDiffusionInpaintPipeline

    from offload_core.tiny_models import FAMILIES
    from offload_core.tiny_models.pictures import mask, picture

    plain = FAMILIES["sd15"].build()
    torch.manual_seed(0)
    parts = {**plain.components, "unet": type(plain.unet).from_config({**plain.unet.config, "in_channels": 9})}
    folder, fox = tmp_path / "folder", picture("fox")
    StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False).save_pretrained(folder)
    unet = backwards(layout_rules("unet", unet_names(4, 4, (2,))), component_weights(folder / "unet"))
    weights = {**checkpoint_parts("sd15"), "model.diffusion_model.": unet}
    file = write_file(tmp_path / "inpainting.safetensors", weights)
    call: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 4.0}
    shown = {"prompt": "a fox", "image": fox, "mask_image": mask(), "height": 48, "width": 64}
    expected, _ = one_shot(folder, dtype=torch.float32, seed=3, cls=StableDiffusionInpaintPipeline, **shown, **call)
    model = po.load(SplitFiles(checkpoint=file, configs=folder), device="cpu", dtype="float32", settings=TIGHT)
    images = po.encode_images(model, fox, mask=mask())
    latents = po.denoise(model, po.encode(model, "a fox", images=images), images=images, seed=3, **call)
    assert torch.equal(po.decode(model, latents, "pt"), expected)


@pytest.mark.slow
def test_flux_fill_of_one_file_gives_the_picture_of_its_folder(tmp_path: Path) -> None:
    """Its transformer takes noise, the picture without what is masked, and the mask: 16 + 16 + 4 x 4 x 4 numbers."""
    from diffusers import FluxFillPipeline

    from offload_core.tiny_models import FAMILIES
    from offload_core.tiny_models.pictures import mask, picture

    plain = FAMILIES["flux"].build()
    torch.manual_seed(0)
    sizes = {name: value for name, value in plain.transformer.config.items() if not name.startswith("_")}
    wider = {**sizes, "in_channels": 96, "out_channels": 16}
    folder, fox = tmp_path / "folder", picture("fox")
    parts = {name: plain.components[name] for name in FluxFillPipeline._get_signature_keys(FluxFillPipeline)[0]}
    FluxFillPipeline(**{**parts, "transformer": type(plain.transformer).from_config(wider)}).save_pretrained(folder)
    transformer = backwards(layout_rules("flux", {}), component_weights(folder / "transformer"))
    weights = {**checkpoint_parts("flux"), "model.diffusion_model.": transformer}
    file = write_file(tmp_path / "fill.safetensors", weights)
    call: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 4.0}
    shown = {"prompt": "a fox", "image": fox, "mask_image": mask(), "height": 48, "width": 64}
    expected, _ = one_shot(folder, dtype=torch.float32, seed=3, cls=FluxFillPipeline, **shown, **call)
    model = po.load(SplitFiles(checkpoint=file, configs=folder), device="cpu", dtype="float32", settings=TIGHT)
    images = po.encode_images(model, fox, mask=mask(), height=48, width=64)
    latents = po.denoise(model, po.encode(model, "a fox", images=images), images=images, seed=3, **call)
    assert torch.equal(po.decode(model, latents, "pt"), expected)
