"""LoRAs in phases: the bits of the one-shot pipeline with the same LoRA, and sentences for files that don't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import encoder_loras_work, make_lora
from offload_core.tiny_models.running import align
from staging import job, staged, tiny_model, words

pytest.importorskip("peft")


def one_shot_with_lora(name: str, files: list[tuple[Path, float]], seed: int, **call: Any) -> torch.Tensor:
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    for index, (file, _) in enumerate(files):
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"phase_offload_{index}")
    pipeline.set_adapters([f"phase_offload_{i}" for i in range(len(files))], [scale for _, scale in files])
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.as_tensor(pipeline(**call, output_type="pt", generator=generator)[0]).float()


@pytest.mark.parametrize(("name", "denoiser"), [("flux", "transformer"), ("sd15", "unet")])
def test_two_loras_in_phases_equal_the_one_shot_run(name: str, denoiser: str, tmp_path: Path) -> None:
    first = make_lora(name, denoiser, tmp_path / "first.safetensors", ["to_q", "to_v"], alpha=16)
    second = make_lora(name, denoiser, tmp_path / "second.safetensors", ["to_k"])
    files, call = [(first, 0.5), (second, 1.5)], job(name, guided=True)
    expected = one_shot_with_lora(name, files, 3, **words(name), **call)
    pictures, session = staged(tiny_model(name), words(name), call, dtype="auto", seed=3, loras=files)
    plain, _ = staged(tiny_model(name), words(name), call, dtype="auto", seed=3)
    assert torch.equal(pictures, expected)
    assert not torch.equal(pictures, plain)
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)
    assert not any("not used" in note for phase in session.report.phases for note in phase.notes)


def test_a_lora_in_a_full_budget_makes_room_and_gives_the_same_bits(tmp_path: Path) -> None:
    files = [(make_lora("flux", "transformer", tmp_path / "lora.safetensors", ["to_q", "to_v", "to_k"]), 0.7)]
    call, budget = job("flux", guided=True), 300 * 1024
    expected = one_shot_with_lora("flux", files, 3, **words("flux"), **call)
    settings = po.OffloadSettings(device_memory=budget, resident_below=4096, activation_memory=0)
    options: dict[str, Any] = {"dtype": "auto", "seed": 3, "settings": settings, "loras": files}
    pictures, session = staged(tiny_model("flux"), words("flux"), call, **options)
    assert torch.equal(pictures, expected)
    denoise = session.report.phases[1]
    assert denoise.streamed_bytes > 0
    assert denoise.reserved_peak_bytes <= budget
    assert denoise.leaked_bytes == 0


def test_a_lora_in_the_kohya_dialect_keeps_its_alphas(tmp_path: Path) -> None:
    state = {}
    for key, value in load_file(make_lora("sd15", "unet", tmp_path / "own.safetensors", ["to_q"])).items():
        layer, _, side = key.removeprefix("unet.").rpartition(".lora_")
        name = "lora_unet_" + layer.replace(".", "_")
        state[f"{name}.lora_{'down' if side.startswith('A') else 'up'}.weight"] = value
        state[f"{name}.alpha"] = torch.tensor(16.0)
    save_file(state, tmp_path / "kohya.safetensors")
    files, call = [(tmp_path / "kohya.safetensors", 1.0)], job("sd15", guided=True)
    expected = one_shot_with_lora("sd15", files, 3, **words("sd15"), **call)
    assert torch.equal(staged(tiny_model("sd15"), words("sd15"), call, dtype="auto", seed=3, loras=files)[0], expected)


def test_a_lora_of_the_text_encoder_says_what_it_needs(tmp_path: Path) -> None:
    if encoder_loras_work():
        pytest.skip("this peft can change text encoders")
    file = tmp_path / "words.safetensors"
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    save_file({f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}, file)
    with pytest.raises(po.InputError, match="weights for text_encoder, and the installed transformers needs peft"):
        po.encode(po.load(tiny_model("sd15"), device="cpu", loras=[file]), "a star")


@pytest.mark.skipif(not encoder_loras_work(), reason="the installed transformers needs a newer peft for its models")
def test_a_lora_of_the_text_encoder_is_applied_in_encode_and_marks_the_embeddings(tmp_path: Path) -> None:
    file = make_lora("sd15", "text_encoder", tmp_path / "words.safetensors", ["q_proj", "v_proj"], alpha=8)
    files, call = [(file, 0.7)], job("sd15", guided=True)
    expected = one_shot_with_lora("sd15", files, 3, **words("sd15"), **call)
    assert torch.equal(staged(tiny_model("sd15"), words("sd15"), call, dtype="auto", seed=3, loras=files)[0], expected)
    plain = po.load(tiny_model("sd15"), device="cpu")
    with pytest.raises(po.RecordError, match="field encoders"):
        po.denoise(plain, po.encode(po.load(tiny_model("sd15"), device="cpu", loras=files), "a star"), **call)


def test_embeddings_stay_good_when_only_the_denoisers_lora_changes(tmp_path: Path) -> None:
    file = make_lora("sd15", "unet", tmp_path / "a.safetensors", ["to_q"])
    embeds = po.encode(po.load(tiny_model("sd15"), device="cpu"), "a star")
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[(file, 0.3)])
    assert po.denoise(handle, embeds, **job("sd15", guided=False)).samples.isfinite().all()


def test_a_lora_for_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    lora = make_lora("sd15", "unet", tmp_path / "portrait.safetensors", ["to_q"])
    handle = po.load(tiny_model("flux"), device="cpu", loras=[lora])
    with pytest.raises(po.ModelError, match="portrait.safetensors is for another kind of model"):
        po.denoise(handle, po.encode(handle, "a star"), **job("flux", guided=False))


def test_a_lora_for_another_kind_of_model_says_which_it_seems_to_be_for(tmp_path: Path) -> None:
    layer = "transformer.single_transformer_blocks.0.attn.to_q"
    save_file({f"{layer}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}, tmp_path / "poster.safetensors")
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[tmp_path / "poster.safetensors"])
    with pytest.raises(po.ModelError, match="poster.safetensors .* seems to be for FLUX, Chroma or HunyuanVideo"):
        po.encode(handle, "a star")


@pytest.mark.parametrize(
    ("name", "good", "dropped"),
    [
        ("flux", "lora_unet_double_blocks_0_img_attn_proj", "text_encoders.t5xxl.transformer.encoder.layers.0.q"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("flux", "lora_unet_double_blocks_0_img_attn_qkv", "other.layer"),
                ("sdxl", "lora_unet_down_blocks_1_attentions_0_proj_in", "lora_unet_input_blocks_4_0_in_layers_2"),
            )
        ),
    ],
)
def test_weights_that_the_converter_drops_are_named(name: str, good: str, dropped: str, tmp_path: Path) -> None:
    out = 96 if good.endswith("qkv") else 32
    state = {}
    for layer, rows in ((good, out), (dropped, 32)):
        state |= {f"{layer}.lora_down.weight": torch.ones(2, 32), f"{layer}.lora_up.weight": torch.ones(rows, 2)}
        state[f"{layer}.alpha"] = torch.tensor(1.0)
    save_file(state, tmp_path / "x.safetensors")
    handle, session = po.load(tiny_model(name), device="cpu", loras=[tmp_path / "x.safetensors"]), po.Session()
    po.denoise(handle, po.encode(handle, "a star"), session=session, **job(name, guided=False))
    (note,) = [note for note in session.report.phases[0].notes if "not used" in note]
    assert "2 of its" in note
    assert f"({dropped}.lora_down.weight, {dropped}.lora_up.weight)" in note


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
        po.denoise(handle, po.encode(po.load(tiny_model("sd15"), device="cpu"), "a star"))
