"""The training pool: pictures of allowed combinations only, their token ids, and (once there is an encoder) latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL

from offload_core.demo.architecture import Parts, tokenize
from offload_core.demo.scenes import Scene, caption, render, sample_scene


@dataclass(frozen=True)
class Pool:
    """``n`` scenes: pictures uint8 ``(n, 3, 64, 64)``, CLIP and T5 ids int64 ``(n, 16)``, ids of the empty caption."""

    scenes: tuple[Scene, ...]
    pictures: torch.Tensor
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor
    empty_clip_ids: torch.Tensor
    empty_t5_ids: torch.Tensor

    def batch(self, index: torch.Tensor) -> torch.Tensor:
        """Pictures as float ``(b, 3, 64, 64)`` in -1 to 1."""
        return self.pictures[index].float() / 127.5 - 1


def make_pool(parts: Parts, count: int, seed: int) -> Pool:
    """Draw ``count`` random training scenes."""
    rng = np.random.default_rng(seed)
    scenes = tuple(sample_scene(rng) for _ in range(count))
    pictures = np.stack([render(scene, rng) for scene in scenes])
    captions = [_as_typed(caption(scene), rng) for scene in scenes]
    clip_ids, t5_ids = tokenize(parts, captions)
    empty_clip_ids, empty_t5_ids = tokenize(parts, [""])
    return Pool(
        scenes, torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), clip_ids, t5_ids,
        empty_clip_ids, empty_t5_ids,
    )  # fmt: skip


@torch.no_grad()
def encode(vae: AutoencoderKL, pool: Pool, batch: int = 64) -> torch.Tensor:
    """Unscaled latents (posterior means) of the whole pool: float ``(n, 8, 8, 8)``."""
    index = torch.arange(len(pool.pictures)).split(batch)
    return torch.cat([vae.encode(pool.batch(i)).latent_dist.mean for i in index]).contiguous()


def _as_typed(text: str, rng: np.random.Generator) -> str:
    """Now and then a capital, a full stop, or the other spelling, so that these do not surprise the model."""
    if rng.random() < 0.1:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.1:
        text += "."
    return text.replace("centre", "center") if rng.random() < 0.3 else text
