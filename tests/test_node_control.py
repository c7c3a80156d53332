"""The ControlNet and IP-Adapter nodes: diffusers' own pictures with the same files, what runs again, and sentences."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionControlNetImg2ImgPipeline
from safetensors.torch import save_file

import offload_core
from control_files import controlnet_file, image_encoder_file, wide_image_encoder
from control_models import tiny_ip_adapter
from node_graphs import SIZE, Prompt, SpokenHost, call, graph_of, leave_out_plans, node, results_of
from offload_core.errors import InputError, ModelError
from offload_core.tiny_models import picture
from phase_offload_nodes.graph import GraphError
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.pictures import picture_as_image
from staging import often, tiny_model
from test_control import one_shot_controlled, run
from test_control_files import one_shot_parts

EDGES, FOX = picture("edges", 80, 80), picture("fox")
NAMES = ("sd15", "sdxl", "flux")
WORDS = {"prompt": "a red fox", "negative_prompt": "blurry"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> SpokenHost:
    """Tests add files to its folders and change none."""
    root = tmp_path_factory.mktemp("files")
    for kind in ("controlnet", "ipadapter", "clip_vision"):
        (root / kind).mkdir()
    for name in NAMES:
        shutil.copy(controlnet_file(name), root / "controlnet" / f"{name}.safetensors")
        shutil.copy(tiny_ip_adapter(name), root / "ipadapter" / f"{name}.safetensors")
    shutil.copy(image_encoder_file(), root / "clip_vision" / "clip_l.safetensors")
    folders = {kind: [root / kind] for kind in ("controlnet", "ipadapter", "clip_vision")}
    return SpokenHost(root / "models", *NAMES, folders=folders)


@pytest.fixture(scope="module")
def runner(host: SpokenHost, tmp_path_factory: pytest.TempPathFactory) -> GraphRunner:
    """Shared, so that prompts are encoded once."""
    folder = tmp_path_factory.mktemp("in")
    for name, shown in (("edges", EDGES), ("fox", FOX)):
        shown.save(folder / f"{name}.png")
    return GraphRunner(host, output_dir=tmp_path_factory.mktemp("out"), input_dir=folder)


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_plans(monkeypatch)


def with_controlnet(graph: Prompt, model: str, **change: Any) -> Prompt:
    """The graph with a ControlNet before Denoise alone, as its page says."""
    how = {"controlnet": f"{model}.safetensors", "strength": 0.8, "start_percent": 0.0, "end_percent": 0.5, "mode": -1}
    graph["edges"] = node("LoadImage", image="edges.png")
    graph["control"] = node(
        "PhaseOffloadControlNet",
        model=graph["denoise"]["inputs"]["model"],
        image=["edges", 0],
        **how | change,
    )
    graph["denoise"]["inputs"]["model"] = ["control", 0]
    return graph


def with_ip_adapter(graph: Prompt, model: str, weight: float = 0.7) -> Prompt:
    graph["face"] = node("LoadImage", image="fox.png")
    graph["adapter"] = node(
        "PhaseOffloadIPAdapter",
        model=["load", 0],
        ip_adapter=f"{model}.safetensors",
        clip_vision="clip_l.safetensors",
        image=["face", 0],
        weight=weight,
    )
    for name in ("encode", "denoise", "decode"):
        graph[name]["inputs"]["model"] = ["adapter", 0]
    return graph


def guidance(model: str) -> dict[str, float]:
    """What 5.0 on Denoise Phase is."""
    return {"guidance_scale": 5.0}


def control_call(model: str) -> dict[str, Any]:
    shown = {"control_image" if model == "flux" else "image": EDGES, "controlnet_conditioning_scale": 0.8}
    return shown | {"control_guidance_start": 0.0, "control_guidance_end": 0.5}


@pytest.mark.parametrize("model", often(NAMES, ("sd15",)))
def test_a_controlnet_in_a_graph_makes_the_picture_of_diffusers_pipeline(model: str, runner: GraphRunner) -> None:
    image = results_of(runner, with_controlnet(graph_of(model), model))["decode"].values[0]
    call_ = {**WORDS, **SIZE, **guidance(model), "num_inference_steps": 2, **control_call(model)}
    assert torch.equal(image, one_shot_controlled(model, 7, **call_).movedim(1, -1))


@pytest.mark.parametrize("model", often(NAMES, ("sd15",)))
def test_an_ip_adapter_in_a_graph_makes_the_picture_of_diffusers_pipeline(model: str, runner: GraphRunner) -> None:
    image = results_of(runner, with_ip_adapter(graph_of(model), model))["decode"].values[0]
    call_ = {**WORDS, **SIZE, **guidance(model), "num_inference_steps": 2, "ip_adapter_image": FOX}
    assert torch.equal(image, one_shot_with_adapter(model, 7, 0.7, **call_).movedim(1, -1))


def one_shot_with_adapter(name: str, seed: int, scale: float, **call_: Any) -> torch.Tensor:
    from transformers import CLIPVisionModelWithProjection

    from offload_core.tiny_models.running import align, load_tiny

    pipeline, file = load_tiny(tiny_model(name), dtype=torch.float32), tiny_ip_adapter(name)
    if name == "flux":
        where = {"image_encoder_pretrained_model_name_or_path": str(wide_image_encoder()), "weight_name": file.name}
        pipeline.load_ip_adapter(str(file.parent), image_encoder_dtype=torch.float32, **where)
    else:
        encoder = CLIPVisionModelWithProjection.from_pretrained(wide_image_encoder())
        pipeline.register_modules(image_encoder=encoder)
        pipeline.load_ip_adapter(str(file.parent), subfolder="", weight_name=file.name)
    align(pipeline.image_encoder)
    align(pipeline.transformer if name == "flux" else pipeline.unet)
    pipeline.set_ip_adapter_scale(scale)
    return run(pipeline, seed, **call_)


def test_a_start_picture_and_a_controlnet_make_the_picture_of_diffusers_pipeline(runner: GraphRunner) -> None:
    graph = graph_of("sd15", steps=4, width=0, height=0, strength=0.6)
    graph["fox"] = node("LoadImage", image="fox.png")
    graph["images"] = node("PhaseOffloadEncodeImage", model=["load", 0], image=["fox", 0])
    graph["denoise"]["inputs"]["images"] = ["images", 0]
    image = results_of(runner, with_controlnet(graph, "sd15"))["decode"].values[0]
    expected = run(
        StableDiffusionControlNetImg2ImgPipeline(**one_shot_parts("sd15")),
        7,
        **WORDS,
        **SIZE,
        **control_call("sd15") | {"image": FOX, "control_image": EDGES},
        guidance_scale=5.0,
        num_inference_steps=4,
        strength=0.6,
    )
    assert torch.equal(image, expected.movedim(1, -1))


@pytest.mark.slow
def test_both_nodes_together_in_either_order_make_one_picture(runner: GraphRunner) -> None:
    first = with_controlnet(with_ip_adapter(graph_of("sd15"), "sd15"), "sd15")
    image = results_of(runner, first)["decode"].values[0]
    second = with_ip_adapter(with_controlnet(graph_of("sd15"), "sd15"), "sd15")
    second["adapter"]["inputs"]["model"] = ["control", 0]
    assert torch.equal(results_of(runner, second)["decode"].values[0], image)


# What runs again


def reruns(runner: GraphRunner, before: dict[str, str], graph: Prompt) -> set[str]:
    return {name for name, key in runner._cache_keys(runner.check(graph)).items() if before[name] != key}


def test_another_control_strength_runs_no_encoder_again(runner: GraphRunner) -> None:
    graph = with_controlnet(graph_of("sd15"), "sd15")
    before = runner._cache_keys(runner.check(graph))
    graph["control"]["inputs"]["strength"] = 0.5
    assert reruns(runner, before, graph) == {"control", "denoise", "decode", "preview"}


@pytest.mark.parametrize("kind", ["controlnet", "ipadapter", "clip_vision"])
def test_a_file_that_changes_makes_its_node_run_again(kind: str, runner: GraphRunner, host: SpokenHost) -> None:
    graph = with_controlnet(with_ip_adapter(graph_of("sd15"), "sd15"), "sd15")
    key = {"controlnet": "controlnet", "ipadapter": "ip_adapter", "clip_vision": "clip_vision"}[kind]
    changed = "control" if kind == "controlnet" else "adapter"
    file = host.folders(kind)[0] / "changing.safetensors"
    save_file({"x": torch.ones(2)}, file)
    graph[changed]["inputs"][key] = "changing.safetensors"
    before = runner._cache_keys(runner.check(graph))
    assert reruns(runner, before, graph) == set()
    save_file({"x": torch.zeros(2)}, file)
    assert changed in reruns(runner, before, graph)


def test_a_strength_of_0_leaves_either_out(runner: GraphRunner) -> None:
    (plain,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    assert control_on(runner, plain, strength=0.0) == plain
    assert adapter_on(runner, plain, weight=0.0) == plain


def control_on(runner: GraphRunner, model: Any, **change: Any) -> Any:
    how = {"controlnet": "sd15.safetensors", "image": picture_as_image(EDGES), "strength": 1.0}
    how |= {"start_percent": 0.0, "end_percent": 1.0}
    return call(runner, "PhaseOffloadControlNet", model=model, **how | change)[0]


def adapter_on(runner: GraphRunner, model: Any, **change: Any) -> Any:
    how = {"ip_adapter": "sd15.safetensors", "clip_vision": "clip_l.safetensors", "weight": 1.0}
    return call(runner, "PhaseOffloadIPAdapter", model=model, **how | {"image": picture_as_image(FOX)} | change)[0]


# Plans and reports


@pytest.mark.slow
def test_plan_preview_and_phase_report_know_both(runner: GraphRunner) -> None:
    graph = with_controlnet(with_ip_adapter(graph_of("sd15"), "sd15"), "sd15")
    plan = {name: graph["denoise"]["inputs"][name] for name in ("steps", "guidance", "width", "height", "batch")}
    graph["plan"] = node("PhaseOffloadPlanPreview", model=["control", 0], prompt="a red fox", **plan)
    graph["report"] = node("PhaseOffloadReport", anything=["decode", 0])
    graph["encode"]["inputs"]["prompt"] = "a picture that no test asked for before"  # else its answers are kept
    results = results_of(runner, graph)
    assert "controlnet" in results["plan"].values[0]
    for name in ("controlnet", "image_encoder"):
        assert name in results["report"].values[2]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd15", "flux"])
def test_a_plan_by_which_a_graph_runs_holds(
    model: str, host: SpokenHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with plans
    runner = GraphRunner(host, output_dir=tmp_path / "out", input_dir=tmp_path)
    for name, shown in (("edges", EDGES), ("fox", FOX)):
        shown.save(tmp_path / f"{name}.png")
    results_of(runner, with_controlnet(with_ip_adapter(graph_of(model), model), model))
    denoise = [phase for phase in runner.state.report.phases if phase.name == "denoise"][-1]
    assert denoise.predicted
    assert denoise.reserved_peak_bytes <= denoise.predicted["device_peak_bytes"]


# Sentences


def test_lists_without_folders_are_empty_and_say_so(tmp_path: Path) -> None:
    runner = GraphRunner(SpokenHost(tmp_path / "m", "sd15"), output_dir=tmp_path / "out")
    assert runner.state.choices("controlnets")[0].startswith("no ControlNet found")
    assert runner.state.choices("ip_adapters")[0].startswith("no IP-Adapter found")
    assert runner.state.choices("image_encoders") == ["model's own"]
    (plain,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    for made, name in ((control_on, "ControlNet"), (adapter_on, "IP-Adapter")):
        with pytest.raises(InputError, match=f"There is no {name} yet"):
            made(runner, plain)


def test_only_files_of_the_lists_are_opened(runner: GraphRunner, host: SpokenHost) -> None:
    outside = host.folders("controlnet")[0].parent / "outside.safetensors"
    shutil.copy(controlnet_file("sd15"), outside)
    (plain,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    for name in ("../outside.safetensors", str(outside), ""):
        with pytest.raises(InputError, match="There is no ControlNet"):
            control_on(runner, plain, controlnet=name)
        with pytest.raises(InputError, match="There is no IP-Adapter"):
            adapter_on(runner, plain, ip_adapter=name)
        with pytest.raises(InputError, match="There is no image encoder"):
            adapter_on(runner, plain, clip_vision=name)
        graph = with_controlnet(graph_of("sd15"), "sd15", controlnet=name)
        with pytest.raises(GraphError, match="isn't in the list"):
            runner.check(graph)


def test_what_the_nodes_refuse(runner: GraphRunner) -> None:
    (plain,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    two = torch.cat([picture_as_image(EDGES)] * 2)
    with pytest.raises(InputError, match="follows one picture, and there are 2"):
        control_on(runner, plain, image=two)
    with pytest.raises(InputError, match="reads one picture, and there are 2"):
        adapter_on(runner, plain, image=two)
    with pytest.raises(InputError, match="never does"):
        control_on(runner, plain, start_percent=0.5, end_percent=0.5)
    with pytest.raises(ModelError, match="for another model"):
        control_on(runner, plain, controlnet="sdxl.safetensors")
    with pytest.raises(InputError, match="one at a time"):
        control_on(runner, control_on(runner, plain))
    with pytest.raises(InputError, match="one at a time"):
        adapter_on(runner, adapter_on(runner, plain))
    for made in (control_on, adapter_on):
        with pytest.raises(InputError, match="needs the model of Load With Dynamic Offload"):
            made(runner, offload_core.Session())
    blind = adapter_on(runner, plain, clip_vision="model's own")
    with pytest.raises(InputError, match="no image encoder for the IP-Adapter"):
        call(runner, "PhaseOffloadEncodePrompt", model=blind, prompt="a fox", negative_prompt="")
