"""The pack inside real ComfyUI servers: registration, the example graph, caches, interrupts, errors and messages."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from host.comfy_server import Graph, Run, Server

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(900)]

LOAD = "PhaseOffloadLoad"
ENCODE = "PhaseOffloadEncodePrompt"
DENOISE = "PhaseOffloadDenoise"
DECODE = "PhaseOffloadVAEDecode"
PURGE = "PhaseOffloadPurgeCache"
PLAN = "PhaseOffloadPlanPreview"
SAVE = "SaveImage"

EVERY_NODE = {LOAD, ENCODE, DENOISE, PURGE, DECODE, SAVE}
AFTER_THE_SEED = {DENOISE, PURGE, DECODE, SAVE}
CACHE_FLAGS = {
    "cache-none": ("--cache-none",),
    "cache-lru": ("--cache-lru", "10"),
    "cache-classic": ("--cache-classic",),
}
STEPS = 4
SETTLE_LIMIT_SECONDS = 60


def node_of(graph: Graph, class_type: str) -> str:
    """The id of the only node of a class."""
    (node,) = (node for node, entry in graph.items() if entry["class_type"] == class_type)
    return node


def with_inputs(graph: Graph, class_type: str, **inputs: Any) -> Graph:
    """A copy of the graph in which the only node of a class has other inputs."""
    changed = copy.deepcopy(graph)
    changed[node_of(changed, class_type)]["inputs"].update(inputs)
    return changed


def classes_that_ran(run: Run, graph: Graph) -> set[str]:
    return {graph[node]["class_type"] for node in run.ran}


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))


def only_picture(run: Run) -> np.ndarray:
    assert run.outcome == "execution_success", run.messages[-3:]
    (picture,) = run.pictures
    return pixels(picture)


@pytest.fixture
def short(graph: Graph) -> Graph:
    """The example graph with few steps."""
    return with_inputs(graph, DENOISE, steps=STEPS)


@pytest.fixture(scope="module", params=CACHE_FLAGS)
def cache_server(request: pytest.FixtureRequest, boot: Callable, checkout: Any) -> Iterator[tuple[str, Server]]:
    """The name of a cache mode, and a server in it, with previews off."""
    flags = CACHE_FLAGS[request.param]
    if not checkout.has_flag(flags[0]):
        pytest.skip(f"ComfyUI {checkout.version} has no {flags[0]}")
    with boot(*flags, "--preview-method", "none") as server:
        yield request.param, server


# Registration


def test_pack_is_imported_without_a_fault(server: Server) -> None:
    from host.comfy_server import PACK_FOLDER

    about_the_pack = [line for line in server.log.splitlines() if PACK_FOLDER in line]
    assert any("seconds" in line for line in about_the_pack), "the import times don't list the pack"
    assert not [line for line in about_the_pack if "IMPORT FAILED" in line or "Cannot import" in line]


def test_object_info_lists_every_node(server: Server) -> None:
    info = server.get("/object_info")
    for node in (LOAD, ENCODE, DENOISE, DECODE, PLAN, PURGE):
        assert info[node]["description"], node
        for kind in ("required", "optional"):
            for name, (_, options) in info[node]["input"].get(kind, {}).items():
                assert options.get("tooltip"), f"{node}.{name} has no tooltip"
    assert list(info[LOAD]["input"]["optional"]) == [
        "device_memory",
        "host_memory",
        "warm",
        "settings",
        "weight_storage",
    ]
    assert info[LOAD]["output"] == ["PHASE_OFFLOAD_MODEL"]
    assert info[ENCODE]["output"] == ["PHASE_OFFLOAD_EMBEDS"]
    assert info[DENOISE]["output"] == ["LATENT"]
    assert info[DECODE]["output"] == ["IMAGE", "AUDIO", "VIDEO"]


def test_models_below_the_diffusers_folder_are_offered(server: Server) -> None:
    options = model_options(server)
    assert "linked/demo" in options


def model_options(server: Server) -> list[str]:
    kind, settings = server.get(f"/object_info/{LOAD}")[LOAD]["input"]["required"]["model"]
    return kind if isinstance(kind, list) else settings["options"]


def test_every_template_of_the_pack_is_a_workflow(server: Server) -> None:
    """The Templates dialog offers each JSON file of example_workflows; a graph in API format there can't be opened."""
    from host.comfy_server import PACK_FOLDER

    names = server.get("/workflow_templates").get(PACK_FOLDER, [])
    assert names
    for name in names:
        template = server.get(f"/api/workflow_templates/{PACK_FOLDER}/{name}.json")
        assert isinstance(template.get("nodes"), list), f"{name} isn't in the UI format"


# The example graph


