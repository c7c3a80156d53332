"""A handle says which model, on what device, in which dtype. It is plain data and holds no weight."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..devices import resolve_device, resolve_dtype
from ..errors import InputError, ModelError
from ..model_source import ComponentSource, ModelSource, resolve_model
from ..settings import WEIGHT_STORAGES, OffloadSettings, check_settings
from ..single_files.split_files import SplitFiles
from ._blocks import blocks_make_video
from ._companions import Companion, companion, controlled_class, with_companions
from ._control import Control, checked_control
from ._ip_adapter import IPAdapter, check_encoder, checked_adapter
from ._loras import Lora, as_loras
from ._pipeline import call_class, call_parameters
from ._tasks import check_sibling, class_for_task, task_of
from ._waveforms import SECONDS_ARGUMENTS, only_sound

COUNT_ARGUMENTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")


@dataclass(frozen=True)
class Handle:
    """A model ready for phases. Frozen, hashable, picklable; equal handles mean the same model and settings.

    model: folder or file as given. pipeline: the class it runs as. fingerprint: of the model's configs and files when
    it was loaded; a phase refuses files that changed since. device and dtype: as asked ("auto" is decided where the
    phase runs). loras: applied in this order. files: of a model that was given as `SplitFiles`. weight_storage: as for
    `load`. companions: components that aren't in its folder. ip_adapter: see `load`. control: a ControlNet with its
    picture; `pipeline` is the class without it, see `controlled`.
    """

    model: str = field(repr=False)
    fingerprint: str = field(repr=False)
    pipeline: str
    device: str = "auto"
    dtype: str = "auto"
    settings: OffloadSettings = field(default_factory=OffloadSettings, repr=False)
    loras: tuple[Lora, ...] = ()
    files: SplitFiles | None = field(default=None, repr=False)
    weight_storage: str = field(default="as stored", repr=False)
    companions: tuple[Companion, ...] = field(default=(), repr=False)
    ip_adapter: IPAdapter | None = field(default=None, repr=False)
    control: Control | None = field(default=None, repr=False)

    def source(self) -> ModelSource:
        """The model's files, checked again. Raises ModelError if they are gone or changed since `load`."""
        source = self._folder()
        if source.pipeline_class != self.pipeline:
            check_sibling(source, self.pipeline)
            source = replace(source, pipeline_class=self.pipeline)
        return source

    def _folder(self) -> ModelSource:
        source = resolve_model(self.files or self.model)
        if source.fingerprint != self.fingerprint:
            raise ModelError(f"The model {source.root.name} changed on disk since it was loaded. Load it again.")
        return with_companions(source, self.companions)

    def with_control(self, control: Control) -> Handle:
        """The same model with this ControlNet and its picture. Raises InputError and ModelError, see `load`."""
        if self.control is not None:
            raise InputError("The model has a ControlNet already, and one at a time works. Take one of them off.")
        handle = replace(self, control=checked_control(control, self.source()))
        handle.controlled()  # says it now if there is no pipeline for it
        return handle

    def with_ip_adapter(self, adapter: IPAdapter) -> Handle:
        """The same model with this IP-Adapter. Raises InputError and ModelError, see `load`."""
        if self.ip_adapter is not None:
            raise InputError("The model has an IP-Adapter already, and one at a time works. Take one of them off.")
        adapter, more = checked_adapter(adapter), self.companions
        if adapter.image_encoder is not None:
            more = (*more, companion("image_encoder", adapter.image_encoder, "transformers", self.source()))
        handle = replace(self, ip_adapter=adapter, companions=more)
        encoder = handle.source().components.get("image_encoder")
        if encoder is not None:
            check_encoder(adapter, encoder)
        return handle

    def controlled(self) -> Handle:
        """The same model as the pipeline that runs it with its ControlNet, a component from there on; itself if it has
        none. Raises InputError if there is no such pipeline."""
        if self.control is None:
            return self
        source, more = self.source(), self.control.companion
        pipeline = controlled_class(source, more.source(source))
        return replace(self, control=None, companions=(*self.companions, more), pipeline=pipeline)

    def _comfy_cache_tensors(self) -> list[torch.Tensor]:
        """None: ComfyUI's cache of results asks by this name what a value holds in RAM."""
        return []

    def for_task(self, task: str) -> Handle:
        """The same model as the pipeline that does `task`: "image-to-image", "inpaint", "image-to-video" or
        "video-to-video".

        Its own pipeline if that takes a picture, else a sibling of it over the same components. Raises InputError if
        there is none.
        """
        return replace(self, pipeline=class_for_task(self._folder(), task))

    def for_pictures(self, *, masked: bool = False, count: int = 1) -> Handle:
        """The same model as the pipeline that `encode_images` chooses for so many pictures, with or without a mask."""
        return self.for_task(task_of(self.source(), masked=masked, count=count))

    def device_here(self) -> torch.device:
        return resolve_device(self.device)

    def dtype_of(self, component: ComponentSource) -> torch.dtype:
        """The dtype a component runs in: the handle's, or with "auto" the one that holds most bytes of its file, of the
        denoiser's for a component from another place."""
        wanted = resolve_dtype(self.dtype)
        stored = getattr(torch, component.runs_in or component.dtype or "float32")
        return wanted or (stored if stored.itemsize >= 2 else torch.bfloat16)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of the pipeline's call, overlaid by the model's own."""
        source = self.source()
        signature = call_parameters(call_class(source))
        own = {name: p.default for name, p in signature.items() if p.default is not p.empty}
        return {**own, **model_defaults(source)}

    @property
    def guidance_name(self) -> str | None:
        """The argument that a person means by guidance.

        `guidance_scale` for a denoiser that was distilled to take it as an input (FLUX.1-dev), else true CFG where the
        pipeline has it (Qwen-Image), else `guidance_scale`.
        """
        source = self.source()
        embedded = any((part.config or {}).get("guidance_embeds") for part in source.components.values())
        names = ("true_cfg_scale", "guidance_scale")
        return _first_argument(source, *(reversed(names) if embedded else names))

    @property
    def images_name(self) -> str | None:
        """The argument that sets how many pictures, videos or sounds one prompt gives."""
        return _first_argument(self.source(), *COUNT_ARGUMENTS)

    @property
    def seconds_name(self) -> str | None:
        """The argument that sets how many seconds of sound are made, of a model that makes sound alone."""
        source = self.source()
        return _first_argument(source, *SECONDS_ARGUMENTS) if only_sound(source) else None

    @property
    def only_sound(self) -> bool:
        """Whether the model makes sound and no picture."""
        return only_sound(self.source())

    @property
    def makes_video(self) -> bool:
        """Whether the model makes videos, not pictures."""
        source = self.source()
        if source.blocks is not None:
            return blocks_make_video(source)
        return _first_argument(source, "num_videos_per_prompt") is not None


def model_defaults(source: ModelSource) -> dict[str, Any]:
    """Arguments that the model's folder sets (phase_offload.json), of those its pipeline takes."""
    signature = call_parameters(call_class(source))
    return {name: value for name, value in source.defaults.items() if name in signature}


