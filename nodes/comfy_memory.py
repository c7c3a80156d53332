"""Memory shared with ComfyUI: its models make room for a phase, ours is in its list, and it counts what is pinned.

Everything that moves ComfyUI's weights runs in inference mode, as in ComfyUI itself: its weights are made there, and
torch refuses to change such tensors elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload_core.limits import Machine, auto_device_budget
from offload_core.memory_host import Claim

from .patcher import NoCopies, PhasePatcher, WarmCopies

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class ComfyMemory:
    """A MemoryHost (see offload_core.memory_host) over `comfy.model_management`. own: the machine without ComfyUI."""

    def __init__(self, own: Machine | None = None) -> None:
        self._own = own or Machine()
        self._warm: WarmCopies = NoCopies()
        self._patchers: dict[str, PhasePatcher] = {}  # by device; ComfyUI's list holds them weakly
        self._claims = 0

    def offer(self, warm: WarmCopies) -> None:
        """Host copies that ComfyUI may have back whenever it asks for memory."""
        self._warm = warm

    def machine(self) -> Machine:
        return replace(self._own, device_info=self._free_and_total, nvml_info=lambda index: None)

    @contextlib.contextmanager
    def claim(self, claim: Claim) -> Iterator[None]:
        import comfy.model_management as mm
        import torch

        patcher = self._patchers.setdefault(
            str(claim.device), PhasePatcher(claim.device, torch.device("cpu"), self._warm)
        )
        patcher.begin()
        self._claims += 1
        try:
            with torch.inference_mode():
                self._make_room(mm, claim)
                _register(mm, patcher)
            patcher.hold(claim.weight_bytes)
            yield
        finally:
            self._claims -= 1
            if not patcher.end():
                self._patchers.pop(str(claim.device), None)

    def pins(self) -> ComfyPins | None:
        """Those of ComfyUI, if it has any; else torch pins (ComfyUI 0.3.64)."""
        import comfy.model_management as mm

        return ComfyPins() if hasattr(mm, "pin_memory") and hasattr(mm, "unpin_memory") else None

    def unload_others(self) -> bool:
        """Has ComfyUI unload all of its models. Returns whether any of them was on a device."""
        import comfy.model_management as mm
        import torch

        held = any(patcher.loaded_size() for patcher in self._theirs(mm))
        with torch.inference_mode():
            mm.unload_all_models()
        return held

    def _make_room(self, mm: Any, claim: Claim) -> None:
        """As much as the phase asks for, and what is to be left free: the engine's headroom, or --reserve-vram if that
        is more. ComfyUI asks for nothing on the CPU either."""
        if claim.device.type == "cpu":
            return
        spare = max(claim.spare_bytes, mm.extra_reserved_memory())
        mm.free_memory(claim.weight_bytes + claim.activation_bytes + spare, claim.device)
        mm.soft_empty_cache()

    def _free_and_total(self, device: torch.device) -> tuple[int, int] | None:
        import comfy.model_management as mm

        own = self._own.device(device)
        if own is None:
            return None
        unused = mm.get_free_memory(device, torch_free_too=True)[1]  # of what torch holds
        theirs = 0 if self._claims else sum(p.loaded_size() for p in self._theirs(mm) if p.load_device == device)
        headroom = own.total - auto_device_budget(replace(own, free=own.total))
        beyond = max(mm.extra_reserved_memory() - headroom, 0)  # of --reserve-vram
        return int(min(own.free + unused + theirs - beyond, own.total)), own.total

    def _theirs(self, mm: Any) -> list[Any]:
        ours = list(self._patchers.values())
        return [other for other in mm.loaded_models() if other is not None and other not in ours]


def _register(mm: Any, patcher: PhasePatcher) -> None:
    """Puts our patcher in ComfyUI's list of loaded models. Room was made before, so this makes sure only of the least
    that ComfyUI keeps free in any case."""
    try:
        mm.load_models_gpu([patcher])
    except (AttributeError, TypeError) as error:  # a later ComfyUI asks its patchers for something that ours hasn't
        log.warning("ComfyUI can't list what this pack holds: %s", error)


class ComfyPins:
    """Pinned memory as ComfyUI grants and counts it."""

    def pin(self, memory: torch.Tensor) -> bool:
        import comfy.model_management as mm
        import torch

        with torch.inference_mode():
            return bool(mm.pin_memory(memory))

    def unpin(self, memory: torch.Tensor) -> None:
        import comfy.model_management as mm

        mm.unpin_memory(memory)
