"""Metrics of a run and learnt capacity: found by content and shape, never by a name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload_core as po
from offload_core import ddo
from offload_core.ddo._profiles import content_of, shapes_in
from offload_core.errors import InputError
from offload_core.report import PhaseReport, RunReport

SETTINGS = po.OffloadSettings(execution_device="cpu", device_memory="1MiB", resident_below=1024, activation_memory=0)


def net(seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


@torch.no_grad()
def profile(module: nn.Module, folder: Path, batch: int = 2, **options: Any) -> Any:
    view = po.DynamicOffloadSettings(offload=SETTINGS, variables={"DDO_PROFILE_DIR": str(folder)})
    with po.enable_offload(module, settings=view, **options) as result, result.profile_run() as run:
        module(torch.randn(batch, module[0].in_features))
    return run


def test_a_run_is_learnt_and_found_again_by_the_same_weights_and_shapes(tmp_path: Path):
    first, again = profile(net(), tmp_path), profile(net(), tmp_path)
    assert first.path == again.path == ddo.dynamic_offload_profile_path(again.context, tmp_path)
    kept = ddo.load_dynamic_offload_profile(again.context, tmp_path)
    assert kept is not None and len(kept["observations"]) == 2
    assert first.observation["streamed_bytes"] > 0
    peak = ddo.get_dynamic_offload_profile_capacity(kept, "reserved_peak_bytes")
    assert peak == {"largest": max(run.observation["reserved_peak_bytes"] for run in (first, again))}
    assert ddo.get_dynamic_offload_profile_capacity(kept, "nothing") is None


def test_other_weights_other_shapes_and_other_inputs_have_other_profiles_whatever_their_name(tmp_path: Path):
    """In the original, one name of one class was one profile."""
    runs = [
        profile(net(), tmp_path, profile_name="mine"),
        profile(net(seed=1), tmp_path, profile_name="mine"),
        profile(net(width=32), tmp_path, profile_name="mine"),
        profile(net(), tmp_path, batch=3, profile_name="mine"),
    ]
    assert len({run.path for run in runs}) == len(runs)
    assert profile(net(), tmp_path, profile_name="yours").path == runs[0].path


def test_content_is_that_of_the_files_where_weights_lie_in_files(tmp_path: Path):
    def content(path: Path) -> str:
        module = net()
        module.load_state_dict(load_file(path), assign=True)
        with po.enable_offload(module, settings=SETTINGS) as result:
            return content_of(result._offload)

    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for path in (one, two):
        save_file(net().state_dict(), path)
        os.utime(path, (1, 1))
    assert content(one) == content(two)
    os.utime(two, (2, 2))  # as a file that was written anew
    assert content(one) != content(two)


def test_a_run_that_failed_or_did_not_happen_teaches_nothing(tmp_path: Path):
    module = net()
    with po.enable_offload(module, settings=SETTINGS) as result:
        with result.profile_run() as run:
            pass
        with pytest.raises(KeyError), result.profile_run() as failed:
            module(torch.randn(1, 64))
            raise KeyError
        assert run.path is None and failed.path is None and not module._forward_pre_hooks
    with pytest.raises(InputError, match="goes another way"):
        po.enable_offload(net(), preset="off", environ={}, execution_device="cpu").profile_run()


def test_a_recommendation_fills_in_only_what_settings_leave_open(tmp_path: Path):
    job, needs = {"prompt": "a"}, {"content": "x", "shape": [1, 2]}
    session = ddo.DynamicOffloadProfileSession(job, needs, tmp_path)
    assert session.apply_settings(po.OffloadSettings()) == (po.OffloadSettings(), None)
    session.record_success({"peak_gb": 3.5}, {"activation_memory": 12345})
    session = ddo.DynamicOffloadProfileSession({"prompt": "b"}, needs, tmp_path)
    settings, found = session.apply_settings(po.OffloadSettings())
    assert settings.activation_memory == 12345 and found == {"activation_memory": 12345}
    said = po.OffloadSettings(activation_memory="1GiB")
    assert session.apply_settings(said)[0] == said
    assert session.apply_settings(po.OffloadSettings(), allow_recommendation=False)[1] is None
    assert session.recommend_resident_budget(8.0, 3.5, 1.0) == 3.5
    assert session.recommend_resident_budget(4.0, 3.5, 1.0) == 0.0


def test_profiles_survive_what_files_can_be(tmp_path: Path):
    context = {"b": 1, "a": [1, 2]}
    assert ddo.dynamic_offload_profile_key(context) == ddo.dynamic_offload_profile_key({"a": (1, 2), "b": 1})
    path = ddo.record_dynamic_offload_profile(context, {"gb": 1.0}, tmp_path)
    for _ in range(25):
        ddo.record_dynamic_offload_profile(context, {"gb": 2.0}, tmp_path)
    kept = ddo.load_dynamic_offload_profile(context, tmp_path)
    assert kept is not None and len(kept["observations"]) == 20 and kept["largest"] == {"gb": 2.0}
    for text in (
        "",
        "[]",
        "{}",
        json.dumps(kept | {"context": {"other": 1}}),
        json.dumps(kept | {"schema_version": 0}),
    ):
        path.write_text(text)
        assert ddo.load_dynamic_offload_profile(context, tmp_path) is None
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InputError, match="plain JSON values"):
        ddo.dynamic_offload_profile_key({"x": object()})
    assert shapes_in({"x": [torch.zeros(2, 3), 1]}) == {"x": [[2, 3, "torch.float32"], "int"]}


def test_the_folder_of_profiles_is_a_variables_or_the_projects_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path))
    assert ddo.get_dynamic_offload_profile_dir() == tmp_path / "profiles"
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path / "mine"))
    assert ddo.get_dynamic_offload_profile_dir() == tmp_path / "mine"
    assert ddo.get_dynamic_offload_profile_dir("here") == Path("here")


# ------------------------------------------------------------------------------------------------ watching a run


@torch.no_grad()
def test_steps_are_timed_and_kept_in_files_of_their_own_when_that_is_wanted(tmp_path: Path):
    module = net()
    with (
        po.enable_offload(module, settings=SETTINGS) as result,
        result.execution_timer(enabled=True) as timer,
        result.metrics_journal(tmp_path / "run", enabled=True) as journal,
        result.execution_timer() as silent,
    ):
        for _ in range(2):
            module(torch.randn(1, 64))
            timer.mark_step()
            silent.mark_step()
            journal.record()
        assert result.metrics_journal(tmp_path / "other").record() is None
        with pytest.raises(InputError, match="Step 1 is in"):
            journal.record(1)
    found = timer.snapshot()
    assert len(found["steps"]) == 2 and found["total_seconds"] > 0 and silent.snapshot()["steps"] == []
    assert found["total_streamed_bytes"] <= result.report().streamed_bytes
    files = sorted((tmp_path / "run").iterdir())
    assert [file.name for file in files] == ["step-0000.json", "step-0001.json"]
    assert json.loads(files[1].read_text())["runtime"]["fetches"] > 0
    assert not (tmp_path / "other").exists()


def test_host_memory_counts_each_storage_once_and_no_streamed_weight():
    module = net()
    module.tied = module[0].weight
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    found = ddo.inspect_host_memory(module, phase="x", max_storage_samples=1).setup["host_memory"]
    assert found["cpu_storages"]["unique_storage_bytes"] == nbytes and found["host"]["process_rss_bytes"] > 0
    assert (len(found["cpu_storages"]["storage_samples"]), found["cpu_storages"]["omitted_storage_count"]) == (1, 5)
    with po.enable_offload(module, settings=SETTINGS):
        small = ddo.inspect_host_memory(module).setup["host_memory"]["cpu_storages"]["unique_storage_bytes"]
    assert small < nbytes // 10


def test_a_phase_report_is_told_under_ddos_names():
    phase = PhaseReport("denoise", 2.0, 0.5, 10, 20, 30, 40, 0, streamed_bytes=7, stall_s=0.1)
    found = ddo.metrics_of_run(RunReport([phase])).as_dict()
    assert found["route"] == "phases"
    runtime = found["runtime"]["denoise"]
    assert (runtime["device_peak_bytes"], runtime["host_peak_bytes"], runtime["stall_s"]) == (20, 30, 0.1)
