"""Which files make up a model that isn't a diffusers folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class SplitFiles:
    """The files of one model. Plain data: paths become texts.

    checkpoint: one file with several parts, as most of Stable Diffusion's and SDXL's are. denoiser, encoders, vae: a
    file with that part; it goes before the checkpoint's. denoiser_2: the second of a model that has two (Wan 2.2: the
    first is the one for high noise). family: "auto" (told by the files), or the name of a known model. configs: a
    diffusers folder of the same architecture, whose configs, scheduler and tokenizers are taken; its weights aren't
    read and may be missing. tokenizers: folders to look for tokenizers in.
    """

    checkpoint: str | None = None
    denoiser: str | None = None
    denoiser_2: str | None = None
    encoders: tuple[str, ...] = ()
    vae: str | None = None
    family: str = "auto"
    configs: str | None = None
    tokenizers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("checkpoint", "denoiser", "denoiser_2", "vae", "configs"):
            value = getattr(self, name)
            object.__setattr__(self, name, os.fspath(value) if value else None)
        for name in ("encoders", "tokenizers"):
            object.__setattr__(self, name, _paths(getattr(self, name)))

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """(what it was given as, path) of each file, those of one part before the checkpoint."""
        for name in ("denoiser", "denoiser_2"):
            if getattr(self, name):
                yield name, getattr(self, name)
        yield from (("encoders", path) for path in self.encoders)
        if self.vae:
            yield "vae", self.vae
        if self.checkpoint:
            yield "checkpoint", self.checkpoint


def _paths(value: FilePath | Sequence[FilePath]) -> tuple[str, ...]:
    """One path, or several, as texts."""
    several = [value] if isinstance(value, str | os.PathLike) else value
    return tuple(os.fspath(path) for path in several)
