"""What the pack's page may ask of its server: functions from data to JSON, and how ComfyUI's server calls them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import fake_engine
from offload_core.presets import PRESETS
from offload_core.report import PhaseReport
from offload_core.settings import OffloadSettings
from phase_offload_nodes.calls import fingerprint, run_node
from phase_offload_nodes.defaults import PRESET_NAMES, Defaults
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.machine import FRESH_S, MachineFigures
from phase_offload_nodes.routes import ROUTES, Route, answer
from phase_offload_nodes.state import PackState

ROUTE = {route.path.rpartition("/")[2]: route for route in ROUTES}


class Copies:
    held_bytes = 5

    def release(self, nbytes: int | None = None) -> int:
        held, self.held_bytes = self.held_bytes, 0
        return held


class FreedHost(LocalHost):
    freed = 0

    def free_between_prompts(self) -> None:
        self.freed += 1


@pytest.fixture
def state(tmp_path: Path) -> PackState:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    return PackState(FreedHost([tmp_path / "models"]))


def ask(state: PackState, name: str, data: Any = None) -> dict[str, Any]:
    given = answer(ROUTE[name], state, data or {})
    assert given.status == 200, given
    return json.loads(json.dumps(given.body))


def test_state_says_machine_settings_and_the_run_that_goes_on(state: PackState) -> None:
    state.history.foretold("p", "1", "encode", {"seconds": 1.0})
    shown = ask(state, "state")
    assert shown["running"]["id"] == "p"
    assert shown["machine"]["host"]["total"] >= shown["machine"]["host"]["free"] > 0
    assert shown["machine"]["host"]["taken"] > 0
    assert shown["machine"]["device"] is None or shown["machine"]["device"]["total"] > 0
    assert shown["defaults"] == asdict(Defaults())
    assert set(shown["presets"]) == set(PRESET_NAMES)
    assert shown["warm_bytes"] == 0


def test_history_and_report_tell_what_ran(state: PackState) -> None:
    assert "No phase has run." in ask(state, "report")["text"]
    for name in ("first", "second"):
        state.history.ended(name, "1", [PhaseReport(f"{name}-phase", 1.0, 0.5, 10, 0, 0, 0, 0)])
    assert [run["id"] for run in ask(state, "history")["runs"]] == ["second", "first"]
    assert "second-phase" in ask(state, "report")["text"]
    text = ask(state, "report", {"run": "first"})["text"]
    assert "first-phase" in text and "second-phase" not in text
    assert "Phase Offload" in text and "RAM:" in text and "preset=plain" in text


def test_no_answer_names_a_folder(state: PackState, tmp_path: Path) -> None:
    state.history.ended("p", "1", [PhaseReport("encode", 1.0, 0.5, 10, 0, 0, 0, 0)])
    for name in ("state", "history", "report"):
        said = json.dumps(ask(state, name))
        assert str(tmp_path) not in said
        assert str(Path.home()) not in said


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("settings", [], "takes a JSON object, not list"),
        ("settings", None, "takes a JSON object, not NoneType"),
        ("settings", {"device_memory": "lots"}, "device_memory='lots' isn't a usable memory budget"),
        ("settings", {"device_memory": 7}, "device_memory is 7; use a text"),
        ("settings", {"warm": "yes"}, "warm is 'yes'; use true or false"),
        ("settings", {"preset": "off"}, "There is no preset 'off' for phases"),
        ("settings", {"model_roots": "/"}, "There is no setting 'model_roots'"),
        ("report", {"run": "gone"}, "There is no run 'gone'"),
        ("report", {"run": 5}, "run is 5"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_changes_nothing(state: PackState, name: str, data: Any, said: str) -> None:
    given = answer(ROUTE[name], state, data)
    assert given.status == 400
    assert said in given.body["error"] and "\n" not in given.body["error"]
    assert state.defaults == Defaults()


def test_settings_are_all_taken_or_none(state: PackState) -> None:
    assert answer(ROUTE["settings"], state, {"warm": True, "host_memory": "0"}).status == 400
    assert state.defaults == Defaults()
    ask(state, "settings", {"warm": True, "host_memory": "4GiB"})
    assert ask(state, "settings", {"preset": "low_ram_safe"})["defaults"] == asdict(
        Defaults("low_ram_safe", "auto", "4GiB", warm=True)
    )


def test_defaults_are_what_auto_in_a_load_node_stands_for(state: PackState) -> None:
    assert state.settings(device_memory="auto", host_memory="auto") == OffloadSettings()
    ask(state, "settings", {"preset": "shared_desktop", "host_memory": "4GiB"})
    expected = OffloadSettings(device_memory="leave 2GiB", host_memory="4GiB")
    assert state.settings(device_memory="auto", host_memory=" Auto") == expected
    assert state.settings(device_memory="1GiB").device_memory == "1GiB"
    ask(state, "settings", {"device_memory": "60%"})
    assert state.settings(device_memory="auto").device_memory == "60%"


@pytest.mark.parametrize(
    "field", [{"preset": "low_ram_safe"}, {"host_memory": "4GiB"}, {"warm": True}, {"prompt_cache": True}]
)
def test_load_runs_again_when_the_defaults_change_what_it_gives(
    state: PackState, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any]
) -> None:
    monkeypatch.setattr(PackState, "fingerprint", lambda self, name: f"files of {name}")
    before = fingerprint("PhaseOffloadLoad", state, {"model": "tiny"})
    ask(state, "settings", field)
    assert fingerprint("PhaseOffloadLoad", state, {"model": "tiny"}) != before
    ask(state, "settings", asdict(Defaults()))
    assert fingerprint("PhaseOffloadLoad", state, {"model": "tiny"}) == before


@pytest.mark.parametrize("connected", [None, OffloadSettings()], ids=["budgets", "settings"])
def test_what_is_kept_for_all_graphs_reaches_a_loaded_model_and_leaves_it_again(
    state: PackState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connected: OffloadSettings | None
) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    engine = fake_engine.install(monkeypatch)

    def loaded() -> tuple[bool, str | None]:
        given = {"model": "tiny", "dtype": "auto", "device": "cpu", "settings": connected}
        run_node("PhaseOffloadLoad", state, state.host.observer("node"), given)
        settings = engine.calls[-1][1]["settings"]
        return settings.warm, settings.prompt_cache_folder

    assert loaded() == (False, None)
    ask(state, "settings", {"warm": True, "prompt_cache": True})
    assert loaded() == (True, str(tmp_path / "cache" / "prompts"))
    ask(state, "settings", {"warm": False, "prompt_cache": False})
    assert loaded() == (False, None)


def test_presets_on_offer_are_numbers_of_this_engine() -> None:
    assert "plain" in PRESET_NAMES and "low_ram_safe" in PRESET_NAMES
    for name in PRESET_NAMES:
        assert PRESETS[name].settings(), name
        assert not PRESETS[name].group


def test_purge_leaves_the_freeing_to_the_host_and_drops_what_is_kept_warm(state: PackState) -> None:
    state.warm = Copies()
    assert ask(state, "state")["warm_bytes"] == 5
    assert ask(state, "purge") == {"warm_bytes": 5}
    assert ask(state, "purge") == {"warm_bytes": 0}
    assert state.host.freed == 2  # type: ignore[attr-defined]


def test_figures_of_the_machine_are_measured_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("phase_offload_nodes.machine.measure", lambda device: asked.append(device) or {"device": None})
    now = [0.0]
    figures = MachineFigures(lambda: "cpu", clock=lambda: now[0])
    for now[0] in (1.0, 1.5, 1.0 + FRESH_S, 1.5 + FRESH_S):
        figures.read()
    assert len(asked) == 2


# In ComfyUI's server


class Web(types.ModuleType):
    @staticmethod
    def json_response(body: Any, status: int = 200) -> Any:
        return types.SimpleNamespace(body=body, status=status)


class Request:
    def __init__(self, body: Any = None, content_type: str = "application/json", size: int = 10) -> None:
        self.body, self.content_type, self.content_length, self.query = body, content_type, size, {"run": "gone"}

    async def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture
def respond(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ComfyUI's side of a route, with a stand-in of the web library."""
    module = types.ModuleType("aiohttp")
    module.web = Web("aiohttp.web")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiohttp", module)
    from phase_offload_nodes.host import respond

    return lambda route, state, request: asyncio.run(respond(route, state, request))


