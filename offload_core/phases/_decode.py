"""Decode: the real VAE on exactly the arguments the pipeline gave it, then the pipeline's processors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..devices import empty_cache, is_out_of_memory
from ..errors import InputError, InsufficientMemoryError, RecordError
from ..model_source import ModelSource
from ..plan import Plan
from ..session import Session
from ._components import Component
from ._frames import check_finite, finished_frames
from ._handle import Handle
from ._jobs import each_job, need_jobs
from ._layout import Layout
from ._marks import vae_mark
from ._plain import Plain, from_plain, to_plain
from ._ports import Port, StopPort
from ._records import Latents, Sound
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._stretches import Stretches, can_stretch, decode_in_stretches
from ._tiling import TILE_PIXELS, tile, tile_words
from ._waveforms import ending_of, only_sound

Arguments = Callable[[], Any]  # makes the arguments of `vae.decode`, fresh for every try

OUTPUT_TYPES = ("pil", "np", "pt")
# Tile sizes to try in turn, in pixels; None decodes whole.
TILE_SIZES: dict[str, tuple[int | None, ...]] = {
    "off": (None,),
    "on": (TILE_PIXELS,),
    "auto": (None, TILE_PIXELS, TILE_PIXELS // 2, TILE_PIXELS // 4),
}
ENCODER_HALF = ("encoder", "quant_conv")


def decode(
    handle: Handle,
    latents: Latents,
    output_type: str = "pil",
    *,
    tiling: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
) -> Any:
    """Pictures of `latents`: a list of PIL images ("pil"), float32 (B, H, W, C) in 0..1 ("np"), or (B, C, H, W) in 0..1
    and the VAE's dtype ("pt").

    A video model gives a list of lists of frames, (B, F, H, W, C) or (B, F, C, H, W). The VAE's encoder half stays on
    disk. tiling: "auto" decodes whole and in smaller and smaller tiles only if memory runs out, "on" in tiles of 512
    pixels (seams may show slightly), "off" never; None is the handle's setting. plan: see `encode`; with "auto" the
    tiles that it foretells to fit are the first to be tried.

    Raises RecordError, naming the field, for latents of another kind of model, InputError, InsufficientMemoryError,
    NumericalError. The latents are never changed or lost.
    """
    (pictures,) = decode_many(handle, [latents], output_type, tiling=tiling, session=session, plan=plan)
    return pictures


def decode_many(
    handle: Handle,
    jobs: Sequence[Latents],
    output_type: str = "pil",
    *,
    tiling: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
) -> list[Any]:
    """Pictures of each of several latents, with the VAE loaded once for all that need it in one dtype.

    The pictures are those that `decode` gives for them one by one; with tiling "auto", what follows one that didn't fit
    whole is decoded in tiles, too. plan: of the most demanding one. Raises what `decode` does, and InputError for no
    latents; then there are no pictures of any.
    """
    if output_type not in OUTPUT_TYPES:
        raise InputError(f"output_type is {output_type!r}; use one of {', '.join(OUTPUT_TYPES)}.")
    tiling = check_tiling(handle, tiling)
    source = handle.source()
    for latents in need_jobs(jobs):
        check_latents(handle, source, latents)
        if latents.only_sound:
            raise InputError(f"{latents.pipeline} makes sound and no picture: decode these latents with decode_sound.")
    session, made = session or Session(), []
    for (name, _, by_blocks), same in itertools.groupby(jobs, key=functools.partial(_way, handle, source)):
        group = list(same)
        owned = {name} | {tail for tail, part in models(source) if role_of(part) is Role.TAIL}
        port = PicturePort()
        others = {other: StopPort() for other, part in models(source) if role_of(part) is Role.VAE}
        ports: dict[str, Port] = {**others, name: port} if by_blocks else {}
        with OpenPhase(handle, source, "decode", session, ports, owned, plan) as phase:
            component = phase.components[name]
            component.skip = ENCODER_HALF
            use_dtype_of(group[0], component)
            decoder = Decoder(phase, component, tiling)
            for latents in each_job(phase, group):
                if by_blocks:
                    made.append(_finish_by_blocks(phase, port, decoder, latents, output_type))
                else:
                    asked = functools.partial(decode_arguments, latents, component.module, phase.device)
                    made.append(_finish(phase, decoder.decode(asked), latents, output_type))
    return made


def check_tiling(handle: Handle, tiling: str | None) -> str:
    """How to decode, the handle's way for None. Raises InputError for what isn't one."""
    tiling = tiling or handle.settings.vae_tiling
    if tiling not in TILE_SIZES:
        raise InputError(f"tiling is {tiling!r}; use auto, on or off.")
    return tiling


def use_dtype_of(latents: Latents, component: Component) -> None:
    """What the pipeline did to its VAE before decoding: an SDXL VAE in float16 is upcast."""
    recast = getattr(torch, latents.dtype)
    component.recast = recast if recast != component.dtype else None


def _way(handle: Handle, source: ModelSource, latents: Latents) -> tuple[str, str, bool]:
    """The VAE that decodes, its dtype, and whether the model's own last blocks finish the picture."""
    by_blocks = latents.rest is not None and source.blocks is not None and latents.pipeline == handle.pipeline
    return latents.component, latents.dtype, by_blocks


