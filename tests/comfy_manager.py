"""A stand-in for `comfy.model_management`: a list of models on one pretend device, with ComfyUI's rules for who goes.

`install(monkeypatch)` puts it where `import comfy.model_management` finds it. The real ones are asked in tests/host.
"""

from __future__ import annotations

import sys
import types
import weakref
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pytest
import torch

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
LEAST_FREE_BYTES = 12


class VRAMState(Enum):
    NO_VRAM = auto()
    NORMAL_VRAM = auto()


class Module:
    """What a model of ComfyUI is: anything that can be referred to weakly."""


class OwnModel:
    """A model of ComfyUI itself. It gives what it is asked for."""

    parent = None

    def __init__(self, nbytes: int, device: torch.device = GPU) -> None:
        self.nbytes, self.loaded, self.load_device, self.offload_device = nbytes, 0, device, CPU
        self.model = Module()
        self.in_inference_mode: list[bool] = []

    def model_size(self) -> int:
        return self.nbytes

    def loaded_size(self) -> int:
        return self.loaded

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded else self.offload_device

    def partially_load(self, device: torch.device, extra: float, force_patch_weights: bool = False) -> int:
        self.loaded = self.nbytes
        return self.nbytes

    def partially_unload(self, device: torch.device, nbytes: float, force_patch_weights: bool = False) -> float:
        self.in_inference_mode.append(torch.is_inference_mode_enabled())
        self.loaded -= int(nbytes)
        return nbytes

    def detach(self, unpatch_all: bool = True) -> None:
        self.in_inference_mode.append(torch.is_inference_mode_enabled())
        self.loaded = 0 if unpatch_all else self.loaded

    def is_clone(self, other: Any) -> bool:
        return getattr(other, "model", None) is self.model

    def model_patches_models(self) -> list[Any]:
        return []

    def is_dynamic(self) -> bool:
        return False


class Loaded:
    """An entry of the list: it holds the patcher and its module weakly."""

    def __init__(self, patcher: Any, gone: Any) -> None:
        self.patcher, self.device = weakref.ref(patcher), patcher.load_device
        self.end = weakref.finalize(patcher.model, gone, self)


@dataclass
class Manager:
    """total: bytes of the device. reserve: bytes that the person wants to be left free. can_pin: whether it has a
    function for pinning, as newer versions do, and grants it. pinned: addresses."""

    total: int = 100
    reserve: int = 0
    can_pin: bool | None = None
    smart: bool = True
    vram_state: VRAMState = VRAMState.NORMAL_VRAM
    others_bytes: int = 0  # that phases and other programs really took
    asked: list[float] = field(default_factory=list)
    pinned: dict[int, int] = field(default_factory=dict)
    list: list[Loaded] = field(default_factory=list)

    def load_models_gpu(self, models: Any, memory_required: float = 0) -> None:
        for patcher in models:
            for entry in [e for e in self.list if patcher.is_clone(e.patcher())]:
                self._drop(entry)
                entry.patcher().detach(unpatch_all=False)
            here = patcher.load_device == patcher.current_loaded_device()
            size = patcher.model_size() - (patcher.loaded_size() if here else 0)
            if patcher.load_device != CPU:
                self.free_memory(
                    1.1 * size + max(LEAST_FREE_BYTES, memory_required) + self.reserve, patcher.load_device
                )
            patcher.partially_load(patcher.load_device, 1e32)
            self.list.insert(0, Loaded(patcher, self._drop))

    def free_memory(self, needed: float, device: torch.device) -> None:
        self.asked.append(needed)
        here = [entry for entry in self.list if entry.device == device]
        for entry in sorted(here, key=lambda e: e.patcher().loaded_size() - e.patcher().model_size()):
            patcher = entry.patcher()
            missing = needed - self.free(device) if self.smart else 1e32
            if missing <= 0:
                continue
            if missing < patcher.loaded_size() and patcher.partially_unload(CPU, missing) >= missing:
                continue
            patcher.detach(True)
            self._drop(entry)

    def unload_all_models(self) -> None:
        self.free_memory(1e30, GPU)

    def free(self, device: torch.device) -> int:
        own = [patcher for patcher in self.loaded_models() if isinstance(patcher, OwnModel)]
        return self.total - self.others_bytes - sum(model.loaded_size() for model in own)

    def loaded_models(self) -> list[Any]:
        return [entry.patcher() for entry in self.list]

    def _drop(self, entry: Loaded) -> None:
        entry.end.detach()
        self.list.remove(entry)

    def module(self) -> types.SimpleNamespace:
        """`comfy.model_management` as the pack finds it."""
        named = {
            name: getattr(self, name)
            for name in ("load_models_gpu", "free_memory", "unload_all_models", "loaded_models")
        }
        found = types.SimpleNamespace(
            **named,
            VRAMState=VRAMState,
            vram_state=self.vram_state,
            get_torch_device=lambda: GPU,
            get_free_memory=lambda device, torch_free_too=False: (self.free(device), 0),
            extra_reserved_memory=lambda: self.reserve,
            soft_empty_cache=lambda: None,
        )
        if self.can_pin is not None:
            found.pin_memory, found.unpin_memory = self._pin, self._unpin
        return found

    def _pin(self, tensor: torch.Tensor) -> bool:
        if self.can_pin:
            self.pinned[tensor.data_ptr()] = tensor.nbytes
        return bool(self.can_pin)

    def _unpin(self, tensor: torch.Tensor) -> bool:
        return self.pinned.pop(tensor.data_ptr()) == tensor.nbytes


def install(monkeypatch: pytest.MonkeyPatch, manager: Manager) -> Manager:
    """ComfyUI's memory is this manager's for the rest of the test."""
    module = manager.module()
    monkeypatch.setitem(sys.modules, "comfy", types.SimpleNamespace(model_management=module))
    monkeypatch.setitem(sys.modules, "comfy.model_management", module)
    return manager