def test_example_gives_the_picture_of_the_command_line(
    server: Server, short: Graph, run_on_the_command_line: Callable[[Graph], Image.Image]
) -> None:
    graph = with_inputs(short, DENOISE, seed=11)
    np.testing.assert_array_equal(only_picture(server.run(graph)), pixels(run_on_the_command_line(graph)))


def test_same_graph_again_is_cached(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=12)
    first = server.run(graph)
    again = server.run(graph)
    assert classes_that_ran(first, graph) >= AFTER_THE_SEED
    assert again.ran == []
    assert again.outcome == "execution_success"


def test_another_seed_runs_only_denoise_and_below(server: Server, short: Graph) -> None:
    first = server.run(with_inputs(short, DENOISE, seed=13))
    graph = with_inputs(short, DENOISE, seed=14)
    second = server.run(graph)
    assert classes_that_ran(second, graph) == AFTER_THE_SEED
    assert not np.array_equal(only_picture(first), only_picture(second))


def test_batch_gives_one_picture_per_sample(server: Server, short: Graph) -> None:
    run = server.run(with_inputs(short, DENOISE, seed=15, batch=2))
    assert run.outcome == "execution_success"
    first, second = (pixels(picture) for picture in run.pictures)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("flags", [{"unload_models": True}, {"free_memory": True}], ids=lambda flags: next(iter(flags)))
def test_graph_runs_again_after_free(server: Server, short: Graph, flags: dict[str, bool]) -> None:
    graph = with_inputs(short, DENOISE, seed=16)
    before = only_picture(server.run(graph))
    server.free(**flags)
    runs = [server.run(graph), server.run(graph)]  # the flags count after the first at the latest
    ran = set().union(*(classes_that_ran(run, graph) for run in runs))
    assert ran == (EVERY_NODE if "free_memory" in flags else set())
    for run in runs:
        if run.pictures:
            np.testing.assert_array_equal(only_picture(run), before)
    np.testing.assert_array_equal(only_picture(server.run(with_inputs(graph, SAVE, filename_prefix="again"))), before)


def test_purge_changes_no_pixel_and_says_what_it_freed(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=17)
    purge = node_of(graph, PURGE)
    with_purge = server.run(graph)
    (sentence,) = with_purge.history["outputs"][purge]["text"]
    assert sentence.endswith(".")
    graph[node_of(graph, DECODE)]["inputs"]["latent"] = graph.pop(purge)["inputs"]["anything"]
    np.testing.assert_array_equal(only_picture(server.run(graph)), only_picture(with_purge))


