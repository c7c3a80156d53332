"""The node bodies on tiny real models: the pipeline's own pictures, plain outputs, and nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import offload_core
from offload_core.errors import BudgetError, InputError, ModelError, OffloadError, RecordError, TraceError
from offload_core.plan import Rates
from offload_core.settings import OffloadSettings
from offload_core.tiny_models import one_shot, save_tiny
from offload_core.trace import Tracer
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import GraphInterrupted, LocalHost
from phase_offload_nodes.model_list import DEMO_MODEL, NO_MODEL, ModelList
from phase_offload_nodes.results import NodeResult
from phase_offload_nodes.state import PackState

Prompt = dict[str, Any]
SIZE = {"width": 64, "height": 48}
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diffusers")
    for name in ("sd15", "flux", "wan22_5b"):
        save_tiny(name, root / name)
    (root / "wan22_5b" / "phase_offload.json").write_text('{"num_frames": 5}')
    return root


class SpokenHost(LocalHost):
    """Remembers what nodes say, and can interrupt at the k-th check."""

    def __init__(self, models: Path) -> None:
        self.said: dict[str | None, str] = {}
        super().__init__([models], say=self.said.__setitem__)
        self.checks = 0
        self.stop_at = 0

    def check_interrupt(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            self.interrupt()
        super().check_interrupt()


@pytest.fixture
def host(models: Path) -> SpokenHost:
    return SpokenHost(models)


@pytest.fixture
def runner(host: SpokenHost, tmp_path: Path) -> GraphRunner:
    return GraphRunner(host, output_dir=tmp_path / "out")


def graph_of(model: str, **denoise: Any) -> Prompt:
    denoise = {"seed": 7, "steps": 2, "guidance": 5.0, **SIZE, "batch": 1} | denoise
    return {
        "load": node("PhaseOffloadLoad", model=model, dtype="auto", device="auto"),
        "encode": node("PhaseOffloadEncodePrompt", model=["load", 0], prompt="a red fox", negative_prompt="blurry"),
        "denoise": node("PhaseOffloadDenoise", model=["load", 0], embeds=["encode", 0], **denoise),
        "decode": node("PhaseOffloadVAEDecode", model=["load", 0], latent=["denoise", 0], tiling="auto"),
        "preview": node("PreviewImage", images=["decode", 0]),
    }


def no_plan(*_: Any, **__: Any) -> None:
    raise TraceError("there is no model")


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def results_of(runner: GraphRunner, graph: Prompt) -> dict[str, NodeResult]:
    """Runs the graph and gives what each node gave."""
    runner.run(graph)
    return {name: runner._results[key] for name, key in runner._cache_keys(runner.check(graph)).items()}


def call(runner: GraphRunner, class_type: str, **inputs: Any) -> tuple[Any, ...]:
    """Runs one node on values, as a host does."""
    from phase_offload_nodes.calls import run_node

    with torch.inference_mode():
        return run_node(class_type, runner.state, runner.host.observer("node"), inputs).values


@contextmanager
def without_collector() -> Iterator[None]:
    """What is there now is set aside, so that looking at what is new takes no time. Only reference counts free it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def living_weights() -> int:
    """New weights with memory that anything at all still holds. (A cold weight has a type of its own.)"""
    return sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a plain value leads to."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def digest(value: Any) -> str:
    sha = hashlib.sha256()
    for tensor in tensors_in(value):
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# Pictures


@pytest.mark.parametrize(
    ("model", "options"),
    [("sd15", {"guidance_scale": 5.0}), ("flux", {"guidance_scale": 5.0})],
)
def test_images_are_those_of_the_pipeline(runner: GraphRunner, models: Path, model: str, options: dict) -> None:
    image = results_of(runner, graph_of(model, batch=2))["decode"].values[0]
    expected = one_shot(
        models / model,
        dtype=torch.float32,
        seed=7,
        prompt="a red fox",
        negative_prompt="blurry",
        num_inference_steps=2,
        num_images_per_prompt=2,
        **SIZE,
        **options,
    )
    assert image.shape == (2, 48, 64, 3)
    assert image.dtype == torch.float32
    assert torch.equal(image, expected.movedim(1, -1))


