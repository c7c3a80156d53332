"""What the pack remembers of runs for its page: phases as foretold and as measured, memory over time, and bounded."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import fake_engine
from offload_core.errors import BudgetError, InputError
from offload_core.report import PhaseReport
from offload_core.session import Held, Progress
from phase_offload_nodes.calls import run_node
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import GraphInterrupted, LocalHost
from phase_offload_nodes.run_history import KEPT_RUNS, MOST_SAMPLES, RunHistory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def history() -> RunHistory:
    return RunHistory(lambda device: (len(device), 7), clock=Clock())


def step(done: int, phase: str = "denoise", total: int = 1000) -> Progress:
    return Progress(phase, "step", done, total, "steps", held=Held("cuda:0", 30, 40))


def report(name: str, **values: Any) -> PhaseReport:
    return PhaseReport(name, 2.0, 0.5, 100, 0, 0, 0, 0, **values)


def test_a_phase_is_told_before_while_and_after_it_runs(history: RunHistory) -> None:
    told = history.foretold("p", "3", "denoise", {"seconds": 4.0})
    assert told["outcome"] == "running"
    assert told["phases"][0]["predicted"] == {"seconds": 4.0}
    history.progressed("p", "3", Progress("denoise", "load", 5, 10, "bytes"))
    going = history.progressed("p", "3", step(2))
    assert going is not None
    (phase,) = going["phases"]
    assert (phase["loaded"], phase["steps"]) == ([5, 10], [2, 1000])
    assert phase["held"] == {"device": "cuda:0", "device_bytes": 30, "host_bytes": 40}
    assert going["samples"][0][1:] == [len("cuda:0"), 30, 7]
    history.ended("p", "3", [report("denoise", notes=("slow",), streamed_bytes=9)])
    (run,) = history.to_list()
    (phase,) = run["phases"]
    assert (run["outcome"], phase["outcome"], phase["seconds"]) == ("done", "done", 2.0)
    assert (phase["notes"], phase["measured"]["streamed_bytes"], phase["held"]) == (["slow"], 9, None)
    assert history.running() is None


def test_everything_is_json(history: RunHistory) -> None:
    history.foretold("p", None, "encode", {"seconds": 1.0})
    history.progressed("p", None, step(1, "encode"))
    assert json.loads(json.dumps(history.running())) == history.running()
    history.ended("p", None, [report("encode", forwards={"text_encoder": 2})])
    assert json.loads(json.dumps(history.to_list())) == history.to_list()


def test_runs_and_samples_are_bounded_and_a_long_run_keeps_its_beginning(history: RunHistory) -> None:
    for number in range(KEPT_RUNS + 5):
        history.ended(str(number), "1", [report("encode")])
    assert [run["id"] for run in history.to_list()] == [str(n) for n in range(KEPT_RUNS + 4, 4, -1)]
    for done in range(4 * MOST_SAMPLES):
        history.progressed("long", "1", step(done))
    rows = history.to_list()[0]["samples"]
    assert MOST_SAMPLES / 2 <= len(rows) <= MOST_SAMPLES
    assert rows[0][0] < 5 and rows[-1][0] > 3 * MOST_SAMPLES
    assert rows == sorted(rows)


def test_the_same_node_twice_in_a_prompt_makes_two_phases(history: RunHistory) -> None:
    for _ in range(2):
        history.progressed("p", "3", step(1))
        history.ended("p", "3", [report("denoise")])
    assert [phase["outcome"] for phase in history.to_list()[0]["phases"]] == ["done", "done"]


def test_it_may_be_read_while_it_is_written(history: RunHistory) -> None:
    faults: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                json.dumps(history.to_list())
                json.dumps(history.running())
        except BaseException as error:
            faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        for done in range(20):
            history.progressed(str(number), "1", step(done))
        history.ended(str(number), "1", [report("denoise")])
    stop.set()
    reader.join()
    assert faults == []


# Through the nodes


class WatchedHost(LocalHost):
    """Remembers what it was asked to send."""

    def __init__(self, models: Path) -> None:
        super().__init__([models])
        self.sent: list[dict[str, Any]] = []

    def send(self, event: str, data: dict[str, Any]) -> None:
        assert event == "phase_offload.event"
        self.sent.append(json.loads(json.dumps(data)))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Engine:
    monkeypatch.setattr("phase_offload_nodes.state.PackState.fingerprint", lambda self, name: f"files of {name}")
    return fake_engine.install(monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> WatchedHost:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    return WatchedHost(tmp_path / "models")


@pytest.fixture
def runner(host: WatchedHost, tmp_path: Path, engine: fake_engine.Engine) -> GraphRunner:
    return GraphRunner(host, output_dir=tmp_path / "out", cache="none")


GRAPH = {
    "load": {"class_type": "PhaseOffloadLoad", "inputs": {"model": "tiny", "dtype": "auto", "device": "auto"}},
    "encode": {
        "class_type": "PhaseOffloadEncodePrompt",
        "inputs": {"model": ["load", 0], "prompt": "a fox", "negative_prompt": ""},
    },
    "purge": {"class_type": "PhaseOffloadPurgeCache", "inputs": {"anything": ["encode", 0]}},
}


def kinds(host: WatchedHost) -> list[str]:
    return [data["kind"] for data in host.sent]


def test_phases_are_grouped_by_run_and_said_to_who_watches(runner: GraphRunner, host: WatchedHost) -> None:
    runner.run(GRAPH)
    runner.run(GRAPH)
    runs = runner.state.history.to_list()
    assert [[phase["name"] for phase in run["phases"]] for run in runs] == [["encode"], ["encode"]]
    assert runs[0]["id"] != runs[1]["id"]
    assert runs[0]["phases"][0]["node"] == "encode"
    assert kinds(host) == ["progress", "ended", "progress", "ended"]  # progress: not at every step


@pytest.mark.parametrize(
    ("error", "kind", "outcome", "said"),
    [
        (BudgetError("Set device_memory to 2 GiB."), "refused", "failed", "Set device_memory to 2 GiB."),
        (InputError("No."), "ended", "failed", "No."),
        (ValueError("/a/path/of/somebody"), "ended", "failed", "ValueError"),
        (GraphInterrupted("x"), "ended", "interrupted", ""),
    ],
)
def test_how_a_phase_failed_is_said(
    runner: GraphRunner, host: WatchedHost, engine: fake_engine.Engine, error: BaseException, kind: str, outcome: str,
    said: str,
) -> None:  # fmt: skip
    engine.fails["encode"] = error
    with pytest.raises(type(error)):
        runner.run(GRAPH)
    assert kinds(host)[-1] == kind
    (phase,) = host.sent[-1]["run"]["phases"]
    assert (phase["outcome"], phase["error"]) == (outcome, said)
    assert runner.state.history.running() is None


def test_a_retry_after_memory_ran_out_is_said(runner: GraphRunner, host: WatchedHost, engine: Any) -> None:
    encode = engine.encode

    def short_of_memory(*args: Any, session: Any, **kwargs: Any) -> Any:
        session.observer.progress(Progress("encode", "load", 1, 2, "bytes"))
        session.observer.make_room()
        return encode(*args, session=session, **kwargs)

    import offload_core

    vars(offload_core)["encode"] = short_of_memory  # put back by the fixture
    runner.run(GRAPH)
    assert "retry" in kinds(host)
    assert runner.state.history.to_list()[0]["phases"][0]["retries"] == 1


def test_what_follows_a_node_holds_no_error(runner: GraphRunner, engine: fake_engine.Engine) -> None:
    """A host that frees by reference counts only must get everything back from a failed node."""

    class MarkedError(ValueError):
        pass

    engine.fails["encode"] = MarkedError("x")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MarkedError):
            run_node(
                "PhaseOffloadEncodePrompt",
                runner.state,
                runner.host.observer("1"),
                {"model": fake_engine.Handle("m", "cpu", "auto"), "prompt": "x", "negative_prompt": ""},
            )
        engine.fails.clear()
        assert not [thing for thing in gc.get_objects() if type(thing) is MarkedError]
    finally:
        gc.enable()
