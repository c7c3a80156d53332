"""What a row of the family table holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Family:
    """A kind of pipeline: how to make a tiny one, and how to call it.

    name: the key in FAMILIES and the folder's usual name.
    builder: makes the pipeline in float32 on the CPU; call it through ``build``.
    call: keyword arguments of a small run without classifier-free guidance, if the family can do without.
    guidance: what to add to ``call`` to switch real classifier-free guidance on.
    count_argument: the argument that asks for several pictures or videos of one prompt; None where none works.
    oddities: what a user of this family should know.
    title: the name that people know it by; empty for a twin of another row, which needs no line in docs/families.md.
    task: what `call` does, where that isn't a picture, a video or a sound from texts alone.
    """

    name: str
    builder: Callable[[], DiffusionPipeline]
    call: Mapping[str, Any]
    guidance: Mapping[str, Any]
    count_argument: str | None = "num_images_per_prompt"
    oddities: tuple[str, ...] = field(default=())
    title: str = ""
    task: str = ""

    def build(self) -> DiffusionPipeline:
        """Return the pipeline, the same bits each time; the global random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.builder()

    @property
    def guided_call(self) -> dict[str, Any]:
        """Keyword arguments of the same small run with classifier-free guidance, complete in themselves."""
        return {**self.call, **self.guidance}

    @property
    def own_task(self) -> str:
        """What `call` does."""
        made = "sound" if self.makes_sound else "video" if self.makes_video else "image"
        return self.task or f"text to {made}"

    @property
    def makes_video(self) -> bool:
        """Whether the result is frames (B, F, C, H, W) and not pictures (B, C, H, W)."""
        return "num_frames" in self.call

    @property
    def makes_sound(self) -> bool:
        """Whether the result is a waveform (B, channels, samples) and nothing else."""
        return any(name in self.call for name in ("audio_end_in_s", "audio_duration"))
