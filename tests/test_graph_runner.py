"""The graph runner: checks a graph as ComfyUI does, runs it in order, and runs nothing twice that is cached."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fake_engine
import offload_core
from offload_core.errors import InputError
from offload_core.settings import OffloadSettings
from phase_offload_nodes.graph import GraphError, read_graph
from phase_offload_nodes.graph_runner import CacheMode, GraphRunner
from phase_offload_nodes.local_host import GraphInterrupted, LocalHost
from staging import tiny_model

ROOT = Path(__file__).parents[1]

Prompt = dict[str, Any]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Engine:
    monkeypatch.setattr("phase_offload_nodes.state.PackState.fingerprint", lambda self, name: f"files of {name}")
    return fake_engine.install(monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    fake_engine.model_folder(tmp_path / "models", "more/other")
    return LocalHost([tmp_path / "models"])


def make_runner(host: LocalHost, tmp_path: Path, cache: CacheMode = "classic") -> GraphRunner:
    return GraphRunner(host, output_dir=tmp_path / "out", input_dir=tmp_path / "in", cache=cache)


@pytest.fixture
def runner(host: LocalHost, tmp_path: Path, engine: fake_engine.Engine) -> GraphRunner:
    return make_runner(host, tmp_path)


@pytest.fixture
def graph() -> Prompt:
    denoise = {"seed": 1, "steps": 0, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    return {
        "save": node("SaveImage", images=["decode", 0], filename_prefix="picture"),
        "decode": node("PhaseOffloadVAEDecode", model=["load", 0], latent=["purge", 0], tiling="auto"),
        "purge": node("PhaseOffloadPurgeCache", anything=["denoise", 0]),
        "denoise": node("PhaseOffloadDenoise", model=["load", 0], embeds=["encode", 0], **denoise),
        "encode": node("PhaseOffloadEncodePrompt", model=["load", 0], prompt="a fox", negative_prompt=""),
        "load": node("PhaseOffloadLoad", model="tiny", dtype="auto", device="auto"),
    }


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def changed(graph: Prompt, node_id: str, **inputs: Any) -> Prompt:
    graph = copy.deepcopy(graph)
    graph[node_id]["inputs"].update(inputs)
    return graph


# Order and results


def test_nodes_run_after_the_nodes_they_need(runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine) -> None:
    result = runner.run(graph)
    assert result.executed == ["load", "encode", "denoise", "purge", "decode", "save"]
    assert engine.phases == ["load", "encode", "denoise", "purge", "decode"]


def test_text_of_a_node_is_in_the_result(runner: GraphRunner, graph: Prompt) -> None:
    assert runner.run(graph).ui["purge"] == {"text": ["Freed 1 MiB."]}


def test_a_branch_that_leads_nowhere_is_not_run(runner: GraphRunner, graph: Prompt) -> None:
    graph["unused"] = node("PhaseOffloadEncodePrompt", model=["load", 0], prompt="unused")
    assert "unused" not in runner.run(graph).executed


def test_bodies_run_under_inference_mode(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    original = engine.denoise

    def denoise(*args: Any, **kwargs: Any) -> fake_engine.Latents:
        modes.append(torch.is_inference_mode_enabled())
        return original(*args, **kwargs)

    monkeypatch.setitem(vars(offload_core), "denoise", denoise)
    runner.run(graph)
    assert modes == [True]
    assert not torch.is_inference_mode_enabled()


def test_two_equal_nodes_run_once(runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine) -> None:
    graph["load 2"] = copy.deepcopy(graph["load"])
    graph["decode"]["inputs"]["model"] = ["load 2", 0]
    runner.run(graph)
    assert engine.phases.count("load") == 1


# Caches


def test_an_unchanged_graph_runs_nothing(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(graph)
    again = runner.run(copy.deepcopy(graph))
    assert again.executed == []
    assert again.cached == ["load", "encode", "denoise", "purge", "decode", "save"]
    assert again.ui["save"]["images"][0]["filename"] == "picture_00001_.png"


def test_renamed_nodes_are_cached_too(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(graph)
    text = json.dumps(graph).replace('"denoise"', '"77"')
    assert runner.run(json.loads(text)).executed == []


def test_another_seed_runs_denoise_and_what_follows(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(graph)
    assert runner.run(changed(graph, "denoise", seed=2)).executed == ["denoise", "purge", "decode", "save"]


def test_another_tiling_never_denoises_again(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(graph)
    assert runner.run(changed(graph, "decode", tiling="on")).executed == ["decode", "save"]


def test_a_failed_decode_keeps_the_denoised_latent(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine
) -> None:
    engine.fails["decode"] = InputError("no")
    with pytest.raises(InputError, match="no"):
        runner.run(graph)
    engine.fails.clear()
    assert runner.run(graph).executed == ["decode", "save"]
    assert engine.phases.count("denoise") == 1


def test_changed_model_files_run_everything_again(
    runner: GraphRunner, graph: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(graph)
    monkeypatch.setattr("phase_offload_nodes.state.PackState.fingerprint", lambda self, name: "new files")
    assert runner.run(graph).executed == ["load", "encode", "denoise", "purge", "decode", "save"]


def test_going_back_to_a_dropped_value_runs_again(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(graph)
    runner.run(changed(graph, "denoise", seed=2))
    assert "denoise" in runner.run(graph).executed


def test_without_a_cache_every_node_runs_each_time(host: LocalHost, tmp_path: Path, graph: Prompt, engine: Any) -> None:
    runner = make_runner(host, tmp_path, "none")
    assert len(runner.run(graph).executed) == len(runner.run(graph).executed) == 6


@pytest.mark.parametrize("cache", ["classic", "none"])
def test_outputs_are_held_as_in_comfyui(
    host: LocalHost, tmp_path: Path, graph: Prompt, engine: fake_engine.Engine, cache: CacheMode
) -> None:
    """ "none" drops a result when its last consumer has run; "classic" keeps it, idle or not."""
    runner = make_runner(host, tmp_path, cache)
    runner.run(graph)
    (latents,) = (weakref.ref(arguments["latents"]) for name, arguments in engine.calls if name == "decode")
    engine.calls.clear()
    gc.collect()
    assert (latents() is not None) == (cache == "classic")


# Memory budgets


def test_a_graph_saved_before_there_were_budgets_runs_with_auto(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine
) -> None:
    assert "device_memory" not in graph["load"]["inputs"]
    assert runner.run(graph).executed[0] == "load"
    assert engine.calls[0][1]["settings"] == OffloadSettings()


@pytest.mark.parametrize("budget", ["6GiB", "60%", "leave 2GiB", "auto", 2**33])
def test_budgets_of_the_load_node_are_part_of_the_handle(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine, budget: Any
) -> None:
    runner.run(changed(graph, "load", device_memory=budget, host_memory="50%"))
    assert engine.calls[0][1]["settings"] == OffloadSettings(device_memory=str(budget), host_memory="50%")


def test_another_budget_runs_everything_again(runner: GraphRunner, graph: Prompt) -> None:
    runner.run(changed(graph, "load", device_memory="6GiB"))
    again = runner.run(changed(graph, "load", device_memory="5GiB"))
    assert again.executed == ["load", "encode", "denoise", "purge", "decode", "save"]


def test_a_linked_budget_is_what_the_other_node_gives(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine
) -> None:
    graph["load"]["inputs"]["device_memory"] = ["report", 1]
    graph["report"] = node("PhaseOffloadPurgeCache", anything=["first", 0])
    graph["first"] = node("PhaseOffloadLoad", model="tiny", dtype="auto", device="auto")
    runner.run(graph)
    budgets = [arguments["settings"].device_memory for name, arguments in engine.calls if name == "load"]
    assert budgets == ["auto", "Freed 1 MiB."]


# Bad graphs


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g: g["load"].update(class_type="Nope"), "Node load: there is no node 'Nope' here"),
        (lambda g: g["load"].pop("class_type"), "Node load has no class_type"),
        (lambda g: g["load"].update(inputs=[]), r"Node load \(PhaseOffloadLoad\): its inputs must be an object"),
        (
            lambda g: g["denoise"]["inputs"].pop("seed"),
            r"Node denoise \(PhaseOffloadDenoise\), input 'seed': it is mis",
        ),
        (lambda g: g["denoise"]["inputs"].pop("embeds"), "Node denoise .* input 'embeds': it is missing"),
        (lambda g: g["denoise"]["inputs"].update(seed="x"), "input 'seed': 'x' isn't a whole number"),
        (lambda g: g["denoise"]["inputs"].update(seed=-1), "input 'seed': -1 is smaller than the least, 0"),
        (lambda g: g["denoise"]["inputs"].update(seed=2**64), "is larger than the most, 18446744073709551615"),
        (lambda g: g["denoise"]["inputs"].update(guidance=float("inf")), "inf is larger than the most, 100"),
        (lambda g: g["denoise"]["inputs"].update(guidance=float("nan")), "isn't a number"),
        (lambda g: g["denoise"]["inputs"].update(steps=None), "input 'steps': None isn't a whole number"),
        (lambda g: g["encode"]["inputs"].update(prompt={}), "input 'prompt': {} isn't a text"),
        (lambda g: g["load"]["inputs"].update(model="../tiny"), r"'../tiny' isn't in the list: .*'tiny'"),
        (lambda g: g["load"]["inputs"].update(dtype="float64"), "input 'dtype': 'float64' isn't in the list: 'auto'"),
        (lambda g: g["load"]["inputs"].update(device="cuda:99"), "input 'device': 'cuda:99' isn't in the list: 'auto'"),
        (
            lambda g: g["load"]["inputs"].update(device_memory="lots"),
            r"Node load \(PhaseOffloadLoad\): device_memory='lots",
        ),
        (lambda g: g["load"]["inputs"].update(host_memory="-1GiB"), "host_memory='-1GiB' isn't a usable memory budget"),
        (lambda g: g["load"]["inputs"].update(device_memory=""), "device_memory='' isn't a usable memory budget: give"),
        (lambda g: g["load"]["inputs"].update(host_memory=None), "input 'host_memory': None isn't a text"),
        (lambda g: g["denoise"]["inputs"].update(embeds=["load", 0]), "it needs PHASE_OFFLOAD_EMBEDS, but output 0"),
        (lambda g: g["denoise"]["inputs"].update(embeds="text"), "needs a link to a node that makes PHASE_OFFLOAD_EMB"),
        (
            lambda g: g["denoise"]["inputs"].update(embeds=["gone", 0]),
            "it links to node gone, which isn't in the graph",
        ),
        (
            lambda g: g["denoise"]["inputs"].update(embeds=["encode", 1]),
            "it links to output 1 of node encode, which has 1",
        ),
        (lambda g: g["denoise"]["inputs"].update(embeds=["encode"]), r"must be \[node id, output number\]"),
        (lambda g: g["encode"]["inputs"].update(prompt=["load", 0, 1]), r"must be \[node id, output number\]"),
        (lambda g: (g.pop("save"), g.pop("purge"), g["decode"]["inputs"].pop("latent")), "has no output node"),
    ],
)
def test_a_wrong_graph_is_a_sentence_and_runs_nothing(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine, change: Any, sentence: str, tmp_path: Path
) -> None:
    change(graph)
    with pytest.raises(GraphError, match=sentence) as caught:
        runner.run(graph)
    assert len(caught.value.problems) == 1
    assert engine.calls == []
    assert not (tmp_path / "out").exists()


def test_all_problems_are_named_at_once(runner: GraphRunner, graph: Prompt) -> None:
    graph["denoise"]["inputs"].update(seed=-1, steps="x")
    graph["load"]["inputs"].pop("dtype")
    with pytest.raises(GraphError) as caught:
        runner.run(graph)
    assert len(caught.value.problems) == 3


def test_a_cycle_is_named(runner: GraphRunner, graph: Prompt) -> None:
    graph["purge"]["inputs"]["anything"] = ["decode", 0]
    with pytest.raises(
        GraphError, match=r"has a cycle: (decode needs purge needs decode|purge needs decode needs purge)"
    ):
        runner.run(graph)


def test_a_long_chain_is_no_problem(runner: GraphRunner, graph: Prompt) -> None:
    for i in range(3000):
        graph[f"p{i}"] = node("PhaseOffloadPurgeCache", anything=[f"p{i - 1}" if i else "denoise", 0])
    graph["decode"]["inputs"]["latent"] = ["p2999", 0]
    assert len(runner.run(graph).executed) == 3005  # p0 is the same as purge


def test_a_wide_graph_of_diamonds_is_quick(runner: GraphRunner, graph: Prompt) -> None:
    """Each node uses the one before twice: 2^60 paths, 60 nodes."""
    previous = "denoise"
    for i in range(60):
        graph[f"d{i}"] = node("PhaseOffloadPurgeCache", anything=[previous, 0])
        graph[f"e{i}"] = node("PhaseOffloadVAEDecode", model=["load", 0], latent=[f"d{i}", 0], tiling=[previous, 0])
        previous = f"d{i}"
    assert runner.check(graph).nodes


@pytest.mark.parametrize("value", ["7", 7.0, True, {"__value__": 7}])
def test_numbers_are_converted_as_comfyui_does(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine, value: Any
) -> None:
    graph["denoise"]["inputs"]["steps"] = value
    runner.run(graph)
    (arguments,) = (arguments for name, arguments in engine.calls if name == "denoise")
    assert arguments["num_inference_steps"] == (1 if value is True else 7)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not json", "isn't JSON"),
        ("[]", "isn't a graph in API format"),
        ("{}", "isn't a graph in API format"),
        ("[" * 100_000, "isn't JSON"),
        ('{"nodes": [], "links": [], "version": 0.4}', r"Export \(API\)"),
    ],
)
def test_a_file_that_is_no_graph(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "graph.json"
    file.write_text(content)
    with pytest.raises(GraphError, match=sentence):
        read_graph(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"gone\.json can't be read: No such file"):
        read_graph(tmp_path / "gone.json")


def test_what_a_client_posts_is_a_graph_too(runner: GraphRunner, graph: Prompt) -> None:
    assert runner.run({"prompt": graph, "client_id": "x"}).executed


# Interrupts and errors


def test_interrupt_at_every_poll_stops_there_and_the_next_run_completes(
    host: LocalHost, tmp_path: Path, graph: Prompt, engine: fake_engine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = [0]
    original = LocalHost.check_interrupt

    def counting(self: LocalHost, stop_at: int = 0) -> None:
        polls[0] += 1
        if polls[0] == target:
            self.interrupt()
        original(self)

    monkeypatch.setattr(LocalHost, "check_interrupt", counting)
    target = 0
    make_runner(host, tmp_path).run(graph)
    total, done = polls[0], []
    assert total >= 6 + 3 * fake_engine.POLLS_PER_PHASE
    for target in range(1, total + 1):
        polls[0] = 0
        runner = make_runner(host, tmp_path)
        with pytest.raises(GraphInterrupted):
            runner.run(graph)
        target = 0
        done.append(len(runner.run(graph).executed))
    assert done == sorted(done, reverse=True)
    assert (done[0], done[-1]) == (6, 1)


def test_errors_hold_no_locals_of_the_failed_run(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine
) -> None:
    engine.fails["decode"] = InputError("no")
    with pytest.raises(InputError) as caught:
        runner.run(graph)
    frames = []
    step = caught.value.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    inside = [frame for frame in frames if frame.f_code.co_name == "_phase"]
    assert inside
    assert all("weights" not in frame.f_locals for frame in inside)


# Pictures


def test_saved_pictures_count_on_and_carry_the_graph(runner: GraphRunner, graph: Prompt, tmp_path: Path) -> None:
    first = runner.run(changed(graph, "denoise", batch=2)).images
    second = runner.run(graph).images
    assert [path.name for path in first + second] == [f"picture_0000{i}_.png" for i in (1, 2, 3)]
    with Image.open(second[0]) as picture:
        assert picture.size == (48, 32)
        assert json.loads(picture.text["prompt"]) == graph


@pytest.mark.parametrize(
    ("prefix", "path"),
    [
        ("a/b", "a/b_00001_.png"),
        ("size %width%x%height%", "size 48x32_00001_.png"),
        ("p%batch_num%", "p0_00001_.png"),
        ("it.is", "it.is_00001_.png"),
    ],
)
def test_prefix_names_the_file(runner: GraphRunner, graph: Prompt, tmp_path: Path, prefix: str, path: str) -> None:
    result = runner.run(changed(graph, "save", filename_prefix=prefix))
    assert result.images == [tmp_path / "out" / path]
    assert (tmp_path / "out" / path).is_file()


@pytest.mark.parametrize("prefix", ["../x", "/etc/x", "a/../../x", "", ".", "..", "a/..", "\0"])
def test_a_prefix_that_leads_out_is_refused(runner: GraphRunner, graph: Prompt, tmp_path: Path, prefix: str) -> None:
    with pytest.raises(InputError, match="must stay inside the output folder"):
        runner.run(changed(graph, "save", filename_prefix=prefix))
    assert list((tmp_path / "out").iterdir()) == []


def test_loaded_and_saved_again_a_picture_is_the_same(runner: GraphRunner, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 4), dtype=np.uint8)
    (tmp_path / "in").mkdir()
    Image.fromarray(pixels, "RGBA").save(tmp_path / "in" / "x.png")
    graph = {
        "1": node("LoadImage", image="x.png"),
        "2": node("SaveImage", images=["1", 0], filename_prefix="y"),
        "3": node("PreviewImage", images=["1", 0]),
    }
    saved, shown = runner.run(graph).images
    assert shown.parent == tmp_path / "out" / "preview"
    np.testing.assert_array_equal(np.asarray(Image.open(saved)), pixels[..., :3])
    image, mask = runner._results[runner._cache_keys(runner.check(graph))["1"]].values
    assert image.shape == (1, 10, 12, 3)
    assert image.dtype == torch.float32
    torch.testing.assert_close(mask[0], 1 - torch.from_numpy(pixels[..., 3].copy()) / 255)
    assert runner.run(graph).executed == []
    Image.fromarray(pixels[::-1], "RGBA").save(tmp_path / "in" / "x.png")
    assert runner.run(graph).executed == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["../x.png", "gone.png", "/etc/passwd", "", "\0"])
def test_a_picture_outside_or_missing(runner: GraphRunner, tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "x.png").touch()
    with pytest.raises(InputError, match=r"refused|There is no picture"):
        runner.run({"1": node("LoadImage", image=name), "2": node("PreviewImage", images=["1", 0])})


# The example workflows


EXAMPLES = ROOT / "example_workflows"
BYPASSED = 4  # the mode of a node that hands its input on, and of which nothing is sent to the server


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.json")))
def test_example_workflows_have_the_inputs_of_the_schemas_and_agree_in_both_formats(name: str) -> None:
    from phase_offload_nodes.graph_runner import SCHEMAS

    editor = json.loads((EXAMPLES / f"{name}.json").read_text("utf-8"))
    twin = read_graph(EXAMPLES / "api" / f"{name}.json")
    links = {link[0]: [str(link[1]), link[2]] for link in editor["links"]}
    for entry in editor["nodes"]:
        if entry["type"] == "MarkdownNote":  # for people; it isn't part of what runs
            continue
        schema = SCHEMAS[entry["type"]]
        assert [(socket["name"], socket["type"]) for socket in entry["inputs"]] == [
            (spec.name, spec.type) for spec in schema.inputs
        ]
        values = list(entry["widgets_values"])
        expected = {}
        for spec in schema.inputs:
            if spec.is_widget:
                expected[spec.name] = values.pop(0)
                if spec.control_after_generate:
                    assert values.pop(0) in ("fixed", "increment", "decrement", "randomize")
        assert values == []
        sockets = {socket["name"]: links[socket["link"]] for socket in entry["inputs"] if socket["link"] is not None}
        if entry["mode"] == BYPASSED:
            (handed_on,) = sockets.values()
            links = {link: handed_on if start[0] == str(entry["id"]) else start for link, start in links.items()}
            assert str(entry["id"]) not in twin
        else:
            assert twin[str(entry["id"])]["class_type"] == entry["type"]
            assert twin[str(entry["id"])]["inputs"] == expected | sockets


def test_example_of_a_lora_says_where_to_put_one_if_there_is_none(runner: GraphRunner) -> None:
    workflow = json.loads((EXAMPLES / "lora.json").read_text("utf-8"))
    (lora,) = [entry for entry in workflow["nodes"] if entry["type"] == "PhaseOffloadLora"]
    name = lora["widgets_values"][0]
    assert runner.state.choices("loras") == [name]
    with pytest.raises(InputError, match="There is no LoRA yet: put a"):
        runner.state.loras.file(name)


def test_example_of_a_video_names_a_model_and_says_that_it_is_not_there(runner: GraphRunner) -> None:
    graph = read_graph(EXAMPLES / "api" / "text_to_video.json")
    with pytest.raises(GraphError, match=r"Wan2.1-T2V-1.3B-Diffusers"):
        runner.check(graph)


@pytest.mark.slow
def test_example_of_a_video_runs_with_a_video_model_and_gives_one_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    shutil.copytree(tiny_model("wan22_5b"), tmp_path / "models" / "wan")
    (tmp_path / "models" / "wan" / "phase_offload.json").write_text('{"num_frames": 5}')
    runner = make_runner(LocalHost([tmp_path / "models"]), tmp_path)
    graph = read_graph(EXAMPLES / "api" / "text_to_video.json")
    graph["1"]["inputs"].update(model="wan", device="cpu")
    graph["3"]["inputs"].update(steps=1, width=64, height=64)
    (file,) = runner.run(graph).images
    with Image.open(file) as clip:
        assert (clip.n_frames, clip.size) == (5, (64, 64))


def test_frames_become_one_animated_file(runner: GraphRunner, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    frames = [Image.new("RGB", (16, 8), colour) for colour in ("red", "green", "blue")]
    frames[0].save(tmp_path / "in" / "three.png", save_all=True, append_images=frames[1:])
    how = {"fps": 8.0, "lossless": True, "quality": 80, "method": "fastest", "filename_prefix": "clip"}
    graph = {"1": node("LoadImage", image="three.png"), "2": node("SaveAnimatedWEBP", images=["1", 0], **how)}
    (file,) = runner.run(graph).images
    assert file.name == "clip_00001_.webp"
    with Image.open(file) as clip:
        assert clip.n_frames == 3
        for number, frame in enumerate(frames):
            clip.seek(number)
            assert clip.convert("RGB").tobytes() == frame.tobytes()
            assert clip.info["duration"] == 125


def test_example_graph_passes_the_checks(
    tmp_path: Path, engine: fake_engine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = fake_engine.model_folder(tmp_path, "demo")
    monkeypatch.setattr("phase_offload_nodes.model_list.demo_model_folder", lambda: demo)
    runner = make_runner(LocalHost(), tmp_path)
    result = runner.run(read_graph(ROOT / "example_workflows" / "api" / "text_to_image.json"))
    assert [path.name for path in result.images] == ["phase-offload_00001_.png"]