def test_frames_of_a_video_are_a_batch_and_a_video(runner: GraphRunner) -> None:
    image, audio, video = results_of(runner, graph_of("wan22_5b", width=96, height=64))["decode"].values
    assert image.shape == (5, 64, 96, 3)  # phase_offload.json asks for 5 frames
    assert audio is None
    assert (video.image is image, video.frame_rate) == (True, 24.0)


def test_defaults_are_left_to_the_model(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setitem(vars(offload_core), "denoise", lambda *a, **k: seen.update(k))
    monkeypatch.setitem(vars(offload_core), "foresee_denoise", no_plan)
    handle = offload_core.load(models / "sd15")
    arguments = {"model": handle, "embeds": None, "seed": 1, "steps": 0, "guidance": -1.0, "width": 0, "height": 0}
    with pytest.raises(AttributeError):
        call(runner, "PhaseOffloadDenoise", **arguments, batch=1)
    assert set(seen) == {"seed", "session", "plan"}


@pytest.mark.parametrize(("guidance", "empty"), [("guidance_scale", None), ("true_cfg_scale", "")])
def test_an_empty_negative_prompt_is_the_models_own_unless_guidance_needs_one(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch, guidance: str, empty: str | None
) -> None:
    # True CFG silently does nothing without a negative prompt, however high the guidance.
    seen = []
    model = SimpleNamespace(guidance_name=guidance)
    monkeypatch.setitem(vars(offload_core), "encode", lambda *a, **k: seen.append(a[2]))
    monkeypatch.setitem(vars(offload_core), "foresee_encode", no_plan)
    for text in ("", " ", "blurry"):
        call(runner, "PhaseOffloadEncodePrompt", model=model, prompt="x", negative_prompt=text)
    assert seen == [empty, " ", "blurry"]


# LATENT


def test_latent_follows_comfyuis_convention_and_carries_the_record(runner: GraphRunner) -> None:
    (latent,) = results_of(runner, graph_of("sd15"))["denoise"].values
    assert set(latent) == {"samples", "phase_offload"}
    assert latent["samples"].shape == (1, 4, 12, 16)  # this tiny VAE scales by 4
    assert latent["samples"].dtype == torch.float32
    assert latent["samples"].device.type == "cpu"


def test_changed_samples_win_over_the_record(runner: GraphRunner, host: SpokenHost) -> None:
    results = results_of(runner, graph_of("sd15"))
    handle, latent, image = (results[name].values[0] for name in ("load", "denoise", "decode"))
    same = call(runner, "PhaseOffloadVAEDecode", model=handle, latent=latent | {"samples": latent["samples"].clone()},
                tiling="off")[0]  # fmt: skip
    assert torch.equal(same, image)
    assert "changed" not in host.said["node"]
    flipped = latent | {"samples": latent["samples"].flip(-1), "another_key": 1}
    changed = call(runner, "PhaseOffloadVAEDecode", model=handle, latent=flipped, tiling="off")[0]
    assert not torch.equal(changed, image)
    assert host.said["node"].startswith("The latent was changed after Denoise Phase")
    bare = call(runner, "PhaseOffloadVAEDecode", model=handle, latent={"samples": flipped["samples"]}, tiling="off")[0]
    torch.testing.assert_close(changed, bare)


def test_a_larger_latent_of_another_node_is_decoded(runner: GraphRunner) -> None:
    results = results_of(runner, graph_of("sd15"))
    (handle,), (latent,) = (results[name].values for name in ("load", "denoise"))
    larger = latent | {"samples": torch.nn.functional.interpolate(latent["samples"], scale_factor=2)}
    image = call(runner, "PhaseOffloadVAEDecode", model=handle, latent=larger, tiling="off")[0]
    assert image.shape == (1, 96, 128, 3)


def test_a_latent_of_another_kind_of_model_is_a_sentence(runner: GraphRunner) -> None:
    handle = results_of(runner, graph_of("sd15"))["load"].values[0]
    with pytest.raises(RecordError, match="channels"):
        call(runner, "PhaseOffloadVAEDecode", model=handle, latent={"samples": torch.zeros(1, 16, 6, 8)}, tiling="off")


# Nothing is kept


def test_outputs_are_plain_and_share_nothing(runner: GraphRunner) -> None:
    results = results_of(runner, graph_of("sd15"))
    owners: dict[int, str] = {}
    for name in ("load", "encode", "denoise", "decode"):
        assert len(repr(results[name].values[0])) < 2000 or name in ("denoise", "decode")
        for tensor in tensors_in(results[name].values):
            assert type(tensor) is torch.Tensor
            assert tensor.device.type == "cpu"
            assert owners.setdefault(tensor.untyped_storage().data_ptr(), name) == name
    (latent,) = results["denoise"].values
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors_in(latent)]
    assert len(storages) == len(set(storages))
    assert list(tensors_in(results["load"].values)) == []


