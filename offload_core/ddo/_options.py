"""Every option of Diffusers Dynamic Offloader: what it does to this engine's plan, or why it does nothing.

One table for both of its spellings, the fields of its config and its environment variables. Names and meanings as in
its release 0.1.0rc2; sizes that it calls GB are GiB.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

log = logging.getLogger(__name__)

Changes = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """field: its name in the config. variable: in the environment ("" if it has none). change: the fields of
    OffloadSettings that a value sets; None if it has no effect. says: what it sets, or why it has no effect. scale:
    what a number in the variable is multiplied with to be one of the field.
    """

    field: str
    variable: str
    says: str
    change: Callable[[Any], Changes] | None = None
    scale: int = 1


def no_effect(name: str, why: str) -> None:
    """Says that something was accepted and does nothing."""
    log.info("%s was accepted and has no effect: %s.", name, why)


def flag(value: Any, name: str) -> bool:
    """A switch, as a bool or as its variables spell it. Raises InputError for anything else."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", "", "none"):
        return False
    raise InputError(f"{name} is {value!r}; use 1 or 0.")


def number(value: Any, name: str) -> float:
    """A number from 0 on. Raises InputError for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found < math.inf:
        raise InputError(f"{name} is {value!r}; use a number from 0 on.")
    return found


def _gib(setting: str, leave: str = "") -> Callable[[float], Changes]:
    """A number of GiB becomes a budget; 0 means that DDO's planner chooses, so ours does."""
    return lambda value: {setting: f"{leave}{int(value * 2**30)}"} if value else {}


def _whole(setting: str) -> Callable[[float], Changes]:
    return lambda value: {setting: int(value)}


def _pin(value: bool) -> Changes:
    return {"pinned_memory": "auto" if value else 0}


def _backend(value: str) -> Changes:
    return {"direct_io": "off"} if value == "mmap" else {}


def _mode(value: str) -> Changes:
    """No setting: the route follows from it."""
    if value not in ("plan", "linear_runtime"):
        log.info("execution_mode=%s was accepted and is the one engine, as every mode but plan.", value)
    return {}


_NO_PIECES = "weights are told apart by how they are used, not by the class or the name of their module"
_NO_VMM = "there is no native allocator here; the ring and the file reader do its work"
_PLANNED = "the plan is made from sizes, order of use and budget"


def _unused(field: str, variable: str, why: str) -> Option:
    return Option(field, variable, why)


