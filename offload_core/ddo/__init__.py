"""The names of Diffusers Dynamic Offloader over this engine: change the import and go on."""

from __future__ import annotations

from ._caches import (
    clear_dynamic_offload_pinned_tensor_cache,
    clear_dynamic_offload_plan_cache,
    get_available_system_ram_gb,
    maybe_purge_windows_standby_cache,
    purge_windows_standby_cache,
    purge_windows_standby_cache_event,
    release_pytorch_host_cache,
)
from ._enable import (
    apply_dynamic_offload,
    enable_diffusers_group_offload,
    enable_dynamic_offload,
    enable_offload,
    get_dynamic_offload_state,
    remove_dynamic_offload,
)
from ._geometry import config_only
from ._loading import DynamicOffloadLoadResult, from_pretrained_with_dynamic_offload
from ._metrics import (
    DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION,
    DynamicOffloadMetrics,
    DynamicOffloadPlanEntry,
    DynamicOffloadState,
)
from ._names import (
    DDO_PRESETS,
    dynamic_offload_env_value,
    dynamic_offload_preset_env_value,
    format_dynamic_offload_presets,
    get_dynamic_offload_presets,
    is_wsl_environment,
    resolve_dynamic_offload_preset,
    variables_table,
)
from ._observe import DynamicOffloadExecutionTimer, DynamicOffloadMetricsJournal, inspect_host_memory, metrics_of_run
from ._pipeline import enable_pipeline_offload
from ._profiles import (
    DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION,
    DynamicOffloadProfileSession,
    dynamic_offload_profile_key,
    dynamic_offload_profile_path,
    get_dynamic_offload_profile_capacity,
    get_dynamic_offload_profile_dir,
    get_dynamic_offload_profile_recommendation,
    load_dynamic_offload_profile,
    normalize_dynamic_offload_profile_context,
    record_dynamic_offload_profile,
)
from ._results import DiffusersGroupOffloadResult, DynamicOffloadApplyResult, DynamicOffloadHook
from ._runner import (
    DynamicOffloadBackend,
    add_dynamic_offload_arguments,
    add_dynamic_offload_lifecycle_arguments,
    build_dynamic_offload_event_payload,
    detect_quantized_backend_modules,
    ensure_vmm_fast_process,
    release_native_vmm_idle_cache,
    resolve_dynamic_offload_backend,
    vmm_fast_requested,
)
from ._settings import DynamicOffloadConfig, DynamicOffloadSettings, load_dynamic_offload_settings_from_env

__all__ = [
    "DDO_PRESETS",
    "DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION",
    "DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION",
    "DiffusersGroupOffloadResult",
    "DynamicOffloadApplyResult",
    "DynamicOffloadBackend",
    "DynamicOffloadConfig",
    "DynamicOffloadExecutionTimer",
    "DynamicOffloadHook",
    "DynamicOffloadLoadResult",
    "DynamicOffloadMetrics",
    "DynamicOffloadMetricsJournal",
    "DynamicOffloadPlanEntry",
    "DynamicOffloadProfileSession",
    "DynamicOffloadSettings",
    "DynamicOffloadState",
    "add_dynamic_offload_arguments",
    "add_dynamic_offload_lifecycle_arguments",
    "apply_dynamic_offload",
    "build_dynamic_offload_event_payload",
    "clear_dynamic_offload_pinned_tensor_cache",
    "clear_dynamic_offload_plan_cache",
    "config_only",
    "detect_quantized_backend_modules",
    "dynamic_offload_env_value",
    "dynamic_offload_preset_env_value",
    "dynamic_offload_profile_key",
    "dynamic_offload_profile_path",
    "enable_diffusers_group_offload",
    "enable_dynamic_offload",
    "enable_offload",
    "enable_pipeline_offload",
    "ensure_vmm_fast_process",
    "format_dynamic_offload_presets",
    "from_pretrained_with_dynamic_offload",
    "get_available_system_ram_gb",
    "get_dynamic_offload_presets",
    "get_dynamic_offload_profile_capacity",
    "get_dynamic_offload_profile_dir",
    "get_dynamic_offload_profile_recommendation",
    "get_dynamic_offload_state",
    "inspect_host_memory",
    "is_wsl_environment",
    "load_dynamic_offload_profile",
    "load_dynamic_offload_settings_from_env",
    "maybe_purge_windows_standby_cache",
    "metrics_of_run",
    "normalize_dynamic_offload_profile_context",
    "purge_windows_standby_cache",
    "purge_windows_standby_cache_event",
    "record_dynamic_offload_profile",
    "release_native_vmm_idle_cache",
    "release_pytorch_host_cache",
    "remove_dynamic_offload",
    "resolve_dynamic_offload_backend",
    "resolve_dynamic_offload_preset",
    "variables_table",
    "vmm_fast_requested",
]
