"""What ComfyUI's own `comfy.model_management` does with our patcher, on a pretend GPU. Prints its findings as JSON.

Run by test_manners.py with the Python of a checkout, in the checkout's folder. Sizes are in GB, of a device of 10 GB.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.path.insert(0, ".")
sys.argv = [sys.argv[0], "--cpu", *sys.argv[1:]]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management as mm  # noqa: E402
import torch  # noqa: E402

from offload_core.limits import Machine  # noqa: E402
from offload_core.memory_host import Claim  # noqa: E402
from phase_offload_nodes.comfy_memory import ComfyMemory  # noqa: E402

GPU, CPU, GB = torch.device("cuda:0"), torch.device("cpu"), 10**9
TOTAL = 10 * GB


class Module(torch.nn.Module):
    """Of a model of ComfyUI."""


class OwnModel:
    """A model of ComfyUI itself, as ComfyUI asks for one."""

    parent = None

    def __init__(self, size: int) -> None:
        self.size, self.loaded, self.load_device, self.offload_device = size, 0, GPU, CPU
        self.model = Module()

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self.loaded

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded else self.offload_device

    def model_dtype(self) -> torch.dtype:
        return torch.float16

    def model_patches_to(self, device_or_dtype: Any) -> None:
        pass

    def model_patches_models(self) -> list[Any]:
        return []

    def is_clone(self, other: Any) -> bool:
        return getattr(other, "model", None) is self.model

    def partially_load(self, device: torch.device, extra: float, force_patch_weights: bool = False) -> float:
        before = self.loaded
        self.loaded = int(min(self.size, self.loaded + extra))
        return self.loaded - before

    def partially_unload(self, device: torch.device, nbytes: float, force_patch_weights: bool = False) -> float:
        self.loaded -= int(nbytes) + 1
        return nbytes + 1

    def detach(self, unpatch_all: bool = True) -> None:
        self.loaded = 0 if unpatch_all else self.loaded

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False

    def loaded_ram_size(self) -> int:
        return 0


class Copies:
    """Warm host copies."""

    def __init__(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes

    def release(self, nbytes: int | None = None) -> int:
        freed = self.held_bytes if nbytes is None else min(nbytes, self.held_bytes)
        self.held_bytes -= freed
        return freed


taken = 0  # by a phase of ours


def free_bytes(device: torch.device | None = None, torch_free_too: bool = False) -> Any:
    own = sum(model.loaded_size() for model in mm.loaded_models() if isinstance(model, OwnModel))
    free = TOTAL - taken - own
    return (free, 0) if torch_free_too else free


def new_memory() -> ComfyMemory:
    return ComfyMemory(Machine(device_info=lambda device: (free_bytes(), TOTAL), nvml_info=lambda index: None))


def listed() -> list[str]:
    return sorted(type(patcher.model).__name__ for patcher in mm.loaded_models())


def gb(nbytes: float) -> float:
    return round(nbytes / GB, 2)


def main() -> dict[str, Any]:
    global taken
    mm.get_free_memory = free_bytes
    mm.get_torch_device = lambda: GPU
    if hasattr(mm, "get_all_torch_devices"):
        mm.get_all_torch_devices = lambda exclude_current=False: [GPU]
    mm.vram_state = mm.VRAMState.NORMAL_VRAM
    mm.EXTRA_RESERVED_VRAM = 0
    found: dict[str, Any] = {}
    memory, copies = new_memory(), Copies(0)
    memory.offer(copies)

    own = OwnModel(8 * GB)
    mm.load_models_gpu([own])
    found["loaded at first"] = gb(own.loaded)
    would_be_free = memory.machine().device(GPU)
    found["counts as free"] = gb(would_be_free.free) if would_be_free else None
    with memory.claim(Claim(GPU, 3 * GB, 1 * GB, spare_bytes=GB // 2)):
        taken = 3 * GB
        found["left beside a phase"] = gb(own.loaded)
        found["listed while it runs"] = listed()
        another = OwnModel(2 * GB)
        mm.load_models_gpu([another])  # makes room in the middle of the phase
        found["listed after pressure in the middle"] = listed()
        found["unloaded for it"] = memory.unload_others()
        found["listed after out of memory"] = listed()
    taken = 0
    found["listed afterwards"] = listed()

    copies.held_bytes = 2 * GB
    with memory.claim(Claim(GPU, 3 * GB, GB)):
        pass
    found["listed with copies"] = listed()
    with memory.claim(Claim(GPU, 8 * GB, GB)):
        pass
    found["copies after our own phase"] = gb(copies.held_bytes)
    mm.load_models_gpu([own])
    found["copies beside a model that fits"] = gb(copies.held_bytes)
    mm.load_models_gpu([OwnModel(6 * GB)])
    found["copies under pressure"] = gb(copies.held_bytes)

    copies.held_bytes = 2 * GB
    with memory.claim(Claim(GPU, GB, GB)):
        pass
    mm.unload_all_models()
    found["copies after everything was unloaded"] = gb(copies.held_bytes)
    found["listed after everything was unloaded"] = listed()
    with memory.claim(Claim(GPU, GB, GB)):
        found["listed again at the next use"] = listed()
    pins = memory.pins()
    found["pins"] = None if pins is None else pins.pin(torch.zeros(4096, dtype=torch.uint8))
    return found


print(json.dumps(main()))
