"""Draw captions with the plain ``FluxPipeline`` and count how many pictures are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import FluxPipeline

from offload_core.demo.architecture import TEXT_TOKENS
from offload_core.demo.judge import judge
from offload_core.demo.scenes import HELD_OUT, PIXELS, Scene, caption, sample_scene


@dataclass(frozen=True)
class CallDefaults:
    """Arguments of ``FluxPipeline.__call__`` that suit the demo model."""

    height: int = PIXELS
    width: int = PIXELS
    num_inference_steps: int = 8
    true_cfg_scale: float = 2.0
    negative_prompt: str = ""
    max_sequence_length: int = TEXT_TOKENS


@dataclass(frozen=True)
class Score:
    """Parts of the pictures (0 to 1) that are right; ``all`` asks for background, colour and shape together."""

    all: float
    background: float
    colour: float
    shape: float

    def __str__(self) -> str:
        return f"{self.all:.1%} (background {self.background:.1%}, colour {self.colour:.1%}, shape {self.shape:.1%})"


def held_out_scenes(count: int, seed: int) -> list[Scene]:
    """Random scenes whose combination training never drew."""
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, HELD_OUT) for _ in range(count)]


def draw(pipe: FluxPipeline, captions: list[str], defaults: CallDefaults, seed: int, batch: int = 50) -> np.ndarray:
    """Pictures uint8 ``(n, 64, 64, 3)``, one a caption, each with its own generator seeded ``seed + i``."""
    pictures = []
    with _quiet(pipe):
        for start in range(0, len(captions), batch):
            part = captions[start : start + batch]
            generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
            call = {**vars(defaults), "negative_prompt": [defaults.negative_prompt] * len(part)}
            images = pipe(part, generator=generators, output_type="np", **call).images
            pictures.append(np.round(images * 255).astype(np.uint8))
    return np.concatenate(pictures)


def score(pictures: np.ndarray, scenes: list[Scene]) -> Score:
    """Judge each picture against its scene."""
    verdicts = [(judge(picture), scene) for picture, scene in zip(pictures, scenes, strict=True)]

    def part(hits: Iterator[bool]) -> float:
        return sum(hits) / len(verdicts)

    return Score(
        all=part(v.shows(s) for v, s in verdicts),
        background=part(v.background == s.background for v, s in verdicts),
        colour=part(v.colour == s.colour for v, s in verdicts),
        shape=part(v.shape == s.shape for v, s in verdicts),
    )


def held_out_score(pipe: FluxPipeline, count: int, seed: int, defaults: CallDefaults | None = None) -> Score:
    """Draw ``count`` held-out captions and judge them."""
    scenes = held_out_scenes(count, seed)
    return score(draw(pipe, [caption(s) for s in scenes], defaults or CallDefaults(), seed), scenes)


@contextmanager
def _quiet(pipe: FluxPipeline) -> Iterator[None]:
    """Without the pipeline's own progress bar."""
    before = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)
