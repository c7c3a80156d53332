"""ControlNets and image encoders as files: told by their headers, and the bits of the same as folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetImg2ImgPipeline, StableDiffusionControlNetImg2ImgPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from control_files import (
    controlnet_file,
    controlnet_of_eight_convolutions,
    image_encoder_file,
    original_names,
    wide_image_encoder,
)
from control_models import tiny_controlnet, tiny_image_encoder, tiny_ip_adapter
from offload_core.checkpoint import read_header
from offload_core.single_files.companion_files import controlnet_file as read_controlnet
from offload_core.single_files.companion_files import image_encoder_file as read_encoder
from offload_core.single_files.controlnet_config import config_of
from offload_core.stored_weight import read_stored
from offload_core.tiny_models import picture
from original_layout import component_weights
from staging import job, often, staged, tiny_model, words
from test_control import EDGES, FACE, one_shot_controlled, run

DIALECTS = [("sd15", "pth"), ("sd15", "original"), ("sd15", "diffusers"), ("sdxl", "original"), ("sdxl", "diffusers")]
DIALECTS += [("flux", "diffusers")]
FOX = picture("fox")


def model_of(name: str) -> Any:
    return po.load(tiny_model(name), device="cpu").source()


@pytest.mark.parametrize(("name", "dialect"), DIALECTS)
def test_a_controlnet_in_a_file_is_that_of_its_folder_by_weights_and_config(name: str, dialect: str) -> None:
    part, _ = read_controlnet(controlnet_file(name, dialect), model_of(name))
    weights = component_weights(tiny_controlnet(name))
    assert part.stored is not None
    assert part.stored.keys() == weights.keys()
    assert all(torch.equal(read_stored(stored), weights[key]) for key, stored in part.stored.items())
    saved = json.loads((tiny_controlnet(name) / "config.json").read_text("utf-8"))
    assert part.class_name == saved["_class_name"]
    told = dict(part.config or {})
    depths = told.pop("transformer_layers_per_block", 1)
    assert depths in (1, [saved.get("transformer_layers_per_block", 1)] * 2, saved.get("transformer_layers_per_block"))
    assert {key: saved[key] for key in told} == told


@pytest.mark.parametrize("prefix", ["control_model.", "", None])
def test_weights_are_those_of_diffusers_own_single_file_loader(prefix: str | None, tmp_path: Path) -> None:
    folder = controlnet_of_eight_convolutions()
    weights = component_weights(folder)
    named = weights if prefix is None else {prefix + key: value for key, value in original_names(weights).items()}
    save_file(named, tmp_path / "control.safetensors")
    theirs = ControlNetModel.from_single_file(str(tmp_path / "control.safetensors"), config=str(folder)).state_dict()
    part, _ = read_controlnet(tmp_path / "control.safetensors", model_of("sd15"))
    assert part.stored is not None
    assert part.stored.keys() == theirs.keys()
    assert all(torch.equal(read_stored(stored), theirs[key]) for key, stored in part.stored.items())


def controlled(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Encode and Denoise are given beside the ControlNet and its picture."""
    return words(name), job(name, guided=True)


@pytest.mark.parametrize("name", often(("sd15", "sdxl", "flux"), ("sd15",)))
def test_a_file_and_its_picture_give_the_bits_of_the_one_shot_run_whole_and_streamed(name: str) -> None:
    texts, call = controlled(name)
    shown = {"control_image" if name == "flux" else "image": EDGES, "controlnet_conditioning_scale": 0.8}
    part = {"control_guidance_start": 0.0, "control_guidance_end": 0.5}
    expected = one_shot_controlled(name, 5, **texts, **call, **shown, **part)
    control = po.Control(controlnet_file(name, "diffusers" if name == "flux" else "pth"), EDGES, 0.8, 0.0, 0.5)
    options: dict[str, Any] = {"dtype": "auto", "seed": 5, "controlnet": control}
    pictures, session = staged(tiny_model(name), texts, call, **options)
    assert torch.equal(pictures, expected)
    assert session.report.phases[-2].forwards["controlnet"] > 0  # FLUX's first try lacks the picture's encoding
    settings = po.OffloadSettings(device_memory=100 << 10, resident_below=1024, activation_memory=0)
    streamed, session = staged(tiny_model(name), texts, call, **options, settings=settings)
    assert torch.equal(streamed, expected)
    assert session.report.phases[-2].streamed_bytes > 0
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)


