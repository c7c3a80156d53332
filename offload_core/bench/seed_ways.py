"""One job, prompt to picture, the way each of the projects that this one comes from does it, and the ways here.

A way is a function of the job and a watch. It books what a person waits for as set-up, encode, denoise and decode, and
gives the picture. Peers are used as their own pages show, at the settings that hold the least memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .job import Job
from .ways import CannotRunError, needs

if TYPE_CHECKING:
    import torch

STAGES = ("setup", "encode", "denoise", "decode")
PROMPT = "a red circle"
SEED = 0
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
PIXELS_PER_TOKEN = 16  # along a side: eight of the VAE, two of the patches


@dataclass
class Watch:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def was_setup(self, stage: str, seconds: float) -> None:
        """Books so many seconds of a stage as set-up."""
        self.seconds[stage] -= seconds
        self.seconds["setup"] += seconds


Run = Callable[[Job, Watch], "torch.Tensor"]


@dataclass(frozen=True)
class SeedWay:
    """`ours`: this project's. `check`: imports what the way needs, before anything is measured; raises CannotRunError
    where it can't run."""

    name: str
    title: str
    run: Run
    ours: bool = False
    check: Callable[[Job], Any] = lambda job: None


def call_of(job: Job) -> dict[str, Any]:
    """The pipeline's arguments for a square picture of `image_tokens`."""
    side = PIXELS_PER_TOKEN * max(1, round(job.image_tokens**0.5))
    return {"height": side, "width": side, "num_inference_steps": job.steps}


# -------------------------------------------------------------------------------- one pipeline, whole


def _plain(job: Job, watch: Watch) -> torch.Tensor:
    with watch("setup"):
        pipe = _load(job).to(job.device)
    return _in_stages(pipe, job, watch)


def _model_offload(job: Job, watch: Watch) -> torch.Tensor:
    with watch("setup"):
        pipe = _load(job)
        pipe.enable_model_cpu_offload(device=job.device)
    return _in_stages(pipe, job, watch)


def _has_accelerator(job: Job) -> None:
    if job.device == "cpu":
        raise CannotRunError("diffusers' model offload needs an accelerator")


def _group_offload(job: Job, watch: Watch) -> torch.Tensor:
    import torch
    from diffusers.hooks import apply_group_offloading

    with watch("setup"):
        pipe = _load(job)
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                options: dict[str, Any] = {"offload_type": "leaf_level", "use_stream": job.device != "cpu"}
                apply_group_offloading(component, torch.device(job.device), torch.device("cpu"), **options)
    return _in_stages(pipe, job, watch)


def _sequential(job: Job, watch: Watch) -> torch.Tensor:
    import torch

    from ..sequential import ModelLevelOffloadBackend, OffloadConfig, OffloadStrategy

    with watch("setup"):
        pipe = _load(job)
        backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL), torch.device(job.device))
        backend.enable(pipe)
    try:
        return _in_stages(pipe, job, watch)
    finally:
        backend.disable()


