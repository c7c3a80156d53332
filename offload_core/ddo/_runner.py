"""What DDO's example runners use: its command line arguments, and the backends they choose between."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ._metrics import DynamicOffloadMetrics, DynamicOffloadState
from ._names import resolve_dynamic_offload_preset
from ._options import no_effect
from ._settings import STANDBY_PHASES, DynamicOffloadConfig, DynamicOffloadSettings

log = logging.getLogger(__name__)

_VMM_MODES = {"auto": "vmm_fast", "vmm_fast": "vmm_fast", "nvme_baseline": "nvme_baseline"}
_MODES = {"vmm_fast": "vmm_fast_runtime", "nvme_baseline": "vmm_runtime"}

# Arguments of the vmm backend: name after --ddo-vmm-, default, kind.
_VMM_ARGUMENTS: tuple[tuple[str, Any, type], ...] = (
    ("resident-weight-budget-gb", 4.0, float),
    ("total-staging-gb", None, float),
    ("staging-buffer-gb", 0.625, float),
    ("native-transport", False, bool),
    ("native-source-cache-slot-mb", 0, int),
    ("native-source-cache-slots", 0, int),
    ("source-cache-gb", 0.0, float),
    ("source-registered-gb", 0.0, float),
    ("component-tensor-ownership", False, bool),
    ("execution-auxiliary-ownership", False, bool),
    ("component-buffer-limit-mb", 1, int),
)


@dataclass(frozen=True)
class DynamicOffloadBackend:
    """A choice of DDO's runners. Both backends are the one engine; vmm says how much stays on the device."""

    backend: str
    requested_preset: str
    effective_preset: str
    execution_mode: str

    @property
    def requires_native_bootstrap(self) -> bool:
        """Always False: no process has to be started anew."""
        return False

    def build_config(self, **overrides: Any) -> DynamicOffloadConfig:
        """A config with these options. Raises TypeError for an unknown one."""
        return DynamicOffloadConfig(**{"execution_mode": self.execution_mode} | overrides)

    def build_config_from_args(self, args: argparse.Namespace) -> DynamicOffloadConfig:
        """A config with what arguments of `add_dynamic_offload_arguments` say, as far as it isn't their default."""
        said = {}
        for name, default, _ in _VMM_ARGUMENTS if self.backend == "vmm" else ():
            value = getattr(args, f"ddo_vmm_{name.replace('-', '_')}", default)
            if value != default or name == "resident-weight-budget-gb":
                said["vmm_staging_buffer_gb" if name == "total-staging-gb" else f"vmm_{name.replace('-', '_')}"] = value
        return self.build_config(**said)


def resolve_dynamic_offload_backend(
    backend: str = "linear", preset: str = "auto", *, running_on_wsl: bool | None = None
) -> DynamicOffloadBackend:
    """The backend of a name, linear or vmm. Raises InputError for another, or a preset it doesn't have."""
    if backend == "linear":
        name = resolve_dynamic_offload_preset(preset, running_on_wsl=running_on_wsl)
        return DynamicOffloadBackend(backend, preset, name, "linear_runtime")
    if backend != "vmm" or preset not in _VMM_MODES:
        raise InputError(f"There is no backend {backend!r} with a preset {preset!r}; use linear, or vmm with auto.")
    log.info("The backend vmm was accepted and goes through the one engine: there is no native allocator.")
    return DynamicOffloadBackend(backend, preset, _VMM_MODES[preset], _MODES[_VMM_MODES[preset]])


def vmm_fast_requested(argv: Sequence[str], *, default_backend: str = "linear") -> bool:
    """Whether arguments of `add_dynamic_offload_arguments` ask for the backend vmm and its fast mode."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ddo-backend", default=default_backend)
    parser.add_argument("--ddo-preset", default="auto")
    said, _ = parser.parse_known_args(list(argv))
    return said.ddo_backend == "vmm" and _VMM_MODES.get(said.ddo_preset) == "vmm_fast"


def ensure_vmm_fast_process(
    *,
    library_path: str | os.PathLike[str] | None = None,
    allocator_cache_mib: int = 512,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Nothing, and returns: the process goes on with torch's own allocator. DDO starts the script anew here, in a
    process with another one. All arguments are without effect, which is logged."""
    no_effect("ensure_vmm_fast_process", "there is no native allocator, so no process has to be started anew")


def add_dynamic_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds DDO's arguments, with its defaults; `build_config_from_args` reads them."""
    group = parser.add_argument_group("dynamic offload")
    group.add_argument("--ddo-backend", choices=("linear", "vmm"), default="linear", help="both are the one engine")
    group.add_argument("--ddo-preset", default="auto", help="see phase-offload presets")
    for name, default, kind in _VMM_ARGUMENTS:
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
        group.add_argument(f"--ddo-vmm-{name}", **how, help="of the backend vmm; see phase-offload presets")
    group.add_argument("--show-profile", action="store_true", help="for the runner: show format_profile()")
    group.add_argument("--show-metrics", action="store_true", help="for the runner: show as_dict()")
    return parser


def add_dynamic_offload_lifecycle_arguments(
    parser: argparse.ArgumentParser, phases: tuple[str, ...] = STANDBY_PHASES
) -> argparse.ArgumentParser:
    """Adds --purge-<phase> and --no-purge-<phase>; None where neither was given, for `maybe_purge...(enabled=)`."""
    for phase in phases:
        parser.add_argument(
            f"--purge-{phase.replace('_', '-')}",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=f"empty the Windows standby list {phase.replace('_', ' ')}",
        )
    return parser


def build_dynamic_offload_event_payload(
    settings: DynamicOffloadSettings, state: DynamicOffloadState, config: DynamicOffloadConfig | None = None
) -> dict[str, Any]:
    """The figures of an attached module for an event. config: no effect, `settings` holds what counts."""
    if config is not None:
        no_effect("config", "settings hold what counts")
    found: Mapping[str, Any] = {name: value for name, value in state.as_dict().items() if name != "entries"}
    return {**found, "pin_cpu_memory": settings.effective_pin_cpu_memory, "execution_mode": settings.execution_mode}


def detect_quantized_backend_modules(module: nn.Module) -> dict[str, Any]:
    """Names of layers by the quantiser whose weights they hold. Nothing depends on it: all of them are streamed."""
    found: dict[str, list[str]] = {}
    for path, part in module.named_modules():
        if hasattr(part, "sdnq_dequantizer"):
            found.setdefault("sdnq", []).append(path)
    return dict(found)


def release_native_vmm_idle_cache(
    *,
    enabled: bool = False,
    phase: str = "",
    device: str | torch.device | None = None,
    clear_cublas_workspaces: bool = False,
) -> DynamicOffloadMetrics:
    """Gives back torch's cache of the device, with its workspaces, as `purge` does. Nothing unless `enabled`."""
    from ._caches import release_pytorch_host_cache

    released = release_pytorch_host_cache(enabled=enabled, phase=phase, device=device)
    setup = {"device_cache_release": released.setup["host_cache_release"]}
    return DynamicOffloadMetrics("native_vmm_idle_cache_release", released.configuration, setup)
