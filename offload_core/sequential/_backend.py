"""Model-level offload of a whole pipeline: its DiTs and encoders take turns, its VAE too if asked for."""

from __future__ import annotations

import logging
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..devices import resolve_device
from ._config import OffloadBackend, OffloadConfig, OffloadStrategy
from ._discovery import ModuleDiscovery, PipelineModules, require_dits
from ._exclusion import Exclusion
from ._hook import give_back, install, rivals_of
from ._layerwise import LayerWiseOffloadBackend

log = logging.getLogger(__name__)


@runtime_checkable
class SupportsModelCpuOffload(Protocol):
    """A pipeline that sees to its own offload. `enable` and `disable` pass the call on."""

    def enable_omni_model_cpu_offload(self, *, device: torch.device, pin_memory: bool, use_hsdp: bool) -> None: ...

    def disable_omni_model_cpu_offload(self) -> None: ...


class ModelLevelOffloadBackend(OffloadBackend):
    """Components of a pipeline take turns on the device.

    DiTs and encoders are rivals, DiTs of one another, too. The VAE, and whatever else the pipeline has, comes when it
    is used. With `config.strict` every component is every other's rival. The pipeline is called as ever: its components
    report the device as theirs from `enable` on.
    """

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._exclusion: Exclusion | None = None
        self._modules: list[nn.Module] = []
        self._own: SupportsModelCpuOffload | None = None

    def enable(self, pipeline: Any) -> None:
        """Raises InputError if the pipeline has no DiT that could be recognised, and what
        `apply_sequential_offload` raises."""
        if self.enabled:
            log.warning("This backend is enabled already. Call disable() before it takes another pipeline.")
            return
        if isinstance(pipeline, SupportsModelCpuOffload):
            self._enable_own(pipeline)
            return
        found = ModuleDiscovery.discover(pipeline)
        require_dits(found, pipeline)
        if not found.encoders:
            log.info("%s has no encoder: only its DiTs and VAE take turns.", type(pipeline).__name__)
        if self.config.resident_bytes:
            log.info("resident_bytes: accepted, no effect because a whole component is resident in its turn.")
        modules = found.named()
        self._exclusion = install(
            modules,
            _strict_rivals(found) if self.config.strict else rivals_of(found.dits, found.encoders),
            self.device,
            pin_memory=self.config.pin_cpu_memory,
            use_hsdp=self.config.use_hsdp,
            settings=self.config.settings,
        )
        self._modules = list(modules.values())
        self.enabled = True

    def disable(self) -> None:
        """All components are tried; the first error is raised after that."""
        exclusion, modules, own = self._exclusion, self._modules, self._own
        self._exclusion, self._modules, self._own, self.enabled = None, [], None, False
        if own is not None:
            own.disable_omni_model_cpu_offload()
        if exclusion is not None:
            give_back(modules, exclusion.members())

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights on the device by component. Buffers, and weights that can't be streamed, stay there."""
        return self._exclusion.device_bytes() if self._exclusion is not None else {}

    def _enable_own(self, pipeline: SupportsModelCpuOffload) -> None:
        try:
            pipeline.enable_omni_model_cpu_offload(
                device=self.device, pin_memory=self.config.pin_cpu_memory, use_hsdp=self.config.use_hsdp
            )
        except BaseException:
            try:
                pipeline.disable_omni_model_cpu_offload()
            except Exception:
                log.exception("%s failed to clean up its own offload", type(pipeline).__name__)
            raise
        self._own, self.enabled = pipeline, True


def _strict_rivals(found: PipelineModules) -> dict[int, list[nn.Module]]:
    alone = [*found.dits, *found.encoders, *found.vaes]
    return {id(module): [other for other in alone if other is not module] for module in alone}


def get_offload_backend(config: Any, device: torch.device | None = None) -> OffloadBackend | None:
    """The backend of a strategy, None for `OffloadStrategy.NONE`.

    config: an OffloadConfig, or vLLM-Omni's own with its flags (`OffloadConfig.from_od_config`). device: the
    accelerator that is there, or the CPU, without it. Raises DeviceError.
    """
    config = config if isinstance(config, OffloadConfig) else OffloadConfig.from_od_config(config)
    device = resolve_device("auto") if device is None else device
    if config.strategy is OffloadStrategy.NONE:
        return None
    model_level = config.strategy is OffloadStrategy.MODEL_LEVEL
    return ModelLevelOffloadBackend(config, device) if model_level else LayerWiseOffloadBackend(config, device)


def enable_offload_backend(
    config: Any, pipeline: Any, device: torch.device | None = None
) -> tuple[Any, OffloadBackend | None]:
    """`get_offload_backend`, enabled on a pipeline. Returns both. Raises what `enable` raises; nothing is left then."""
    backend = get_offload_backend(config, device)
    if backend is not None:
        backend.enable(pipeline)
    return pipeline, backend
