"""One module on its way: through this engine, through diffusers' group offload, or whole to the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..devices import resolve_device
from ..presets import ENGINE, GROUP
from ..streaming import Homes, OffloadScope, offload_of
from ..streaming import enable_offload as attach
from ._geometry import give_missing, watch_missing
from ._group import apply_group, remove_group_offload
from ._guests import PipelineHost, is_guest
from ._metrics import setup_of
from ._results import DynamicOffloadApplyResult
from ._routes import Route
from ._settings import DynamicOffloadSettings
from ._whereabouts import Whereabouts

log = logging.getLogger(__name__)


def attach_one(
    module: nn.Module,
    way: Route,
    view: DynamicOffloadSettings,
    component: str,
    apply_hook: bool,
    low_cpu_mem_usage: bool,
    files: Sequence[str | os.PathLike[str]],
    scope: OffloadScope | None,
    homes: Homes | None = None,
) -> DynamicOffloadApplyResult:
    """Sends a module its way. It is as it was if this raises."""
    device = resolve_device(view.offload.execution_device)
    if not apply_hook:
        return DynamicOffloadApplyResult(module, way.name, view, should_move_to_execution_device=way.name != GROUP)
    if is_guest(module):
        log.info("Nothing of %s was attached: its weights come from the model's folder when it is called.", component)
        return DynamicOffloadApplyResult(module, way.name, view)
    if way.name == ENGINE:
        if homes is None:
            let_go(module)
        offload = attach(module, settings=view.offload, component=component, files=files, scope=scope, homes=homes)
        host = PipelineHost(view.offload, device, offload._managed.scope)
        try:
            give_missing(module, host)
            watch_missing(module, host)
        except BaseException:
            offload.release()
            raise
        return DynamicOffloadApplyResult(module, way.name, view, offload, event_payload=setup_of(offload), host=host)
    let_go(module)
    host, whereabouts = PipelineHost(view.offload, device), Whereabouts(module, component)
    payload: dict[str, Any] = {}
    try:
        payload = _send_elsewhere(module, way, view, device, low_cpu_mem_usage)
        give_missing(module, host)
    except BaseException:
        remove_group_offload(module)
        whereabouts.restore()
        raise
    return DynamicOffloadApplyResult(module, way.name, view, event_payload=payload, host=host, whereabouts=whereabouts)


def _send_elsewhere(
    module: nn.Module, way: Route, view: DynamicOffloadSettings, device: torch.device, low_cpu_mem_usage: bool
) -> dict[str, Any]:
    """Puts a module under diffusers' group offload, or moves it whole. Returns what there is to tell of it."""
    if way.name == GROUP:
        no_streams = view.running_on_wsl and view.disable_pin_on_wsl
        return apply_group(
            module,
            device=device,
            offload_device=view.offload.offload_device,
            offload_type=way.offload_type,
            use_stream=way.use_stream and not no_streams,
            record_stream=way.record_stream and not no_streams,
            low_cpu_mem_usage=low_cpu_mem_usage if way.low_cpu_mem_usage is None else way.low_cpu_mem_usage,
            num_blocks_per_group=way.num_blocks_per_group,
        )
    module.to(device)
    return {}


def let_go(module: nn.Module) -> None:
    """Ends what another call began, so that a module may be attached again."""
    before = offload_of(module)
    if before is not None:
        before.release()
    remove_group_offload(module)
