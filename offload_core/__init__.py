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
    "Embeds": "phases",
    "Handle": "phases",
    "Latents": "phases",
    "Lora": "phases",
    "Phase": "phases",
    "check_denoise": "phases",
    "decode": "phases",
    "denoise": "phases",
    "encode": "phases",
    "latents_from_samples": "phases",
    "load": "phases",
    "open_phase": "phases",
    "Foresight": "foresight",
    "foresee_decode": "foresight",
    "foresee_denoise": "foresight",
    "foresee_encode": "foresight",
    "foresee_job": "foresight",
    "Plan": "plan",
    "PurgeReport": "_purge",
    "purge": "_purge",
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
    "enable_offload": "streaming",
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
    from .foresight import Foresight, foresee_decode, foresee_denoise, foresee_encode, foresee_job
    from .phases import (
        Embeds,
        Handle,
        Latents,
        Lora,
        Phase,
        check_denoise,
        decode,
        denoise,
        encode,
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
    from .streaming import enable_offload


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
