"""A small picture of where the denoise is heading, after each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..model_source import ModelSource
from ..session import Progress
from ._pipeline import call_parameters
from ._waveforms import only_sound

if TYPE_CHECKING:
    from ._scope import Phase


class Previewer:
    """Reports steps to the observer, with a preview if it wants one and the pipeline can say its latents."""

    def __init__(self, phase: Phase, source: ModelSource, call: dict[str, Any]) -> None:
        self.phase, self.call = phase, call
        self.drawable = not only_sound(source)
        self.factors = source.defaults.get("latent_rgb_factors")
        self.bias = source.defaults.get("latent_rgb_bias")
        self.before: torch.Tensor | None = None
        self.picture: Any = None
        phase.on_step = self.step

    def arguments(self) -> dict[str, Any]:
        known = call_parameters(type(self.phase.pipeline))
        wanted = self.drawable and self.phase.session.observer.wants_preview and "callback_on_step_end" in known
        return {"callback_on_step_end": self.at_step_end} if wanted else {}

    def at_step_end(self, pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        self.picture = self._draw(pipeline, step, latents)
        self.before = latents
        return values

    def step(self, done: int, total: int) -> None:
        event = Progress(self.phase.name, "step", done, total, "steps", self.picture, self.phase.held())
        self.phase.session.observer.progress(event)

    def _draw(self, pipeline: Any, step: int, latents: torch.Tensor) -> Any:
        from PIL import Image

        guess = self._endpoint(pipeline, step, latents)[:1].float().cpu()
        grid = _unpack(guess, self._aspect())
        if grid is None or grid.shape[0] < 3 or not torch.isfinite(grid).all():
            return None
        rgb = self._colours(pipeline, grid)
        return Image.fromarray((rgb.clamp(0, 1) * 255).round().to(torch.uint8).numpy())

    def _endpoint(self, pipeline: Any, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Where a straight line through the last two steps arrives at sigma 0 (exact for Euler steps)."""
        sigmas = getattr(pipeline.scheduler, "sigmas", None)
        if self.before is None or sigmas is None or step + 1 >= len(sigmas) or self.before.shape != latents.shape:
            return latents
        last, now = float(sigmas[step]), float(sigmas[step + 1])
        return latents + (latents - self.before) * (now / (last - now)) if last > now else latents

    def _aspect(self) -> float:
        height, width = self.call.get("height"), self.call.get("width")
        return height / width if height and width else 1.0

    def _colours(self, pipeline: Any, grid: torch.Tensor) -> torch.Tensor:
        """(C, h, w) -> (h, w, 3) in 0..1, by the model's own factors or the three main components of the latents.

        Factors turn unscaled latents into RGB from -1 to 1, as those of ComfyUI's latent formats do.
        """
        config = pipeline.vae.config
        pixels = grid.permute(1, 2, 0)
        if self.factors and [len(row) for row in self.factors] == [3] * pixels.shape[-1]:
            unscaled = pixels / (getattr(config, "scaling_factor", None) or 1.0)
            unscaled = unscaled + (getattr(config, "shift_factor", None) or 0.0)
            rgb = unscaled @ torch.tensor(self.factors) + torch.tensor(self.bias or [0.0, 0.0, 0.0])
            return (rgb + 1) / 2
        flat = pixels.reshape(-1, pixels.shape[-1])
        flat = flat - flat.mean(0)
        _, _, directions = torch.linalg.svd(flat, full_matrices=False)
        main = pixels @ directions[:3].T
        low, high = main.amin((0, 1)), main.amax((0, 1))
        return (main - low) / (high - low).clamp_min(1e-6)


def _unpack(latents: torch.Tensor, aspect: float) -> torch.Tensor | None:
    """One latent as (C, h, w): the middle frame of a video, tokens of a packed latent laid out again."""
    if latents.ndim == 5:
        return latents[0, :, latents.shape[2] // 2]
    if latents.ndim == 4:
        return latents[0]
    if latents.ndim != 3 or latents.shape[-1] % 4:
        return None
    count, channels = latents.shape[1:]
    rows = max(1, round((count * aspect) ** 0.5))
    if count % rows:
        return None
    tiles = latents[0].view(rows, count // rows, channels // 4, 2, 2)
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels // 4, rows * 2, -1)
