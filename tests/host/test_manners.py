"""How the pack behaves in real ComfyUI servers: shared memory, caches, interrupts, long runs, and other packs."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from host.comfy_server import Checkout, Graph, Run, Server

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).absolute().parent
REPOSITORY = HERE.parents[1]
NEIGHBOUR = HERE / "neighbour_pack"

LOAD = "PhaseOffloadLoad"
ENCODE = "PhaseOffloadEncodePrompt"
DENOISE = "PhaseOffloadDenoise"
DECODE = "PhaseOffloadVAEDecode"
SAVE = "SaveImage"

INTERRUPTS = 20
PROMPTS = 50
WARM_UP = 10
SLOPE_LIMIT_BYTES = 100_000  # a prompt; its history entry, which ComfyUI keeps, is some kilobytes
SETTLE_LIMIT_SECONDS = 60
# All weights of the demo model are more, in the format of its files. What is left are embeds, latents, pictures, and
# tables that libraries keep.
LEFT_LIMIT_BYTES = 2 << 20
CACHES = {
    "default": (),
    "cache-classic": ("--cache-classic",),
    "cache-lru": ("--cache-lru", "10"),
    "cache-none": ("--cache-none",),
}


def node_of(graph: Graph, class_type: str) -> str:
    """The id of the only node of a class."""
    (node,) = (node for node, entry in graph.items() if entry["class_type"] == class_type)
    return node


def with_inputs(graph: Graph, class_type: str, **inputs: Any) -> Graph:
    """A copy of the graph in which the only node of a class has other inputs."""
    changed = copy.deepcopy(graph)
    changed[node_of(changed, class_type)]["inputs"].update(inputs)
    return changed


def picture_of(run: Run) -> np.ndarray:
    assert run.outcome == "execution_success", run.messages[-3:]
    (picture,) = run.pictures
    return np.asarray(picture.convert("RGB"))


def state_of(server: Server) -> dict[str, Any]:
    return server.get("/neighbour/state")


def settles(server: Server, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state of the server as soon as something holds of it, or after a minute. ComfyUI collects garbage itself."""
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    while not holds(state := state_of(server)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return state


def no_weights_are_left(server: Server) -> bool:
    state = settles(server, lambda state: state["tensor_bytes"] < LEFT_LIMIT_BYTES)
    return state["tensor_bytes"] < LEFT_LIMIT_BYTES and state["listed"] == []


@pytest.fixture(scope="module")
def shared(boot: Callable) -> Iterator[Server]:
    """A server with another pack beside ours."""
    with boot("--preview-method", "none", packs=(NEIGHBOUR,)) as server:
        yield server


@pytest.fixture
def short(graph: Graph) -> Graph:
    """The example graph with two steps, in float32: twice the bytes of its files."""
    return with_inputs(with_inputs(graph, DENOISE, steps=2), LOAD, dtype="float32")


# Memory shared with ComfyUI's own models


def test_comfyuis_models_and_ours_make_room_for_each_other(checkout: Checkout, tmp_path: Path) -> None:
    """Its own list of models on a pretend GPU of 10 GB, of which its model has 8."""
    for name, folder in (("offload_core", "offload_core"), ("phase_offload_nodes", "nodes")):
        (tmp_path / name).symlink_to(REPOSITORY / folder, target_is_directory=True)
    done = subprocess.run(
        [checkout.python, str(HERE / "memory_contract.py")],
        cwd=checkout.directory,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("pins") in (None, False)  # there is nothing to pin for
    assert found == {
        "loaded at first": 8.0,
        "counts as free": 10.0,
        "left beside a phase": 5.5,  # 3 + 1 + 0.5 were asked for, and 2 were free
        "listed while it runs": ["Module", "PhaseOffload"],
        "listed after pressure in the middle": ["Module", "Module", "PhaseOffload"],
        "unloaded for it": True,
        "listed after out of memory": [],
        "listed afterwards": [],
        "listed with copies": ["PhaseOffload"],
        "copies after our own phase": 2.0,
        "copies beside a model that fits": 2.0,
        "copies under pressure": 0.0,
        "copies after everything was unloaded": 0.0,
        "listed after everything was unloaded": [],
        "listed again at the next use": ["PhaseOffload"],
    }


def test_out_of_memory_in_another_node_leaves_ours_as_they_were(shared: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=101)
    before = picture_of(shared.run(graph))
    failing = copy.deepcopy(with_inputs(graph, DENOISE, seed=102))
    failing["oom"] = {"class_type": "NeighbourRunsOutOfMemory", "inputs": {"anything": [node_of(graph, DENOISE), 0]}}
    run = shared.run(failing)
    assert run.outcome == "execution_error"
    assert run.error["node_type"] == "NeighbourRunsOutOfMemory"
    assert no_weights_are_left(shared)
    np.testing.assert_array_equal(picture_of(shared.run(with_inputs(graph, SAVE, filename_prefix="after"))), before)


def test_everything_is_back_after_free_and_the_next_prompt_gives_the_same(shared: Server, short: Graph) -> None:
    graph = with_inputs(short, DENOISE, seed=103)
    before = picture_of(shared.run(graph))
    shared.free(unload_models=True, free_memory=True)
    assert no_weights_are_left(shared)
    runs = [shared.run(with_inputs(graph, SAVE, filename_prefix=name)) for name in ("one", "two")]
    for run in runs:
        np.testing.assert_array_equal(picture_of(run), before)


# Caches


@pytest.mark.parametrize("mode", CACHES)
def test_no_cache_of_results_holds_weights(mode: str, boot: Callable, checkout: Checkout, short: Graph) -> None:
    """At each event of a server's day: a prompt, the same again, another seed, another model, an idle server."""
    if CACHES[mode] and not checkout.has_flag(CACHES[mode][0]):
        pytest.skip(f"ComfyUI {checkout.version} has no {CACHES[mode][0]}")
    with boot(*CACHES[mode], "--preview-method", "none", packs=(NEIGHBOUR,)) as server:
        graph = with_inputs(short, DENOISE, seed=1)
        first = server.run(graph)
        picture = picture_of(first)
        assert no_weights_are_left(server)
        again = server.run(graph)
        assert (again.ran == []) == (mode != "cache-none")
        assert no_weights_are_left(server)
        for change in ({"seed": 2}, {"seed": 3}):
            picture_of(server.run(with_inputs(graph, DENOISE, **change)))
            assert no_weights_are_left(server)
        picture_of(server.run(with_inputs(graph, LOAD, model="linked/demo")))
        assert no_weights_are_left(server)
        back = server.run(with_inputs(graph, SAVE, filename_prefix="back"))
        np.testing.assert_array_equal(picture_of(back), picture)
        server.free(unload_models=True)
        assert no_weights_are_left(server)


def test_without_smart_memory_the_picture_is_the_same(boot: Callable, shared: Server, short: Graph) -> None:
    """ComfyUI unloads everything after each prompt then. (Its flags for VRAM can't be given beside --cpu.)"""
    graph = with_inputs(short, DENOISE, seed=104)
    expected = picture_of(shared.run(graph))
    with boot("--disable-smart-memory", "--preview-method", "none", packs=(NEIGHBOUR,)) as server:
        np.testing.assert_array_equal(picture_of(server.run(graph)), expected)
        assert no_weights_are_left(server)


def test_models_of_extra_model_paths_are_offered_and_run(
    boot: Callable, short: Graph, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "elsewhere").symlink_to(demo_model, target_is_directory=True)
    config = tmp_path / "paths.yaml"
    config.write_text(f"mine:\n  base_path: {tmp_path}\n  diffusers: others\n")
    with boot("--extra-model-paths-config", str(config), "--preview-method", "none") as server:
        picture_of(server.run(with_inputs(short, LOAD, model="elsewhere")))


# Interrupts


def test_interrupts_at_random_moments_give_everything_back(shared: Server, short: Graph) -> None:
    started = time.monotonic()
    picture_of(shared.run(with_inputs(short, DENOISE, seed=200)))
    length = time.monotonic() - started
    moments = random.Random(0)
    outcomes = []
    for number in range(INTERRUPTS):
        graph = with_inputs(short, DENOISE, seed=201 + number)
        graph = with_inputs(graph, ENCODE, prompt=f"a red circle, number {number}")
        timer = threading.Timer(moments.uniform(0, 0.9 * length), shared.interrupt)
        timer.start()
        outcomes.append(shared.run(graph).outcome)
        timer.join()
        assert no_weights_are_left(shared), (number, outcomes)
    assert set(outcomes) <= {"execution_interrupted", "execution_success"}
    assert outcomes.count("execution_interrupted") > INTERRUPTS // 4
    picture_of(shared.run(with_inputs(short, DENOISE, seed=300)))


# Long runs


def test_many_prompts_leave_no_memory_thread_or_file_behind(shared: Server, short: Graph) -> None:
    memory, states = [], []
    for number in range(PROMPTS):
        graph = with_inputs(short, DENOISE, seed=400 + number)
        graph = with_inputs(graph, ENCODE, prompt=f"a {'large ' * (number % 3)}red circle, number {number}")
        picture_of(shared.run(graph))
        memory.append(shared.memory_bytes())
        if number in (WARM_UP, PROMPTS - 1):
            states.append(state_of(shared))
    slope = np.polyfit(np.arange(WARM_UP, PROMPTS), memory[WARM_UP:], 1)[0]
    assert slope < SLOPE_LIMIT_BYTES, memory
    first, last = states
    assert last["threads"] == first["threads"]
    for count in ("native threads", "files"):
        assert last[count] <= first[count], count
    assert last["listed"] == []
    assert last["tensor_bytes"] < LEFT_LIMIT_BYTES


# Other packs


def test_a_node_of_another_pack_in_the_graph_finds_everything_as_without_us(shared: Server, short: Graph) -> None:
    def computes(anything: Any, again: int) -> dict[str, Any]:
        return {"class_type": "NeighbourComputes", "inputs": {"anything": anything, "again": again}}

    empty = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    alone = shared.run({"1": empty, "2": computes(["1", 0], 1)}).history["outputs"]["2"]["text"]
    graph = with_inputs(short, DENOISE, seed=105)
    expected = picture_of(shared.run(graph))
    graph["between"] = computes([node_of(graph, DENOISE), 0], 2)
    graph[node_of(graph, DECODE)]["inputs"]["latent"] = ["between", 0]
    run = shared.run(graph)
    np.testing.assert_array_equal(picture_of(run), expected)
    assert run.history["outputs"]["between"]["text"] == alone


def test_no_function_or_class_of_torch_or_comfyui_is_another_afterwards(shared: Server, short: Graph) -> None:
    picture_of(shared.run(with_inputs(short, DENOISE, seed=106)))
    assert shared.get("/neighbour/changed") == []
