"""A small pipeline with weights of every kind, and what offload could leave on a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Encoder(nn.Module):
    """A table, torch's own attention (its in_proj is a bare parameter) and a bare parameter of its own."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        return self.attention(x, x, x, need_weights=False)[0] * self.scale


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width * 2), nn.Linear(width * 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Denoiser(nn.Module):
    """A convolution, two lists of blocks, a top-level parameter and a tied weight."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.position = nn.Parameter(torch.rand(1, 6, width))
        self.double_blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.single_blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.register_buffer("frequencies", torch.rand(width))
        self.skip: set[int] = set()
        self.fail = False

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        x = self.conv(hidden_states.mT).mT + self.position + self.frequencies * timestep
        x = self.first(x)
        for index, block in enumerate((*self.double_blocks, *self.single_blocks)):
            if index not in self.skip:
                x = block(x)
        if self.fail:
            raise RuntimeError("interrupted")
        return self.last(x)


class Vae(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, width), nn.ConvTranspose1d(width, 8, 2, stride=2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z.mT)


class Pipeline:
    """Four components, called as a diffusers pipeline calls its own."""

    def __init__(self, *, seed: int = 0, width: int = 32, blocks: int = 2) -> None:
        torch.manual_seed(seed)
        self.transformer = Denoiser(width, blocks).eval().requires_grad_(False)
        self.transformer_2 = Denoiser(width, blocks).eval().requires_grad_(False)
        self.text_encoder, self.image_encoder = (Encoder(width).eval().requires_grad_(False) for _ in range(2))
        self.vae = Vae(width).eval().requires_grad_(False)
        self.scheduler = object()

    @property
    def components(self) -> dict[str, Any]:
        return vars(self)

    def modules(self) -> dict[str, nn.Module]:
        return {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}

    def __call__(self, device: str = "cpu") -> torch.Tensor:
        ids = torch.arange(6, device=device)[None]
        with torch.no_grad():
            x = self.text_encoder(ids) + self.image_encoder(ids.flip(1))
            for step in range(3):
                x = (self.transformer if step < 2 else self.transformer_2)(x, torch.tensor(0.5, device=device))
            return self.vae.decode(self.vae.encode(x)).cpu()


def traces(module: nn.Module) -> dict[str, Any]:
    """All that offload could have left on a module: attributes, the objects registered, their memory and versions."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        found[f"{name} attributes"] = set(vars(part))
        found[f"{name} forward"] = vars(part).get("forward")
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                found[f"{name}.{key}"] = (id(tensor), tensor.data_ptr(), tensor.device, tensor.dtype, type(tensor))
    return found
