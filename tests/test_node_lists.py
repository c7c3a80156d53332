"""Lists of prompts, embeds and seeds go through one phase at a time, and plain graphs are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fake_engine
from node_graphs import Prompt, SpokenHost, call, graph_of, leave_out_plans, node, results_of
from offload_core.errors import InputError
from phase_offload_nodes.calls import jobs_of, run_node_on_lists
from phase_offload_nodes.catalog import NODES
from phase_offload_nodes.graph_runner import GraphRunner, Several


@pytest.fixture
def runner(tmp_path: Path) -> GraphRunner:
    return GraphRunner(SpokenHost(tmp_path / "models", "sd15"), output_dir=tmp_path / "out")


def listed(graph: Prompt, lines: str) -> Prompt:
    graph["lines"] = node("PhaseOffloadPromptLines", lines=lines)
    graph["encode"]["inputs"]["prompt"] = ["lines", 0]
    return graph


def phases(runner: GraphRunner) -> list[str]:
    return [phase.name for phase in runner.state.this_run().phases]


def test_a_list_of_prompts_goes_through_one_phase_at_a_time(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_plans(monkeypatch)
    graph = listed(graph_of("sd15", steps=1), "a red fox\n\n  a boat  \n")
    graph["report"] = node("PhaseOffloadReport", anything=["decode", 0])
    done = runner.run(graph)
    assert phases(runner) == ["encode", "denoise", "decode"]
    images = runner._results[runner._cache_keys(runner.check(graph))["decode"]].values[0]
    assert isinstance(images, Several)
    assert [path.name for path in done.images[:2]] == ["preview_00001_.png", "preview_00002_.png"]
    assert len(done.ui["report"]["text"]) == 1
    for prompt, image in zip(("a red fox", "a boat"), images, strict=True):
        single = graph_of("sd15", steps=1)
        single["encode"]["inputs"]["prompt"] = prompt
        assert torch.equal(results_of(runner, single)["decode"].values[0], image)


def test_a_list_of_one_is_a_plain_graph(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.install(monkeypatch)
    plain = results_of(runner, graph_of("sd15"))
    one = results_of(runner, listed(graph_of("sd15"), "a red fox"))
    assert type(one["decode"].values[0]) is torch.Tensor
    assert torch.equal(one["decode"].values[0], plain["decode"].values[0])


@pytest.mark.slow
def test_plans_of_all_jobs_are_asked_and_the_widest_is_followed(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second job is the larger one; what it takes is kept for both, and nothing is said to have been foretold."""
    import offload_core

    given: list[Any] = []
    original = offload_core.denoise_many
    monkeypatch.setitem(
        vars(offload_core), "denoise_many", lambda *a, **k: given.append(k["plan"]) or original(*a, **k)
    )
    (model,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    (embeds,) = call(runner, "PhaseOffloadEncodePrompt", model=model, prompt="a", negative_prompt="")
    sizes = {"width": [32, 96], "height": [32, 96]}
    once = {"model": model, "embeds": embeds, "seed": 1, "steps": 1, "guidance": 1.0, "batch": 1}
    inputs = {name: [value] for name, value in once.items()} | sizes
    (latents,) = run_node_on_lists("PhaseOffloadDenoise", runner.state, runner.host.observer("node"), inputs).values
    assert [latent["samples"].shape[-1] for latent in latents] == [8, 24]
    wide = offload_core.foresee_denoise(
        model, embeds, seed=1, num_inference_steps=1, guidance_scale=1.0, width=96, height=96
    )
    assert given[0].phases[0].activation_peak_bytes == wide.plan.phases[0].activation_peak_bytes
    assert runner.state.report.phases[-1].predicted == {}


def test_lists_are_paired_as_comfyui_pairs_them() -> None:
    assert jobs_of({"a": [1, 2, 3], "b": ["x", "y"], "c": [0]}) == [
        {"a": 1, "b": "x", "c": 0},
        {"a": 2, "b": "y", "c": 0},
        {"a": 3, "b": "y", "c": 0},
    ]
    assert jobs_of({}) == [{}]
    with pytest.raises(InputError, match="The input 'a' is an empty list"):
        jobs_of({"a": [], "b": [1]})


def test_a_node_that_takes_no_lists_runs_for_each_value(runner: GraphRunner) -> None:
    graph = {
        "lines": node("PhaseOffloadPromptLines", lines="one\ntwo"),
        "purge": node("PhaseOffloadPurgeCache", anything=["lines", 0]),
    }
    results = results_of(runner, graph)
    assert results["purge"].values[0] == Several(("one", "two"))
    assert len(results["purge"].ui["text"]) == 2


def test_no_line_is_a_sentence(runner: GraphRunner) -> None:
    with pytest.raises(InputError, match="Prompt Lines has no prompt"):
        call(runner, "PhaseOffloadPromptLines", lines=" \n\n")


def test_nodes_that_take_lists_know_how_to_work_on_several() -> None:
    """All but the report, which tells the same of all."""
    takes = {name for name, each in NODES.items() if each.schema.takes_lists}
    assert takes - {name for name, each in NODES.items() if each.run_many} == {"PhaseOffloadReport"}
    for name in takes - {"PhaseOffloadReport"}:
        assert all(output.is_list for output in NODES[name].schema.outputs)
