"""Another scheduler in Denoise: the bits of the one-shot pipeline with the same one, and sentences for those of
another kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

import offload_core as po
from node_graphs import SpokenHost, call, leave_out_plans
from offload_core.phases import trace_denoise
from offload_core.schedulers import SCHEDULERS, fitting_schedulers, scheduler_like
from offload_core.tiny_models.running import align
from phase_offload_nodes.catalog import NODES
from phase_offload_nodes.graph_runner import GraphRunner
from staging import job, staged, tiny_model, words

KARRAS = {"use_karras_sigmas": True}
SCIPY = importlib.util.find_spec("scipy")


def one_shot(name: str, cls: str, options: dict[str, Any], arguments: dict[str, Any]) -> torch.Tensor:
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    pipeline.scheduler = getattr(diffusers, cls).from_config(pipeline.scheduler.config, **options)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(**arguments, output_type="pt", generator=torch.Generator("cpu").manual_seed(3))[0]
    return torch.as_tensor(picture).float()


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        ("sd15", "DPMSolverMultistepScheduler sde karras", {"algorithm_type": "sde-dpmsolver++", **KARRAS}),
        pytest.param("sd15", "HeunDiscreteScheduler", {}, marks=pytest.mark.slow),
        pytest.param("flux", "FlowMatchEulerDiscreteScheduler karras", KARRAS, marks=pytest.mark.slow),
        pytest.param("wan22_5b", "DPMSolverMultistepScheduler", {}, marks=pytest.mark.slow),
    ],
)
def test_another_scheduler_equals_the_one_shot_run_with_it(model: str, name: str, options: dict[str, Any]) -> None:
    asked = job(model, guided=True) | {"num_inference_steps": 3}  # with two, most spacings are one and the same
    expected = one_shot(model, name.partition(" ")[0], options, words(model) | asked)
    pictures, session = staged(tiny_model(model), words(model), asked | {"scheduler": name}, dtype="auto", seed=3)
    assert torch.equal(pictures, expected)
    assert [phase.name for phase in session.report.phases] == ["encode", "denoise", "decode"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")
@pytest.mark.parametrize("model", ["sd15", "flux", "wan22_5b"])
def test_every_scheduler_that_is_said_to_fit_makes_steps(model: str) -> None:
    """Steps on numbers alone: of each kind of model every name that is offered for it."""
    own = DiffusionPipeline.from_pretrained(tiny_model(model)).scheduler
    fitting = fitting_schedulers(own)
    assert fitting
    for name in fitting:
        if not SCIPY and (name.endswith("beta") or name.startswith("LMS")):
            with pytest.raises(po.InputError, match=f"'{name}' needs a package that isn't installed: .*scipy"):
                scheduler_like(own, name)
            continue
        scheduler = scheduler_like(own, name)
        assert type(scheduler).__name__ == name.partition(" ")[0]
        scheduler.set_timesteps(4, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
        sample = torch.ones(1, 4, 4, 4)
        for step in scheduler.timesteps:
            sample = scheduler.step(sample * 0.1, step, sample, return_dict=False)[0]
        assert sample.isfinite().all(), name


def test_a_flow_model_takes_no_scheduler_of_another_kind(tmp_path: Path) -> None:
    handle = po.load(tiny_model("flux"), device="cpu")
    own = "FlowMatchEulerDiscreteScheduler"
    sentence = f"'DDIMScheduler' doesn't fit this model; the model's own is {own}: choose one of {own}, {own} karras, "
    with pytest.raises(po.InputError, match=sentence):
        po.check_denoise(handle, scheduler="DDIMScheduler")
    wan = po.load(tiny_model("wan22_5b"), device="cpu")
    for name in ("EulerDiscreteScheduler", "UniPCMultistepScheduler karras", "FlowMatchEulerDiscreteScheduler"):
        with pytest.raises(po.InputError, match=f"'{name}' doesn't fit this model.*choose one of .*UniPCMultistep"):
            po.check_denoise(wan, scheduler=name)


@pytest.mark.parametrize("name", ["list", "", "EDMEulerScheduler", "os.system", "DDIMScheduler karras"])
def test_a_name_that_is_none_names_those_that_fit(name: str) -> None:
    handle = po.load(tiny_model("sd15"), device="cpu")
    with pytest.raises(
        po.InputError, match=f"'{name}' isn't one of the schedulers here; .*choose one of DDIMScheduler, "
    ):
        po.check_denoise(handle, scheduler=name)


def test_a_scheduler_that_calls_the_denoiser_twice_a_step_is_foretold_so() -> None:
    handle = po.load(tiny_model("sd15"), device="cpu")
    embeds = po.encode(handle, "a star")
    call = {"num_inference_steps": 3, "width": 32, "height": 32}

    def times(scheduler: str | None) -> int:
        return sum(each.times for each in trace_denoise(handle, embeds, scheduler=scheduler, **call).calls)

    assert times(None) == 3
    assert times("HeunDiscreteScheduler") == 5  # the last step has no second half


def test_the_node_offers_every_name_and_leaves_the_models_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {spec.name: spec for spec in NODES["PhaseOffloadDenoise"].schema.inputs}
    assert specs["scheduler"].options == ("model's own", *SCHEDULERS)
    leave_out_plans(monkeypatch)
    seen: list[dict[str, Any]] = []
    monkeypatch.setitem(vars(po), "denoise", lambda *a, **k: seen.append(k))
    runner = GraphRunner(SpokenHost(tmp_path / "models", "sd15"), output_dir=tmp_path / "out")
    (model,) = call(runner, "PhaseOffloadLoad", model="sd15", dtype="auto", device="cpu")
    inputs = {"model": model, "embeds": None, "seed": 1, "steps": 0, "guidance": -1.0, "width": 0, "height": 0}
    for scheduler in ({}, {"scheduler": "model's own"}, {"scheduler": "DDIMScheduler"}):
        with pytest.raises(AttributeError):
            call(runner, "PhaseOffloadDenoise", **inputs, batch=1, **scheduler)
    assert [each.get("scheduler") for each in seen] == [None, None, "DDIMScheduler"]


def test_the_command_names_those_that_fit_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from offload_core.cli import main

    words = ["--model", str(tiny_model("sd15")), "--prompt", "a star", "--output", str(tmp_path / "x.png")]
    assert main(["generate", *words, "--scheduler", "list"]) == 2
    said = capsys.readouterr().err
    assert "'list' isn't one of the schedulers here; the model's own is DDIMScheduler: choose one of " in said
    assert not (tmp_path / "x.png").exists()
