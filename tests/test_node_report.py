"""Phase Report: the phases of this run of the graph alone, as a table, a chart and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fake_engine
from node_graphs import Prompt, SpokenHost, graph_of, node, results_of
from offload_core.errors import InputError
from offload_core.report import PhaseReport
from offload_core.report_chart import MOST_PHASES, report_figure, report_picture
from phase_offload_nodes.graph_runner import GraphRunner

FORETOLD = {"device_peak_bytes": 3e9, "streamed_bytes": 0.0, "seconds": 20.0, "step_s": 1.0}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Engine:
    monkeypatch.setattr("phase_offload_nodes.state.PackState.fingerprint", lambda self, name: f"files of {name}")
    return fake_engine.install(monkeypatch)


@pytest.fixture
def runner(tmp_path: Path, engine: fake_engine.Engine) -> GraphRunner:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    return GraphRunner(SpokenHost(tmp_path / "models"), output_dir=tmp_path / "out")


@pytest.fixture
def graph() -> Prompt:
    return graph_of("tiny") | {"report": node("PhaseOffloadReport", anything=["decode", 0])}


def names(text: str) -> list[str]:
    return [phase["name"] for phase in json.loads(text)["phases"]]


def test_a_report_tells_of_the_phases_of_its_own_run(runner: GraphRunner, graph: Prompt) -> None:
    table, chart, text = results_of(runner, graph)["report"].values
    assert names(text) == ["encode", "denoise", "decode"]
    assert [line.split()[0] for line in table.splitlines()[2:6]] == ["encode", "denoise", "decode", "all"]
    assert chart.shape == (1, 800, 1800, 3)
    graph["denoise"]["inputs"]["seed"] = 8
    assert names(results_of(runner, graph)["report"].values[2]) == ["denoise", "decode"]  # the prompt was there already
    runner.forget()
    assert names(results_of(runner, graph)["report"].values[2]) == ["encode", "denoise", "decode"]


def test_a_run_that_failed_is_not_told_by_the_next(
    runner: GraphRunner, graph: Prompt, engine: fake_engine.Engine
) -> None:
    engine.fails["decode"] = InputError("no")
    with pytest.raises(InputError, match="no"):
        runner.run(graph)
    engine.fails.clear()
    assert names(results_of(runner, graph)["report"].values[2]) == ["decode"]


def test_a_run_without_phases_is_a_sentence(runner: GraphRunner) -> None:
    load = node("PhaseOffloadLoad", model="tiny", dtype="auto", device="auto")
    graph = {"load": load, "report": node("PhaseOffloadReport", anything=["load", 0])}
    table, chart, text = results_of(runner, graph)["report"].values
    assert table.startswith("No phase has run in this run of the graph")
    assert names(text) == []
    assert chart.shape == (1, 800, 1800, 3)


def test_table_and_chart_are_shown_on_the_node(runner: GraphRunner, graph: Prompt) -> None:
    result = runner.run(graph)
    table, chart, _ = results_of(runner, graph)["report"].values
    assert result.ui["report"]["text"] == [table]
    (shown,) = [path for path in result.images if path.parent == runner.folders.preview and "preview_0" in path.name][
        1:
    ]
    assert np.abs(np.asarray(Image.open(shown)) / 255 - chart[0].numpy()).max() < 2 / 255


def test_the_page_shows_the_table_of_every_node_that_has_one() -> None:
    script = (Path(__file__).parents[1] / "web" / "tables.js").read_text("utf-8")
    assert 'const NODES = ["PhaseOffloadPlanPreview", "PhaseOffloadReport"];' in script


# The chart


def phase(name: str, **figures: Any) -> PhaseReport:
    plain = PhaseReport(name, 10.0, 4.0, 1, 0, 0, 0, 0, device_budget_bytes=8 << 30, reserved_peak_bytes=2 << 30)
    return replace(plain, **figures)


def words(phases: list[PhaseReport]) -> list[str]:
    figure = report_figure(phases)
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [text.get_text() for text in figure.texts]


def test_what_was_foretold_is_beside_what_was_taken() -> None:
    said = words([phase("encode"), phase("denoise", predicted=FORETOLD)])
    assert said.count("2.0 GiB") == 2
    assert said.count("10.0 s") == 2
    assert said.count("2.8 GiB") == said.count("20.0 s") == 1
    assert "2.0 GiB of device memory at most, 20.0 s in all" in said


def test_of_many_phases_the_last_are_drawn() -> None:
    said = words([phase("denoise") for _ in range(MOST_PHASES + 3)])
    assert said.count("10.0 s") == MOST_PHASES
    assert any(f"the last {MOST_PHASES} of {MOST_PHASES + 3} phases are drawn" in text for text in said)


@pytest.mark.parametrize("phases", [[], [phase("decode", reserved_peak_bytes=0, wall_s=0.0, load_s=0.0)]])
def test_a_chart_of_nothing_is_a_picture_too(phases: list[PhaseReport]) -> None:
    assert report_picture(phases).size == (1800, 800)
