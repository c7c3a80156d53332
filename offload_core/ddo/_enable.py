"""DDO's functions that attach, over the one engine.

They take every argument of the originals, with its meaning there where it has one here; the others are logged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..presets import ENGINE, GROUP
from ..settings import OffloadSettings
from ..streaming import offload_of
from ._attach import attach_one, let_go
from ._geometry import give_missing
from ._group import apply_group, group_device, remove_group_offload
from ._guests import PipelineHost, is_guest
from ._metrics import DynamicOffloadState, state_of
from ._options import no_effect
from ._results import DiffusersGroupOffloadResult, DynamicOffloadApplyResult, DynamicOffloadHook, RecordEvent
from ._routes import Route, with_group, with_route, with_switches
from ._settings import DEFAULT_DEVICE, DynamicOffloadConfig, DynamicOffloadSettings, as_settings
from ._whereabouts import Whereabouts


def enable_offload(
    module: nn.Module,
    *,
    settings: DynamicOffloadSettings | OffloadSettings | None = None,
    config: DynamicOffloadConfig | None = None,
    component: str = "model",
    preset: str = "auto",
    route: str | None = None,
    group_offload: bool | None = None,
    dynamic_offload: bool | None = None,
    offload_type: str | None = None,
    use_stream: bool | None = None,
    record_stream: bool | None = None,
    group_low_cpu_mem_usage: bool | None = None,
    num_blocks_per_group: int | None = None,
    execution_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    low_cpu_mem_usage: bool = True,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    use_environment: bool = True,
    apply_hook: bool = True,
    record_event: RecordEvent | None = None,
    dynamic_event_name: str | None = None,
    group_event_name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **config_overrides: Any,
) -> DynamicOffloadApplyResult:
    """Runs `module` inside a byte budget, with the same bits as if it were resident on the execution device.

    settings: an `OffloadSettings`, or what `DynamicOffloadSettings.from_env` gave. Without it, the preset with the
    DDO_... variables over it. component: what the module is called in messages, reports and variables. files: its
    safetensors files; without them they are found by what is mapped. route: "auto" (the preset's and the variables'),
    "dynamic_offload" (this engine), "diffusers_group_offload", "none" (moved whole), or another of DDO's names. The
    arguments of group offload, and options of DDO's config as keywords, act as `phase-offload presets` lists them.
    apply_hook: False decides only, and leaves the module as it is. record_event: called with a name, seconds and
    figures once the module is attached.

    A module that is under offload already is attached anew. A pipeline that holds it and was built without its VAE or
    image encoder gets a stand-in, so that it knows its latent grid; where the pipeline calls that, its weights come
    from the model's folder, in the same budget, and leave it after the call (`visits` of the result).

    Raises BudgetError (with the smallest budget that works), ManagedModuleError, DeviceError, InputError, ModelError,
    ValueError for a route, TypeError for an unknown option. The module is unchanged then; one that was under offload
    is as it was before that.
    """
    view = as_settings(
        settings,
        config=config,
        preset=preset,
        execution_device=execution_device,
        offload_device=offload_device,
        running_on_wsl=running_on_wsl,
        environ=environ,
        use_environment=use_environment,
        overrides=config_overrides,
    )
    way = with_switches(view.route_of(component), group_offload, dynamic_offload, "")
    way = with_group(
        with_route(way, route),
        offload_type=offload_type,
        use_stream=use_stream,
        record_stream=record_stream,
        low_cpu_mem_usage=group_low_cpu_mem_usage,
        num_blocks_per_group=num_blocks_per_group,
    )
    of_groups = {
        "offload_type": offload_type,
        "use_stream": use_stream,
        "record_stream": record_stream,
        "group_low_cpu_mem_usage": group_low_cpu_mem_usage,
        "num_blocks_per_group": num_blocks_per_group,
    }
    said = [name for name, value in of_groups.items() if value is not None]
    if said and way.name != GROUP:
        no_effect(", ".join(said), f"{component} goes the way {way.name}, and they are of group offload")
    started = time.perf_counter()
    result = attach_one(module, way, view, component, apply_hook, low_cpu_mem_usage, files, None)
    if record_event is not None and apply_hook and result.event_payload:
        names = {ENGINE: dynamic_event_name or f"setup_{component}_dynamic_offload"}
        names[GROUP] = group_event_name or f"setup_{component}_group_offload"
        record_event(names[way.name], time.perf_counter() - started, **result.event_payload)
    return result


def enable_dynamic_offload(
    module: nn.Module,
    *,
    component: str = "model",
    settings: DynamicOffloadSettings | OffloadSettings | None = None,
    config: DynamicOffloadConfig | None = None,
    preset: str = "auto",
    execution_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    target_module_classes: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding),
    skip_modules_pattern: tuple[str, ...] = (),
    always_resident_modules_pattern: tuple[str, ...] | None = None,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    use_environment: bool = True,
    apply_hook: bool = True,
    record_event: RecordEvent | None = None,
    event_name: str = "setup_dynamic_offload",
    **config_overrides: Any,
) -> DynamicOffloadApplyResult:
    """`enable_offload` through this engine, whatever the variables of the component say; but where a preset or a mode
    offloads nothing this way, nothing is attached and the result says that the module is to be moved.

    Classes and patterns have no effect, which is logged. Raises what `enable_offload` raises.
    """
    pieces: dict[str, Any] = {"skip_modules_pattern": skip_modules_pattern}
    pieces["always_resident_modules_pattern"] = always_resident_modules_pattern
    if set(target_module_classes) != {nn.Linear, nn.Embedding}:
        pieces["target_module_classes"] = target_module_classes
    view = as_settings(
        settings,
        config=config,
        preset=preset,
        execution_device=execution_device,
        offload_device=offload_device,
        running_on_wsl=running_on_wsl,
        environ=environ,
        use_environment=use_environment,
        overrides={name: value for name, value in pieces.items() if value} | config_overrides,
    )
    started = time.perf_counter()
    result = attach_one(module, Route(), view, component, apply_hook and view.enabled, True, (), None)
    if record_event is not None and result.event_payload:
        record_event(event_name, time.perf_counter() - started, **result.event_payload)
    return result


def enable_diffusers_group_offload(
    module: nn.Module,
    *,
    onload_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    offload_type: str = "leaf_level",
    use_stream: bool = True,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = True,
    num_blocks_per_group: int = 1,
    apply_hook: bool = True,
    record_event: RecordEvent | None = None,
    event_name: str = "setup_diffusers_group_offload",
) -> DiffusersGroupOffloadResult:
    """diffusers' own `apply_group_offloading`, timed. It has no byte budget. On the CPU streams are left out.

    Raises DeviceError, and ValueError for an offload_type that diffusers doesn't have.
    """
    device = group_device(onload_device)
    payload: dict[str, Any] = {}
    host = PipelineHost(OffloadSettings(execution_device=str(device)), device)
    whereabouts: Whereabouts | None = None
    if apply_hook and not is_guest(module):
        let_go(module)
        whereabouts = Whereabouts(module, type(module).__name__)
        try:
            payload = apply_group(
                module,
                device=device,
                offload_device=offload_device,
                offload_type=offload_type,
                use_stream=use_stream,
                record_stream=record_stream,
                low_cpu_mem_usage=low_cpu_mem_usage,
                num_blocks_per_group=num_blocks_per_group,
            )
            give_missing(module, host)
        except BaseException:
            remove_group_offload(module)
            whereabouts.restore()
            raise
        if record_event is not None:
            record_event(event_name, payload["seconds"], **payload)
    return DiffusersGroupOffloadResult(module, payload, host.visits, whereabouts)


def apply_dynamic_offload(module: nn.Module, config: DynamicOffloadConfig | None = None) -> DynamicOffloadHook:
    """`enable_offload` with a config alone; neither preset nor environment is asked. Returns the hook."""
    result = enable_offload(module, settings=OffloadSettings(), config=config, route=ENGINE)
    assert result.hook is not None
    return result.hook


def remove_dynamic_offload(module: nn.Module, recurse: bool = True) -> None:
    """Gives a module its own weights back, and with `recurse` its parts that are under offload of their own. Nothing
    if there is none."""
    for part in list(module.modules()) if recurse else [module]:
        offload = offload_of(part)
        if offload is not None:
            offload.release()


def get_dynamic_offload_state(module: nn.Module) -> DynamicOffloadState | None:
    """Where the weights of a module lie and what it did so far; None if it isn't under offload."""
    offload = offload_of(module)
    return state_of(offload) if offload is not None else None