def test_encode_knows_nothing_of_the_controlnet() -> None:
    plain = po.load(tiny_model("flux"), device="cpu")
    model = plain.with_control(po.Control(controlnet_file("flux"), EDGES))
    session = po.Session()
    embeds = po.encode(model, "a fox", session=session)
    assert embeds.records.keys() == po.encode(plain, "a fox").records.keys()
    assert "vae" not in session.report.phases[-1].forwards
    assert (model.pipeline, model.controlled().pipeline) == ("FluxPipeline", "FluxControlNetPipeline")


@pytest.mark.slow  # a graph does it for SD 1.5 in every run
@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_image_to_image_with_a_controlnet_is_diffusers_pipeline_for_it(name: str) -> None:
    cls = {"sd15": StableDiffusionControlNetImg2ImgPipeline, "flux": FluxControlNetImg2ImgPipeline}[name]
    plain, call = one_shot_parts(name), {"num_inference_steps": 4, "strength": 0.6}
    size, scale = {"height": 48, "width": 64}, {"controlnet_conditioning_scale": 1.0}
    wide = EDGES.resize((80, 80))
    expected = run(cls(**plain), 3, prompt="a fox", image=FOX, control_image=wide, **size, **call, **scale)
    model = po.load(tiny_model(name), device="cpu")
    images, embeds = po.encode_images(model, FOX), po.encode(model, "a fox")
    model = model.with_control(po.Control(controlnet_file(name), wide))
    session = po.Session()
    latents = po.denoise(model, embeds, images=images, seed=3, session=session, **call)
    assert torch.equal(torch.as_tensor(po.decode(model, latents, "pt")).float(), expected)
    again = [note for phase in session.report.phases for note in phase.notes if "run again" in note]
    assert len(again) == (1 if name == "flux" else 0)  # FLUX's VAE sees the ControlNet's picture, too


def one_shot_parts(name: str) -> dict[str, Any]:
    from offload_core.phases import from_files
    from offload_core.tiny_models.running import align, load_tiny

    pipeline = load_tiny(tiny_model(name), dtype=torch.float32)
    source = po.load(tiny_model(name), device="cpu", controlnet=tiny_controlnet(name)).source()
    controlnet = from_files(source.components["controlnet"], torch.float32)
    align(controlnet)
    more: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts = {key: part for key, part in pipeline.components.items() if part is not None}
    return {**parts, "controlnet": controlnet, **(more if name == "sd15" else {})}


def test_a_model_without_such_a_pipeline_is_a_sentence() -> None:
    with pytest.raises(po.InputError, match="aren't known as files"):
        po.load(tiny_model("z_image"), device="cpu", controlnet=po.Control(controlnet_file("flux"), EDGES))
    with pytest.raises(po.InputError, match="no Flux2KleinControlNetPipeline"):
        po.load(tiny_model("flux2_klein"), device="cpu", controlnet=po.Control(tiny_controlnet("flux"), EDGES))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"start": 0.5, "end": 0.5}, "never does"),
        ({"end": 2.0}, "never does"),
        ({"strength": "much"}, "is a number"),
        ({"picture": "edges.png"}, "needs one picture"),
        ({"mode": 1}, "is no union ControlNet"),
    ],
)
def test_a_control_that_can_t_be_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    control = po.Control(**{"place": controlnet_file("sd15"), "picture": EDGES} | change)
    with pytest.raises(po.InputError, match=sentence):
        po.load(tiny_model("sd15"), device="cpu", controlnet=control)


def test_one_controlnet_at_a_time() -> None:
    model = po.load(tiny_model("sd15"), device="cpu").with_control(po.Control(controlnet_file("sd15"), EDGES))
    with pytest.raises(po.InputError, match="one at a time"):
        model.with_control(po.Control(controlnet_file("sd15"), FOX))


def test_handles_are_equal_if_their_pictures_are_and_hold_no_tensor() -> None:
    plain = po.load(tiny_model("sd15"), device="cpu")
    one, same, other = (
        plain.with_control(po.Control(controlnet_file("sd15"), shown)) for shown in (EDGES, EDGES.copy(), FOX)
    )
    assert (one == same, hash(one) == hash(same), one == other) == (True, True, False)
    assert one._comfy_cache_tensors() == []
    assert len(repr(one)) < 400


