"""All modules of a pipeline at once, in one budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..devices import empty_cache, resolve_device
from ..errors import InputError
from ..presets import ENGINE
from ..settings import OffloadSettings
from ..streaming import Homes, OffloadScope, take_to_host
from ._attach import attach_one, let_go
from ._guests import is_guest
from ._results import DynamicOffloadApplyResult, RecordEvent
from ._routes import Route, with_group, with_route, with_switches
from ._settings import DEFAULT_DEVICE, DynamicOffloadSettings, as_settings

# Asked where a pipeline has no list of its components.
_COMMON_NAMES = ("text_encoder", "text_encoder_2", "transformer", "unet", "vae")


def enable_pipeline_offload(
    pipeline: Any,
    *,
    settings: DynamicOffloadSettings | OffloadSettings | None = None,
    components: Mapping[str, Any] | Sequence[str] | None = None,
    preset: str = "auto",
    execution_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    low_cpu_mem_usage: bool = True,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    use_environment: bool = True,
    apply_hook: bool = True,
    record_event: RecordEvent | None = None,
    **config_overrides: Any,
) -> dict[str, DynamicOffloadApplyResult]:
    """`enable_offload` for the modules of a pipeline, by name. Those that go through this engine share one budget and
    one ring, so the pipeline as a whole keeps to `device_memory`.

    components: names, or a mapping of names to modules, routes ("none") or policies ({"route": "none"}); without it all
    of the pipeline's. Raises what `enable_offload` raises, and InputError for a policy; every module is as it was then,
    or as it was before an offload that this one was to replace.
    """
    view = as_settings(
        settings,
        config=None,
        preset=preset,
        execution_device=execution_device,
        offload_device=offload_device,
        running_on_wsl=running_on_wsl,
        environ=environ,
        use_environment=use_environment,
        overrides=config_overrides,
    )
    chosen = [(name, module, _way_of(view, name, policy)) for name, module, policy in _chosen(pipeline, components)]
    shared: OffloadScope | None = None
    results: dict[str, DynamicOffloadApplyResult] = {}
    homes: dict[str, Homes] = {}
    try:
        ours = {name: module for name, module, way in chosen if way.name == ENGINE and not is_guest(module)}
        if ours and apply_hook:
            device = resolve_device(view.offload.execution_device)
            for name, module in ours.items():
                let_go(module)
                homes[name] = take_to_host(module, name)
            if any(homes.values()):
                empty_cache(device)  # "auto" is what is free now
            shared = OffloadScope(view.offload, device)
        for name, module, way in chosen:
            started = time.perf_counter()
            home = homes.pop(name, None)  # from here on it is the module's to go back
            results[name] = attach_one(module, way, view, name, apply_hook, low_cpu_mem_usage, (), shared, home)
            if record_event is not None and results[name].event_payload:
                kind = "dynamic" if way.name == ENGINE else "group"
                seconds = time.perf_counter() - started
                record_event(f"setup_{name}_{kind}_offload", seconds, **results[name].event_payload)
    except BaseException:
        for result in results.values():
            result.release()
        for each in homes.values():
            each.restore()
        if shared is not None and not shared.in_use:
            shared.close()
        raise
    return results


def _way_of(view: DynamicOffloadSettings, name: str, policy: dict[str, Any]) -> Route:
    way = view.route_of(name)
    way = with_switches(way, policy.pop("group_offload", None), policy.pop("dynamic_offload", None), name)
    return with_group(with_route(way, policy.pop("route", None)), **policy)


def _chosen(pipeline: Any, components: Any) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Names, modules and policies of the components that are asked for, each module once."""
    there = getattr(pipeline, "components", None)
    if not isinstance(there, Mapping):
        there = {name: getattr(pipeline, name, None) for name in _COMMON_NAMES}
    asked = components if components is not None else list(there)
    seen: set[int] = set()
    for name in asked:
        said = asked[name] if isinstance(asked, Mapping) else None
        module = said if isinstance(said, nn.Module) else there.get(name)
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield name, module, _policy(name, said)


def _policy(name: str, said: Any) -> dict[str, Any]:
    if said is None or isinstance(said, nn.Module):
        return {}
    policy = {"route": said} if isinstance(said, str) else dict(said) if isinstance(said, Mapping) else None
    known = {"group_offload", "dynamic_offload", "route", *(each.name for each in fields(Route) if each.name != "name")}
    if policy is None or not policy.keys() <= known:
        raise InputError(
            f"The policy of {name} is {said!r}; use a module, a route, or some of {', '.join(sorted(known))}."
        )
    return policy
