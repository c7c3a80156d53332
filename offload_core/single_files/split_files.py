"""Which files make up a model that isn't a diffusers folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

FilePath = str | os.PathLike[str]
_SINGLE = ("checkpoint", "denoiser", "denoiser_2", "vae", "configs")
_SEVERAL = ("encoders", "tokenizers")


@dataclass(frozen=True)
class SplitFiles:
    """The files of one model. Plain data: paths become texts.

    checkpoint: one file with several parts, as most of Stable Diffusion's and SDXL's are. denoiser, encoders, vae: a
    file with that part; it goes before the checkpoint's. denoiser_2: the second of a model that has two (Wan 2.2: the
    first is the one for high noise). family: "auto" (told by the files), or the name of a known model. configs: a
    diffusers folder of the same architecture, whose configs, scheduler and tokenizers are taken; its weights aren't
    read and may be missing. tokenizers: folders to look for tokenizers in.
    """

    checkpoint: FilePath | None = None
    denoiser: FilePath | None = None
    denoiser_2: FilePath | None = None
    encoders: FilePath | Sequence[FilePath] = ()
    vae: FilePath | None = None
    family: str = "auto"
    configs: FilePath | None = None
    tokenizers: FilePath | Sequence[FilePath] = ()

    def __post_init__(self) -> None:
        for name in _SINGLE:
            value = getattr(self, name)
            object.__setattr__(self, name, os.fspath(value) if value else None)
        for name in _SEVERAL:
            object.__setattr__(self, name, _paths(getattr(self, name)))

    def absolute(self) -> SplitFiles:
        """The same with full paths, which mean the same files from another folder."""
        changed: dict[str, Any] = {name: _full(path) for name in _SINGLE if (path := getattr(self, name))}
        several: dict[str, Any] = {name: tuple(map(_full, getattr(self, name))) for name in ("encoders", "tokenizers")}
        return replace(self, **changed, **several)

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """(what it was given as, path) of each file, those of one part before the checkpoint."""
        for name in ("denoiser", "denoiser_2"):
            if getattr(self, name):
                yield name, getattr(self, name)
        yield from (("encoders", path) for path in _paths(self.encoders))
        for name in ("vae", "checkpoint"):
            if getattr(self, name):
                yield name, getattr(self, name)

    @property
    def tokenizer_folders(self) -> tuple[str, ...]:
        return _paths(self.tokenizers)


def _paths(value: FilePath | Sequence[FilePath]) -> tuple[str, ...]:
    """One path, or several, as texts."""
    several = [value] if isinstance(value, str | os.PathLike) else value
    return tuple(os.fspath(path) for path in several)


def _full(path: str) -> str:
    """Of a path that can't be one, the path itself: whoever opens it says so."""
    return path if not path.strip() or "\0" in path else os.path.abspath(os.path.expanduser(path))