def _finish_by_blocks(phase: Phase, port: PicturePort, decoder: Decoder, latents: Latents, output_type: str) -> Any:
    asked = functools.partial(decode_arguments, latents, decoder.component.module, phase.device)
    port.start(latents, asked, functools.partial(decoder.decode, whole=True))
    pictures = phase.pipeline.finish(latents.rest, phase.device, output_type)
    if pictures is None:
        raise InputError(f"The last blocks of {phase.handle.pipeline} made neither pictures nor videos.")
    return _on_cpu(pictures)


class PicturePort:
    """Stands before the VAE while the last blocks run: its first picture is that of the latents, whose values may have
    been changed since; further ones (a video in pieces) are what the blocks ask for."""

    def __init__(self) -> None:
        self.latents: Latents | None = None
        self.first: Arguments | None = None
        self.decode: Callable[[Arguments], torch.Tensor] | None = None
        self._inside = False

    def start(self, latents: Latents, first: Arguments, decode: Callable[[Arguments], torch.Tensor]) -> None:
        """What comes from now on belongs to these latents."""
        self.latents, self.first, self.decode = latents, first, decode

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name != "decode" or self._inside or self.decode is None or self.latents is None:
            return run(*args, **kwargs)
        first, self.first = self.first, None
        if first is None and self.latents.seed is None:
            raise RecordError("This model decodes in several pieces, so its latents can't be changed before Decode.")
        self._inside = True
        try:
            picture = self.decode(first or (lambda: (args, kwargs)))
        finally:
            self._inside = False
        check_finite(picture)
        return (picture,) if kwargs.get("return_dict") is False else SimpleNamespace(sample=picture)


def latents_from_samples(handle: Handle, samples: torch.Tensor) -> Latents:
    """Latents from a bare ComfyUI LATENT (unscaled VAE output), for this model's VAE.

    samples: (B, C, h, w) or (B, C, T, h, w); (B, C, T) for a model that makes sound alone, which then is decoded whole.
    Raises RecordError if they can't be latents of this VAE.
    """
    source = handle.source()
    vaes = [(name, part) for name, part in models(source) if role_of(part) is Role.VAE]
    if not vaes:
        raise InputError(f"{handle.pipeline} has no VAE to decode with.")
    name, part = vaes[0]
    config = part.config or {}
    if config.get("timestep_conditioning"):
        raise RecordError(
            "This model's VAE needs more than the field samples (a decode timestep and noise). "
            "Decode latents that its own Denoise made."
        )
    alone = only_sound(source)
    with OpenPhase(handle, source, "latents", Session()) as phase:
        layout = Layout.of(phase.components[name].module)
        ending = ending_of(phase.pipeline, None) if alone else None
    widths = ("latent_channels", "z_dim", "decoder_input_channels")
    channels = int(next((config[width] for width in widths if config.get(width)), samples.shape[1]))
    channels *= 4 if layout.kind == "flux2" else 1
    dimensions = 5 if config.get("z_dim") or "temporal_compression_ratio" in config else 3 if alone else samples.ndim
    layout.check(samples, torch.Size([1, channels, *[1] * (dimensions - 2)]))
    dtype = handle.dtype_of(part)
    dtype = torch.float32 if dtype == torch.float16 and config.get("force_upcast") else dtype  # as SDXL's pipeline does
    call: Plain = to_plain([[layout.to_latents(samples).to(dtype)], {"return_dict": False}], "samples")
    mark = vae_mark(part)
    sound = Sound(name, mark, call, ending) if ending is not None else None
    return Latents(handle.pipeline, mark, name, str(dtype).removeprefix("torch."), call, layout, sound=sound)


def check_latents(handle: Handle, source: ModelSource, latents: Any) -> None:
    """Raises InputError for what isn't latents, RecordError for those of another VAE."""
    if not isinstance(latents, Latents):
        raise InputError(f"Decode needs the latents that Denoise made, not {type(latents).__name__}.")
    if latents.component not in source.components:
        raise RecordError(f"The latents' field component is {latents.component!r}, which this model doesn't have.")
    if latents.vae != vae_mark(source.components[latents.component]):
        raise RecordError(
            f"The latents' field vae doesn't match: {latents.pipeline} made them for a VAE with another configuration. "
            "Decode them with the model that made them."
        )


class Decoder:
    """Decodes whole, or in tiles: with "auto" first in those that are foretold to fit, and after running out of memory
    in smaller and smaller ones. What failed once isn't tried for the next picture."""

    def __init__(self, phase: Phase, component: Component, tiling: str) -> None:
        self.phase, self.component, self.tiling = phase, component, tiling
        self.sizes: tuple[int | None, ...] = TILE_SIZES[tiling]
        if tiling == "auto" and phase.plan is not None and phase.plan.tile in self.sizes:
            self.sizes = self.sizes[self.sizes.index(phase.plan.tile) :]

    def decode(self, asked: Arguments, *, whole: bool = False) -> Any:
        """The picture, or a clip in stretches. whole: as one tensor. Raises InsufficientMemoryError."""
        picture, self.sizes = _decode(self.phase, self.component, asked, self.sizes, self.tiling, whole)
        return picture


