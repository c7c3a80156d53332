"""Presets and variables: each changes the plan, and nothing that is accepted goes unsaid."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_core._memory_options import memory_settings
from offload_core.cli import main
from offload_core.ddo import (
    DynamicOffloadConfig,
    DynamicOffloadSettings,
    dynamic_offload_preset_env_value,
    get_dynamic_offload_presets,
    load_dynamic_offload_settings_from_env,
    resolve_dynamic_offload_preset,
    variables_table,
)
from offload_core.ddo._options import OPTIONS
from offload_core.ddo._settings import make_settings
from offload_core.errors import InputError
from offload_core.foresight import _limits_of
from offload_core.known import known_machines
from offload_core.limits import Machine
from offload_core.presets import PRESETS, resolve_preset
from offload_core.settings import OffloadSettings
from offload_core.streaming import OffloadScope, WeightSize, make_plan

GIB = 2**30
CPU = torch.device("cpu")
# A model of 24 GiB in blocks of 64 MiB, on a machine that has room for half of it.
WEIGHTS = [WeightSize(f"block.{i}", 64 << 20) for i in range(384)]
MACHINE = Machine(virtual_memory=lambda: SimpleNamespace(total=16 * GIB, available=14 * GIB), platform="test")


def plan_of(settings: OffloadSettings) -> tuple[Any, ...]:
    """The numbers that a scope and its plan have under these settings on the machine above."""
    scope = OffloadScope(settings, CPU, machine=MACHINE)
    try:
        plan = make_plan(WEIGHTS, available=scope.available(), resident_limit=scope.resident_limit)
        files = (settings.direct_io, settings.drop_page_cache, settings.vae_tiling, settings.resident_below)
        return (*scope.ledger.limits.values(), plan.resident_bytes, scope.staging_bytes, settings.pinned_memory, *files)
    finally:
        scope.close()


def test_each_preset_changes_the_plan():
    plans = {
        name: (preset.route, *preset.group.items(), *plan_of(preset.settings())) for name, preset in PRESETS.items()
    }
    assert len(set(plans.values())) == len(plans)


def test_presets_set_only_fields_that_settings_have_and_each_says_when_to_use_it():
    known = {each.name for each in fields(OffloadSettings)}
    for preset in PRESETS.values():
        assert set(preset.numbers) <= known
        assert preset.when.endswith(".") and len(preset.numbers) <= 4


def test_weights_that_stay_obey_their_limit():
    assert plan_of(OffloadSettings(resident_memory="3GiB"))[2] == 3 * GIB
    assert plan_of(OffloadSettings(resident_memory=0))[2] == 0
    assert plan_of(OffloadSettings(resident_memory="100GiB")) == plan_of(OffloadSettings())
    assert make_plan(WEIGHTS, available=100 * GIB, resident_limit=GIB).resident_bytes == GIB  # though all would fit


def test_a_plan_for_a_known_card_obeys_the_limit_too():
    card = next(iter(known_machines().values()))
    assert _limits_of(card, OffloadSettings(resident_memory="3GiB")).resident_limit == 3 * GIB
    assert _limits_of(card, OffloadSettings()).resident_limit is None


def test_auto_is_another_preset_under_wsl():
    assert resolve_dynamic_offload_preset("auto", running_on_wsl=True) == "wsl_compat"
    assert resolve_dynamic_offload_preset("auto", running_on_wsl=False) == "one_shot_fast"
    with pytest.raises(InputError, match="no preset 'fastest'"):
        resolve_preset("fastest")


def settings(environ: dict[str, str] | None = None, **more: Any) -> DynamicOffloadSettings:
    return load_dynamic_offload_settings_from_env(environ=environ or {}, running_on_wsl=False, **more)


def test_a_variable_of_ours_that_does_nothing_is_logged_and_an_unknown_one_is_warned_of(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, logger="offload_core")
    settings({"DDO_VMM_LIBRARY_PATH": "x", "DDO_TRANSFORMER_ROUTE": "ddo", "DDO_PIN_WORKERS": "3"})
    assert [(record.levelname, record.getMessage().split()[0]) for record in caplog.records] == [
        ("INFO", "DDO_VMM_LIBRARY_PATH"),
        ("WARNING", "DDO_PIN_WORKERS"),
    ]


def test_modes_are_the_one_engine_except_plan():
    assert settings({"DDO_EXECUTION_MODE": "plan"}).route_of("transformer").name == "none"
    assert settings({"DDO_EXECUTION_MODE": "vmm_runtime"}).route_of("transformer").name == "dynamic_offload"


def test_a_budget_for_pinned_memory_does_not_pin_what_is_not_to_be_pinned():
    environ = {"DDO_PIN_CPU_MEMORY": "0", "DDO_PIN_WEIGHT_BUDGET_GB": "5"}
    assert settings(environ).offload.pinned_memory == 0
    assert settings(environ | {"DDO_PIN_CPU_MEMORY": "1"}).offload.pinned_memory == str(5 * GIB)


VALUES = {"load_safetensors_backend": "mmap", "pin_cpu_memory": "0", "pin_cpu_workers": "7"}


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.variable], ids=lambda option: option.variable
)
def test_a_variable_changes_the_settings_or_says_why_not(option: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    found = settings({option.variable: VALUES.get(option.field, "5")}, default_preset="plain")
    if option.change is None:
        assert found.offload == settings(default_preset="plain").offload
        assert f"{option.field} was accepted and has no effect" in caplog.text
    elif option.field == "execution_mode":
        assert "every mode but plan" in caplog.text
    else:
        assert found.offload != settings(default_preset="plain").offload


def test_what_is_said_wins_over_variables_they_over_the_preset_and_it_over_the_defaults():
    environ = {"DDO_PIN_CPU_WORKERS": "3"}
    assert OffloadSettings().read_threads == settings(default_preset="plain").offload.read_threads == 2
    assert settings(default_preset="warm_process").offload.read_threads == 4
    assert settings(environ, default_preset="warm_process").offload.read_threads == 3
    said = make_settings(
        preset="warm_process",
        variables=environ,
        said={"pin_cpu_workers": 1},
        execution_device="cpu",
        offload_device="cpu",
        running_on_wsl=False,
        component_policies={},
    )
    assert said.offload.read_threads == 1
    assert settings({"DDO_PRESET": "low_ram_safe"}, default_preset="off").effective_preset == "low_ram_safe"


def test_sizes_are_gib_and_a_threshold_in_kb_is_one_in_bytes():
    found = settings({"DDO_RESIDENT_MODULE_BUDGET_GB": "1.5", "DDO_SMALL_TENSOR_THRESHOLD_KB": "16"}).offload
    assert found.resident_memory == str(3 * GIB // 2)
    assert found.resident_below == 16384
    assert DynamicOffloadConfig(small_tensor_threshold_bytes=9).small_tensor_threshold_bytes == 9


def test_the_plain_preset_has_the_defaults_of_the_one_settings_object():
    assert settings(default_preset="plain", execution_device="auto").offload == OffloadSettings()
    assert settings().offload.execution_device == "auto"  # nobody named a device
    assert settings(execution_device="cpu").offload.execution_device == "cpu"


def test_nothing_is_pinned_under_wsl_unless_it_is_allowed():
    under_wsl = {"running_on_wsl": True, "default_preset": "one_shot_fast"}
    assert load_dynamic_offload_settings_from_env(environ={}, **under_wsl).effective_pin_cpu_memory is False
    allowed = load_dynamic_offload_settings_from_env(environ={"DDO_DISABLE_PIN_ON_WSL": "0"}, **under_wsl)
    assert allowed.effective_pin_cpu_memory and allowed.requested_pin_cpu_memory
    asked = settings({"DDO_PIN_CPU_MEMORY": "0"}, default_preset="one_shot_fast")
    assert not asked.requested_pin_cpu_memory and not asked.effective_pin_cpu_memory


@pytest.mark.parametrize("prefix", ["DDO_", "DDO_RUNNER_"])
def test_routes_are_chosen_per_component_in_both_spellings(prefix: str):
    found = settings({f"{prefix}VAE_ROUTE": "group", f"{prefix}VAE_OFFLOAD_TYPE": "block_level"})
    assert (found.route_of("vae").name, found.route_of("vae").offload_type) == (
        "diffusers_group_offload",
        "block_level",
    )
    assert found.route_of("transformer").name == "dynamic_offload"
    assert (
        settings({f"{prefix}TEXT_ENCODER_GROUP_OFFLOAD": "1"}).route_of("text_encoder").name.endswith("group_offload")
    )
    assert settings({f"{prefix}UNET_DYNAMIC_OFFLOAD": "0"}).route_of("unet").name == "none"


@pytest.mark.parametrize("name", ["diffusers_offload_compat", "diffusers_leaf_offload_compat"])
@pytest.mark.parametrize("component", ["transformer", "text_encoder_2", "vae", "model"])
def test_compat_presets_offload_every_component(name: str, component: str):
    """In the original, components it had no key for went whole to the device."""
    assert settings(default_preset=name).route_of(component).name == "diffusers_group_offload"


def test_policies_win_over_variables():
    found = settings({"DDO_VAE_ROUTE": "none"}, component_policies={"vae": {"route": "ddo"}})
    assert found.route_of("vae").name == "dynamic_offload"


@pytest.mark.parametrize(
    "environ",
    [{"DDO_PIN_CPU_MEMORY": "perhaps"}, {"DDO_PIN_CPU_WORKERS": "-1"}, {"DDO_SMALL_TENSOR_THRESHOLD_KB": "x"}],
)
def test_a_variable_that_makes_no_sense_is_named(environ: dict[str, str]):
    with pytest.raises(InputError, match=next(iter(environ))):
        settings(environ)


def test_values_of_variables_come_from_the_preset_where_they_are_not_set():
    name = "DDO_PURGE_WINDOWS_STANDBY_BEFORE_RUN"
    ask = {"running_on_wsl": False, "requested_preset": "one_shot_fast"}
    assert dynamic_offload_preset_env_value(name, "0", environ={}, **ask) == "1"
    assert dynamic_offload_preset_env_value(name, "0", environ={name: "0"}, **ask) == "0"
    assert dynamic_offload_preset_env_value("DDO_PIN_CPU_WORKERS", environ={}, **ask) == "4"
    assert settings({name: "0"}, default_preset="one_shot_fast").preset_bool(name) is False


def test_presets_command_lists_presets_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DDO_PIN_CPU_WORKERS", "3")
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert f"\n{name}\n  {preset.when}" in out
    for option in OPTIONS:
        assert option.variable in out
    assert "* DDO_PIN_CPU_WORKERS" in out
    assert "  DDO_PRESET" in variables_table({})
    assert set(get_dynamic_offload_presets()) == set(PRESETS)


def test_budgets_that_are_given_win_over_the_preset():
    args = argparse.Namespace(preset="shared_desktop", device_memory="auto", host_memory="3GiB")
    assert memory_settings(args) == OffloadSettings(device_memory="leave 2GiB", host_memory="3GiB")
    args.device_memory = "6GiB"
    assert memory_settings(args).device_memory == "6GiB"


def test_generate_refuses_a_preset_without_a_budget(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "sdxl", "--preset", "off"]) == 2
    assert "is for enable_offload" in capsys.readouterr().err
