"""What tests of nodes share: a host that remembers, graphs of tiny models, and what each node of a run gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core
from offload_core.errors import TraceError
from phase_offload_nodes.calls import run_node
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.results import NodeResult
from staging import tiny_model

Prompt = dict[str, Any]
SIZE = {"width": 64, "height": 48}


class SpokenHost(LocalHost):
    """Remembers what nodes say. Its models are the tiny ones of these names."""

    def __init__(self, root: Path, *names: str, folders: Mapping[str, Sequence[Path]] | None = None) -> None:
        self.said: dict[str | None, str] = {}
        root.mkdir(exist_ok=True)
        for name in names:
            (root / name).symlink_to(tiny_model(name), target_is_directory=True)
        super().__init__([root], say=self.said.__setitem__, folders=folders)


def leave_out_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases run without looking ahead, which takes most of the time of a tiny model's run."""

    def no_plan(*_: Any, **__: Any) -> None:
        raise TraceError("this test needs no plan")

    for name in ("foresee_encode", "foresee_denoise", "foresee_decode"):
        monkeypatch.setitem(vars(offload_core), name, no_plan)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def graph_of(model: str, **denoise: Any) -> Prompt:
    """Load to preview, as short as it can be."""
    denoise = {"seed": 7, "steps": 2, "guidance": 5.0, **SIZE, "batch": 1} | denoise
    return {
        "load": node("PhaseOffloadLoad", model=model, dtype="auto", device="cpu"),
        "encode": node("PhaseOffloadEncodePrompt", model=["load", 0], prompt="a red fox", negative_prompt="blurry"),
        "denoise": node("PhaseOffloadDenoise", model=["load", 0], embeds=["encode", 0], **denoise),
        "decode": node("PhaseOffloadVAEDecode", model=["load", 0], latent=["denoise", 0], tiling="auto"),
        "preview": node("PreviewImage", images=["decode", 0]),
    }


def results_of(runner: GraphRunner, graph: Prompt) -> dict[str, NodeResult]:
    """Runs the graph and gives what each node gave."""
    runner.run(graph)
    return {name: runner._results[key] for name, key in runner._cache_keys(runner.check(graph)).items()}


def call(runner: GraphRunner, class_type: str, **inputs: Any) -> tuple[Any, ...]:
    """Runs one node on values, as a host does."""
    with torch.inference_mode():
        return run_node(class_type, runner.state, runner.host.observer("node"), inputs).values
