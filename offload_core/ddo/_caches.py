"""DDO's functions that give memory back, over `offload_core.purge`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._purge import purge
from .._standby_list import StandbyListError, Windows, purge_standby_list
from ..errors import InputError
from ..limits import Machine
from ._metrics import DynamicOffloadMetrics
from ._settings import DEFAULT_DEVICE, STANDBY_PHASES, DynamicOffloadSettings, load_dynamic_offload_settings_from_env

log = logging.getLogger(__name__)


def purge_windows_standby_cache() -> dict[str, Any]:
    """Empties the Windows standby list of the whole machine. Raises StandbyListError elsewhere or without elevation."""
    return {"purged": True, "reason": "purged", "freed_bytes": purge_standby_list(Windows.here())}


def purge_windows_standby_cache_event(
    record_event: Callable[..., Any] | None, event_name: str, *, print_message: bool = True
) -> dict[str, Any]:
    """The same, told to `record_event`. print_message: logs it; the library never prints."""
    started = time.perf_counter()
    found = purge_windows_standby_cache()
    _tell(record_event, event_name, time.perf_counter() - started, found, print_message)
    return found


def maybe_purge_windows_standby_cache(
    settings_or_phase: DynamicOffloadSettings | str | None = None,
    phase: str | None = None,
    *,
    settings: DynamicOffloadSettings | None = None,
    preset: str = "auto",
    execution_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    running_on_wsl: bool | None = None,
    record_event: Callable[..., Any] | None = None,
    event_name: str | None = None,
    default: str = "0",
    print_message: bool = True,
    ignore_errors: bool = True,
    environ: Mapping[str, str] | None = None,
    enabled: bool | None = None,
) -> dict[str, Any]:
    """Empties the Windows standby list if this moment is one to do it at: by `enabled`, else by the variable
    DDO_PURGE_WINDOWS_STANDBY_<PHASE>, else by the preset, else by `default`.

    phase: before_run, after_text_encoder, before_transformer or after_run. Returns whether it was done and a reason:
    "disabled", "non_windows", or the error. ignore_errors: False raises it. Raises InputError for another phase.
    """
    if isinstance(settings_or_phase, str):
        phase, settings_or_phase = settings_or_phase if phase is None else phase, None
    moment = str(phase or "").strip().lower()
    if moment not in STANDBY_PHASES:
        raise InputError(f"There is no purge phase {phase!r}; use {', '.join(STANDBY_PHASES)}.")
    view = settings or settings_or_phase
    if view is None:
        view = load_dynamic_offload_settings_from_env(
            execution_device=execution_device,
            offload_device=offload_device,
            running_on_wsl=running_on_wsl,
            environ=environ,
            default_preset=preset,
        )
    name = f"DDO_PURGE_WINDOWS_STANDBY_{moment.upper()}"
    if enabled is None:
        enabled = view.preset_bool(name, default, environ)
    if not enabled:
        return {"purged": False, "reason": "disabled", "phase": moment}
    told = event_name or name.lower().removeprefix("ddo_")
    if Windows.here() is None:
        answer: dict[str, Any] = {"purged": False, "reason": "non_windows", "phase": moment}
        _tell(record_event, told, 0.0, answer, False)
        return answer
    try:
        return purge_windows_standby_cache_event(record_event, told, print_message=print_message) | {"phase": moment}
    except StandbyListError as error:
        if not ignore_errors:
            raise
        answer = {"purged": False, "reason": str(error), "phase": moment}
        _tell(record_event, told, 0.0, answer, print_message)
        return answer


def _tell(record_event: Any, name: str, seconds: float, answer: Mapping[str, Any], log_it: bool) -> None:
    if record_event is not None:
        record_event(name, seconds, **answer)
    if log_it:
        log.info("Windows standby list, %s: %s", name, dict(answer))


def release_pytorch_host_cache(
    *, enabled: bool = False, phase: str = "", device: str | torch.device | None = None
) -> DynamicOffloadMetrics:
    """Gives back what torch keeps of pinned memory, and what `purge` gives back beside it. Nothing unless `enabled`."""
    if not enabled:
        setup: dict[str, Any] = {"phase": phase, "status": "disabled", "released": False}
        return DynamicOffloadMetrics("pytorch_host_cache_release", {"enabled": False}, {"host_cache_release": setup})
    report = purge("auto" if device is None else device)
    setup = {"phase": phase, "status": "released", "released": True}
    setup |= {f"{row.what.replace(' ', '_')}_bytes": row.nbytes for row in report.rows}
    return DynamicOffloadMetrics("pytorch_host_cache_release", {"enabled": True}, {"host_cache_release": setup})


def clear_dynamic_offload_plan_cache() -> None:
    """Nothing: plans aren't cached."""


def clear_dynamic_offload_pinned_tensor_cache() -> None:
    """Nothing: pinned weights belong to the module they are of and end with its offload."""


def get_available_system_ram_gb() -> float:
    """RAM that may be taken, in GiB, by the tightest bound there is: a container's limit counts."""
    return Machine().host().free / 2**30
