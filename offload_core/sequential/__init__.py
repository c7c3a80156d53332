"""vLLM-Omni's offloader by its own names, over this engine: change the import and go on.

    from offload_core.sequential import apply_sequential_offload, remove_sequential_offload

    apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], device="cuda:0")
    ...  # DiT and encoder take turns on the device
    remove_sequential_offload([pipeline.transformer, pipeline.text_encoder])

`ModelLevelOffloadBackend` and `LayerWiseOffloadBackend` do it for a whole pipeline. `HookRegistry` and `ModelHook` are
diffusers' own. docs/coming-from.md says what differs and why.
"""

from __future__ import annotations

from diffusers.hooks import HookRegistry, ModelHook

from ._backend import (
    ModelLevelOffloadBackend,
    SupportsModelCpuOffload,
    enable_offload_backend,
    get_offload_backend,
)
from ._config import OffloadBackend, OffloadConfig, OffloadStrategy
from ._discovery import ModuleDiscovery, PipelineModules
from ._hook import (
    SequentialOffloadHook,
    apply_sequential_offload,
    remove_sequential_offload,
    sequential_offload_component,
)
from ._layerwise import LayerWiseOffloadBackend

__all__ = [
    "HookRegistry",
    "LayerWiseOffloadBackend",
    "ModelHook",
    "ModelLevelOffloadBackend",
    "ModuleDiscovery",
    "OffloadBackend",
    "OffloadConfig",
    "OffloadStrategy",
    "PipelineModules",
    "SequentialOffloadHook",
    "SupportsModelCpuOffload",
    "apply_sequential_offload",
    "enable_offload_backend",
    "get_offload_backend",
    "remove_sequential_offload",
    "sequential_offload_component",
]