def test_plan_preview_shows_a_table_and_a_chart_before_anything_is_loaded(server: Server, graph: Graph) -> None:
    load = node_of(graph, LOAD)
    job = {"prompt": "", "steps": 2, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    asked = {load: graph[load], "plan": {"class_type": PLAN, "inputs": {"model": [load, 0], **job}}}
    run = server.run(asked)
    (table,) = run.history["outputs"]["plan"]["text"]
    assert [line.split()[0] for line in table.splitlines()[2:6]] == ["encode", "denoise", "decode", "all"]
    (chart,) = run.history["outputs"]["plan"]["images"]
    assert chart["type"] == "temp"
    (picture,) = run.pictures  # as /view serves it
    assert picture.size == (1800, 800)


def test_latent_changed_by_a_node_of_the_host_is_decoded_as_changed(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=18)
    plain = only_picture(server.run(graph))
    decode = graph[node_of(graph, DECODE)]["inputs"]
    flip = {"samples": decode["latent"], "flip_method": "y-axis: horizontally"}
    graph["flip"] = {"class_type": "LatentFlip", "inputs": flip}
    decode["latent"] = ["flip", 0]
    flipped = only_picture(server.run(graph)).astype(float)
    mirrored = plain[:, ::-1].astype(float)
    assert np.abs(flipped - mirrored).mean() < np.abs(flipped - plain).mean()


# Memory budgets


def test_graph_saved_before_there_were_budgets_runs(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=19)
    old = copy.deepcopy(graph)
    for name in ("device_memory", "host_memory"):
        del old[node_of(old, LOAD)]["inputs"][name]
    np.testing.assert_array_equal(only_picture(server.run(old)), only_picture(server.run(graph)))


@pytest.mark.parametrize("budget", ["60%", "leave 512 MiB", "1GiB"])
def test_budget_changes_no_pixel(server: Server, short: Graph, budget: str) -> None:
    graph = with_inputs(short, DENOISE, seed=20)
    plain = only_picture(server.run(graph))
    within = with_inputs(graph, LOAD, device_memory=budget, host_memory=budget)
    run = server.run(within)
    assert classes_that_ran(run, within) == EVERY_NODE
    np.testing.assert_array_equal(only_picture(run), plain)


@pytest.mark.parametrize("name", ["device_memory", "host_memory"])
def test_unusable_budget_gives_one_sentence_on_the_load_node(server: Server, short: Graph, name: str) -> None:
    for budget in ("lots", "", "101%"):
        run = server.run(with_inputs(short, LOAD, **{name: budget}))
        assert run.outcome == "execution_error"
        assert run.error["node_type"] == LOAD
        message = run.error["exception_message"].strip()
        assert message.startswith(f"{name}={budget!r} isn't a usable memory budget: give auto")
        assert "\n" not in message


def test_budget_that_cannot_work_gives_one_sentence(server: Server, short: Graph) -> None:
    message = failure_of(server, with_inputs(short, LOAD, device_memory="16KiB"))
    assert "Raise device_memory by" in message
    assert "\n" not in message
    only_picture(server.run(with_inputs(short, DENOISE, seed=24)))


# Cache modes


def test_every_cache_mode_gives_the_same_pictures(cache_server: tuple[str, Server], short: Graph) -> None:
    mode, server = cache_server
    graph = with_inputs(short, DENOISE, seed=21)
    first = server.run(graph)
    again = server.run(graph)
    other_seed = with_inputs(graph, DENOISE, seed=22)
    other = server.run(other_seed)
    picture = only_picture(first)
    if mode == "cache-none":
        assert classes_that_ran(again, graph) == EVERY_NODE
        assert classes_that_ran(other, graph) == EVERY_NODE
        np.testing.assert_array_equal(only_picture(again), picture)
    else:
        assert again.ran == []
        assert classes_that_ran(other, graph) == AFTER_THE_SEED
    assert not np.array_equal(only_picture(other), picture)
    np.testing.assert_array_equal(only_picture(server.run(with_inputs(graph, SAVE, filename_prefix="back"))), picture)


def test_no_previews_if_the_person_wants_none(cache_server: tuple[str, Server], short: Graph) -> None:
    _, server = cache_server
    run = server.run(with_inputs(short, DENOISE, seed=23))
    assert run.outcome == "execution_success"
    assert run.previews == []


# Interrupts and memory


def test_interrupt_in_mid_step_gives_the_memory_back(server: Server, graph: Graph, big_model: Path) -> None:
    big = with_inputs(graph, LOAD, model=big_model.name, dtype="float32")
    only_picture(server.run(with_inputs(graph, DENOISE, seed=31, steps=STEPS)))  # so that libraries are loaded
    before = server.memory_bytes()
    long = with_inputs(big, DENOISE, seed=32, steps=1000)
    denoise = node_of(long, DENOISE)
    in_the_middle = []

    def interrupt_at_a_step(message: dict[str, Any]) -> None:
        data = message["data"]
        if in_the_middle or message["type"] != "progress" or data["node"] != denoise:
            return
        if data["max"] == 1000 and data["value"] >= 2:
            in_the_middle.append(server.memory_bytes())
            server.interrupt()

    run = server.run(long, on_message=interrupt_at_a_step)
    assert run.outcome == "execution_interrupted"
    assert (1000, 1000) not in run.progress_of(denoise)
    half_of_the_weights = weight_bytes(big_model)  # in float32 they are twice their files
    assert in_the_middle[0] > before + half_of_the_weights, "the weights weren't there to be given back"
    assert settles_below(server, before + half_of_the_weights)
    only_picture(server.run(with_inputs(big, DENOISE, seed=33, steps=1)))


def test_finished_prompts_leave_no_weights_behind(server: Server, graph: Graph, big_model: Path) -> None:
    only_picture(server.run(with_inputs(graph, DENOISE, seed=41, steps=STEPS)))  # so that libraries are loaded
    before = server.memory_bytes()
    big = with_inputs(graph, LOAD, model=big_model.name, dtype="float32")
    for seed in (42, 43, 44):
        only_picture(server.run(with_inputs(big, DENOISE, seed=seed, steps=1)))
    assert settles_below(server, before + weight_bytes(big_model))  # half of the weights in float32


@pytest.fixture
def big_model(server: Server, demo_model: Path, tmp_path: Path) -> Iterator[Path]:
    """The demo model with a denoiser of 100 MB in float32, so that a copy left behind can't be overlooked."""
    import torch
    from diffusers import FluxTransformer2DModel

    folder = server.diffusers_folder / f"big-{tmp_path.name}"
    shutil.copytree(demo_model, folder)
    config = FluxTransformer2DModel.load_config(folder / "transformer")
    layers = {"num_layers": 10 * config["num_layers"], "num_single_layers": 10 * config["num_single_layers"]}
    shutil.rmtree(folder / "transformer")
    torch.manual_seed(0)
    FluxTransformer2DModel.from_config(config | layers).to(torch.bfloat16).save_pretrained(folder / "transformer")
    yield folder
    shutil.rmtree(folder)


def settles_below(server: Server, limit: int) -> bool:
    """Whether the server's memory goes below a limit. The host collects what a failed run left within ten seconds."""
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    while server.memory_bytes() > limit:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.rglob("*.safetensors"))


