"""The route through diffusers' own group offload."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ..devices import resolve_device
from ._options import no_effect
from ._settings import DEFAULT_DEVICE


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
        no_effect("use_stream", "the CPU has no streams")
        use_stream = False
    arguments: dict[str, Any] = {
        "offload_type": offload_type,
        "use_stream": use_stream,
        "record_stream": record_stream and use_stream,
        "low_cpu_mem_usage": low_cpu_mem_usage and use_stream,
        "num_blocks_per_group": num_blocks_per_group if offload_type == "block_level" else None,
    }
    started = time.perf_counter()
    apply_group_offloading(module, onload_device=device, offload_device=torch.device(offload_device), **arguments)
    return {**arguments, "onload_device": str(device), "seconds": time.perf_counter() - started}


def remove_group_offload(module: nn.Module) -> None:
    """Takes diffusers' group offload off a module, nothing if it is under none. diffusers has no function for it.

    Registries and forwards that came with it go, too. Where the weights are then is where group offload left them.
    """
    if not any("_diffusers_hook" in vars(part) for part in module.modules()):
        return
    from diffusers.hooks import group_offloading as names

    hooks = (names._LAZY_PREFETCH_GROUP_OFFLOADING, names._LAYER_EXECUTION_TRACKER, names._GROUP_OFFLOADING)
    for part in module.modules():
        registry: Any = vars(part).get("_diffusers_hook")
        mine = [name for name in hooks if registry is not None and registry.get_hook(name) is not None]
        for name in mine:
            registry.remove_hook(name, recurse=False)
        if mine and not registry.hooks:
            del part.__dict__["_diffusers_hook"]
            if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
                del part.__dict__["forward"]  # the class's own, which the registry leaves as an attribute


def group_device(device: str | torch.device) -> torch.device:
    return resolve_device("auto" if device is DEFAULT_DEVICE else device)