def _decode(
    phase: Phase, component: Component, asked: Arguments, sizes: tuple[int | None, ...], tiling: str, whole: bool
) -> tuple[torch.Tensor | Stretches, tuple[int | None, ...]]:
    """The picture, and the sizes from the one that worked on. After running out of memory it is tried again with
    everything else given back, before smaller tiles are."""
    vae = component.module
    component.load()
    reason = ""
    for index, pixels in enumerate(sizes):
        if pixels is not None and not tile(vae, pixels):
            if tiling == "on":
                phase.notes.append(f"{type(vae).__name__} can't decode in tiles; it was decoded whole.")
            elif index:
                break  # whole has been tried
        elif pixels is not None:
            phase.notes.append(f"Decoded in tiles of {tile_words(vae, pixels)}.")
        picture, failed = _try(phase, component, asked, whole)
        if failed and not reason and phase.make_room(component, share=1.0):
            picture, failed = _try(phase, component, asked, whole)
        if picture is not None:
            return picture, sizes[index:]
        reason = failed
    tiles = f", in tiles of {tile_words(vae, pixels)} too" if pixels else ""
    raise InsufficientMemoryError(
        f"Decode ran out of memory on {phase.device}{tiles} ({reason.splitlines()[0]}). The latents are "
        f"kept: decode fewer at once, {'with tiling, ' if tiling == 'off' else ''}or with device=cpu."
    )


def decode_arguments(latents: Latents, vae: Any, device: torch.device) -> Any:
    """What to call `vae.decode` with: what the pipeline asked, in the VAE's dtype. Some pipelines take for granted that
    all files are of one dtype, and FLUX.2's aren't."""
    args, kwargs = from_plain(latents.decode, device)
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        args[0] = args[0].to(_decoder_dtype(vae))
    return args, kwargs


def _decoder_dtype(vae: Any) -> torch.dtype:
    """Of the half that decodes: the other one stays on disk, in its file's dtype."""
    halves = tuple(f"{half}." for half in ENCODER_HALF)
    return next(weight.dtype for name, weight in vae.named_parameters() if not name.startswith(halves))


def _try(
    phase: Phase, component: Component, asked: Arguments, whole: bool
) -> tuple[torch.Tensor | Stretches | None, str]:
    """The picture; or none, and how memory ran out."""
    vae: Any = component.module
    try:
        args, kwargs = asked()
        if not whole and hasattr(phase.pipeline, "video_processor") and can_stretch(vae, args):
            return decode_in_stretches(vae, component.gate, args, kwargs), ""
        return _sample_of(vae.decode(*args, **kwargs)), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        args = kwargs = None
        error.__traceback__ = None
        reason = str(error) or type(error).__name__
    empty_cache(phase.device)
    return None, reason


def _sample_of(output: Any) -> torch.Tensor:
    result = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
    return result if isinstance(result, torch.Tensor) else torch.stack(list(result))


def _finish(phase: Phase, picture: torch.Tensor | Stretches, latents: Latents, output_type: str) -> Any:
    """What the pipeline does to what its VAE decoded: size, watermark, safety checker, its processor; on the CPU."""
    pipeline = phase.pipeline
    video = getattr(pipeline, "video_processor", None)
    if isinstance(picture, Stretches) or (picture.ndim == 5 and video is not None):
        return finished_frames(video, picture, output_type)
    still: torch.Tensor = picture[:, :, 0] if picture.ndim == 5 else picture
    check_finite(still)
    processor = pipeline.image_processor
    size = (latents.height, latents.width)
    if hasattr(processor, "resize_and_crop_tensor") and None not in size and tuple(still.shape[-2:]) != size:
        still = processor.resize_and_crop_tensor(still, latents.width, latents.height)
    if getattr(pipeline, "watermark", None) is not None:
        still = pipeline.watermark.apply_watermark(still)
    return _on_cpu(processor.postprocess(still, output_type=output_type, **_safety(phase, still)))


def _safety(phase: Phase, picture: torch.Tensor) -> dict[str, Any]:
    """SD 1.5's checker, where the model has one: blanks what it flags, as the pipeline does."""
    pipeline = phase.pipeline
    if getattr(pipeline, "safety_checker", None) is None or not hasattr(pipeline, "run_safety_checker"):
        return {}
    checked, flagged = pipeline.run_safety_checker(picture, phase.device, picture.dtype)
    picture.copy_(checked)
    return {"do_denormalize": [not bad for bad in flagged] if flagged is not None else [True] * len(picture)}


def _on_cpu(pictures: Any) -> Any:
    if isinstance(pictures, torch.Tensor):
        return pictures.to("cpu", torch.float32 if pictures.dtype == torch.float64 else pictures.dtype, copy=True)
    return pictures