# In the order they are applied: a later one that says the same as an earlier one wins.
OPTIONS: tuple[Option, ...] = (
    Option("pin_cpu_memory", "DDO_PIN_CPU_MEMORY", "pinned_memory: auto, or none", _pin),
    Option("max_pin_weight_budget_gb", "DDO_MAX_PIN_WEIGHT_BUDGET_GB", "pinned_memory", _gib("pinned_memory")),
    Option("pin_weight_budget_gb", "DDO_PIN_WEIGHT_BUDGET_GB", "pinned_memory", _gib("pinned_memory")),
    Option("vmm_host_cache_gb", "DDO_VMM_HOST_CACHE_GB", "pinned_memory", _gib("pinned_memory")),
    Option("vmm_source_cache_gb", "DDO_VMM_SOURCE_CACHE_GB", "pinned_memory", _gib("pinned_memory")),
    Option("pin_cpu_workers", "DDO_PIN_CPU_WORKERS", "read_threads", _whole("read_threads")),
    Option(
        "max_resident_module_budget_gb",
        "DDO_MAX_RESIDENT_MODULE_BUDGET_GB",
        "resident_memory",
        _gib("resident_memory"),
    ),
    Option("resident_module_budget_gb", "DDO_RESIDENT_MODULE_BUDGET_GB", "resident_memory", _gib("resident_memory")),
    Option(
        "vmm_resident_weight_budget_gb",
        "DDO_VMM_RESIDENT_WEIGHT_BUDGET_GB",
        "resident_memory",
        _gib("resident_memory"),
    ),
    Option(
        "small_tensor_threshold_bytes",
        "DDO_SMALL_TENSOR_THRESHOLD_KB",
        "resident_below",
        _whole("resident_below"),
        scale=1024,
    ),
    Option(
        "system_ram_headroom_gb",
        "DDO_SYSTEM_RAM_HEADROOM_GB",
        "host_memory: leave so much",
        _gib("host_memory", "leave "),
    ),
    Option(
        "vmm_dxgi_system_headroom_gb",
        "DDO_VMM_DXGI_SYSTEM_HEADROOM_GB",
        "host_memory: leave so much",
        _gib("host_memory", "leave "),
    ),
    Option("available_system_ram_gb", "DDO_AVAILABLE_SYSTEM_RAM_GB", "host_memory", _gib("host_memory")),
    Option(
        "auto_vram_headroom_gb",
        "DDO_AUTO_VRAM_HEADROOM_GB",
        "device_memory: leave so much",
        _gib("device_memory", "leave "),
    ),
    Option(
        "vmm_dxgi_local_headroom_gb",
        "DDO_VMM_DXGI_LOCAL_HEADROOM_GB",
        "device_memory: leave so much",
        _gib("device_memory", "leave "),
    ),
    Option(
        "load_safetensors_backend",
        "DDO_LOAD_SAFETENSORS_BACKEND",
        "direct_io: off for mmap, so that reads stay in the page cache",
        _backend,
    ),
    Option(
        "execution_mode", "DDO_EXECUTION_MODE", "the route: none for plan; every other mode is the one engine", _mode
    ),
    _unused("execution_device", "", "an argument of its own"),
    _unused("offload_device", "", "an argument of its own"),
    _unused("target_module_classes", "", _NO_PIECES),
    _unused("skip_modules_pattern", "", _NO_PIECES),
    _unused("always_resident_modules_pattern", "DDO_ALWAYS_RESIDENT_MODULE_PATTERNS", _NO_PIECES),
    _unused("resident_module_patterns", "DDO_RESIDENT_MODULE_PATTERNS", _NO_PIECES),
    _unused("resident_module_selection", "DDO_RESIDENT_MODULE_SELECTION", "resident weights are always spread"),
    _unused("pin_weight_selection", "DDO_PIN_WEIGHT_SELECTION", "pinned weights are always spread"),
    _unused("pin_weight_budget_ratio", "DDO_PIN_WEIGHT_BUDGET_RATIO", "pinned memory is given in bytes"),
    _unused("linear_runtime_strategy", "DDO_LINEAR_RUNTIME_STRATEGY", "no forward is replaced"),
    _unused("linear_convolution_offload", "", "convolutions are always streamed, too"),
    _unused("allow_pin_memory_fallback", "DDO_ALLOW_PIN_MEMORY_FALLBACK", "where pinning fails, RAM is always used"),
    _unused("cache_plan", "DDO_CACHE_PLAN", "a plan takes milliseconds"),
    _unused("cache_pinned_weights", "DDO_CACHE_PINNED_WEIGHTS", "a cache by class and shape gives wrong weights"),
    _unused("pinned_weight_cache_namespace", "DDO_PINNED_WEIGHT_CACHE_NAMESPACE", "there is no such cache"),
    _unused("auto_budget_policy", "DDO_AUTO_BUDGET_POLICY", _PLANNED),
    _unused("auto_full_pin_min_model_to_vram_ratio", "DDO_AUTO_FULL_PIN_MIN_MODEL_TO_VRAM_RATIO", _PLANNED),
    _unused("profile_vram_headroom_gb", "DDO_PROFILE_VRAM_HEADROOM_GB", "learnt profiles state their own headroom"),
    _unused("profile_name", "", "a learnt profile is found by content and shape"),
    _unused("build_profile", "", "a profile is learnt in profile_run(), whether or not this is set"),
    _unused("profile_resident_module_budget_gb", "", "an internal number of DDO"),
    _unused("verbose", "DDO_VERBOSE", "use Python's logging, logger offload_core"),
    _unused("show_profile", "DDO_SHOW_PROFILE", "metrics_snapshot().format_profile() gives the text"),
    _unused("vmm_staging_buffer_gb", "DDO_VMM_STAGING_BUFFER_GB", "the ring's size follows from the plan"),
    _unused("vmm_windows_file_read_chunk_mb", "DDO_VMM_WINDOWS_FILE_READ_CHUNK_MB", _NO_VMM),
    _unused("vmm_virtual_host_transport", "DDO_VMM_VIRTUAL_HOST_TRANSPORT", _NO_VMM),
    _unused("vmm_native_transport", "DDO_VMM_NATIVE_TRANSPORT", _NO_VMM),
    _unused("vmm_source_registered_gb", "DDO_VMM_SOURCE_REGISTERED_GB", _NO_VMM),
    _unused("vmm_module_pattern", "DDO_VMM_MODULE_PATTERN", _NO_VMM),
    _unused("vmm_component_tensor_ownership", "", _NO_VMM),
    _unused("vmm_float8_weight_only", "", "8-bit floats are streamed like any weight"),
    _unused("vmm_execution_auxiliary_ownership", "", _NO_VMM),
    _unused("vmm_component_buffer_limit_mb", "", _NO_VMM),
    _unused("vmm_page_mb", "DDO_VMM_PAGE_MB", _NO_VMM),
    _unused("vmm_dxgi_shared_headroom_gb", "DDO_VMM_DXGI_SHARED_HEADROOM_GB", _NO_VMM),
    _unused("vmm_native_source_cache_slot_mb", "DDO_VMM_NATIVE_SOURCE_CACHE_SLOT_MB", _NO_VMM),
    _unused("vmm_native_source_cache_slots", "DDO_VMM_NATIVE_SOURCE_CACHE_SLOTS", _NO_VMM),
    _unused("vmm_pin_source_weights", "DDO_VMM_PIN_SOURCE_WEIGHTS", _NO_VMM),
    _unused("vmm_fault_fallback", "DDO_VMM_FAULT_FALLBACK", _NO_VMM),
)
BY_FIELD = types.MappingProxyType({option.field: option for option in OPTIONS})

