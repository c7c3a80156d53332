"""Phase Offload's engine: run a diffusers model in phases on a machine it doesn't fit.

    import offload_core as po

    handle = po.load("models/flux")
    embeds = po.encode(handle, "a red circle")
    latents = po.denoise(handle, embeds, seed=1)
    images = po.decode(handle, latents)

Names load on first use: importing this package costs nothing beyond torch, and diffusers comes with the first phase.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Conditioning": "phases",
    "Control": "phases",
    "Embeds": "phases",
    "Handle": "phases",
    "Images": "phases",
    "Latents": "phases",
    "IPAdapter": "phases",
    "Lora": "phases",
    "Phase": "phases",
    "check_denoise": "phases",
    "conditioning_of": "phases",
    "decode": "phases",
    "decode_sound": "phases",
    "decode_sound_many": "phases",
    "decode_many": "phases",
    "denoise": "phases",
    "denoise_many": "phases",
    "embeds_from_conditioning": "phases",
    "encode": "phases",
    "encode_images": "phases",
    "images_from_samples": "phases",
    "encode_many": "phases",
    "latents_from_samples": "phases",
    "load": "phases",
    "open_phase": "phases",
    "Foresight": "foresight",
    "foresee_decode": "foresight",
    "foresee_denoise": "foresight",
    "foresee_encode": "foresight",
    "foresee_images": "foresight",
    "foresee_job": "foresight",
    "modular_blocks": "modular",
    "open_block": "modular",
    "Plan": "plan",
    "PurgeReport": "_purge",
    "purge": "_purge",
    "Claim": "memory_host",
    "MemoryHost": "memory_host",
    "Pins": "memory_host",
    "PhaseReport": "report",
    "RunReport": "report",
    "Observer": "session",
    "Progress": "session",
    "Session": "session",
    "SilentObserver": "session",
    "LayerWiseOffloadBackend": "sequential",
    "ModelLevelOffloadBackend": "sequential",
    "SequentialOffloadHook": "sequential",
    "apply_sequential_offload": "sequential",
    "remove_sequential_offload": "sequential",
    "OffloadSettings": "settings",
    "SplitFiles": "single_files",
    "enable_offload": "ddo",
    "DiffusersGroupOffloadResult": "ddo",
    "DynamicOffloadApplyResult": "ddo",
    "DynamicOffloadConfig": "ddo",
    "DynamicOffloadLoadResult": "ddo",
    "DynamicOffloadMetrics": "ddo",
    "DynamicOffloadSettings": "ddo",
    "DynamicOffloadState": "ddo",
    "apply_dynamic_offload": "ddo",
    "config_only": "ddo",
    "enable_diffusers_group_offload": "ddo",
    "enable_dynamic_offload": "ddo",
    "enable_pipeline_offload": "ddo",
    "format_dynamic_offload_presets": "ddo",
    "from_pretrained_with_dynamic_offload": "ddo",
    "get_dynamic_offload_presets": "ddo",
    "get_dynamic_offload_state": "ddo",
    "is_wsl_environment": "ddo",
    "load_dynamic_offload_settings_from_env": "ddo",
    "maybe_purge_windows_standby_cache": "ddo",
    "purge_windows_standby_cache": "ddo",
    "release_pytorch_host_cache": "ddo",
    "remove_dynamic_offload": "ddo",
    "resolve_dynamic_offload_preset": "ddo",
    "BudgetError": "errors",
    "ColdWeightError": "errors",
    "DeviceError": "errors",
    "InputError": "errors",
    "InsufficientMemoryError": "errors",
    "ManagedModuleError": "errors",
    "MissingRecordError": "errors",
    "ModelError": "errors",
    "NumericalError": "errors",
    "OffloadError": "errors",
    "PhaseBusyError": "errors",
    "RecordError": "errors",
    "TraceError": "errors",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from ._purge import PurgeReport, purge
    from .ddo import (
        DiffusersGroupOffloadResult,
        DynamicOffloadApplyResult,
        DynamicOffloadConfig,
        DynamicOffloadLoadResult,
        DynamicOffloadMetrics,
        DynamicOffloadSettings,
        DynamicOffloadState,
        apply_dynamic_offload,
        config_only,
        enable_diffusers_group_offload,
        enable_dynamic_offload,
        enable_offload,
        enable_pipeline_offload,
        format_dynamic_offload_presets,
        from_pretrained_with_dynamic_offload,
        get_dynamic_offload_presets,
        get_dynamic_offload_state,
        is_wsl_environment,
        load_dynamic_offload_settings_from_env,
        maybe_purge_windows_standby_cache,
        purge_windows_standby_cache,
        release_pytorch_host_cache,
        remove_dynamic_offload,
        resolve_dynamic_offload_preset,
    )
    from .errors import (
        BudgetError,
        ColdWeightError,
        DeviceError,
        InputError,
        InsufficientMemoryError,
        ManagedModuleError,
        MissingRecordError,
        ModelError,
        NumericalError,
        OffloadError,
        PhaseBusyError,
        RecordError,
        TraceError,
    )
    from .foresight import Foresight, foresee_decode, foresee_denoise, foresee_encode, foresee_images, foresee_job
    from .memory_host import Claim, MemoryHost, Pins
    from .modular import modular_blocks, open_block
    from .phases import (
        Conditioning,
        Control,
        Embeds,
        Handle,
        Images,
        IPAdapter,
        Latents,
        Lora,
        Phase,
        check_denoise,
        conditioning_of,
        decode,
        decode_many,
        decode_sound,
        decode_sound_many,
        denoise,
        denoise_many,
        embeds_from_conditioning,
        encode,
        encode_images,
        encode_many,
        images_from_samples,
        latents_from_samples,
        load,
        open_phase,
    )
    from .plan import Plan
    from .report import PhaseReport, RunReport
    from .sequential import (
        LayerWiseOffloadBackend,
        ModelLevelOffloadBackend,
        SequentialOffloadHook,
        apply_sequential_offload,
        remove_sequential_offload,
    )
    from .session import Observer, Progress, Session, SilentObserver
    from .settings import OffloadSettings
    from .single_files import SplitFiles


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
