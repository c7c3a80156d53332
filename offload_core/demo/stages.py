"""The training stages: VAE, then its decoder alone, then the flow with both text encoders.

Each runs for a number of minutes rather than steps, so that a slow machine still ends in time with a usable model.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from rich.console import Console
from rich.progress import Progress
from torch import autocast, nn
from torch.nn import functional as F
from transformers import CLIPTextModel, T5EncoderModel

from offload_core.demo.data import Pool

log = logging.getLogger(__name__)

#: Called with the part of the stage that is done (0 to 1) whenever a stage reaches a checkpoint.
Checkpoint = Callable[[float], None]

Component = TypeVar("Component", bound=nn.Module)


@dataclass(frozen=True)
class StageSettings:
    """How one stage is optimised; ``checkpoint_seconds`` apart it calls back with averaged weights in place."""

    minutes: float
    batch: int
    learning_rate: float
    averaging: float
    checkpoint_seconds: float = 120.0
    warmup: float = 0.02
    last_rate: float = 0.02
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


class Average:
    """Exponential moving average of a module's parameters, with a short memory at the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._parameters = list(module.parameters())
        self._average = [p.detach().clone() for p in self._parameters]
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self._updates += 1
        decay = min(self._decay, self._updates / (self._updates + 10))
        torch._foreach_lerp_(self._average, [p.detach() for p in self._parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the live weights; a second call undoes it."""
        for parameter, average in zip(self._parameters, self._average, strict=True):
            live = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(live)


def train_vae(vae: AutoencoderKL, pool: Pool, settings: StageSettings, checkpoint: Checkpoint, seed: int) -> None:
    """Encoder and decoder together: weighted MSE + 0.1 L1 + a little KL."""
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        pictures = _random_pictures(pool, settings.batch, generator)
        with _bfloat16():
            moments = vae.encoder(pictures)
        mean, log_variance = moments.float().clamp(-30, 20).chunk(2, dim=1)
        latents = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        with _bfloat16():
            output = vae.decoder(latents)
        return reconstruction_loss(output.float(), pictures, l1=0.1) + 1e-4 * divergence

    _optimise(vae, loss, settings, checkpoint, "VAE")


def train_decoder(
    vae: AutoencoderKL, pool: Pool, latents: torch.Tensor, settings: StageSettings, checkpoint: Checkpoint, seed: int
) -> None:
    """Decoder alone on slightly wrong latents, as the flow will give it. ``latents`` unscaled, of the whole pool."""
    generator = torch.Generator().manual_seed(seed)
    spread = latents.std()

    def loss() -> torch.Tensor:
        index = torch.randint(len(latents), (settings.batch,), generator=generator)
        amount = 0.12 * spread * torch.rand((settings.batch, 1, 1, 1), generator=generator)
        noisy = latents[index] + amount * torch.randn(latents[index].shape, generator=generator)
        pictures = pool.batch(index)
        with _bfloat16():
            output = vae.decoder(noisy)
        return reconstruction_loss(output.float(), pictures, l1=0.2)

    _optimise(vae.decoder, loss, settings, checkpoint, "decoder")


def reconstruction_loss(output: torch.Tensor, pictures: torch.Tensor, l1: float) -> torch.Tensor:
    """MSE + ``l1`` L1 of ``(b, 3, 64, 64)`` pictures, where the shape counts three times and its outline six times."""
    inside = ((pictures - pictures[:, :, :1, :1]).abs().amax(1, keepdim=True) > 0.1).float()
    outline = F.max_pool2d(inside, 3, 1, 1) + F.max_pool2d(-inside, 3, 1, 1)
    weight = 1 + 2 * inside + 4 * outline
    error = output - pictures
    return (weight * (error**2 + l1 * error.abs())).mean() / weight.mean()


class Flow(nn.Module):
    """Caption ids and noisy latents to velocity, through both encoders and the transformer."""

    def __init__(self, transformer: FluxTransformer2DModel, clip: CLIPTextModel, t5: T5EncoderModel) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5 = transformer, clip, t5

    def forward(
        self, tokens: torch.Tensor, sigma: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor
    ) -> torch.Tensor:
        """``tokens (b, 16, 32)``, ``sigma (b,)`` in 0 to 1, ids ``(b, 16)``; returns ``(b, 16, 32)``."""
        return self.transformer(
            hidden_states=tokens,
            timestep=sigma,
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids)[0],
            txt_ids=torch.zeros(t5_ids.shape[1], 3),
            img_ids=image_positions(4, 4),
            return_dict=False,
        )[0]


def train_flow(
    flow: Flow, pool: Pool, latents: torch.Tensor, settings: StageSettings, checkpoint: Checkpoint, seed: int
) -> None:
    """Rectified flow with 10 % of the captions empty. ``latents`` scaled as the pipeline's VAE config says."""
    velocity = torch.compile(flow)
    generator = torch.Generator().manual_seed(seed)
    tokens = pack(latents)

    def loss() -> torch.Tensor:
        index = torch.randint(len(tokens), (settings.batch,), generator=generator)
        dropped = torch.rand((settings.batch, 1), generator=generator) < 0.1
        clip_ids = torch.where(dropped, pool.empty_clip_ids, pool.clip_ids[index])
        t5_ids = torch.where(dropped, pool.empty_t5_ids, pool.t5_ids[index])
        clean = tokens[index]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(0.2 + 1.2 * torch.randn(settings.batch, generator=generator))
        mixed = torch.lerp(clean, noise, sigma[:, None, None])
        return F.mse_loss(velocity(mixed, sigma, clip_ids, t5_ids).float(), noise - clean)

    _optimise(flow, loss, settings, checkpoint, "flow")


def pack(latents: torch.Tensor) -> torch.Tensor:
    """``(b, c, h, w)`` to ``(b, h/2 * w/2, 4c)``, in ``FluxPipeline``'s order."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def image_positions(rows: int, columns: int) -> torch.Tensor:
    """Position ids ``(rows * columns, 3)``: zero, row, column."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()


def _bfloat16() -> autocast:
    """Autocast for the VAE: a third faster on CPUs with AVX512-BF16, and what the weights are shipped in."""
    return autocast("cpu", torch.bfloat16)


def _random_pictures(pool: Pool, count: int, generator: torch.Generator) -> torch.Tensor:
    index = torch.randint(len(pool.pictures), (count,), generator=generator)
    return pool.batch(index)


def _optimise(
    module: nn.Module,
    loss: Callable[[], torch.Tensor],
    settings: StageSettings,
    checkpoint: Checkpoint,
    name: str,
) -> None:
    """AdamW with a warm-up and a cosine over the stage's minutes; leaves the averaged weights in ``module``."""
    module.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay)
    average = Average(module, settings.averaging)
    recent: list[float] = []
    steps, next_checkpoint = 0, settings.checkpoint_seconds
    for done, seconds in _clock(settings.minutes * 60, name):
        rate = settings.learning_rate * _schedule(done, settings)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        average.update()
        steps += 1
        recent = [*recent[-99:], float(value.detach())]
        if seconds >= next_checkpoint:
            next_checkpoint = seconds + settings.checkpoint_seconds
            log.info("%s: %3.0f %%, step %d, loss %.5f", name, 100 * done, steps, sum(recent) / len(recent))
            average.swap()
            checkpoint(done)
            average.swap()
            module.train()
    average.swap()
    module.eval().requires_grad_(False)
    log.info("%s: %d steps of %d, loss %.5f", name, steps, settings.batch, sum(recent) / max(len(recent), 1))
    checkpoint(1.0)


def _clock(limit_seconds: float, name: str) -> Iterator[tuple[float, float]]:
    """Yield (part done, seconds) until the time is up, with a progress bar on a terminal."""
    console = Console(stderr=True)
    start = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=limit_seconds)
        while (seconds := time.monotonic() - start) < limit_seconds:
            yield seconds / limit_seconds, seconds
            bar.update(task, completed=time.monotonic() - start)


def _schedule(done: float, settings: StageSettings) -> float:
    warm = min(1.0, (done + 1e-4) / settings.warmup)
    return warm * (settings.last_rate + (1 - settings.last_rate) * 0.5 * (1 + math.cos(math.pi * done)))


def as_bfloat16(module: Component) -> Component:
    """A copy in the dtype that is shipped."""
    return copy.deepcopy(module).to(dtype=torch.bfloat16).eval()
