"""Embeds and ComfyUI's CONDITIONING: its encoders mean the same as the model's own, and its sockets carry tensors."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from host.comfy_server import Checkout, Graph, Server

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).absolute().parent
ROUNDING = 2e-6  # float32, of the largest value: the same numbers, added up in another order


def test_encoders_of_comfyui_give_what_the_model_s_own_give(checkout: Checkout) -> None:
    """For SD 1.5, SDXL, FLUX.1 and Wan, on tiny weights: layer, norm, padding, mask and pooled output are the same."""
    done = subprocess.run(
        [checkout.python, str(HERE / "conditioning_contract.py")],
        cwd=checkout.directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["SD 1.5", "SDXL", "SDXL, pooled", "FLUX.1", "Wan"]
    assert max(found.values()) < ROUNDING


def test_a_prompt_that_goes_through_conditioning_gives_the_same_picture(server: Server, graph: Graph) -> None:
    (encode,) = (node for node, entry in graph.items() if entry["class_type"] == "PhaseOffloadEncodePrompt")
    (denoise,) = (node for node, entry in graph.items() if entry["class_type"] == "PhaseOffloadDenoise")
    graph[denoise]["inputs"] |= {"steps": 2, "seed": 41}
    straight = picture(server, graph)
    around = copy.deepcopy(graph)
    model = graph[encode]["inputs"]["model"]
    around["to"] = {
        "class_type": "PhaseOffloadEmbedsToConditioning",
        "inputs": {"model": model, "embeds": [encode, 0]},
    }
    around["from"] = {
        "class_type": "PhaseOffloadConditioningToEmbeds",
        "inputs": {"model": model, "positive": ["to", 0], "negative": ["to", 1]},
    }
    around[denoise]["inputs"]["embeds"] = ["from", 0]
    np.testing.assert_array_equal(picture(server, around), straight)


def test_a_core_node_takes_the_conditioning_and_what_it_adds_is_refused_by_name(server: Server, graph: Graph) -> None:
    (encode,) = (node for node, entry in graph.items() if entry["class_type"] == "PhaseOffloadEncodePrompt")
    (denoise,) = (node for node, entry in graph.items() if entry["class_type"] == "PhaseOffloadDenoise")
    model = graph[encode]["inputs"]["model"]
    graph["to"] = {"class_type": "PhaseOffloadEmbedsToConditioning", "inputs": {"model": model, "embeds": [encode, 0]}}
    area = {"conditioning": ["to", 0], "width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}
    graph["area"] = {"class_type": "ConditioningSetArea", "inputs": area}
    graph["from"] = {
        "class_type": "PhaseOffloadConditioningToEmbeds",
        "inputs": {"model": model, "positive": ["area", 0], "negative": ["to", 1]},
    }
    graph[denoise]["inputs"]["embeds"] = ["from", 0]
    run = server.run(graph)
    assert run.outcome == "execution_error"
    assert "carries area" in str(run.messages[-3:])


def test_object_info_tells_how_long_it_takes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints it, for docs/comfyui.md: ComfyUI makes all schemas anew for each opened page."""
    seconds = {"all": measured(server, "/object_info"), "ours": 0.0}
    ours = [name for name in server.get("/object_info") if name.startswith("PhaseOffload")]
    seconds["ours"] = sum(measured(server, f"/object_info/{name}") for name in ours)
    with capsys.disabled():
        print(f"\n/object_info: {seconds['all'] * 1e3:.0f} ms; our {len(ours)} nodes: {seconds['ours'] * 1e3:.0f} ms")
    assert len(ours) >= 18


def measured(server: Server, path: str) -> float:
    """Seconds of the fastest of five."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        server.get(path)
        found.append(time.perf_counter() - begin)
    return min(found)


def picture(server: Server, graph: Graph) -> Any:
    run = server.run(graph)
    assert run.outcome == "execution_success", run.messages[-3:]
    (made,) = run.pictures
    return np.asarray(made.convert("RGB"))
