"""A second node pack for tests in a real ComfyUI: nodes that need nothing of ours, and a look inside the process.

Its routes answer only while no graph runs: `/neighbour/state` says what is in memory, `/neighbour/changed` which
functions, classes and modules of torch and ComfyUI are no longer those that were there when this pack was imported.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import comfy.model_management as mm
import psutil
import torch
from aiohttp import web
from server import PromptServer

WATCHED = (
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.cuda",
    "torch.accelerator",
    "torch.utils.data",
    "comfy.model_management",
    "comfy.model_patcher",
    "comfy.sample",
    "comfy.samplers",
    "comfy.sd",
    "comfy.utils",
    "execution",
    "folder_paths",
    "latent_preview",
    "nodes",
    "server",
)
CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.Generator, PromptServer)
LASTING = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)


def identities() -> dict[str, int]:
    """Every function, class and module of what is watched, by its full name."""
    places = [(name, vars(importlib.import_module(name))) for name in WATCHED]
    places += [(f"{cls.__module__}.{cls.__qualname__}", vars(cls)) for cls in CLASSES]
    return {
        f"{place}.{name}": id(value)
        for place, found in places
        for name, value in found.items()
        if isinstance(value, LASTING)
    }


def modes() -> dict[str, str]:
    """What holds for every computation in the process."""
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "grad": str(torch.is_grad_enabled()),
        "autocast cache": str(torch.is_autocast_cache_enabled()),
        "inference": str(torch.is_inference_mode_enabled()),
    }


AT_FIRST = identities()


class Computes:
    """Passes a value on, and says what holds in the process and what a small computation gives here."""

    CATEGORY = "neighbour"
    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"anything": ("*", {})}, "optional": {"again": ("INT", {"default": 0})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict) -> bool:
        return True

    def run(self, anything: object, again: int = 0) -> dict:
        generator = torch.Generator().manual_seed(1)
        layer = torch.nn.Conv2d(3, 8, 3).requires_grad_(False)
        layer.weight.data = torch.randn(8, 3, 3, 3, generator=generator)
        layer.bias.data.zero_()
        result = layer(torch.randn(1, 3, 16, 16, generator=generator)).sum().item()
        return {"ui": {"text": [*(f"{k}: {v}" for k, v in modes().items()), repr(result)]}, "result": (anything,)}


class RunsOutOfMemory:
    """Raises what an accelerator raises when its memory ran out."""

    CATEGORY = "neighbour"
    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"anything": ("*", {})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict) -> bool:
        return True

    def run(self, anything: object) -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory (on purpose).")


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows. Nothing is collected first."""
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            try:
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except Exception:  # a tensor without a storage, which libraries refuse in their own words, holds nothing
                continue
    return sum(nbytes for address, nbytes in storages.items() if address)


@PromptServer.instance.routes.get("/neighbour/state")
async def state(request: web.Request) -> web.Response:
    process = psutil.Process(os.getpid())
    listed = [(type(p.model).__name__, p.model_size(), p.loaded_size()) for p in mm.loaded_models() if p is not None]
    return web.json_response(
        {
            "listed": listed,
            "tensor_bytes": tensor_bytes(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "native threads": process.num_threads(),
            "files": process.num_fds(),
        }
    )


@PromptServer.instance.routes.get("/neighbour/changed")
async def changed(request: web.Request) -> web.Response:
    now = identities()
    return web.json_response([name for name, value in AT_FIRST.items() if now.get(name) != value])


NODE_CLASS_MAPPINGS = {"NeighbourComputes": Computes, "NeighbourRunsOutOfMemory": RunsOutOfMemory}
