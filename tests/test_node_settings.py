"""Offload Settings: a preset with numbers in its place, and what Load makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fake_engine
from node_graphs import Prompt, SpokenHost, call, node
from offload_core.errors import InputError
from offload_core.presets import PRESETS
from offload_core.settings import OffloadSettings
from phase_offload_nodes.catalog import NODES
from phase_offload_nodes.catalog.settings import NODE
from phase_offload_nodes.graph import GraphError
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import LocalHost

DEFAULTS = {spec.name: spec.default for spec in NODE.schema.inputs}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Engine:
    monkeypatch.setattr("phase_offload_nodes.state.PackState.fingerprint", lambda self, name: f"files of {name}")
    return fake_engine.install(monkeypatch)


@pytest.fixture
def runner(tmp_path: Path, engine: fake_engine.Engine) -> GraphRunner:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    return GraphRunner(SpokenHost(tmp_path / "models"), output_dir=tmp_path / "out")


def graph(**given: Any) -> Prompt:
    load = {"model": "tiny", "dtype": "auto", "device": "auto", "device_memory": "5GiB", "host_memory": "9GiB"}
    return {
        "settings": node("PhaseOffloadSettings", **DEFAULTS | given),
        "load": node("PhaseOffloadLoad", **load, settings=["settings", 0]),
        "purge": node("PhaseOffloadPurgeCache", anything=["load", 0]),
    }


def settings_of(runner: GraphRunner, **given: Any) -> OffloadSettings:
    (settings,) = call(runner, "PhaseOffloadSettings", **DEFAULTS | given)
    return settings


def test_connected_settings_win_over_the_budgets_of_load(runner: GraphRunner, engine: fake_engine.Engine) -> None:
    runner.run(graph(device_memory="6GiB"))
    assert engine.calls[0][1]["settings"] == OffloadSettings(device_memory="6GiB")


def test_the_defaults_are_the_engines_own(runner: GraphRunner) -> None:
    assert settings_of(runner) == OffloadSettings()


def test_every_preset_of_a_byte_budget_is_offered_with_its_numbers(runner: GraphRunner) -> None:
    presets = NODE.schema.inputs[0].options
    assert set(presets) == {"auto", *(name for name, each in PRESETS.items() if each.route == "dynamic_offload")}
    for name in set(presets) - {"auto"}:
        assert settings_of(runner, preset=name) == PRESETS[name].settings()
    assert settings_of(runner, preset="auto") in (PRESETS["one_shot_fast"].settings(), PRESETS["wsl_compat"].settings())


def test_a_number_that_is_given_takes_the_place_of_the_presets(runner: GraphRunner) -> None:
    given = {"resident_memory": "auto", "read_threads": 0, "resident_below": "64KiB", "drop_page_cache": "off"}
    found = settings_of(runner, preset="low_ram_safe", **given, encode_missing="off", direct_io="on")
    assert found == OffloadSettings(
        read_threads=0, resident_below=65536, pinned_memory=0, encode_missing=False, direct_io="on"
    )
    assert settings_of(runner, preset="least_device_memory", resident_below="0").resident_below == 0


def test_a_budget_that_is_given_wins_over_the_presets_and_that_over_the_hosts(tmp_path: Path) -> None:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    host = LocalHost([tmp_path / "models"], budgets={"device_memory": "3GiB", "host_memory": "4GiB"})
    runner = GraphRunner(host, output_dir=tmp_path / "out")
    assert settings_of(runner, preset="shared_desktop").device_memory == "leave 2GiB"
    assert settings_of(runner, preset="shared_desktop").host_memory == "4GiB"
    assert settings_of(runner, preset="shared_desktop", device_memory="1GiB").device_memory == "1GiB"
    assert settings_of(runner).device_memory == "3GiB"


def test_the_node_says_what_differs_from_the_defaults(runner: GraphRunner) -> None:
    host: Any = runner.host
    settings_of(runner, preset="one_shot_fast")
    assert host.said["node"] == "read_threads=4"
    settings_of(runner)
    assert host.said["node"] == "the engine's own defaults"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"device_memory": "lots"}, "device_memory='lots' isn't a usable memory budget"),
        ({"pinned_memory": "-1GiB"}, "pinned_memory='-1GiB' isn't a usable memory budget"),
        ({"resident_below": "60%"}, "resident_below='60%' is a share of memory whose size isn't known here"),
        ({"resident_below": "small"}, "resident_below='small' isn't a usable"),
    ],
)
def test_words_that_are_no_setting_are_a_sentence_before_anything_runs(
    runner: GraphRunner, engine: fake_engine.Engine, given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(GraphError, match=sentence):
        runner.run(graph(**given))
    with pytest.raises(InputError, match=sentence):
        settings_of(runner, **given)
    assert engine.calls == []


def test_something_else_in_the_place_of_settings_is_a_sentence(runner: GraphRunner) -> None:
    with pytest.raises(InputError, match="Load's settings must come from Offload Settings, not be str"):
        call(runner, "PhaseOffloadLoad", model="tiny", dtype="auto", device="auto", settings="6GiB")


def test_decode_in_tiles_is_the_presets_word_where_the_node_says_auto(
    runner: GraphRunner, engine: fake_engine.Engine
) -> None:
    for tiling, expected in (("auto", "on"), ("off", "off")):
        (settings,) = call(runner, "PhaseOffloadSettings", **DEFAULTS | {"preset": "least_device_memory"})
        (model,) = call(runner, "PhaseOffloadLoad", model="tiny", dtype="auto", device="auto", settings=settings)
        latent = call(runner, "PhaseOffloadDenoise", model=model, embeds=None, seed=1, steps=0, guidance=-1.0, width=0,
                      height=0, batch=1)[0]  # fmt: skip
        call(runner, "PhaseOffloadVAEDecode", model=model, latent=latent, tiling=tiling)
        assert engine.calls[-1][1]["tiling"] == expected


def test_the_help_page_names_every_preset() -> None:
    page = (Path(__file__).parents[1] / "web" / "docs" / "PhaseOffloadSettings.md").read_text("utf-8")
    assert [name for name in NODES["PhaseOffloadSettings"].schema.inputs[0].options if name not in page] == []
