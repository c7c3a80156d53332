"""The LoRA node: diffusers' own pictures with the same files, once each, within the budget, and sentences."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import make_lora
from node_graphs import Prompt, SpokenHost, call, graph_of, leave_out_plans, node, results_of
from offload_core.errors import InputError, ModelError
from offload_core.settings import OffloadSettings
from phase_offload_nodes.graph import GraphError
from phase_offload_nodes.graph_runner import GraphRunner
from staging import tiny_model

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loras folder of the host. Tests add files and change none."""
    folder = tmp_path_factory.mktemp("loras")
    make_lora("sd15", "unet", folder / "style.safetensors", ["to_q", "to_v"], alpha=16)
    (folder / "more").mkdir()
    make_lora("sd15", "unet", folder / "more" / "line.safetensors", ["to_k"])
    return folder


@pytest.fixture(scope="module")
def host(loras: Path, tmp_path_factory: pytest.TempPathFactory) -> SpokenHost:
    return SpokenHost(tmp_path_factory.mktemp("models"), "sd15", folders={"loras": [loras]})


@pytest.fixture(scope="module")
def runner(host: SpokenHost, tmp_path_factory: pytest.TempPathFactory) -> GraphRunner:
    """Shared, so that the prompt is encoded once."""
    return GraphRunner(host, output_dir=tmp_path_factory.mktemp("out"))


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_plans(monkeypatch)


def with_loras(graph: Prompt, *chain: tuple[str, float]) -> Prompt:
    """The graph with LoRA nodes between Load and all that comes after Encode."""
    last = "load"
    for number, (name, strength) in enumerate(chain):
        graph[f"lora{number}"] = node("PhaseOffloadLora", model=[last, 0], lora=name, strength=strength)
        last = f"lora{number}"
    for name in ("denoise", "decode"):
        graph[name]["inputs"]["model"] = [last, 0]
    return graph


def picture(runner: GraphRunner, *chain: tuple[str, float]) -> torch.Tensor:
    return results_of(runner, with_loras(graph_of("sd15", steps=1), *chain))["decode"].values[0]


def one_shot(loras: Path, *files: tuple[str, float]) -> torch.Tensor:
    pipeline = DiffusionPipeline.from_pretrained(tiny_model("sd15"))
    pipeline.set_progress_bar_config(disable=True)
    for index, (name, _) in enumerate(files):
        pipeline.load_lora_weights(loras, weight_name=name, adapter_name=str(index))
    pipeline.set_adapters([str(index) for index in range(len(files))], [strength for _, strength in files])
    words = {"prompt": "a red fox", "negative_prompt": "blurry", "guidance_scale": 5.0}
    options: dict[str, Any] = {"num_inference_steps": 1, "width": 64, "height": 48, "output_type": "pt"}
    images = pipeline(**words, **options, generator=torch.Generator("cpu").manual_seed(7))[0]
    return torch.as_tensor(images).float().movedim(1, -1)


def test_a_chain_of_loras_makes_the_pictures_of_diffusers(runner: GraphRunner, loras: Path) -> None:
    chain = [("style.safetensors", 0.5), ("more/line.safetensors", 1.5)]
    assert torch.equal(picture(runner, *chain), one_shot(loras, *chain))


def test_a_file_that_comes_twice_is_applied_once_with_the_sum_of_its_strengths(
    runner: GraphRunner, loras: Path, host: SpokenHost
) -> None:
    shutil.copy(loras / "style.safetensors", loras / "copy.safetensors")
    twice = picture(runner, ("style.safetensors", 0.25), ("copy.safetensors", 0.5))
    assert host.said["lora1"] == "style.safetensors 0.75: ready, nothing loaded yet"
    assert torch.equal(twice, one_shot(loras, ("style.safetensors", 0.75)))


