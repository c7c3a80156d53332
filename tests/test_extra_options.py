"""`generate` and `plan` with LoRAs, pictures, a ControlNet and an IP-Adapter: what the library makes with the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import offload_core as po
from control_models import tiny_controlnet, tiny_image_encoder, tiny_ip_adapter
from lora_files import make_lora
from offload_core._extra_options import _lora
from offload_core.cli import main
from offload_core.plan import Rates
from offload_core.tiny_models import picture
from staging import tiny_model

RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
JOB: dict[str, Any] = {"num_inference_steps": 2}
SIZE = {"height": 48, "width": 64}
WORDS = ("--prompt", "a red fox", "--steps", "2", "--seed", "3", "--device", "cpu")
SIZED = ("--width", "64", "--height", "48")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("offload_core.rates.measure", lambda *_: RATES)
    monkeypatch.chdir(tmp_path)


def generated(*words: str, model: str = "sd15") -> np.ndarray:
    assert main(["generate", "--model", str(tiny_model(model)), *WORDS, *words, "--output", "made.png"]) == 0
    return np.asarray(Image.open("made.png"))


def by_hand(handle: po.Handle, shown: dict[str, Any], denoised: dict[str, Any]) -> np.ndarray:
    embeds = po.encode(handle, "a red fox", **shown)
    latents = po.denoise(handle, embeds, seed=3, **denoised, **JOB)
    return np.asarray(po.decode(handle, latents, output_type="pil")[0])


def unet_lora(folder: Path) -> Path:
    return make_lora("sd15", "unet", folder / "fox.safetensors", ["to_q", "to_k"], rank=8)


@pytest.mark.parametrize(
    ("words", "file", "strength"),
    [
        (["fox.safetensors"], "fox.safetensors", 1.0),
        (["fox.safetensors:0.8"], "fox.safetensors", 0.8),
        (["fox.safetensors:-1"], "fox.safetensors", -1.0),
        (["fox.safetensors", "0.8"], "fox.safetensors", 0.8),
        ([r"C:\loras\fox.safetensors"], r"C:\loras\fox.safetensors", 1.0),
        ([r"C:\loras\fox.safetensors:0.8"], r"C:\loras\fox.safetensors", 0.8),
        (["C:/fox.safetensors:.5"], "C:/fox.safetensors", 0.5),
        ([r"C:\fox"], r"C:\fox", 1.0),
        (["C:fox.safetensors"], "C:fox.safetensors", 1.0),
        (["12:30/fox.safetensors"], "12:30/fox.safetensors", 1.0),
    ],
)
def test_a_strength_follows_the_last_colon_that_is_not_of_the_path(
    words: list[str], file: str, strength: float
) -> None:
    assert _lora(words) == (file, strength)


def test_a_file_whose_name_ends_like_a_strength_is_that_file(tmp_path: Path) -> None:
    Path("fox:2").write_bytes(b"")
    assert _lora(["fox:2"]) == ("fox:2", 1.0)


def adapter() -> po.IPAdapter:
    return po.IPAdapter(tiny_ip_adapter("sd15"), 0.7, tiny_image_encoder())


def adapter_words() -> tuple[str, ...]:
    picture("face", 40, 40).save("face.png")
    words = (
        "--ip-adapter",
        str(tiny_ip_adapter("sd15")),
        "--ip-adapter-image",
        "face.png",
        "--ip-adapter-scale",
        "0.7",
    )
    return (*words, "--image-encoder", str(tiny_image_encoder()))


PLANNED = [("--no-plan",), pytest.param((), marks=pytest.mark.slow)]


@pytest.mark.parametrize("plan", PLANNED, ids=["just run", "planned"])
def test_a_lora_a_picture_a_mask_and_an_ip_adapter_are_those_of_the_library(
    plan: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the LoRA's file there is a pair for a layer that the model lacks: it is named, as in the node."""
    fox, mask = picture("fox"), picture("hole", 64, 64).convert("L").point(lambda value: 255 * (value > 127))
    fox.save("fox.png")
    mask.save("mask.png")
    file = unet_lora(tmp_path)
    state = load_file(file)
    key = next(key for key in state if "lora_A" in key)
    other = {name: state[name].clone() for name in (key, key.replace("lora_A", "lora_B"))}
    save_file(state | {name.replace("attentions.0", "attentions.7"): tensor for name, tensor in other.items()}, file)
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[(file, 0.8)], ip_adapter=adapter())
    images = po.encode_images(handle, fox, mask=mask, height=48, width=64)
    shown = {"images": images, "ip_adapter_image": picture("face", 40, 40)}
    expected = by_hand(handle, shown, {"images": images, "strength": 0.5})
    given = ("--image", "fox.png", "--mask", "mask.png", "--strength", "0.5", "--lora", f"{file}:0.8")
    made = generated(*SIZED, *given, *adapter_words(), "--report", "report.json", *plan)
    out, err = capsys.readouterr()
    assert (made == expected).all()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert f"unet got {nbytes / 1024:.1f} KiB of LoRA weights" in out
    assert "fox.safetensors fits this model in part: 2 of its" in out and "attentions.7" in out
    phases = json.loads(Path("report.json").read_text())["phases"]
    assert [phase["name"] for phase in phases] == ["images", "encode", "denoise", "decode"]
    assert ("Plan: " in err) is (not plan) is all(phase["predicted"] for phase in phases)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANNED, ids=["just run", "planned"])