# Errors


def test_unknown_model_name_is_refused_at_submission(server: Server, short: Graph) -> None:
    from host.comfy_server import GraphRefusedError

    graph = with_inputs(short, LOAD, model="not-there")
    with pytest.raises(GraphRefusedError) as refusal:
        server.run(graph)
    errors = refusal.value.details["node_errors"][node_of(graph, LOAD)]["errors"]
    assert any("not-there" in error["details"] for error in errors)


def test_path_as_a_model_name_is_refused_at_submission(server: Server, short: Graph) -> None:
    from host.comfy_server import GraphRefusedError

    for name in ("../diffusers/linked/demo", str(server.diffusers_folder / "linked" / "demo")):
        with pytest.raises(GraphRefusedError):
            server.run(with_inputs(short, LOAD, model=name))


def test_broken_model_gives_one_sentence(server: Server, short: Graph, copied_model: Path) -> None:
    weights = largest_weight_file(copied_model)
    weights.write_bytes(weights.read_bytes()[:-1000])
    graph = with_inputs(short, LOAD, model=copied_model.name)
    message = failure_of(server, graph)
    assert "\n" not in message
    assert message.endswith(".")
    only_picture(server.run(with_inputs(short, DENOISE, seed=51)))


def failure_of(server: Server, graph: Graph) -> str:
    """What the person reads about a graph that fails: at submission or while it runs."""
    from host.comfy_server import GraphRefusedError

    try:
        run = server.run(graph)
    except GraphRefusedError as refusal:
        ((error,),) = (node["errors"] for node in refusal.details["node_errors"].values())
        return error["details"].strip()
    assert run.outcome == "execution_error"
    return run.error["exception_message"].strip()


def test_unusable_size_gives_one_sentence_and_no_paths(server: Server, short: Graph) -> None:
    """The host sends str() of every input of a failed node, handle and embeds too, and keeps it in its history."""
    run = server.run(with_inputs(short, DENOISE, seed=52, width=72))
    assert run.outcome == "execution_error"
    assert run.error["node_type"] == DENOISE
    message = run.error["exception_message"].strip()
    assert "72" in message
    assert "\n" not in message
    shown = str(run.error["current_inputs"])
    assert str(server.base) not in shown
    assert "offload_core" not in shown


@pytest.fixture
def copied_model(server: Server, demo_model: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the demo model in the server's models folder, under a name of its own, that a test may change."""
    folder = server.diffusers_folder / f"copy-{tmp_path.name}"
    shutil.copytree(demo_model, folder)
    yield folder
    shutil.rmtree(folder)


def largest_weight_file(model: Path) -> Path:
    return max(model.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


# Messages


def test_progress_counts_the_steps(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=61)
    run = server.run(graph)
    steps = [value for value, most in run.progress_of(node_of(graph, DENOISE)) if most == STEPS]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert run.progress_of(node_of(graph, DENOISE))[-1] == (STEPS, STEPS)


def test_loading_in_another_format_is_complete_once(server: Server, short: Graph) -> None:
    """The bytes counted and their total must be of one kind: those of the files, or those in memory."""
    graph = with_inputs(short, LOAD, dtype="float32")
    run = server.run(with_inputs(graph, DENOISE, seed=63))
    loading = [(done, most) for done, most in run.progress_of(node_of(graph, DENOISE)) if most > STEPS]
    assert len({most for _, most in loading}) == 1
    assert [done for done, most in loading if done == most] == [loading[-1][0]]


def test_previews_arrive_for_denoise(server: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=62)
    run = server.run(graph)
    assert run.previews
    assert {node for node, _ in run.previews} <= {node_of(graph, DENOISE), None}
    for _, picture in run.previews:
        assert min(picture.size) > 8


def test_changed_model_files_make_load_run_again(server: Server, short: Graph, copied_model: Path) -> None:
    graph = with_inputs(short, LOAD, model=copied_model.name)
    graph = with_inputs(graph, DENOISE, seed=71)
    before = only_picture(server.run(graph))
    assert server.run(graph).ran == []
    weights = largest_weight_file(copied_model)
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    run = server.run(graph)
    assert LOAD in classes_that_ran(run, graph)
    assert not np.array_equal(only_picture(run), before)
