"""The route through diffusers' own group offload."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

from ..devices import resolve_device
from ._settings import DEFAULT_DEVICE

log = logging.getLogger(__name__)


def apply_group(
    module: nn.Module,
    *,
    device: torch.device,
    offload_device: str | torch.device,
    offload_type: str,
    use_stream: bool,
    record_stream: bool,
    low_cpu_mem_usage: bool,
    num_blocks_per_group: int,
) -> dict[str, Any]:
    """Calls diffusers' `apply_group_offloading`. Returns what was asked of it, and the seconds it took.

    The CPU has no streams; asking for one there is logged and left out.
    """
    from diffusers.hooks import apply_group_offloading

    if device.type == "cpu" and use_stream:
        log.info("use_stream was accepted and has no effect: the CPU has no streams.")
        use_stream = False
    arguments: dict[str, Any] = {
        "offload_type": offload_type,
        "use_stream": use_stream,
        "record_stream": record_stream and use_stream,
        "low_cpu_mem_usage": low_cpu_mem_usage and use_stream,
        "num_blocks_per_group": num_blocks_per_group if offload_type == "block_level" else None,
    }
    remove_group_offload(module)
    started = time.perf_counter()
    apply_group_offloading(module, onload_device=device, offload_device=torch.device(offload_device), **arguments)
    return {**arguments, "onload_device": str(device), "seconds": time.perf_counter() - started}


def remove_group_offload(module: nn.Module) -> None:
    """Takes diffusers' group offload off a module, nothing if it is under none. diffusers has no function for it."""
    registries: list[Any] = [vars(part).get("_diffusers_hook") for part in module.modules()]
    if not any(registries):
        return
    from diffusers.hooks import group_offloading as names

    hooks = (names._LAZY_PREFETCH_GROUP_OFFLOADING, names._LAYER_EXECUTION_TRACKER, names._GROUP_OFFLOADING)
    for registry in filter(None, registries):
        for name in hooks:
            if registry.get_hook(name) is not None:
                registry.remove_hook(name, recurse=False)


def group_device(device: str | torch.device) -> torch.device:
    return resolve_device("auto" if device is DEFAULT_DEVICE else device)
