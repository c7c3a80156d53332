"""What a block of Modular Diffusers has to know about components that it doesn't run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .model_source import ComponentSource


def give_configs(
    pipeline: Any,
    sources: Mapping[str, ComponentSource],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    only: str = "",
) -> list[str]:
    """Gives a modular pipeline a stand-in (class, config, no weights) for each component of the model that its block
    doesn't list. Returns what its guesses became, as text; nothing where they were right.

    only: a part of the names that are meant. A component that the block lists is the caller's to load. dtype: of the
    stand-ins, the files' own without it.
    """
    from .phases import stand_in

    before = sizes_of(pipeline)
    for name, source in sources.items():
        elsewhere = name not in pipeline._component_specs and getattr(pipeline, name, None) is None
        if elsewhere and only in name and source.has_weights:
            own = getattr(torch, source.dtype or "float32")
            setattr(pipeline, name, stand_in(source, dtype or own, device))
    after = sizes_of(pipeline)
    return [f"{name} {before[name]}, it is {after[name]}" for name in before if before[name] != after.get(name)]


def sizes_of(pipeline: Any) -> dict[str, Any]:
    """The numbers that a modular pipeline derives from its components: scale factors, channels, default sizes."""
    from diffusers import ModularPipeline

    found = {}
    for cls in type(pipeline).__mro__:
        if issubclass(cls, ModularPipeline) and cls is not ModularPipeline:
            for name, member in vars(cls).items():
                if isinstance(member, property) and name not in found:
                    value = getattr(pipeline, name, None)
                    if isinstance(value, int | float | tuple):
                        found[name] = value
    return found
