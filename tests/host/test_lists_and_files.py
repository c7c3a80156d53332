"""Lists, settings, reports and saved files inside real ComfyUI servers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from host.comfy_server import Graph, Run, Server

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = ("a red circle", "a blue square")


@pytest.fixture
def short(graph: Graph) -> Graph:
    """The example graph with few steps and a fixed seed."""
    names = {entry["class_type"]: node for node, entry in graph.items()}
    graph[names["PhaseOffloadDenoise"]]["inputs"].update(steps=2, seed=3)
    return graph


def node_of(graph: Graph, class_type: str) -> str:
    (node,) = (node for node, entry in graph.items() if entry["class_type"] == class_type)
    return node


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def saved(run: Run) -> list[np.ndarray]:
    """The pictures that the graph saved, without those that a node only shows."""
    assert run.outcome == "execution_success", run.messages[-3:]
    return [np.asarray(picture.convert("RGB")) for picture in run.pictures if picture.size != (1800, 800)]


def test_a_list_of_prompts_goes_through_each_phase_once(server: Server, short: Graph) -> None:
    encode, decode = node_of(short, "PhaseOffloadEncodePrompt"), node_of(short, "PhaseOffloadVAEDecode")
    graph = copy.deepcopy(short)
    graph["lines"] = node("PhaseOffloadPromptLines", lines="\n".join(PROMPTS))
    graph[encode]["inputs"]["prompt"] = ["lines", 0]
    graph["report"] = node("PhaseOffloadReport", anything=[decode, 0])
    run = server.run(graph)
    pictures = saved(run)
    (table,) = run.history["outputs"]["report"]["text"]
    assert [line.split()[0] for line in table.splitlines()[2:6]] == ["encode", "denoise", "decode", "all"]
    assert len(pictures) == 2
    for prompt, picture in zip(PROMPTS, pictures, strict=True):
        short[encode]["inputs"]["prompt"] = prompt
        (single,) = saved(server.run(short))
        np.testing.assert_array_equal(picture, single)


def test_what_one_prompt_saved_the_next_one_loads(server: Server, short: Graph) -> None:
    encode, denoise = node_of(short, "PhaseOffloadEncodePrompt"), node_of(short, "PhaseOffloadDenoise")
    graph = copy.deepcopy(short)
    graph["embeds"] = node("PhaseOffloadSaveEmbeds", embeds=[encode, 0], filename_prefix="a/fox")
    graph["latents"] = node("PhaseOffloadSaveLatents", latent=[denoise, 0], filename_prefix="fox")
    run = server.run(graph)
    (picture,) = saved(run)
    (embeds,), (latents,) = (run.history["outputs"][name]["text"] for name in ("embeds", "latents"))
    assert embeds == "a/fox_00001_.embeds.safetensors [output]"
    for node_id, loader in (
        (encode, node("PhaseOffloadLoadEmbeds", file=embeds)),
        (denoise, node("PhaseOffloadLoadLatents", file=latents)),
    ):
        (again,) = saved(server.run(short | {node_id: loader}))
        np.testing.assert_array_equal(again, picture)


def test_settings_and_another_scheduler_reach_the_phases(server: Server, short: Graph) -> None:
    (whole,) = saved(server.run(short))
    defaults = {
        name: options["default"]
        for name, (_, options) in server.get("/object_info/PhaseOffloadSettings")["PhaseOffloadSettings"]["input"][
            "required"
        ].items()
    }
    graph = copy.deepcopy(short)
    graph["settings"] = node("PhaseOffloadSettings", **defaults | {"preset": "least_device_memory"})
    graph[node_of(graph, "PhaseOffloadLoad")]["inputs"]["settings"] = ["settings", 0]
    graph[node_of(graph, "PhaseOffloadVAEDecode")]["inputs"]["tiling"] = "off"
    (same,) = saved(server.run(graph))
    np.testing.assert_array_equal(same, whole)
    graph[node_of(graph, "PhaseOffloadDenoise")]["inputs"]["scheduler"] = "DDIMScheduler"
    run = server.run(graph)
    assert run.outcome == "execution_error"
    assert "'DDIMScheduler' doesn't fit this model" in run.error["exception_message"]


def test_loras_of_the_hosts_folder_are_offered(server: Server) -> None:
    def offered() -> list[str]:
        kind, options = server.get("/object_info/PhaseOffloadLora")["PhaseOffloadLora"]["input"]["required"]["lora"]
        return kind if isinstance(kind, list) else options["options"]

    folder = server.diffusers_folder.parent / "loras"
    folder.mkdir(exist_ok=True)
    (folder / "style.safetensors").touch()
    assert "style.safetensors" in offered()
    (folder / "style.safetensors").unlink()