def _load(job: Job, **parts: Any) -> Any:
    import torch
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(job.folder, torch_dtype=torch.bfloat16, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _in_stages(pipe: Any, job: Job, watch: Watch) -> torch.Tensor:
    """Encode, denoise and decode with a whole pipeline."""
    with watch("encode"):
        embeds = _encode(pipe, job)
    with watch("denoise"):
        latents = _denoise(pipe, embeds, job)
    with watch("decode"):
        return _decode(pipe, pipe.vae, latents, job)


def _encode(pipe: Any, job: Job) -> dict[str, torch.Tensor]:
    import torch

    with torch.no_grad():
        embeds, pooled, _ = pipe.encode_prompt(PROMPT, None, device=job.device, max_sequence_length=job.text_tokens)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _denoise(pipe: Any, embeds: dict[str, torch.Tensor], job: Job) -> torch.Tensor:
    import torch

    generator = torch.Generator("cpu").manual_seed(SEED)
    return pipe(**embeds, **call_of(job), output_type="latent", generator=generator)[0]


def _decode(pipe: Any, vae: Any, latents: torch.Tensor, job: Job) -> torch.Tensor:
    import torch

    call = call_of(job)
    latents = pipe._unpack_latents(latents, call["height"], call["width"], pipe.vae_scale_factor)
    with torch.no_grad():
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
    return pipe.image_processor.postprocess(decoded, output_type="pt")


# ------------------------------------------------------------------------------------- three passes, by hand


def _ddo(job: Job, watch: Watch) -> torch.Tensor:
    return _three_passes(_ddo_itself(job), lambda component: {"preset": "low_ram_safe"}, job, watch)


def _ddo_itself(job: Job) -> Any:
    return needs("diffusers-dynamic-offloader")


def _facade(job: Job, watch: Watch) -> torch.Tensor:
    import offload_core

    return _three_passes(offload_core, lambda component: {"settings": _settings(job)}, job, watch)


def _three_passes(offloader: Any, options: Callable[[str], dict[str, Any]], job: Job, watch: Watch) -> torch.Tensor:
    """DDO's staged recipe: each pass loads, attaches and lets go of its own components."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    def attach(component: Any, name: str) -> Any:
        result = offloader.enable_offload(
            component, component=name, execution_device=job.device, offload_device="cpu", **options(name)
        )
        if result.should_move_to_execution_device:
            component.to(job.device)
        return result

    with watch("setup"):
        pipe = _load(job, transformer=None, vae=None)
        results = [attach(getattr(pipe, name), name) for name in TEXT_ENCODERS]
    with watch("encode"):
        embeds = _encode(pipe, job)
    del results, pipe
    without = dict.fromkeys((*TEXT_ENCODERS, "tokenizer", "tokenizer_2", "vae"))
    with watch("setup"):
        transformer = offloader.from_pretrained_with_dynamic_offload(
            job.folder,
            model_loader=FluxTransformer2DModel,
            subfolder="transformer",
            torch_dtype=torch.bfloat16,
            apply_dynamic=False,
            device_map="cpu",
        ).module
        pipe = _load(job, transformer=transformer, **without)
        result = attach(pipe.transformer, "transformer")
    with watch("denoise"):
        latents = _denoise(pipe, embeds, job)
    pipe.transformer = None
    del result, transformer
    with watch("setup"):
        vae = AutoencoderKL.from_pretrained(job.folder, subfolder="vae", torch_dtype=torch.bfloat16)
        result = attach(vae, "vae")
    with watch("decode"):
        picture = _decode(pipe, vae, latents, job)
    del result
    return picture


def _settings(job: Job) -> Any:
    from ..settings import OffloadSettings

    return OffloadSettings(execution_device=job.device, device_memory=job.budget_bytes or "auto")


# ------------------------------------------------------------------------------------------------- phases


def _phases(job: Job, watch: Watch) -> torch.Tensor:
    """A phase loads its components itself. Its report says how long that took, which is set-up as for the others."""
    import offload_core

    session = offload_core.Session()
    with watch("setup"):
        handle = offload_core.load(job.folder, device=job.device, settings=_settings(job))
    with watch("encode"):
        embeds = offload_core.encode(handle, PROMPT, max_sequence_length=job.text_tokens, session=session)
    with watch("denoise"):
        latents = offload_core.denoise(
            handle, embeds, seed=SEED, max_sequence_length=job.text_tokens, session=session, **call_of(job)
        )
    with watch("decode"):
        picture = offload_core.decode(handle, latents, "pt", session=session)
    for phase in session.report.phases:
        watch.was_setup(phase.name, phase.load_s)
    return picture


SEED_WAYS = {
    way.name: way
    for way in (
        SeedWay("plain", "diffusers, whole", _plain),
        SeedWay("model_offload", "diffusers model offload", _model_offload, check=_has_accelerator),
        SeedWay("group_offload", "diffusers group offload, leaf", _group_offload),
        SeedWay("ddo", "Diffusers Dynamic Offloader", _ddo, check=_ddo_itself),
        SeedWay("phases", "phases", _phases, ours=True),
        SeedWay("ddo_names", "the DDO names here", _facade, ours=True),
        SeedWay("sequential", "sequential offload here", _sequential, ours=True),
    )
}