# Which file it is


def other_file(folder: Path, name: str, names: list[str]) -> Path:
    save_file({key: torch.zeros(2, 2) for key in names}, folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["unet.a.lora_A.weight", "unet.a.lora_B.weight"], "is a LoRA, not a model"),
        (["lora_controlnet", "input_blocks.0.0.weight"], "is a Control-LoRA"),
        (["lllite_unet_input_blocks_4_1.down.0.weight"], "is a ControlNet-LLLite"),
        (["adapter.body.0.resnets.0.block1.weight"], "is a T2I-Adapter"),
        (["body.0.block1.weight", "conv_in.weight"], "is a T2I-Adapter"),
        (["body.0.in_conv.weight"], "is a T2I-Adapter"),
        (["ip_adapter.1.to_k_ip.weight", "image_proj.proj.weight"], "is an IP-Adapter, not a ControlNet"),
        (["double_blocks.0.img_attn.proj.weight", "controlnet_blocks.0.weight"], "in XLabs' names"),
        (["controlnet_blocks.0.weight", "pos_embed_input.proj.weight"], "of a kind that isn't known as a file"),
        (["difference", "control_model.zero_convs.0.0.weight"], "the difference of a ControlNet"),
        (["some.weight"], "holds no part of a model that is known here"),
    ],
)
def test_what_isn_t_a_controlnet_is_called_by_what_it_is(tmp_path: Path, names: list[str], sentence: str) -> None:
    with pytest.raises(po.ModelError, match=sentence):
        read_controlnet(other_file(tmp_path, "x.safetensors", names), model_of("sd15"))


def test_a_controlnet_for_another_model_says_how_it_differs() -> None:
    with pytest.raises(po.ModelError, match=r"is a ControlNet for another model: it reads text that is \d+ wide"):
        read_controlnet(controlnet_file("sdxl"), model_of("sd15"))
    with pytest.raises(po.ModelError, match="for another kind of model \\(FluxControlNetModel\\)"):
        read_controlnet(controlnet_file("flux"), model_of("sd15"))
    with pytest.raises(po.ModelError, match="for another kind of model \\(ControlNetModel\\)"):
        read_controlnet(controlnet_file("sd15", "pth"), model_of("flux"))
    with pytest.raises(po.ModelError, match="holds a Stable Diffusion UNet, not a ControlNet"):
        read_controlnet(tiny_model("sd15") / "unet" / "diffusion_pytorch_model.safetensors", model_of("sd15"))


def test_a_file_that_is_cut_or_lacks_a_part_is_a_sentence(tmp_path: Path) -> None:
    whole = controlnet_file("sd15")
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(po.ModelError, match=r"cut\.safetensors"):
        read_controlnet(tmp_path / "cut.safetensors", model_of("sd15"))
    weights = load_file(whole)
    del weights["down_blocks.0.resnets.0.conv1.weight"]
    save_file(weights, tmp_path / "part.safetensors")
    with pytest.raises(po.ModelError, match="a part of it is missing"):
        read_controlnet(tmp_path / "part.safetensors", model_of("sd15"))
    (tmp_path / "x.pth").write_bytes(b"x")
    with pytest.raises(po.ModelError, match=r"x\.pth is a \.pth file"):
        read_controlnet(tmp_path / "x.pth", model_of("sd15"))


def test_a_weight_file_beside_its_config_means_the_folder() -> None:
    folder = tiny_controlnet("sd15")
    model = po.load(tiny_model("sd15"), device="cpu", controlnet=folder / "diffusion_pytorch_model.safetensors")
    assert model.source().components["controlnet"].stored is None
    assert model.source() == po.load(tiny_model("sd15"), device="cpu", controlnet=folder).source()


def test_only_a_shuffle_controlnet_averages_what_it_gives(tmp_path: Path) -> None:
    for name, averages in (("control_v11e_sd15_shuffle", True), ("control_v11p_sd15_canny", False)):
        shutil.copy(controlnet_file("sd15", "pth"), tmp_path / f"{name}.safetensors")
        part, _ = read_controlnet(tmp_path / f"{name}.safetensors", model_of("sd15"))
        assert bool((part.config or {}).get("global_pool_conditions")) is averages


