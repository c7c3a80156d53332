"""Random weights that matter: fixed per name, and large enough for every input of a model to show in its output."""

import zlib

import torch
from torch import nn

NOISE = 0.1  # spread added to norm weights, biases and free parameters around their initial value
DENOISER_GAIN = 1.4  # above one, so that the prompt, which enters through attention, is not drowned by the noise
FAN_IN_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def seeded(name: str) -> torch.Generator:
    """Return a CPU generator whose stream depends on the name alone."""
    return torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))


def with_weights(module: nn.Module, name: str, gain: float = 1.0) -> nn.Module:
    """Return the module in eval mode with all parameters redrawn from the stream called ``name``.

    Matrices and kernels get N(0, gain² / fan-in), embeddings N(0, 1); everything else (norms, biases, modulation
    tables, layers that start at zero) keeps its initial value plus noise. Library initialisers draw with a spread of
    0.02, or zero, so that a change of the prompt would hardly reach the picture.
    """
    generator = seeded(name)
    seen: set[int] = set()
    with torch.no_grad():
        for layer in module.modules():
            for key, parameter in layer.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    _redraw(layer, key, parameter, generator, gain)
    return module.eval().requires_grad_(False)


def denoiser(model: nn.Module, name: str) -> nn.Module:
    """Return the transformer or UNet with weights that make it listen to the prompt."""
    return with_weights(model, name, DENOISER_GAIN)


def spread_around(centre: float, count: int, name: str, spread: float = 0.3) -> list[float]:
    """Return ``count`` different numbers near ``centre``, for statistics that must not pass as 0 or 1."""
    draws = torch.rand(count, generator=seeded(name), dtype=torch.float64) * 2 - 1
    return [round(centre + spread * draw, 4) for draw in draws.tolist()]


def _redraw(layer: nn.Module, key: str, parameter: nn.Parameter, generator: torch.Generator, gain: float) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if isinstance(layer, nn.Embedding):
        parameter.copy_(noise)
    elif isinstance(layer, FAN_IN_LAYERS) and key == "weight":
        parameter.copy_(noise * gain / parameter[0].numel() ** 0.5)
    else:
        parameter.add_(noise * NOISE)
