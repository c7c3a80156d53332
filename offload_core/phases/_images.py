"""Encode Image: run the pipeline up to its denoiser with only the VAE real, and keep what it made of the pictures.

The pipeline asks its text encoders before it asks the VAE. Nothing that it asks the VAE depends on what the text
encoders answer, only on its shape: they answer with noise of that shape, found by tracing them, and aren't loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError, TraceError
from ..model_source import ComponentSource, ModelSource, component_class
from ..plan import Plan
from ..session import Session
from ..trace import Tracer
from ..trace_blocks import repeated_blocks
from ._clips import check_clip, frames_of, given_pictures, is_clip, whole_clip
from ._denoise import check_size, size_multiple
from ._encode import friendly_errors
from ._handle import Handle, model_defaults
from ._layout import Layout
from ._marks import encoders_mark
from ._pipeline import call_class, call_parameters, check_call
from ._plain import from_plain
from ._ports import EncodeOnlyPort, PhaseDone, Port, RecordingPort, Records, StopPort
from ._records import Images, plain_call
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._tasks import (
    VIDEO_TO_VIDEO,
    class_for_task,
    reads_pictures_with_the_prompt,
    starts_from_a_clip,
    takes_many,
    task_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Some pipelines skip encoding the picture at full strength; what is encoded at any other serves every strength. There
# must be steps left to do at it, whatever the model's default number of steps.
PARTIAL = {"strength": 0.5, "num_inference_steps": 4}
UNTOUCHED = 1.0  # every value of the white picture that stands for latents, as a VAE gets it


def encode_images(
    handle: Handle,
    images: Image | Sequence[Image],
    *,
    mask: Image | None = None,
    height: int | None = None,
    width: int | None = None,
    task: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
    **pipeline_kwargs: Any,
) -> Images:
    """What the model's VAE makes of RGB pictures, for `denoise` and any prompt, seed, strength or number of steps.

    images: one picture; or several: references for a pipeline that reads them together, the first and the last frame
    for one that takes a `last_image`, or, for one that starts from a picture, each a start of its own, and `denoise`
    makes a picture from each for each prompt (they must be of one size, or be given one). For a model that makes videos
    and can start from one they are the frames of a clip. mask: white (255) where to
    repaint. height, width: of the result, in pixels; left out it is the picture's, rounded down to what the model can
    do, or the pipeline's default where the picture is only looked at or set in motion. task: see `Handle.for_task`;
    left out, the mask and the model decide. pipeline_kwargs: of the pipeline's own call that bear on the picture
    (num_frames, ...). plan: see `encode`.

    Raises InputError if the model has no pipeline for it, or for pictures that it doesn't take.
    """
    handle, source, call = images_question(handle, images, mask, task, pipeline_kwargs)
    records, session = Records(), session or Session()
    ports = image_ports(source, records, handle.device_here())
    owned = {name for name, port in ports.items() if not isinstance(port, StopPort | NoisePort)}
    with OpenPhase(handle, source, "images", session, ports, owned, plan) as phase:
        call = with_size(phase, source, call, height, width)
        kept = run_images(phase, source, call)
        plain = records.settle()
    return Images(handle.pipeline, encoders_mark(handle, source, plain), kept, plain, tuple(phase.notes))


def images_from_samples(handle: Handle, samples: torch.Tensor, mask: Image | None = None) -> Images:
    """A bare ComfyUI LATENT (unscaled VAE output, as core's VAE Encode makes it) to start from, for this model.

    samples: (B, C, h, w) or (B, C, 1, h, w), each of the B a start of its own as in `encode_images`; or a clip of T
    latent frames, (1, C, T, h, w). mask: white (255) where to repaint. The VAE isn't loaded: where the pipeline encodes
    its picture, it is answered with `samples`. So the result is that of the picture they were made of, where the
    pipeline takes the mode of the encoding and doesn't draw from it.

    Raises InputError if the model has no pipeline that starts from a picture or a clip, or one that must see it.
    """
    clip = is_clip(samples)
    if clip:
        check_clip(handle.source(), samples)
    task = VIDEO_TO_VIDEO if clip else None
    handle, source, call = images_question(handle, [_white((8, 8))] * samples.shape[0], mask, task, {})
    records = Records()
    ports = image_ports(source, records, handle.device_here())
    ignores = mask is not None and not _looks_at_masked(source)
    vaes = {name: port for name, port in ports.items() if isinstance(port, EncodeOnlyPort)}
    ports |= {name: GivenPort(port, samples, ignores_masked=ignores) for name, port in vaes.items()}
    with OpenPhase(handle, source, "images", Session(), ports, set()) as phase:
        vae: Any = phase.modules[_vae_name(source)]
        size = _pixels(phase, Layout.of(vae), samples)
        whites = [_white(size)] * (frames_of(phase.pipeline, samples) if clip else samples.shape[0])
        shown = {"video": whites} if clip else {"image": whites if len(whites) > 1 else whites[0]}
        call = with_size(phase, source, {**call, **shown}, *size)
        kept = run_images(phase, source, call)
        plain = records.settle()
    return Images(handle.pipeline, encoders_mark(handle, source, plain), kept, plain)


def image_ports(source: ModelSource, records: Records, device: torch.device) -> dict[str, Port]:
    """What this phase does with each component: those that see pictures run, those that read texts are guessed."""
    return {name: _port(part, name, records, device) for name, part in models(source)}


def _port(part: ComponentSource, name: str, records: Records, device: torch.device) -> Port:
    role = role_of(part)
    if role is Role.VAE:
        return EncodeOnlyPort(name, records, device)
    if role is Role.ENCODER and getattr(component_class(part), "main_input_name", "") == "pixel_values":
        return RecordingPort(name, records, device)
    return NoisePort(name) if role in (Role.ENCODER, Role.HEAD) else StopPort()


class NoisePort:
    """Answers for a component whose answer doesn't matter, with noise of the right shape."""

    def __init__(self, component: str) -> None:
        self.component = component

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tracer = Tracer()
        with repeated_blocks([module], tracer), tracer:
            return tracer.call(".".join(filter(None, (self.component, name))), run, args, kwargs)[0]


class GivenPort:
    """Before the port of a VAE that isn't loaded: answers for the white picture with latents that are there already.

    ignores_masked: pipelines for inpainting encode the masked picture, too, though only denoisers that were made for
    inpainting look at it. For the others it may be anything.
    """

    def __init__(self, inner: EncodeOnlyPort, samples: torch.Tensor, *, ignores_masked: bool) -> None:
        self.inner, self.samples, self.ignores_masked = inner, samples, ignores_masked

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput

        def answer(picture: torch.Tensor, return_dict: bool = True) -> Any:
            if not torch.equal(picture, torch.full_like(picture, UNTOUCHED)) and not self.ignores_masked:
                raise InputError(
                    "This model encodes the picture together with a mask or with frames of a video, so a latent isn't "
                    "enough: give the picture itself to Encode Image."
                )
            latents = Layout.of(module).to_latents(self.samples).to(picture.device, picture.dtype)
            # An encoding that is a value and no distribution: where a pipeline may draw from one, nothing is drawn, as
            # if it had been given the latents itself.
            return AutoencoderTinyOutput(latents=latents) if return_dict else (latents,)

        return self.inner.call(module, name, answer if name == "encode" else run, args, kwargs)


def run_images(phase: Phase, source: ModelSource, call: dict[str, Any]) -> Any:
    """Runs the open phase's pipeline with the arguments `call`, and gives them as plain data."""
    known = call_parameters(call_class(source))
    check_call(call_class(source), call)
    check_size(phase.pipeline, call)
    kept = plain_call(call)
    run = {**model_defaults(source), "prompt": "", **from_plain(kept, torch.device("cpu")), **PARTIAL}
    run = {name: value for name, value in run.items() if name in known}
    try:
        with contextlib.suppress(PhaseDone), friendly_errors():
            phase.pipeline(**run, generator=torch.Generator("cpu").manual_seed(0))
    except TraceError as error:
        phase.notes.append(f"The pictures are encoded by Denoise, because {str(error)[0].lower()}{str(error)[1:]}")
    for component in phase.components.values():
        if isinstance(component.gate.port, NoisePort):
            component.gate.forwards = 0  # it was traced, not run
    return kept


def images_question(
    handle: Handle, images: Any, mask: Any, task: str | None, kwargs: dict[str, Any], source: ModelSource | None = None
) -> tuple[Handle, ModelSource, dict[str, Any]]:
    """The model as the pipeline that takes these pictures, and the arguments of its call that they are, checked.
    source: the model, if it isn't the handle's folder."""
    pictures = [images] if hasattr(images, "getbands") else list(images)
    if not pictures or not all(hasattr(picture, "getbands") for picture in pictures):
        raise InputError("Encode Image needs a picture, as a PIL image, or a list of them.")
    task = task or task_of(source or handle.source(), masked=mask is not None, count=len(pictures))
    if source is None:
        handle = handle.for_task(task)
        source = handle.source()
    else:
        handle = replace(handle, pipeline=class_for_task(source, task))
        source = replace(source, pipeline_class=handle.pipeline)
    if mask is not None and "mask_image" not in call_parameters(call_class(source)):
        raise InputError(f"{source.pipeline_class} takes no mask. Leave it out.")
    return handle, source, {**_arguments(source, pictures, mask), **kwargs}


def _arguments(source: ModelSource, pictures: Sequence[Any], mask: Any) -> dict[str, Any]:
    """Pictures and mask as arguments of the pipeline's call."""
    if starts_from_a_clip(source):
        return {"video": [picture.convert("RGB") for picture in pictures]}
    call: dict[str, Any] = {"image": pictures[0].convert("RGB")}
    if mask is not None:
        call["mask_image"] = mask.convert("L")
    if len(pictures) == 1:
        return call
    if takes_many(source):
        return {**call, "image": [picture.convert("RGB") for picture in pictures]}
    starts = _starts(source)
    if starts is not None:
        return {**call, "image": [picture.convert("RGB") for picture in pictures], starts: len(pictures)}
    if len(pictures) == 2 and "last_image" in call_parameters(call_class(source)):
        return {**call, "last_image": pictures[1].convert("RGB")}
    clip = ", and it has no video-to-video" if "num_frames" in call_parameters(call_class(source)) else ""
    raise InputError(
        f"{source.pipeline_class} takes one picture at a time and there are {len(pictures)}{clip}. Choose one."
    )


def _starts(source: ModelSource) -> str | None:
    """The argument for how many pictures one prompt gives, of a pipeline that makes one from each picture."""
    known = call_parameters(call_class(source))
    starts_here = "strength" in known and "num_images_per_prompt" in known
    return "num_images_per_prompt" if starts_here and not reads_pictures_with_the_prompt(source) else None


def with_size(
    phase: Phase, source: ModelSource, call: dict[str, Any], height: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """`call` with the size of the result. A pipeline that takes no size takes the picture's: it is resized for it."""
    known = call_parameters(call_class(source))
    starts_here = "strength" in known or "mask_image" in known
    call = whole_clip(phase, call)
    pictures = given_pictures(call)
    first = pictures[0]
    if starts_here and height is None and len({picture.size for picture in pictures}) > 1:
        raise InputError("The pictures to start from differ in size. Give height and width, or pictures of one size.")
    if height is None and width is None:
        if not starts_here or "height" not in known:
            return call
        multiple = size_multiple(phase.pipeline)
        width, height = (max(side // multiple, 1) * multiple for side in first.size)
    elif height is None or width is None:
        raise InputError("Give both height and width, or neither.")
    if "height" in known:
        return {**call, "height": height, "width": width}
    if not starts_here:
        raise InputError(f"{source.pipeline_class} chooses the size itself. Leave height and width out.")
    from PIL.Image import Resampling

    # As diffusers' VaeImageProcessor does.
    resized = [picture.resize((width, height), Resampling.LANCZOS) for picture in pictures]
    return {**call, "image": resized if isinstance(call["image"], list) else resized[0]}


def _vae_name(source: ModelSource) -> str:
    vaes = [name for name, part in models(source) if role_of(part) is Role.VAE]
    if not vaes:
        raise InputError(f"{source.pipeline_class} has no VAE, so it can't start from a latent.")
    return vaes[0]


def _looks_at_masked(source: ModelSource) -> bool:
    """Whether the denoiser has channels for the mask and the masked picture beside those of the latents."""
    config = source.components[_vae_name(source)].config or {}
    latent = int(config.get("latent_channels") or config.get("z_dim") or 0)
    denoisers = [part.config or {} for _, part in models(source) if role_of(part) is Role.DENOISER]
    return any(part.get("in_channels", latent) not in (latent, 4 * latent) for part in denoisers)


def _pixels(phase: Phase, layout: Layout, samples: torch.Tensor) -> tuple[int, int]:
    """Height and width of the picture that such latents are of."""
    pipeline = phase.pipeline
    scale = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(
        pipeline, "vae_spatial_compression_ratio", None
    )
    scale = int(scale or pipeline.vae_scale_factor) * (2 if layout.kind == "flux2" else 1)
    return samples.shape[-2] * scale, samples.shape[-1] * scale


def _white(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size[::-1], "white")