def _first_argument(source: ModelSource, *names: str) -> str | None:
    signature = call_parameters(call_class(source))
    return next((name for name in names if name in signature), None)


def load(
    model: str | os.PathLike[str] | SplitFiles,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    settings: OffloadSettings | None = None,
    loras: Sequence[Any] = (),
    weight_storage: str = "as stored",
    controlnet: str | os.PathLike[str] | Control | None = None,
    ip_adapter: IPAdapter | None = None,
) -> Handle:
    """A handle for `model`: a diffusers folder, a checkpoint file, or `SplitFiles`. Reads configs and safetensors
    headers, no weights.

    device: "auto", "cpu", "cuda:0", ...; dtype: "auto" (each component in its file's own), "float32", "bfloat16" or
    "float16", weights are cast on the way in; settings: how phases run; loras: paths of LoRA files, or (path, scale).
    weight_storage: "as stored", or "fp8": large weights of denoisers and encoders are packed to 8 bits on their way in,
    with a scale for each row, and unpacked where they are used. That halves what bfloat16 weights take on the device,
    in RAM and on the link, and changes results a little.
    controlnet: the folder or the file of a ControlNet; the model then runs as the pipeline that takes its picture. Or a
    `Control`, which has the picture, too, and leaves `encode` and `encode_images` as they are. ip_adapter: an
    `IPAdapter`.

    Raises ModelError if the model can't be used, InputError for a dtype, device or setting that isn't one, DeviceError
    for a device that isn't there.
    """
    settings = settings or OffloadSettings()
    device = settings.execution_device if str(device) == "auto" else str(device)
    resolve_device(device)
    resolve_dtype(dtype)
    check_settings(settings)
    if weight_storage not in WEIGHT_STORAGES:
        raise InputError(f"weight_storage is {weight_storage!r}; use {' or '.join(map(repr, WEIGHT_STORAGES))}.")
    source = resolve_model(model)
    handle = Handle(
        model=str(source.root),
        fingerprint=source.fingerprint,
        pipeline=source.pipeline_class,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        settings=settings,
        files=None if isinstance(model, str | os.PathLike) else model.absolute(),
        weight_storage=weight_storage,
    )
    if controlnet is not None and not isinstance(controlnet, Control):
        more = (companion("controlnet", controlnet, "diffusers", source),)
        handle = replace(handle, companions=more, pipeline=with_companions(source, more).pipeline_class)
    if ip_adapter is not None:
        handle = handle.with_ip_adapter(ip_adapter)
    if isinstance(controlnet, Control):
        handle = handle.with_control(controlnet)
    return replace(handle, loras=as_loras(loras))