def test_a_strength_of_0_leaves_the_lora_out(runner: GraphRunner, host: SpokenHost) -> None:
    (plain,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    (same,) = call(runner, "PhaseOffloadLora", model=plain, lora="style.safetensors", strength=0.0)
    assert same == plain
    assert host.said["node"] == "no LoRA: ready, nothing loaded yet"


@pytest.mark.slow
def test_loras_are_counted_in_a_budget_that_streams(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [("style.safetensors", 0.5), ("more/line.safetensors", 1.5)]
    whole = picture(runner, *chain)
    budget = runner.state.report.phases[-2].weight_bytes * 3 // 4
    # The weights of this model are all small, and small ones are never streamed.
    settings = partial(OffloadSettings, resident_below=0, activation_memory=0)
    monkeypatch.setattr("phase_offload_nodes.state.OffloadSettings", settings)
    graph = with_loras(graph_of("sd15", steps=1), *chain)
    graph["load"]["inputs"]["device_memory"] = str(budget)
    assert torch.equal(results_of(runner, graph)["decode"].values[0], whole)
    denoise = runner.state.report.phases[-2]
    assert denoise.streamed_bytes > 0
    assert denoise.reserved_peak_bytes <= budget
    assert denoise.leaked_bytes == 0


def reruns(runner: GraphRunner, before: dict[str, str], graph: Prompt) -> set[str]:
    """Nodes that would run again."""
    return {name for name, key in runner._cache_keys(runner.check(graph)).items() if before[name] != key}


def test_another_strength_runs_no_encoder_again(runner: GraphRunner) -> None:
    graph = with_loras(graph_of("sd15", steps=1), ("style.safetensors", 0.5))
    before = runner._cache_keys(runner.check(graph))
    graph["lora0"]["inputs"]["strength"] = 0.75
    assert reruns(runner, before, graph) == {"lora0", "denoise", "decode", "preview"}


def test_a_file_that_changes_makes_the_node_run_again(runner: GraphRunner, loras: Path) -> None:
    file = Path(shutil.copy(loras / "style.safetensors", loras / "changing.safetensors"))
    graph = with_loras(graph_of("sd15", steps=1), ("changing.safetensors", 0.5))
    before = runner._cache_keys(runner.check(graph))
    assert reruns(runner, before, graph) == set()
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    assert "lora0" in reruns(runner, before, graph)


# Wrong files


@pytest.mark.slow
def test_a_lora_of_another_model_is_a_sentence(runner: GraphRunner, loras: Path) -> None:
    make_lora("flux", "transformer", loras / "flux.safetensors", ["to_q"])
    with pytest.raises(ModelError, match=r"The LoRA flux\.safetensors is for another kind of model"):
        picture(runner, ("flux.safetensors", 1.0))


def test_a_lora_in_a_form_of_another_family_is_a_sentence(runner: GraphRunner, loras: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_proj"  # FLUX, as kohya's scripts write it
    tensors = {f"{name}.lora_down.weight": torch.ones(2, 8), f"{name}.lora_up.weight": torch.ones(8, 2)}
    save_file(tensors | {f"{name}.alpha": torch.tensor(2.0)}, loras / "kohya.safetensors")
    with pytest.raises(ModelError, match=r"The LoRA kohya\.safetensors "):
        picture(runner, ("kohya.safetensors", 1.0))


def test_a_lora_that_fits_in_part_runs_and_says_which_weights_were_not_used(
    runner: GraphRunner, loras: Path, host: SpokenHost
) -> None:
    file = Path(shutil.copy(loras / "style.safetensors", loras / "bare.safetensors"))
    layers = ("unet.no_such_block.to_q", "nowhere.to_q")
    stray = {f"{layer}.lora_{side}.weight": torch.ones(2, 2) for layer in layers for side in "AB"}
    save_file(load_file(file), file)  # as old files are: without the metadata that the other one won't have, either
    save_file(load_file(file) | stray, loras / "part.safetensors")
    part = picture(runner, ("part.safetensors", 0.5))
    assert "The LoRA part.safetensors fits this model in part: 4 of its " in host.said["denoise"]
    for key in ("unet.no_such_block.to_q.lora_A.weight", "nowhere.to_q.lora_A.weight"):
        assert key in host.said["denoise"]
    assert torch.equal(part, picture(runner, ("bare.safetensors", 0.5)))


def test_the_node_refuses_a_lora_of_one_half_by_the_name_of_the_other(runner: GraphRunner, loras: Path) -> None:
    save_file({"unet.a.lora_up.weight": torch.ones(2, 2)}, loras / "half.safetensors")
    (handle,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    with pytest.raises(ModelError, match=r"half\.safetensors has .* without its partner 'unet\.a\.lora_down\.weight'"):
        call(runner, "PhaseOffloadLora", model=handle, lora="half.safetensors", strength=1.0)


def test_only_files_of_the_list_are_opened(runner: GraphRunner, tmp_path: Path) -> None:
    save_file({"a.lora_A.weight": torch.ones(2, 2)}, tmp_path / "outside.safetensors")
    (handle,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "", "gone.safetensors"):
        with pytest.raises(InputError, match=r"There is no LoRA .*choose one of .*more/line\.safetensors, "):
            call(runner, "PhaseOffloadLora", model=handle, lora=name, strength=1.0)
        with pytest.raises(GraphError, match="isn't in the list"):
            runner.check(with_loras(graph_of("sd15", steps=1), (name, 1.0)))


def test_an_empty_list_says_where_to_put_a_lora(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    runner = GraphRunner(SpokenHost(tmp_path / "m", "sd15", folders={"loras": [folder]}), output_dir=tmp_path / "out")
    (nothing,) = runner.state.choices("loras")
    assert nothing.startswith("no LoRA found")
    with pytest.raises(InputError, match=r"There is no LoRA yet: put a \*\.safetensors file into .*none"):
        runner.run(with_loras(graph_of("sd15", steps=1), (nothing, 1.0)))


def test_the_same_lora_twice_in_load_is_one(loras: Path) -> None:
    style = loras / "style.safetensors"
    handle = po.load(
        tiny_model("sd15"), device="cpu", loras=[(style, 0.5), (loras / "more/line.safetensors", 1), style]
    )
    assert [lora.scale for lora in handle.loras] == [1.5, 1.0]