def test_a_controlnet_and_an_ip_adapter_are_those_of_the_library(plan: tuple[str, ...]) -> None:
    edges = picture("edges")
    edges.save("edges.png")
    handle = po.load(tiny_model("sd15"), device="cpu", controlnet=tiny_controlnet("sd15"), ip_adapter=adapter())
    shown = {"image": edges, "ip_adapter_image": picture("face", 40, 40), **SIZE}
    expected = by_hand(handle, shown, {"controlnet_conditioning_scale": 0.8})
    control = ("--controlnet", str(tiny_controlnet("sd15")), "--control-image", "edges.png", "--control-scale", "0.8")
    assert (generated(*SIZED, *control, *adapter_words(), *plan) == expected).all()


@pytest.mark.slow
def test_a_controlnet_goes_with_a_picture_to_start_from() -> None:
    fox, edges = picture("fox"), picture("edges")
    fox.save("fox.png")
    edges.save("edges.png")
    control = po.Control(tiny_controlnet("sd15"), edges, 0.8)
    handle = po.load(tiny_model("sd15"), device="cpu", controlnet=control)
    images = po.encode_images(handle, fox, height=48, width=64)
    expected = by_hand(handle, {"images": images}, {"images": images, "strength": 0.5})
    start = ("--image", "fox.png", "--strength", "0.5", "--control-scale", "0.8")
    net = ("--controlnet", str(tiny_controlnet("sd15")), "--control-image", "edges.png")
    assert (generated(*SIZED, *start, *net) == expected).all()


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_plan_is_asked_for_the_controlnet_of_the_command_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def foresee(*_: Any, **given: Any) -> Any:
        asked.update(given)
        raise po.InputError("seen")

    monkeypatch.setattr("offload_core.foresight.foresee_job", foresee)
    monkeypatch.setattr(po, "foresee_job", foresee)
    picture("edges").save("edges.png")
    words = ("--controlnet", str(tiny_controlnet("flux")), "--control-image", "edges.png", "--control-scale", "0.8")
    assert main([command, "--model", str(tiny_model("flux")), "--prompt", "a fox", "--device", "cpu", *words]) == 2
    control = asked["controlnet"]
    assert (str(control.place), control.strength, control.mode) == (str(tiny_controlnet("flux")), 0.8, None)
    assert control.picture.tobytes() == picture("edges").tobytes()


def test_a_plan_is_asked_for_the_loras_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def foresee(*_: Any, loras: Any, **__: Any) -> Any:
        asked.append(loras)
        raise po.InputError("seen")

    monkeypatch.setattr("offload_core.foresight.foresee_job", foresee)
    assert main(["plan", "--model", "sdxl", "--lora", "a.safetensors:0.8", "--lora", "b.safetensors", "2"]) == 2
    assert asked == [[("a.safetensors", 0.8), ("b.safetensors", 2.0)]]


@pytest.mark.slow
def test_a_plan_counts_a_lora_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = unet_lora(tmp_path)
    words = ("--model", str(tiny_model("sd15")), "--steps", "2", "--device", "cpu", "--json", "plan.json")
    assert main(["plan", *words, "--lora", f"{file}:0.8"]) == 0
    assert "of LoRA weights, which stay" in capsys.readouterr().out
    added = json.loads(Path("plan.json").read_text())["phases"][1]["components"]["unet"]["added_bytes"]
    assert added == sum(tensor.nbytes for tensor in load_file(file).values())


@pytest.mark.slow
def test_flux_takes_the_picture_of_its_controlnet_under_another_name() -> None:
    edges = picture("edges")
    edges.save("edges.png")
    handle = po.load(tiny_model("flux"), device="cpu", controlnet=tiny_controlnet("flux"))
    expected = by_hand(handle, {"control_image": edges, **SIZE}, {})
    control = ("--controlnet", str(tiny_controlnet("flux")), "--control-image", "edges.png")
    assert (generated(*SIZED, *control, model="flux") == expected).all()


@pytest.mark.slow
def test_a_model_that_reads_the_picture_with_the_prompt_gets_it_from_the_command_line() -> None:
    fox = picture("fox")
    fox.save("fox.png")
    handle = po.load(tiny_model("qwen_image_edit"), device="cpu")
    images = po.encode_images(handle, [fox])
    embeds = po.encode(handle, "a red fox", "", images=images)
    latents = po.denoise(handle, embeds, images=images, seed=3, **JOB)
    expected = np.asarray(po.decode(handle, latents, output_type="pil")[0])
    assert (generated("--image", "fox.png", model="qwen_image_edit") == expected).all()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("--lora fox.safetensors:much", 2, "--lora takes a file and one number (FILE or FILE:STRENGTH)"),
        ("--lora fox.safetensors:", 2, "--lora takes a file and one number"),
        ("--lora fox.safetensors:nan", 2, "--lora takes a file and one number"),
        ("--lora fox.safetensors 1 2", 2, "--lora takes a file and one number"),
        ("--lora gone.safetensors", 4, "There is no LoRA file gone.safetensors"),
        ("--image gone.png", 2, "There is no picture gone.png"),
        ("--mask white.png", 2, "There is no picture for --mask: give --image, too."),
        ("--control-image white.png", 2, "--control-image needs --controlnet: give both."),
        ("--controlnet folder", 2, "--controlnet needs --control-image: give both."),
        ("--ip-adapter-scale 0.5", 2, "--ip-adapter-scale needs --ip-adapter: give both."),
        ("--ip-adapter a.safetensors", 2, "--ip-adapter needs --ip-adapter-image: give both."),
        ("--controlnet nowhere --control-image white.png", 4, "There is no controlnet in 'nowhere'"),
        ("--control-mode 1", 2, "--control-mode needs --controlnet: give both."),
    ],
)
def test_bad_input_gets_a_sentence_and_its_code(
    words: str, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (16, 16), "white").save("white.png")
    given = ["generate", "--model", str(tiny_model("sd15")), *WORDS, *words.split(), "--output", "made.png"]
    assert main(given) == code
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err
    assert not Path("made.png").exists()
