"""LoRAs in phases: the bits of the one-shot pipeline with the same LoRA, and sentences for files that don't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from staging import job, staged, tiny_model, words

pytest.importorskip("peft")


def make_lora(name: str, denoiser: str, file: Path, targets: list[str]) -> Path:
    """A LoRA of rank 2 with random weights for the denoiser of a tiny model, in diffusers' own format."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    module = getattr(pipeline, denoiser)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
        state = get_peft_model_state_dict(module)
    save_file({f"{denoiser}.{key}": value.contiguous().clone() for key, value in state.items()}, file)
    return file


def one_shot_with_lora(name: str, files: list[tuple[Path, float]], seed: int, **call: Any) -> torch.Tensor:
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    pipeline.set_progress_bar_config(disable=True)
    for index, (file, _) in enumerate(files):
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"phase_offload_{index}")
    pipeline.set_adapters([f"phase_offload_{i}" for i in range(len(files))], [scale for _, scale in files])
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.as_tensor(pipeline(**call, output_type="pt", generator=generator)[0]).float()


@pytest.mark.parametrize(("name", "denoiser"), [("flux", "transformer"), ("sd15", "unet")])
def test_two_loras_in_phases_equal_the_one_shot_run(name: str, denoiser: str, tmp_path: Path) -> None:
    first = make_lora(name, denoiser, tmp_path / "first.safetensors", ["to_q", "to_v"])
    second = make_lora(name, denoiser, tmp_path / "second.safetensors", ["to_k"])
    files, call = [(first, 0.5), (second, 1.5)], job(name, guided=True)
    expected = one_shot_with_lora(name, files, 3, **words(name), **call)
    pictures, session = staged(tiny_model(name), words(name), call, dtype="auto", seed=3, loras=files)
    plain, _ = staged(tiny_model(name), words(name), call, dtype="auto", seed=3)
    assert torch.equal(pictures, expected)
    assert not torch.equal(pictures, plain)
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)


def test_a_lora_for_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    lora = make_lora("sd15", "unet", tmp_path / "portrait.safetensors", ["to_q"])
    handle = po.load(tiny_model("flux"), device="cpu", loras=[lora])
    with pytest.raises(po.ModelError, match="portrait.safetensors is for another kind of model"):
        po.denoise(handle, po.encode(handle, "a star"), **job("flux", guided=False))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.safetensors", "not lora", "holds no LoRA weights"),
        ("x.pt", "lora", "isn't a safetensors file"),
        ("x.safetensors", "cut", "x.safetensors"),
    ],
)
def test_files_that_are_no_loras_are_refused(name: str, content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    save_file({"a.lora_A.weight" if content == "lora" else "a.weight": torch.ones(2, 2)}, file)
    if content == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(po.ModelError, match=says):
        po.load(tiny_model("sd15"), device="cpu", loras=[file])


def test_a_lora_file_changed_after_load_is_refused(tmp_path: Path) -> None:
    lora = make_lora("sd15", "unet", tmp_path / "a.safetensors", ["to_q"])
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[lora])
    save_file({key: value * 2 for key, value in load_file(lora).items()} | {"unet.lora_more": torch.ones(9)}, lora)
    with pytest.raises(po.ModelError, match="LoRA a.safetensors changed"):
        po.encode(handle, "a star")
