"""How the latents that a VAE decodes relate to ComfyUI's LATENT.

A LATENT holds unscaled VAE output: what diffusers passes to `vae.decode`. Two VAEs differ, because ComfyUI keeps their
normalisation inside the VAE: FLUX.2 (patchified and batch-normalised) and LTX-Video (normalised per channel).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import RecordError


@dataclass(frozen=True, eq=False)
class Layout:
    """kind: "plain", "flux2" or "ltx". statistics: (mean, std) per channel of the latter two, float32 on the CPU."""

    kind: str = "plain"
    statistics: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, vae: Any) -> Layout:
        """The layout of a VAE, loaded or cold: statistics are small state that a cold VAE has, too."""
        name = type(vae).__name__
        if name == "AutoencoderKLFlux2":
            std = torch.sqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps)
            return cls("flux2", (_plain(vae.bn.running_mean), _plain(std)))
        if name.startswith("AutoencoderKLLTX") and hasattr(vae, "latents_mean"):
            scale = float(getattr(vae.config, "scaling_factor", 1.0) or 1.0)
            return cls("ltx", (_plain(vae.latents_mean), _plain(vae.latents_std) / scale))
        return cls()

    def to_samples(self, latents: torch.Tensor) -> torch.Tensor:
        samples = latents.detach().to("cpu", torch.float32, copy=True)
        if self.kind == "flux2":
            samples = _patchify(samples)
        return (samples - self._mean(samples)) / self._std(samples) if self.statistics else samples

    def to_latents(self, samples: torch.Tensor) -> torch.Tensor:
        latents = samples.detach().to("cpu", torch.float32, copy=True)
        if self.statistics:
            latents = latents * self._std(latents) + self._mean(latents)
        return _unpatchify(latents) if self.kind == "flux2" else latents

    def check(self, samples: torch.Tensor, expected: torch.Size) -> None:
        """Raises RecordError if `samples` can't be latents of this VAE; sizes and batch may differ."""
        if samples.ndim != len(expected) or samples.shape[1] != expected[1]:
            raise RecordError(
                f"The latent's field samples has shape {tuple(samples.shape)}, and this model's VAE decodes "
                f"{len(expected)}-dimensional latents with {expected[1]} channels. Use a latent made for this model."
            )

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.statistics[0].view(1, -1, *[1] * (x.ndim - 2))

    def _std(self, x: torch.Tensor) -> torch.Tensor:
        return self.statistics[1].view(1, -1, *[1] * (x.ndim - 2))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _patchify(x: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, 4C, H/2, W/2), channels ordered (c, row, column) as FLUX.2 does."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, c * 4, h // 2, w // 2)


def _unpatchify(x: torch.Tensor) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, h * 2, w * 2)
