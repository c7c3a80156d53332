"""LoRA files told apart by their headers, and a sentence for each way in which one can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_core.errors import ModelError
from offload_core.lora_header import read_lora_header
from offload_core.phases import as_loras

UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
KOHYA = "lora_unet_" + UNET.replace(".", "_")


def written(file: Path, shapes: dict[str, tuple[int, ...]], **alphas: float) -> Path:
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors | {name: torch.tensor(value) for name, value in alphas.items()}, file)
    return file


def pair(layer: str, down: str = ".lora_A.weight", up: str = ".lora_B.weight", width: int = 8) -> dict[str, tuple]:
    return {layer + down: (2, width), layer + up: (8, 2)}


def kohya(layer: str, width: int = 8) -> dict[str, tuple]:
    return pair(layer, ".lora_down.weight", ".lora_up.weight", width)


def loha(layer: str, width: int = 8) -> dict[str, tuple]:
    sides = {f"{layer}.hada_w{i}_a": (8, 2) for i in (1, 2)}
    return sides | {f"{layer}.hada_w{i}_b": (2, width) for i in (1, 2)}


@pytest.mark.parametrize(
    ("shapes", "dialect", "family"),
    [
        (pair(f"unet.{UNET}", width=768), "PEFT", "Stable Diffusion 1.5"),
        (kohya(KOHYA, width=2048), "Kohya", "SDXL"),
        (kohya("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_v", 2048), "Kohya", "SDXL"),
        (kohya(KOHYA, width=1024), "Kohya", "Stable Diffusion 2"),
        (pair(f"unet.{UNET}", ".lora.down.weight", ".lora.up.weight", 768), "older diffusers", "Stable Diffusion 1.5"),
        (pair("transformer.single_transformer_blocks.0.attn.to_q"), "PEFT", "FLUX, Chroma or HunyuanVideo"),
        (kohya("lora_unet_double_blocks_0_img_attn_qkv"), "Kohya", "FLUX, Chroma or HunyuanVideo"),
        (pair("diffusion_model.blocks.0.cross_attn.k"), "ComfyUI", "Wan"),
        (kohya("diffusion_model.joint_blocks.0.x_block.attn.qkv"), "ComfyUI", "Stable Diffusion 3"),
        (pair("transformer.transformer_blocks.0.img_mlp.net.0.proj"), "PEFT", "Qwen-Image"),
        (pair("diffusion_model.noise_refiner.0.attention.to_q"), "ComfyUI", "Z-Image or Lumina 2"),
        (loha(KOHYA, width=768), "LoHa", "Stable Diffusion 1.5"),
        ({f"{KOHYA}.lokr_w1": (2, 2), f"{KOHYA}.lokr_w2": (4, 1024)}, "LoKr", "SDXL"),
        (loha("diffusion_model.double_blocks.0.img_mlp.0"), "LoHa", "FLUX, Chroma or HunyuanVideo"),
        ({f"{KOHYA}.diff": (8, 2048), f"{KOHYA}.diff_b": (8,)}, "whole differences", "SDXL"),
        (
            pair("diffusion_model.blocks.0.cross_attn.k") | {"diffusion_model.blocks.0.cross_attn.k.diff_b": (8,)},
            "ComfyUI",
            "Wan",
        ),
        (pair("transformer.somewhere.else"), "PEFT", ""),
    ],
)
def test_a_header_says_the_dialect_and_the_family(
    shapes: dict[str, tuple], dialect: str, family: str, tmp_path: Path
) -> None:
    header = read_lora_header(written(tmp_path / "x.safetensors", shapes))
    assert (header.dialect, header.family, header.layers) == (dialect, family, 1)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"a.lora_up.weight": (8, 2)}, "'a.lora_up.weight' without its partner 'a.lora_down.weight'"),
        ({"a.lora_A.weight": (2, 8)}, "'a.lora_A.weight' without its partner 'a.lora_B.weight'"),
        ({"a.lora_A.weight": (2, 8), "a.lora_B.weight": (8, 4)}, "has rank 2 and 'a.lora_B.weight' has rank 4"),
        ({"a.lora_A.weight": (2,), "a.lora_B.weight": (8, 2)}, "is no matrix"),
        ({"lora_unet_a.hada_w1_a": (8, 2), "lora_unet_a.hada_w1_b": (2, 8)}, "without 'lora_unet_a.hada_w2_a'"),
        (loha("a") | {"a.hada_t1": (2, 2, 3, 3)}, "without 'a.hada_t2'"),
        (loha("a") | {"a.hada_w2_b": (3, 8)}, "'a': hada_w2_a has rank 2 and hada_w2_b has rank 3"),
        (loha("a") | {"a.hada_w2_b": (2, 9)}, r"products of a LoHa have the shapes \(8, 8\) and \(8, 9\)"),
        ({"a.lokr_w1": (2, 2)}, "'a.lokr_w1' without 'a.lokr_w2'"),
        ({"a.lokr_w1": (2, 2), "a.lokr_w2_b": (2, 4)}, "without 'a.lokr_w2_a'"),
        ({"a.lokr_w1": (2,), "a.lokr_w2": (4, 4)}, "lokr_w1 is no matrix"),
        (loha("a") | {"a.dora_scale": (8, 1)}, "holds LoHa with DoRA"),
        ({"lora_unet_a.oft_blocks": (2, 4, 4)}, "holds OFT, which phases don't apply"),
        ({"diffusion_model.a.set_weight": (8, 8)}, "replaced weights, which phases don't apply"),
        ({"diffusion_model.a.diff": (8, 0)}, r"'diffusion_model.a.diff' has the shape \[8, 0\]"),
        ({"model.diffusion_model.a.weight": (8, 8)}, "holds no LoRA weights"),
    ],
)
def test_a_file_that_no_converter_could_use_is_refused_by_what_is_wrong(
    shapes: dict[str, tuple], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"x\.safetensors.*" + says):
        as_loras([written(tmp_path / "x.safetensors", shapes)])


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_an_alpha_that_is_no_number_is_refused_by_name(alpha: float, tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", kohya("lora_unet_a"), **{"lora_unet_a.alpha": alpha})
    with pytest.raises(ModelError, match=r"'lora_unet_a\.alpha' is (nan|inf), not a number"):
        as_loras([file])


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickled", b"PK\x03\x04archive"])
def test_an_empty_or_pickled_file_under_the_right_name_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        as_loras([file])


def test_a_convolution_in_groups_may_hold_a_part_of_the_rank(tmp_path: Path) -> None:
    shapes = {"a.lora_A.weight": (4, 8, 3, 3), "a.lora_B.weight": (8, 2, 1, 1)}
    assert read_lora_header(written(tmp_path / "x.safetensors", shapes)).layers == 1