# Older spellings that its own presets and examples still use.
RENAMED = types.MappingProxyType({"DDO_SAFETENSORS_BACKEND": "DDO_LOAD_SAFETENSORS_BACKEND"})

_SWITCHES = {"pin_cpu_memory"}
_WORDS = {"load_safetensors_backend", "execution_mode"}

# Variables that stand for no option and have no effect here.
IDLE_VARIABLES = types.MappingProxyType(
    {
        "DDO_PLAN": "`phase-offload plan` makes a plan before anything is loaded",
        "DDO_RUNNER_PRE_VAE_CLEANUP_REPEATS": "only DDO's example runners read it",
        "DDO_RUNNER_GENERATION_REPEATS": "only DDO's example runners read it",
        "DDO_RUNNER_ATTENTION_BACKEND": "only DDO's example runners read it",
        "DDO_RUNNER_TRANSFORMER_MEMORY_MANAGER": "only DDO's example runners read it",
        "DDO_VMM_LIBRARY_PATH": "there is no native allocator here",
        "DDO_VMM_FAST_CHILD": "there is no native allocator here",
        "DDO_VMM_TORCH_CACHE_MIB": "there is no native allocator here",
    }
)


def changes_of(given: Mapping[str, Any]) -> Changes:
    """The fields of OffloadSettings that config fields set; those without an effect are logged, each with its reason.

    Raises TypeError for a name that isn't an option, InputError for a value that can't be used.
    """
    unknown = [name for name in given if name not in BY_FIELD]
    if unknown:
        raise TypeError(f"Unknown option(s) of dynamic offload: {', '.join(unknown)}.")
    changes: Changes = {}
    for option in OPTIONS:
        if option.field not in given:
            continue
        if option.change is None:
            no_effect(option.field, option.says)
        else:
            changes |= option.change(_value(option, given[option.field], option.field))
    if "pin_cpu_memory" in given and not flag(given["pin_cpu_memory"], "pin_cpu_memory"):
        changes["pinned_memory"] = 0  # whatever a budget for it says
    return changes


def fields_in(environ: Mapping[str, str]) -> dict[str, Any]:
    """The config fields that variables set, as the fields would hold them. Raises InputError for a bad number."""
    found: dict[str, Any] = {}
    for option in OPTIONS:
        names = [option.variable, *(old for old, new in RENAMED.items() if new == option.variable)]
        name = next((name for name in names if name and environ.get(name, "").strip()), None)
        if name is not None:
            text = environ[name].strip()
            found[option.field] = number(text, name) * option.scale if option.scale != 1 else text
            if option.change is not None:
                _value(option, found[option.field], name)
    return found


def _value(option: Option, value: Any, name: str) -> Any:
    if option.field in _SWITCHES:
        return flag(value, name)
    if option.field in _WORDS:
        return str(value).strip().lower()
    return number(value, name)