def test_a_small_controlnet_has_blocks_of_its_own_kinds() -> None:
    """As diffusers/controlnet-canny-sdxl-1.0-mid has them: attention without transformer blocks."""
    header = read_header(controlnet_file("sdxl"))
    shapes = {
        name: entry.shape
        for name, entry in header.tensors.items()
        if ".transformer_blocks." not in name and "down_blocks.0.attentions" not in name
    }
    config = config_of("ControlNetModel", shapes, model_of("sdxl").components["unet"].config)
    assert config["down_block_types"] == ["DownBlock2D", "CrossAttnDownBlock2D"]
    assert config["transformer_layers_per_block"] == [1, 0]
    assert config["cross_attention_dim"] == model_of("sdxl").components["unet"].config["cross_attention_dim"]


def test_a_controlnet_from_another_place_runs_in_the_denoiser_s_dtype(tmp_path: Path) -> None:
    half = {name: tensor.to(torch.float16) for name, tensor in load_file(controlnet_file("sd15")).items()}
    save_file(half, tmp_path / "half.safetensors")
    model = po.load(tiny_model("sd15"), device="cpu", controlnet=tmp_path / "half.safetensors")
    assert model.dtype_of(model.source().components["controlnet"]) == torch.float32
    as_asked = po.load(tiny_model("sd15"), device="cpu", dtype="bfloat16", controlnet=controlnet_file("sd15"))
    assert as_asked.dtype_of(as_asked.source().components["controlnet"]) == torch.bfloat16


# Image encoders


@pytest.mark.slow  # a graph runs with the file every time
def test_an_image_encoder_in_a_file_is_that_of_its_folder(tmp_path: Path) -> None:
    part, _ = read_encoder(image_encoder_file())
    saved = json.loads((wide_image_encoder() / "config.json").read_text("utf-8"))
    assert {key: saved[key] for key in part.config or {}} == part.config
    adapter = {place: po.IPAdapter(tiny_ip_adapter("sd15"), 0.7, place, FACE) for place in (image_encoder_file(),)}
    adapter |= {"folder": po.IPAdapter(tiny_ip_adapter("sd15"), 0.7, wide_image_encoder(), FACE)}
    texts, call = controlled("sd15")
    pictures = [
        staged(tiny_model("sd15"), texts, call, dtype="auto", seed=5, ip_adapter=one)[0] for one in adapter.values()
    ]
    assert torch.equal(*pictures)
    save_file(load_file(image_encoder_file()) | {"text_model.x": torch.ones(2)}, tmp_path / "whole.safetensors")
    assert (
        read_encoder(tmp_path / "whole.safetensors")[0].config == part.config
    )  # OpenAI's file has the texts' half, too


def test_an_adapter_of_another_encoder_is_told_by_its_first_matrix(tmp_path: Path) -> None:
    weights = load_file(tiny_ip_adapter("sd15"))
    weights["image_proj.proj.weight"] = torch.zeros(weights["image_proj.proj.weight"].shape[0], 24)
    save_file(weights, tmp_path / "wide.safetensors")
    with pytest.raises(po.ModelError, match="reads another image encoder: one whose projection_dim is 24, and .* 16"):
        po.load(
            tiny_model("sd15"),
            device="cpu",
            ip_adapter=po.IPAdapter(tmp_path / "wide.safetensors", 1.0, image_encoder_file()),
        )


def test_an_image_encoder_of_another_kind_is_a_sentence(tmp_path: Path) -> None:
    weights = load_file(image_encoder_file())
    narrow = tmp_path / "narrow.safetensors"
    shutil.copy(tiny_image_encoder() / "model.safetensors", narrow)
    with pytest.raises(po.ModelError, match="16 wide, which isn't known as a file"):
        read_encoder(narrow)
    save_file({k: v for k, v in weights.items() if k != "visual_projection.weight"}, tmp_path / "blunt.safetensors")
    with pytest.raises(po.ModelError, match="without its projection"):
        read_encoder(tmp_path / "blunt.safetensors")
    save_file({k: v for k, v in weights.items() if "class_embedding" not in k}, tmp_path / "siglip.safetensors")
    with pytest.raises(po.ModelError, match="that is no CLIP"):
        read_encoder(tmp_path / "siglip.safetensors")
    with pytest.raises(po.ModelError, match="holds no CLIP vision encoder"):
        read_encoder(controlnet_file("sd15"))