def test_a_route_never_works_on_the_web_thread(state: PackState, respond: Any) -> None:
    threads: list[int] = []
    route = Route("GET", "/phase_offload/x", lambda *_: threads.append(threading.get_ident()) or {"a": 1})
    given = respond(route, state, Request())
    assert (given.status, given.body) == (200, {"a": 1})
    assert threads and threads[0] != threading.get_ident()


def test_query_and_body_reach_the_route_and_errors_have_their_status(state: PackState, respond: Any) -> None:
    assert respond(ROUTE["report"], state, Request()).status == 400
    assert respond(ROUTE["settings"], state, Request('{"warm": true}')).body["defaults"]["warm"] is True
    assert respond(ROUTE["settings"], state, Request("not json")).status == 400


@pytest.mark.parametrize("request_", [Request("{}", "text/plain"), Request("{}", size=1 << 20)], ids=["form", "large"])
def test_a_post_that_a_form_of_another_site_can_make_is_refused(state: PackState, respond: Any, request_: Any) -> None:
    for route in ROUTES:
        if route.method == "POST":
            assert respond(route, state, request_).status == 415
    assert state.host.freed == 0  # type: ignore[attr-defined]


def test_every_route_is_added_to_comfyuis_server_below_one_address(
    state: PackState, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phase_offload_nodes.host import ComfyHost

    added, flags = [], []
    routes = types.SimpleNamespace(route=lambda *where: lambda handler: added.append((where, handler)))
    queue = types.SimpleNamespace(set_flag=lambda *flag: flags.append(flag))
    instance = types.SimpleNamespace(routes=routes, prompt_queue=queue)
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    ComfyHost().serve(ROUTES, state)
    assert [where for where, _ in added] == [(route.method, route.path) for route in ROUTES]
    assert all(path.startswith("/phase_offload/") for (_, path), _ in added)
    assert all(asyncio.iscoroutinefunction(handler.func) for _, handler in added)
    ComfyHost().free_between_prompts()
    assert flags == [("unload_models", True)]
