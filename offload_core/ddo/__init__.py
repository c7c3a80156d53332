"""The names of Diffusers Dynamic Offloader over this engine: change the import and go on."""

from __future__ import annotations

from ._names import (
    dynamic_offload_env_value,
    dynamic_offload_preset_env_value,
    format_dynamic_offload_presets,
    get_dynamic_offload_presets,
    is_wsl_environment,
    resolve_dynamic_offload_preset,
    variables_table,
)
from ._settings import DynamicOffloadConfig, DynamicOffloadSettings, load_dynamic_offload_settings_from_env

__all__ = [
    "DynamicOffloadConfig",
    "DynamicOffloadSettings",
    "dynamic_offload_env_value",
    "dynamic_offload_preset_env_value",
    "format_dynamic_offload_presets",
    "get_dynamic_offload_presets",
    "is_wsl_environment",
    "load_dynamic_offload_settings_from_env",
    "resolve_dynamic_offload_preset",
    "variables_table",
]