def test_later_nodes_never_change_what_earlier_ones_gave(runner: GraphRunner) -> None:
    graph = graph_of("flux")
    before = {name: digest(result.values) for name, result in results_of(runner, graph).items()}
    for change in ({"seed": 8, "steps": 1}, {"guidance": 1.0, "batch": 2}):
        altered = results_of(runner, graph_of("flux", **change))
        assert {name: digest(altered[name].values) for name in ("load", "encode")} == {
            name: before[name] for name in ("load", "encode")
        }
        (latent,), kept = altered["denoise"].values, digest(altered["denoise"].values)
        call(runner, "PhaseOffloadVAEDecode", model=altered["load"].values[0], latent=latent, tiling="on")
        assert digest(latent) == kept
    assert digest(results_of(runner, graph)["decode"].values) == before["decode"]


def test_no_weight_lives_after_a_run(runner: GraphRunner) -> None:
    runner.run(graph_of("sd15"))
    with without_collector():
        before = living_weights()
        runner.run(graph_of("sd15", seed=8))
        runner.run(graph_of("flux"))
        assert living_weights() == before


@pytest.mark.parametrize("name", ["load", "encode", "denoise", "decode"])
def test_interrupt_anywhere_passes_through_and_leaves_nothing(runner: GraphRunner, host: SpokenHost, name: str) -> None:
    """Each node with all it needs already made: every check of a short node, the ends and every few of a long one."""
    graph = graph_of("flux", steps=1, guidance=1.0)
    results = results_of(runner, graph)
    inputs = {
        key: results[value[0]].values[value[1]] if isinstance(value, list) else value
        for key, value in graph[name]["inputs"].items()
    }

    def run_it() -> tuple[Any, ...]:
        runner.state.prompt_cache.release()  # it would answer for the encoders
        return call(runner, graph[name]["class_type"], **inputs)

    host.checks = 0
    run_it()
    total = host.checks
    assert total > 20 or name == "load"
    with without_collector():
        before = living_weights()
        for k in sorted({*range(1, total + 1, total // 3 + 1), *range(1, total + 1)[:2], *range(1, total + 1)[-2:]}):
            host.checks, host.stop_at = 0, k
            with pytest.raises(GraphInterrupted) as caught:
                run_it()
            assert type(caught.value) is GraphInterrupted
            assert living_weights() == before, k
            assert host.checks == k
            del caught
            gc.collect()  # the next one starts clean
    host.stop_at = 0
    assert digest(run_it()) == digest(results[name].values)


def test_an_error_in_mid_phase_leaves_nothing_while_its_traceback_lives(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(graph_of("sd15", steps=1))
    import diffusers

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(diffusers.UNet2DConditionModel, "get_time_embed", broken)
    with without_collector():
        before = living_weights()
        with pytest.raises(ZeroDivisionError, match="in the middle") as caught:
            runner.run(graph_of("sd15", seed=9))
        assert living_weights() == before
        assert caught.value.__traceback__ is not None


def test_reports_are_remembered_and_few(runner: GraphRunner) -> None:
    runner.run(graph_of("sd15", steps=1))
    assert [phase.name for phase in runner.state.report.phases] == ["encode", "denoise", "decode"]
    assert [phase.leaked_bytes for phase in runner.state.report.phases] == [0, 0, 0]
    runner.state.remember(runner.state.report.phases * 60)
    assert len(runner.state.report.phases) == 100


def test_every_phase_says_how_it_went(runner: GraphRunner, host: SpokenHost) -> None:
    runner.run(graph_of("sd15", steps=1))
    assert host.said["load"] == "sd15: ready, nothing loaded yet"
    for name in ("encode", "denoise", "decode"):
        assert " s, " in host.said[name] and "of weights" in host.said[name]


def test_every_phase_says_its_plan_before_it_loads_and_follows_it(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second run of a job of that shape is foreseen without a trace, and with what the first one taught."""
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("offload_core.rates.measure", lambda *_: RATES)
    order: list[tuple[str | None, str]] = []
    say, traced = host.said.__setitem__, []
    monkeypatch.setattr(host, "_say", lambda node, text: order.append((node, text)) or say(node, text))
    trace = Tracer._trace
    monkeypatch.setattr(Tracer, "_trace", lambda self, *rest: traced.append(rest[0]) or trace(self, *rest))
    runner.run(graph_of("sd15"))
    for name in ("encode", "denoise", "decode"):
        lines = [text for node, text in order if node == name]
        assert lines[0] == "looking ahead, nothing is loaded yet"
        assert lines[1].startswith("Plan: keeps all weights of a phase resident, peaks at ")
        assert re.search(r"\ntook .* of device memory \(.* foretold\) and .* s \(.* s foretold\)", lines[-1])
    phases = runner.state.report.phases
    assert [phase.reserved_peak_bytes for phase in phases] == [
        pytest.approx(phase.predicted["device_peak_bytes"], rel=0.03) for phase in phases
    ]
    (remembered,) = runner.state.history.to_list()
    assert [phase["predicted"] for phase in remembered["phases"]] == [phase.predicted for phase in phases]
    assert [phase["outcome"] for phase in remembered["phases"]] == ["done"] * 3
    most = max(reserved for _, _, reserved, _ in remembered["samples"])
    assert 0 < most <= max(phase.reserved_peak_bytes for phase in phases)
    assert "unet" in traced
    traced.clear()
    runner.run(graph_of("sd15", seed=8))
    assert traced == []
    again = runner.state.report.phases[-2]
    assert again.name == "denoise" and again.predicted["seconds"] != phases[1].predicted["seconds"]


def test_a_phase_that_cannot_be_foreseen_runs_without_a_plan(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results_of(runner, graph_of("sd15"))["decode"].values[0]
    runner.forget()
    for name in ("foresee_encode", "foresee_denoise", "foresee_decode"):
        monkeypatch.setitem(vars(offload_core), name, no_plan)
    again = results_of(runner, graph_of("sd15"))["decode"].values[0]
    assert torch.equal(whole, again) and "foretold" not in host.said["denoise"]


# Models and devices


def test_changed_files_make_load_run_again(host: SpokenHost, tmp_path: Path) -> None:
    save_tiny("sd15", tmp_path / "models" / "mine")
    runner = GraphRunner(SpokenHost(tmp_path / "models"), output_dir=tmp_path / "out")
    graph = graph_of("mine", steps=1)
    first = results_of(runner, graph)["load"].values[0]
    assert runner.run(graph).executed == []
    (weights,) = (tmp_path / "models" / "mine" / "unet").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes())
    assert runner.run(graph).executed[:1] == ["load"]
    assert results_of(runner, graph)["load"].values[0] != first


def test_a_model_that_appears_is_in_the_list_at_once(tmp_path: Path) -> None:
    models = ModelList(lambda: [tmp_path])
    assert "new" not in models.names()
    save_tiny("sd15", tmp_path / "new")
    assert "new" in models.names()
    assert models.folder("new") == tmp_path / "new"


def test_an_empty_list_says_where_to_put_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase_offload_nodes.model_list.demo_model_folder", lambda: None)
    models = ModelList(lambda: [tmp_path / "diffusers"])
    assert models.names() == [NO_MODEL]
    with pytest.raises(ModelError, match=r"Put a diffusers model folder.*diffusers.*hf download"):
        models.folder(NO_MODEL)


def test_the_demo_model_is_offered_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase_offload_nodes.model_list.demo_model_folder", lambda: tmp_path)
    models = ModelList(lambda: [tmp_path / "gone"])
    assert models.names() == [DEMO_MODEL]
    assert models.folder(DEMO_MODEL) == tmp_path


@pytest.mark.parametrize("name", ["..", "../sd15", "/etc", "sd15/../../x", "", "C:\\x", "a\0b", "nope"])
def test_only_names_of_the_list_are_opened(models: Path, name: str) -> None:
    with pytest.raises(ModelError):
        ModelList(lambda: [models]).folder(name)


def test_a_device_that_isnt_there_is_a_sentence(runner: GraphRunner) -> None:
    with pytest.raises(InputError, match="The device 'cuda:99' isn't there: choose one of auto, cpu"):
        call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cuda:99")


def test_a_damaged_model_is_a_sentence_each_time_and_works_when_mended(host: SpokenHost, tmp_path: Path) -> None:
    save_tiny("sd15", tmp_path / "models" / "mine")
    runner = GraphRunner(SpokenHost(tmp_path / "models"), output_dir=tmp_path / "out")
    (weights,) = (tmp_path / "models" / "mine" / "unet").glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    for _ in range(2):
        with pytest.raises(ModelError):
            runner.run(graph_of("mine", steps=1))
    weights.write_bytes(whole)
    assert runner.run(graph_of("mine", steps=1)).executed


# Memory budgets


def test_a_model_larger_than_its_budget_is_streamed_and_gives_the_same_picture(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results_of(runner, graph_of("flux"))["decode"].values[0]
    assert "streamed" not in host.said["denoise"]
    largest = max(phase.weight_bytes for phase in runner.state.report.phases)
    # The weights of this model are all small, and small ones are never streamed.
    monkeypatch.setattr("phase_offload_nodes.state.OffloadSettings", partial(OffloadSettings, resident_below=0))
    graph = graph_of("flux")
    graph["load"]["inputs"]["device_memory"] = str(largest * 3 // 4)
    streamed = results_of(runner, graph)["decode"].values[0]
    assert torch.equal(streamed, whole)
    assert re.search(r"\nstreamed .* of weights within .* on cpu and waited .* for them", host.said["denoise"])
    phases = {phase.name: phase for phase in runner.state.report.phases[-3:]}
    assert phases["denoise"].streamed_bytes > 0
    assert phases["denoise"].reserved_peak_bytes <= phases["denoise"].device_budget_bytes == largest * 3 // 4


def test_a_budget_that_cannot_work_is_a_sentence_that_says_what_can(runner: GraphRunner) -> None:
    graph = graph_of("flux")
    graph["load"]["inputs"]["device_memory"] = "4KiB"
    with pytest.raises(BudgetError, match=r"The budget of cpu leaves .* Raise device_memory by "):
        runner.run(graph)


def test_a_linked_budget_that_is_none_is_a_sentence(runner: GraphRunner) -> None:
    with pytest.raises(InputError, match="device_memory='lots' isn't a usable memory budget"):
        call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="auto", device_memory="lots")


def test_a_graph_without_budgets_gives_the_handle_of_auto(runner: GraphRunner) -> None:
    words = {"model": "sd15", "dtype": "auto", "device": "auto"}
    (old,) = call(runner, "PhaseOffloadLoad", **words)
    (new,) = call(runner, "PhaseOffloadLoad", **words, device_memory="auto", host_memory="auto")
    (other,) = call(runner, "PhaseOffloadLoad", **words, device_memory="6GiB", host_memory="auto")
    assert old == new != other


def test_batch_on_a_model_without_it_and_guidance_without_it(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        guidance_name = images_name = None
        only_sound = False

    class Made:
        samples = torch.zeros(1)

    monkeypatch.setitem(vars(offload_core), "denoise", lambda *a, **k: Made())
    monkeypatch.setitem(vars(offload_core), "foresee_denoise", no_plan)
    arguments = {"model": Plain(), "embeds": None, "seed": 1, "steps": 0, "width": 0, "height": 0}
    call(runner, "PhaseOffloadDenoise", **arguments, guidance=3.0, batch=1)
    assert host.said["node"].startswith("This model has no guidance: 3 was not used.")
    with pytest.raises(InputError, match="one picture at a time"):
        call(runner, "PhaseOffloadDenoise", **arguments, guidance=-1.0, batch=2)


def test_purge_gives_back_the_very_same_thing_and_a_sentence(runner: GraphRunner) -> None:
    thing = object()
    passed, sentence = call(runner, "PhaseOffloadPurgeCache", anything=thing)
    assert passed is thing
    assert sentence.startswith("Freed ")


def test_the_next_prompt_encodes_without_an_encoder_and_reads_no_file_where_the_model_is_warm(
    runner: GraphRunner, host: SpokenHost, tmp_path: Path
) -> None:
    def run(on: GraphRunner, *, warm: bool, **job: Any) -> torch.Tensor:
        graph = graph_of("sd15", steps=1, **job)
        graph["load"]["inputs"]["warm"] = warm
        return results_of(on, graph)["decode"].values[0]

    def figures() -> list[tuple[str, int, int]]:
        phases, runner.state.report.phases[:] = runner.state.report.phases[:], []
        return [(phase.name, phase.weight_bytes, phase.bytes_read) for phase in phases]

    run(runner, warm=True, seed=1)
    cold = figures()
    assert [name for name, *_ in cold] == ["encode", "denoise", "decode"]
    assert all(weights and read for _, weights, read in cold)
    runner.forget()  # the graph's own results are gone
    picture = run(runner, warm=True, seed=2, width=48)
    assert figures() == [("encode", 0, 0), *((name, weights, 0) for name, weights, _ in cold[1:])]
    assert "from the cache" in host.said["encode"]
    assert "weren't read from files" in host.said["denoise"]
    other = GraphRunner(LocalHost(host.model_roots()), output_dir=tmp_path / "other")
    assert torch.equal(picture, run(other, warm=False, seed=2, width=48))
    assert runner.state.warm.held_bytes > other.state.warm.held_bytes == 0
    call(runner, "PhaseOffloadPurgeCache", anything=None)
    assert runner.state.warm.held_bytes == runner.state.prompt_cache.held_bytes == 0


def test_out_of_memory_makes_the_host_make_room(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = []
    monkeypatch.setattr(host, "make_room", lambda: rooms.append(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise offload_core.InsufficientMemoryError("too big")

    monkeypatch.setitem(vars(offload_core), "encode", full)
    monkeypatch.setitem(vars(offload_core), "foresee_encode", no_plan)
    with pytest.raises(OffloadError, match="too big"):
        model = SimpleNamespace(guidance_name=None)
        call(runner, "PhaseOffloadEncodePrompt", model=model, prompt="x", negative_prompt="")
    assert rooms == [1]


def test_state_holds_no_handle_and_no_tensor(runner: GraphRunner, models: Path) -> None:
    state = PackState(LocalHost([models]))
    handle = results_of(runner, graph_of("sd15", steps=1))["load"].values[0]
    assert state.fingerprint(state.model("sd15")) == handle.fingerprint
    kept = weakref.ref(handle)
    runner.forget()
    del handle
    gc.collect()
    assert kept() is None


def test_plan_preview_says_what_a_job_takes_and_loads_nothing(
    runner: GraphRunner, host: SpokenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_load(*_: Any) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr("offload_core.phases._components.from_files", no_load)
    load = {"model": "sd15", "dtype": "auto", "device": "cpu"}
    job = {"prompt": "a red fox", "steps": 2, "guidance": 5.0, **SIZE, "batch": 1}
    graph = {
        "load": node("PhaseOffloadLoad", **load),
        "plan": node("PhaseOffloadPlanPreview", model=["load", 0], **job),
        "tight": node("PhaseOffloadLoad", **load, device_memory="300KiB"),
        "small": node("PhaseOffloadPlanPreview", model=["tight", 0], **job),
    }
    result = runner.run(graph)
    (table,) = result.ui["plan"]["text"]
    assert [line.split()[0] for line in table.splitlines()[2:6]] == ["encode", "denoise", "decode", "all"]
    assert "unet stays resident" in table
    assert host.said["plan"].startswith("Plan: keeps all weights of a phase resident")
    assert host.said["small"].startswith("This doesn't fit 300.0 KiB of device memory; it needs")
    assert [path.name for path in result.images] == ["preview_00001_.png", "preview_00002_.png"]
    report, chart = results_of(runner, graph)["plan"].values
    assert report == table
    assert chart.shape == (1, 800, 1800, 3) and chart.dtype == torch.float32
    assert chart.min() >= 0 and chart.max() == 1
    shown = np.asarray(Image.open(result.images[0]))
    assert np.abs(shown / 255 - chart[0].numpy()).max() < 2 / 255


def test_plan_preview_plans_for_the_loras_of_the_model(
    runner: GraphRunner, monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    seen: dict[str, Any] = {}
    lora = offload_core.Lora("a.safetensors", 0.5, "mark", encodes=False)
    handle = dataclasses.replace(offload_core.load(models / "sd15"), loras=(lora,))
    monkeypatch.setitem(vars(offload_core), "foresee_job", lambda *a, **k: seen.update(k))
    job = {"prompt": "", "steps": 0, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    with pytest.raises(AttributeError):
        call(runner, "PhaseOffloadPlanPreview", model=handle, **job)
    assert seen["loras"] == (lora,)
