"""What a table row says about one layout of one part: how to know it in a header, and how its names are converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .rules import Rule

Role = Literal["denoiser", "encoder", "vae", "other"]
Shapes = Mapping[str, tuple[int, ...]]
#: Shapes that a config asks for, by the file's names; None for a tensor that mustn't be there.
Sizes = Mapping[str, tuple[int, ...] | None]

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
VAE_PREFIXES = ("first_stage_model.", "vae.", "")


@dataclass(frozen=True)
class PartLayout:
    """One way in which a part of a model is published.

    title: what it is, for sentences. classes: of diffusers or transformers, which can be loaded with it. prefixes:
    where it may lie in a file, "" in one of its own. needs, lacks: names below the prefix that tell it from others.
    rules: the conversion; asked with the part's shapes, because some depend on the number of blocks. sizes: what a
    config of such a class asks of a few tensors. absent: beginnings of the library's names of what such a file never
    has. unlike: architectures that GGUF files say they are of whose names and sizes are the same, and weights others.
    """

    name: str
    title: str
    role: Role
    classes: tuple[str, ...]
    prefixes: tuple[str, ...]
    needs: tuple[str, ...]
    rules: Callable[[Shapes], Iterable[Rule]]
    sizes: Callable[[Mapping[str, Any]], Sizes]
    lacks: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()


def count(shapes: Shapes, start: str) -> int:
    """How many numbered parts there are: 19 if the highest name that begins with `start` goes on with 18."""
    numbers = [name[len(start) :].partition(".")[0] for name in shapes if name.startswith(start)]
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)
