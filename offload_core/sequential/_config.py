"""What a backend is told, and what every backend has: `enable(pipeline)` and `disable()`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..devices import resolve_device
from ..settings import OffloadSettings

log = logging.getLogger(__name__)


class OffloadStrategy(Enum):
    """Which backend: whole components that take turns, or a DiT that is streamed through a few blocks' room."""

    NONE = "none"
    MODEL_LEVEL = "model_level"
    LAYER_WISE = "layer_wise"
    DISTRIBUTED_LAYER_WISE = "distributed_layer_wise"


@dataclass(frozen=True)
class OffloadConfig:
    """How a backend offloads.

    pin_cpu_memory: whether copies go through pinned memory. use_hsdp: whether components may have DTensor weights
    (model level). strict: exactly one component is on the device, the VAE and each encoder included (model level);
    else encoders may be there together, and the VAE comes when it is used and stays. resident_bytes: bytes of a
    pipeline's DiTs that stay on the device beside what the streamed part needs (layer-wise). settings: budgets and
    everything else of the engine; None means what is free on the device and in RAM.
    """

    strategy: OffloadStrategy
    pin_cpu_memory: bool = True
    use_hsdp: bool = False
    strict: bool = False
    resident_bytes: int = 0
    settings: OffloadSettings | None = None

    @classmethod
    def from_od_config(cls, od_config: Any) -> OffloadConfig:
        """The config that vLLM-Omni's flags ask for: `enable_cpu_offload`, `enable_layerwise_offload`,
        `enable_distributed_layerwise_offload`, `pin_cpu_memory`, `parallel_config.use_hsdp`. Layer-wise goes before
        model level. A flag that is missing is off; flags of their distributed transport are named in the log.
        """
        distributed = getattr(od_config, "enable_distributed_layerwise_offload", False)
        layerwise = getattr(od_config, "enable_layerwise_offload", False)
        model_level = getattr(od_config, "enable_cpu_offload", False)
        if distributed:
            strategy = OffloadStrategy.DISTRIBUTED_LAYER_WISE
        elif layerwise:
            strategy = OffloadStrategy.LAYER_WISE
        else:
            strategy = OffloadStrategy.MODEL_LEVEL if model_level else OffloadStrategy.NONE
        if model_level and (layerwise or distributed):
            log.info("enable_cpu_offload=True: accepted, no effect because layer-wise offload was asked for as well.")
        for flag in sorted(name for name in dir(od_config) if name.startswith("dlo_")) if distributed else ():
            log.info("%s: accepted, no effect because each process streams its own weights.", flag)
        parallel = getattr(od_config, "parallel_config", None)
        return cls(
            strategy,
            pin_cpu_memory=bool(getattr(od_config, "pin_cpu_memory", True)),
            use_hsdp=bool(getattr(parallel, "use_hsdp", False)),
        )


class OffloadBackend(ABC):
    """A way of offloading a pipeline on one device. `enabled` says whether it is in effect."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        """Raises DeviceError or InputError for a device that isn't there."""
        self.config = config
        self.device = resolve_device(device)
        self.enabled = False

    @abstractmethod
    def enable(self, pipeline: Any) -> None:
        """Takes the pipeline's components under offload. They are unchanged if it raises."""

    @abstractmethod
    def disable(self) -> None:
        """Gives them back: device, storages and `forward` as before, with the edits made since. May be called twice."""

    def is_enabled(self) -> bool:
        return self.enabled
