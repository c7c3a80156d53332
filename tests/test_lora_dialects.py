"""Which dialects of LoRA files work for which families, and that the docs say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

from staging import job, staged, tiny_model, words
from test_loras import one_shot_with_lora

pytest.importorskip("peft")

UNET = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
KOHYA_UNET = "lora_unet_" + UNET.replace(".", "_")
STREAMS = "transformer_blocks.0.attn.to_out.0"  # of FLUX and its kin, which its first code calls double_blocks
ATTENTION = "transformer_blocks.0.attn1.to_q"
# A layer of each family as the library names it, and as files do: (family, layer, Kohya's name, ComfyUI's name).
FAMILIES: tuple[tuple[str, str, str, str], ...] = (
    ("sd15", UNET, KOHYA_UNET, ""),
    ("sd21", UNET, KOHYA_UNET, ""),
    ("sdxl", UNET, "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k", ""),
    ("kolors", UNET, KOHYA_UNET, ""),
    ("sd3", STREAMS, "", ""),
    ("flux", STREAMS, "lora_unet_double_blocks_0_img_attn_proj", "diffusion_model.double_blocks.0.img_attn.proj"),
    ("chroma", STREAMS, "lora_unet_double_blocks_0_img_attn_proj", "diffusion_model.double_blocks.0.img_attn.proj"),
    (
        "flux2_klein",
        STREAMS,
        "lora_unet_double_blocks_0_img_attn_proj",
        "diffusion_model.double_blocks.0.img_attn.proj",
    ),
    (
        "z_image",
        "layers.0.attention.to_q",
        "lora_unet_layers_0_attention_to_q",
        "diffusion_model.layers.0.attention.to_q",
    ),
    (
        "qwen_image",
        "transformer_blocks.0.attn.to_q",
        "lora_unet_transformer_blocks_0_attn_to_q",
        "diffusion_model.transformer_blocks.0.attn.to_q",
    ),
    ("wan22_5b", "blocks.0.attn2.to_k", "", "diffusion_model.blocks.0.cross_attn.k"),
    ("ltx", ATTENTION, "", "diffusion_model.transformer_blocks.0.attn1.to_q"),
    ("ltx2", ATTENTION, "", "diffusion_model.transformer_blocks.0.attn1.to_q"),
    ("sana", ATTENTION, "", ""),
    ("lumina2", "noise_refiner.0.attn.to_q", "", ""),
    ("cogvideox", ATTENTION, "", ""),
    ("mochi", ATTENTION, "", ""),
    ("hunyuan_video", STREAMS, "", ""),
    ("auraflow", "joint_transformer_blocks.0.attn.to_q", "", ""),
)
DIALECTS = ("PEFT", "Kohya", "ComfyUI")
CASES = [
    (family, layer, dialect)
    for family, layer, *_ in FAMILIES
    for dialect, name in zip(DIALECTS, (layer, *next(row[2:] for row in FAMILIES if row[0] == family)), strict=True)
    if name
]


def one_layer(family: str, layer: str, dialect: str, file: Path) -> Path:
    """A LoRA of rank 2 for one layer, in the names of a dialect."""
    pipeline: Any = DiffusionPipeline.from_pretrained(tiny_model(family))
    denoiser = "unet" if "unet" in pipeline.components else "transformer"
    weight = getattr(pipeline, denoiser).get_submodule(layer).weight
    generator = torch.Generator().manual_seed(1)
    down, up = (torch.randn(size, generator=generator) for size in ((2, weight.shape[1]), (weight.shape[0], 2)))
    _, _, kohya, comfy = next(row for row in FAMILIES if row[0] == family)
    if dialect == "Kohya":
        pair = {f"{kohya}.lora_down.weight": down, f"{kohya}.lora_up.weight": up, f"{kohya}.alpha": torch.tensor(1.0)}
    else:
        name = comfy if dialect == "ComfyUI" else f"{denoiser}.{layer}"
        ends = (
            (".lora_down", ".lora_up")
            if dialect == "ComfyUI" and family in ("flux", "chroma")
            else (".lora_A", ".lora_B")
        )
        pair = {f"{name}{ends[0]}.weight": down, f"{name}{ends[1]}.weight": up}
    save_file(pair, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layer", "dialect"), CASES)
def test_a_lora_of_a_dialect_gives_the_picture_of_the_one_shot_run(
    family: str, layer: str, dialect: str, tmp_path: Path
) -> None:
    files = [(one_layer(family, layer, dialect, tmp_path / "x.safetensors"), 0.7)]
    call = job(family, guided=True)
    found, session = staged(tiny_model(family), words(family), call, dtype="auto", seed=3, loras=files)
    assert torch.equal(found, one_shot_with_lora(family, files, 3, **words(family), **call))
    assert not any("not used" in note for phase in session.report.phases for note in phase.notes)
    assert not torch.equal(found, staged(tiny_model(family), words(family), call, dtype="auto", seed=3)[0])


def test_the_docs_say_which_dialects_work_for_which_families() -> None:
    text = (Path(__file__).parent.parent / "docs" / "loras.md").read_text(encoding="utf-8")
    told = {
        (family, dialect)
        for families, *cells in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w*) ?\| (\w*) ?\| (\w*) ?\|$", text, re.M)
        for family in re.findall(r"`(\w+)`", families)
        for dialect, cell in zip(DIALECTS, cells, strict=True)
        if cell
    }
    assert told == {(family, dialect) for family, _, dialect in CASES}
