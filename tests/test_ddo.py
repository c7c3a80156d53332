"""The names of Diffusers Dynamic Offloader: signatures as listed, behaviour, and the original's faults kept out."""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import offload_core as po
from offload_core import ddo
from offload_core._standby_list import StandbyListError, Windows
from offload_core.errors import BudgetError, ColdWeightError, InputError, ManagedModuleError
from offload_core.limits import Machine
from offload_core.streaming import is_streamed
from sequential_models import traces

EMPTY = inspect.Parameter.empty
CLASSES = (nn.Linear, nn.Embedding)
DEVICES = {"execution_device": "cuda:0", "offload_device": "cpu"}
ENVIRONMENT = {"running_on_wsl": None, "environ": None, "use_environment": True, "apply_hook": True}

# Parameters and defaults of release 0.1.0rc2, in its order. Ours may have more, with defaults, at the end.
SIGNATURES: dict[str, dict[str, Any]] = {
    "enable_offload": {
        "module": EMPTY, "settings": None, "config": None, "component": "model", "preset": "auto", "route": None,
        "group_offload": None, "dynamic_offload": None, "offload_type": None, "use_stream": None, "record_stream": None,
        "group_low_cpu_mem_usage": None, "num_blocks_per_group": None, **DEVICES, "low_cpu_mem_usage": True,
        **ENVIRONMENT, "record_event": None, "dynamic_event_name": None, "group_event_name": None,
        "config_overrides": EMPTY,
    },
    "enable_pipeline_offload": {
        "pipeline": EMPTY, "settings": None, "components": None, "preset": "auto", **DEVICES, "low_cpu_mem_usage": True,
        **ENVIRONMENT, "record_event": None, "config_overrides": EMPTY,
    },
    "enable_dynamic_offload": {
        "module": EMPTY, "component": "model", "settings": None, "config": None, "preset": "auto", **DEVICES,
        "target_module_classes": CLASSES, "skip_modules_pattern": (), "always_resident_modules_pattern": None,
        **ENVIRONMENT, "record_event": None, "event_name": "setup_dynamic_offload", "config_overrides": EMPTY,
    },
    "enable_diffusers_group_offload": {
        "module": EMPTY, "onload_device": "cuda:0", "offload_device": "cpu", "offload_type": "leaf_level",
        "use_stream": True, "record_stream": False, "low_cpu_mem_usage": True, "num_blocks_per_group": 1,
        "apply_hook": True, "record_event": None, "event_name": "setup_diffusers_group_offload",
    },
    "from_pretrained_with_dynamic_offload": {
        "pretrained_model_name_or_path": EMPTY, "model_loader": None, "dynamic_offload_config": None,
        "apply_dynamic": False, "profile_name": None, "build_profile": None, "from_pretrained_kwargs": EMPTY,
    },
    "load_dynamic_offload_settings_from_env": {
        **DEVICES, "target_module_classes": CLASSES, "skip_modules_pattern": (),
        "always_resident_modules_pattern": None, "running_on_wsl": None, "environ": None, "default_preset": "",
        "component_policies": None,
    },
    "maybe_purge_windows_standby_cache": {
        "settings_or_phase": None, "phase": None, "settings": None, "preset": "auto", **DEVICES, "running_on_wsl": None,
        "record_event": None, "event_name": None, "default": "0", "print_message": True, "ignore_errors": True,
        "environ": None, "enabled": None,
    },
    "apply_dynamic_offload": {"module": EMPTY, "config": None},
    "remove_dynamic_offload": {"module": EMPTY, "recurse": True},
    "get_dynamic_offload_state": {"module": EMPTY},
    "resolve_dynamic_offload_preset": {"requested_preset": EMPTY, "running_on_wsl": None},
    "get_dynamic_offload_presets": {},
    "format_dynamic_offload_presets": {"default_preset": "auto", "running_on_wsl": None},
    "purge_windows_standby_cache": {},
    "purge_windows_standby_cache_event": {"record_event": EMPTY, "event_name": EMPTY, "print_message": True},
    "release_pytorch_host_cache": {"enabled": False, "phase": "", "device": None},
    "is_wsl_environment": {},
    "get_available_system_ram_gb": {},
    "dynamic_offload_env_value": {"name": EMPTY, "default": "", "environ": None},
    "dynamic_offload_profile_key": {"context": EMPTY},
    "dynamic_offload_profile_path": {"context": EMPTY, "profile_dir": None},
    "load_dynamic_offload_profile": {"context": EMPTY, "profile_dir": None},
    "record_dynamic_offload_profile": {
        "context": EMPTY, "observation": EMPTY, "profile_dir": None, "recommendation": None,
    },
    "get_dynamic_offload_profile_capacity": {"profile": EMPTY, "metric": EMPTY},
    "get_dynamic_offload_profile_recommendation": {"profile": EMPTY},
    "get_dynamic_offload_profile_dir": {"profile_dir": None},
    "normalize_dynamic_offload_profile_context": {"context": EMPTY},
    "resolve_dynamic_offload_backend": {"backend": "linear", "preset": "auto", "running_on_wsl": None},
    "add_dynamic_offload_arguments": {"parser": EMPTY},
    "add_dynamic_offload_lifecycle_arguments": {
        "parser": EMPTY, "phases": ("before_run", "after_text_encoder", "before_transformer", "after_run"),
    },
    "build_dynamic_offload_event_payload": {"settings": EMPTY, "state": EMPTY, "config": None},
    "detect_quantized_backend_modules": {"module": EMPTY},
    "release_native_vmm_idle_cache": {"enabled": False, "phase": "", "device": None, "clear_cublas_workspaces": False},
    "inspect_host_memory": {"module": None, "phase": "", "max_storage_samples": 16},
    "clear_dynamic_offload_plan_cache": {},
    "clear_dynamic_offload_pinned_tensor_cache": {},
    "ensure_vmm_fast_process": {"library_path": None, "allocator_cache_mib": 512, "argv": None, "environ": None},
    "vmm_fast_requested": {"argv": EMPTY, "default_backend": "linear"},
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_those_of_the_original(name: str):
    found = inspect.signature(getattr(ddo, name)).parameters
    for parameter, default in SIGNATURES[name].items():
        assert parameter in found
        assert found[parameter].default == default
    mine = [parameter for key, parameter in found.items() if key not in SIGNATURES[name]]
    assert all(parameter.default is not EMPTY for parameter in mine)


METHODS: dict[str, dict[str, Any]] = {
    "metrics_snapshot": {"collect_completed": False, "execution_timing": None},
    "profile_run": {},
    "cleanup_on_error": {},
    "detach_auxiliary_cpu_sources": {"enabled": False, "max_copy_bytes": 16 << 20},
    "allocation_diagnostics": {"enabled": False},
    "operator_diagnostics": {
        "enabled": False, "module_path": None, "invocations": (0, 2), "output_dir": None, "use_cuda": True,
    },
    "execution_timer": {
        "enabled": False, "native_units": False, "native_capacity": 4096, "diagnostic_step_wait": False,
    },
    "metrics_journal": {"directory": EMPTY, "enabled": False},
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_result_are_those_of_the_original(name: str):
    found = dict(inspect.signature(getattr(ddo.DynamicOffloadApplyResult, name)).parameters)
    del found["self"]
    assert {key: parameter.default for key, parameter in found.items()} == METHODS[name]


def test_what_a_result_is_asked_without_effect_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    with po.enable_offload(model(), settings=SETTINGS) as result:
        result.metrics_snapshot(collect_completed=True, execution_timing={})
        result.detach_auxiliary_cpu_sources(enabled=True)
        with result.allocation_diagnostics(enabled=True), result.operator_diagnostics(enabled=True):
            result.execution_timer(native_units=True)
    names = ("collect_completed", "execution_timing", "detach_auxiliary", "allocation_d", "operator_d", "native_units")
    assert all(name in caplog.text for name in names)


class Block(nn.Module):
    """What the original neither moved nor streamed: a convolution, an attention's in_proj, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(128, 128, 3, padding=1)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.linear = nn.Linear(128, 128)
        self.table = nn.Parameter(torch.randn(128, 128) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.linear(x @ self.table)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


INPUT = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(9))
BUDGET = "1200KiB"  # the model has 1.8 MB
SETTINGS = po.OffloadSettings(execution_device="cpu", device_memory=BUDGET, resident_below=8192, activation_memory=0)
PLAIN = {"environ": {}, "execution_device": "cpu"}


@torch.no_grad()
def run(module: nn.Module) -> torch.Tensor:
    return module(INPUT)


def device_bytes(result: Any) -> int:
    return result._offload._managed.scope.ledger.used("device")


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ enable_offload


def test_enable_offload_streams_every_kind_of_weight_with_the_same_bits():
    twin = run(model())
    result = po.enable_offload(model(), settings=SETTINGS, component="transformer")
    assert torch.equal(run(result.module), twin)
    state = ddo.get_dynamic_offload_state(result.module)
    assert state is not None
    streamed = {entry.tensor_name for entry in state.entries if entry.placement == "streamed_large"}
    kept = {entry.tensor_name for entry in state.entries if entry.placement == "resident_module"}
    assert {"weight", "in_proj_weight", "table"} <= streamed | kept and streamed
    assert result.report().peak_bytes <= result.report().device_budget_bytes == 1200 * 1024
    result.release()


def test_ddo_settings_and_engine_settings_are_the_same_thing():
    view = po.DynamicOffloadSettings.from_env(execution_device="cpu", default_preset="low_ram_safe", environ={})
    with po.enable_offload(model(), settings=view, component="transformer") as result:
        assert result.settings.offload == view.offload
    with po.enable_offload(model(), settings=view.offload) as result:
        assert result.settings.offload == view.offload


def test_nobody_who_names_no_device_is_sent_to_cuda():
    with po.enable_offload(model(), environ={}, route="ddo") as result:
        expected = "cpu" if not torch.accelerator.is_available() else None
        assert expected is None or str(result._offload._managed.scope.device) == expected


def test_options_act_and_those_without_effect_are_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    module = model()
    with po.enable_offload(module, **PLAIN, pin_cpu_workers=3, linear_convolution_offload=True, verbose=True) as result:
        assert result.settings.offload.read_threads == 3
    assert "linear_convolution_offload was accepted and has no effect: convolutions" in caplog.text
    assert "verbose was accepted and has no effect" in caplog.text
    with pytest.raises(TypeError, match="shiny"):
        po.enable_offload(module, **PLAIN, shiny=True)
    with po.enable_offload(module, config=ddo.DynamicOffloadConfig(pin_cpu_workers=1), **PLAIN) as result:
        assert result.settings.offload.read_threads == 1


def test_arguments_that_go_another_way_are_logged_and_none_is_lost(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    with po.enable_offload(
        model(), settings=SETTINGS, use_stream=True, preset="low_ram_safe", running_on_wsl=True
    ) as r:
        assert r.settings.running_on_wsl
    assert "use_stream was accepted and has no effect: model goes the way dynamic_offload" in caplog.text
    assert "preset=low_ram_safe was accepted and has no effect: settings were given" in caplog.text
    with pytest.raises(InputError, match="offload_device"):
        po.enable_offload(model(), settings=SETTINGS, offload_device="meta")


@pytest.mark.parametrize("route", ["auto", "linear_convolution", "sdnq_runtime", "vmm_fast_runtime"])
def test_routes_that_make_no_sense_here_go_through_the_one_engine(route: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    with po.enable_offload(model(), settings=SETTINGS, route=route) as result:
        assert result.route == "dynamic_offload" and result.plan is not None
    assert ("goes through the one engine" in caplog.text) == (route != "auto")


def test_an_unknown_route_is_a_value_error():
    with pytest.raises(ValueError, match="Invalid offload route 'fast'"):
        po.enable_offload(model(), settings=SETTINGS, route="fast")


def test_route_none_moves_the_module_whole():
    module = model().to(torch.float32)
    result = po.enable_offload(module, preset="off", **PLAIN)
    assert (result.route, result.plan, result.hook, result.should_move_to_execution_device) == (
        "none",
        None,
        None,
        False,
    )
    assert not any(is_streamed(parameter) for parameter in module.parameters())
    assert result.release() == 0


def test_a_route_is_taken_from_the_variable_of_the_component():
    environ = {"DDO_VAE_ROUTE": "none", "DDO_PRESET": "low_ram_safe"}
    assert po.enable_offload(model(), component="vae", environ=environ, execution_device="cpu").route == "none"
    with po.enable_offload(model(), component="unet", environ=environ, execution_device="cpu") as result:
        assert (result.route, result.settings.effective_preset) == ("dynamic_offload", "low_ram_safe")
        assert result.settings.offload.read_threads == 1


def test_variables_are_read_only_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDO_PIN_CPU_WORKERS", "9")
    for use, threads in ((True, 9), (False, 4)):
        with po.enable_offload(model(), execution_device="cpu", use_environment=use, running_on_wsl=False) as result:
            assert result.settings.offload.read_threads == threads
    with po.enable_offload(model(), settings=SETTINGS) as result:
        assert result.settings.offload == SETTINGS


def test_without_apply_hook_the_module_is_left_alone():
    module = model()
    before = list(module.parameters())
    result = po.enable_offload(module, settings=SETTINGS, apply_hook=False)
    assert result.hook is None and result.should_move_to_execution_device
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))


def test_a_budget_that_cannot_work_leaves_the_module_as_it_was():
    module = model()
    with pytest.raises(BudgetError, match="smallest|at least"):
        po.enable_offload(module, settings=po.OffloadSettings(execution_device="cpu", device_memory="20KiB"))
    assert torch.equal(run(module), run(model()))
    assert not module._forward_pre_hooks


def test_record_event_is_told_name_seconds_and_figures():
    told: list[Any] = []
    with po.enable_offload(
        model(), settings=SETTINGS, component="transformer", record_event=lambda *a, **k: told.append((a, k))
    ) as result:
        ((name, seconds), payload) = told[0]
        assert name == "setup_transformer_dynamic_offload" and seconds >= 0
        assert payload == result.event_payload and payload["bytes_by_placement"]["streamed_large"] > 0


def test_attaching_again_replaces_what_was_there():
    """The original does so, too; here nothing of the first is left."""
    module = model()
    first = po.enable_offload(module, settings=SETTINGS)
    second = po.enable_offload(module, settings=SETTINGS)
    assert first._offload._managed.released and not second._offload._managed.released
    assert torch.equal(run(module), run(model()))
    second.release()
    assert not module._forward_pre_hooks and not any(is_streamed(p) for p in module.parameters())


def test_to_is_what_it_always_was_where_a_module_is_not_managed():
    module = model()
    assert module.to(torch.float64).blocks[0].table.dtype == torch.float64
    module = model()
    result = po.enable_offload(module, settings=SETTINGS)
    with pytest.raises(ManagedModuleError):
        module.to("meta")
    result.release()
    assert "_apply" not in vars(module)
    assert module.to("meta").blocks[0].table.device.type == "meta"
    assert nn.Module.to is type(module).to


# ------------------------------------------------------------------------------------------------ letting go


def test_deleting_the_result_alone_gives_the_memory_back_and_the_module_still_runs():
    twin = run(model())
    module = model()
    with no_collector():
        result = po.enable_offload(module, settings=SETTINGS)
        run(module)
        ledger, small = result._offload._managed.scope.ledger, result.plan.small_bytes
        assert ledger.used("device") > small
        del result
        assert ledger.used("device") == small
        assert torch.equal(run(module), twin)
    ddo.remove_dynamic_offload(module)


def test_a_result_that_nobody_keeps_leaves_the_module_under_offload():
    module = model()
    po.enable_offload(module, settings=SETTINGS)
    assert torch.equal(run(module), run(model()))
    assert ddo.get_dynamic_offload_state(module) is not None


@pytest.mark.parametrize("order", [("result", "module"), ("module", "result")])
def test_deleting_result_and_module_frees_everything_without_the_collector(order: tuple[str, str]):
    with no_collector():
        held: dict[str, Any] = {"module": model()}
        held["result"] = po.enable_offload(held["module"], settings=SETTINGS)
        run(held["module"])
        managed = held["result"]._offload._managed
        watched = [weakref.ref(thing) for thing in (held["module"], managed, managed.scope, managed.scope.cache)]
        del managed
        for name in order:
            del held[name]
        assert [ref() for ref in watched if ref() is not None] == []


def test_remove_gives_the_very_same_weights_back():
    module = model()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in module.named_parameters()}
    ddo.apply_dynamic_offload(module, ddo.DynamicOffloadConfig(execution_device="cpu"))
    run(module)
    ddo.remove_dynamic_offload(module)
    now = {name: (tensor, tensor.data_ptr()) for name, tensor in module.named_parameters()}
    assert all(now[name][0] is before[name][0] and now[name][1] == before[name][1] for name in before)
    assert ddo.get_dynamic_offload_state(module) is None
    copy.deepcopy(module)
    ddo.remove_dynamic_offload(module)  # nothing more to do


def test_remove_reaches_parts_that_are_under_offload_of_their_own():
    module = model()
    po.enable_offload(module.blocks[1], settings=SETTINGS)
    ddo.remove_dynamic_offload(module, recurse=False)
    assert ddo.get_dynamic_offload_state(module.blocks[1]) is not None
    ddo.remove_dynamic_offload(module)
    assert ddo.get_dynamic_offload_state(module.blocks[1]) is None


def test_the_hook_reaches_the_engine():
    result = po.enable_offload(model(), settings=SETTINGS)
    assert result.hook.state.bytes_by_placement
    assert result.hook.detach_hook(result.module) is result.module
    assert result.hook.state is None and not any(is_streamed(p) for p in result.module.parameters())


def test_an_error_in_a_guarded_block_ends_the_offload_and_goes_on_with_a_note():
    result = po.enable_offload(model(), settings=SETTINGS)
    with pytest.raises(KeyError) as caught, result.cleanup_on_error():
        raise KeyError("x")
    assert "ended because of this error" in caught.value.__notes__[0]
    assert ddo.get_dynamic_offload_state(result.module) is None


def test_two_models_of_one_class_and_shape_keep_their_own_weights():
    """The original's pinned cache knew weights by class and shape: the second model ran with the first one's."""
    twins = [run(model(seed)) for seed in (1, 2)]
    for seed, twin in zip((1, 2), twins, strict=True):
        with po.enable_offload(model(seed), preset="warm_process", cache_pinned_weights=True, **PLAIN) as result:
            assert torch.equal(run(result.module), twin)


# ------------------------------------------------------------------------------------------------ pipelines


class Pipeline:
    def __init__(self) -> None:
        self.components = {"transformer": model(1), "vae": model(2), "scheduler": object()}


def test_a_pipeline_keeps_to_one_budget_as_a_whole():
    pipeline = Pipeline()
    twins = {name: run(model(seed)) for name, seed in (("transformer", 1), ("vae", 2))}
    results = po.enable_pipeline_offload(pipeline, settings=SETTINGS)
    assert set(results) == {"transformer", "vae"}
    for name, twin in twins.items():
        assert torch.equal(run(pipeline.components[name]), twin)
    scopes = {result._offload._managed.scope for result in results.values()}
    (scope,) = scopes
    assert scope.ledger.peak("device") <= 1200 * 1024
    results["vae"].release()
    assert torch.equal(run(pipeline.components["transformer"]), twins["transformer"])
    results["transformer"].release()
    assert scope.ledger.used("device") == 0


def test_policies_send_components_their_own_way():
    pipeline = Pipeline()
    results = po.enable_pipeline_offload(
        pipeline,
        settings=SETTINGS,
        components={"vae": {"route": "none"}, "transformer": pipeline.components["transformer"]},
    )
    assert {name: result.route for name, result in results.items()} == {"vae": "none", "transformer": "dynamic_offload"}
    results["transformer"].release()
    assert po.enable_pipeline_offload(pipeline, settings=SETTINGS, components={"vae": "none"})["vae"].route == "none"
    for policy in (7, {"speed": "fast"}):
        with pytest.raises(InputError, match="The policy of vae is"):
            po.enable_pipeline_offload(pipeline, settings=SETTINGS, components={"vae": policy})


def test_a_pipeline_that_does_not_fit_is_left_as_it_was():
    pipeline = Pipeline()
    tight = po.OffloadSettings(execution_device="cpu", device_memory="300KiB", resident_below=0, activation_memory=0)
    pipeline.components["vae"].blocks.append(nn.Linear(512, 512))
    with pytest.raises(BudgetError):
        po.enable_pipeline_offload(pipeline, settings=tight)
    for module in (pipeline.components["transformer"], pipeline.components["vae"]):
        assert ddo.get_dynamic_offload_state(module) is None and not module._forward_pre_hooks


# ------------------------------------------------------------------------------------------- dynamic and group


def test_enable_dynamic_offload_attaches_nothing_where_the_preset_offloads_nothing():
    module = model()
    result = po.enable_dynamic_offload(module, preset="off", **PLAIN)
    assert result.should_move_to_execution_device and result.hook is None
    with po.enable_dynamic_offload(module, execution_mode="vmm_runtime", settings=SETTINGS) as result:
        assert result.plan is not None
    result = po.enable_dynamic_offload(module, execution_mode="plan", settings=SETTINGS)
    assert result.hook is None


def test_group_offload_is_diffusers_own_and_runs_on_the_cpu(caplog: pytest.LogCaptureFixture):
    """The original asked for streams there, which diffusers refuses."""
    caplog.set_level(logging.INFO, logger="offload_core")
    module, twin = model(), run(model())
    result = po.enable_diffusers_group_offload(module, onload_device="cpu")
    assert "the CPU has no streams" in caplog.text
    assert any(
        "group_offloading" in vars(part)["_diffusers_hook"].hooks
        for part in module.modules()
        if "_diffusers_hook" in vars(part)
    )
    assert torch.equal(run(module), twin)
    result.release()
    with po.enable_offload(module, settings=SETTINGS):  # diffusers' hooks would be refused
        assert torch.equal(run(module), twin)


@pytest.mark.parametrize("route", ["dynamic_offload", "diffusers_group_offload", "none"])
def test_release_leaves_nothing_on_a_module_whichever_way_it_went(route: str):
    """Objects, memory, forwards and registries are what they were; the original's removal gave nothing back."""
    module = model()
    before = traces(module)
    with po.enable_offload(module, settings=SETTINGS, route=route):
        run(module)
    assert traces(module) == before


def test_a_route_that_fails_half_way_leaves_nothing_on_the_module():
    module = model()
    before = traces(module)
    with pytest.raises(ValueError, match="offload_type|bad"):
        po.enable_diffusers_group_offload(module, onload_device="cpu", offload_type="bad")
    assert traces(module) == before


@pytest.mark.parametrize("preset", ["auto", "diffusers_leaf_offload_compat", "diffusers_offload_compat"])
def test_no_preset_raises_on_the_cpu(preset: str):
    """In the original, those that put the text encoder under group offload did."""
    with po.enable_offload(model(), preset=preset, component="text_encoder", **PLAIN) as result:
        assert torch.equal(run(result.module), run(model()))


# ------------------------------------------------------------------------------------------------ the rest


def test_metrics_are_plain_values_with_a_text():
    with po.enable_offload(model(), settings=SETTINGS) as result:
        run(result.module)
        metrics = result.metrics_snapshot()
        found = metrics.as_dict()
        assert (found["schema_version"], found["route"]) == (1, "dynamic_offload")
        assert found["runtime"]["streamed_bytes"] > 0 and "stall_s" in found["runtime"]
        assert "streamed_bytes" in metrics.format_profile()
        state = ddo.get_dynamic_offload_state(result.module).as_dict()
        assert state["total_bytes"] == sum(state["bytes_by_placement"].values())
        assert state["copy_bytes_by_name"]["hot"] == found["runtime"]["streamed_bytes"]


def test_available_ram_knows_a_containers_limit():
    assert ddo.get_available_system_ram_gb() == pytest.approx(Machine().host().free / 2**30, rel=0.2)


def test_purge_at_a_phase_is_asked_of_variable_preset_and_default_in_this_order(monkeypatch: pytest.MonkeyPatch):
    def maybe(*args: Any, **kwargs: Any) -> str:
        return ddo.maybe_purge_windows_standby_cache(*args, **kwargs)["reason"]

    assert maybe("before_run", environ={}, running_on_wsl=False) == "non_windows"
    assert maybe("after_run", environ={}, running_on_wsl=False) == "disabled"
    assert maybe("after_run", environ={}, default="1") == "non_windows"
    assert maybe("before_run", environ={"DDO_PURGE_WINDOWS_STANDBY_BEFORE_RUN": "0"}) == "disabled"
    view = po.DynamicOffloadSettings.from_env(
        environ={"DDO_PURGE_WINDOWS_STANDBY_AFTER_RUN": "1"}, default_preset="off"
    )
    assert maybe(view, "after_run") == maybe(settings=view, phase="after_run") == "non_windows"
    assert maybe(view, "before_run") == "disabled"
    assert maybe(view, "after_run", enabled=False) == "disabled"
    with pytest.raises(InputError, match="no purge phase"):
        maybe("tomorrow")
    told: list[Any] = []
    monkeypatch.setattr(Windows, "here", classmethod(lambda cls: object()))
    monkeypatch.setattr(ddo._caches, "purge_standby_list", lambda windows: 5 << 20)
    answer = ddo.maybe_purge_windows_standby_cache(
        "before_run", enabled=True, record_event=lambda *a, **k: told.append((a[0], k)), environ={}
    )
    assert answer["purged"] and answer["freed_bytes"] == 5 << 20
    assert told[0][0] == "purge_windows_standby_before_run"

    def refuse(windows: Any) -> int:
        raise StandbyListError("not elevated")

    monkeypatch.setattr(ddo._caches, "purge_standby_list", refuse)
    assert maybe("before_run", enabled=True, environ={}) == "not elevated"
    with pytest.raises(StandbyListError):
        maybe("before_run", enabled=True, environ={}, ignore_errors=False)


def test_purging_the_standby_list_elsewhere_is_an_error_of_ours():
    if sys.platform != "win32":
        with pytest.raises(StandbyListError, match="only Windows"):
            po.purge_windows_standby_cache()


def test_the_host_cache_is_released_only_when_it_is_enabled():
    assert po.release_pytorch_host_cache().setup["host_cache_release"]["released"] is False
    setup = po.release_pytorch_host_cache(enabled=True, phase="x", device="cpu").setup["host_cache_release"]
    assert setup["released"] and setup["phase"] == "x" and "pinned_cache_bytes" in setup


def test_nothing_is_printed_and_no_model_library_is_imported_for_a_plain_module():
    """The original printed, and exchanged functions of four libraries while it loaded."""
    code = """
import sys, torch, offload_core as po
m = torch.nn.Sequential(torch.nn.Linear(64, 64))
r = po.enable_offload(m, execution_device="cpu", environ={}, verbose=True, show_profile=True)
m(torch.randn(1, 64)); r.metrics_snapshot().format_profile(); r.release()
sys.exit(len({"diffusers", "transformers", "accelerate"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_arguments_of_runners_become_a_config(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    parser = ddo.add_dynamic_offload_lifecycle_arguments(ddo.add_dynamic_offload_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(["--ddo-backend", "vmm", "--ddo-vmm-source-cache-gb", "2", "--no-purge-after-run"])
    backend = ddo.resolve_dynamic_offload_backend(args.ddo_backend, args.ddo_preset)
    assert (backend.effective_preset, backend.requires_native_bootstrap) == ("vmm_fast", False)
    assert "there is no native allocator" in caplog.text
    config = backend.build_config_from_args(args)
    with po.enable_offload(model(), config=config, **PLAIN) as result:
        offload = result.settings.offload
        assert (offload.resident_memory, offload.pinned_memory) == (str(4 << 30), str(2 << 30))
        payload = ddo.build_dynamic_offload_event_payload(result.settings, ddo.get_dynamic_offload_state(result.module))
        assert payload["total_bytes"] > 0 and payload["pin_cpu_memory"]
    assert (args.purge_after_run, args.purge_before_run) == (False, None)
    linear = ddo.resolve_dynamic_offload_backend(running_on_wsl=False)
    assert (linear.effective_preset, linear.execution_mode) == ("one_shot_fast", "linear_runtime")
    with pytest.raises(InputError, match="no backend 'cuda'"):
        ddo.resolve_dynamic_offload_backend("cuda")
    argv = ["run.py", "--ddo-backend", "vmm", "--steps", "4"]
    assert ddo.vmm_fast_requested(argv) and not ddo.vmm_fast_requested(argv[:1])
    assert not ddo.vmm_fast_requested([*argv, "--ddo-preset", "nvme_baseline"])
    ddo.ensure_vmm_fast_process(argv=argv)
    assert "no process has to be started anew" in caplog.text
    assert ddo.release_native_vmm_idle_cache().setup["device_cache_release"]["status"] == "disabled"
    assert ddo.detect_quantized_backend_modules(model()) == {}


def test_cold_weights_after_a_release_in_a_pipeline_are_never_read_silently():
    stand_in = None
    with po.enable_offload(model(), settings=SETTINGS) as result:
        stand_in = result.module.blocks[0].table
    with pytest.raises(ColdWeightError):
        stand_in + 1
