"""Further layouts beside diffusers' own conversions, whose fixed widths the files are given here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from original_layout import backwards, layout_rules, lumina_names, original_weights, write_file
from test_single_files import assert_same, converted


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
