"""Tokenizers for models that come without one: looked for in folders that the user or the host names.

A tokenizer's vocabulary belongs to its text encoder and is the same for every model that uses this encoder, whoever
ships it: the folders of ComfyUI (`comfy/sd1_tokenizer`, `comfy/text_encoders/t5_tokenizer`) hold the same files as
those of the models' own repositories.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import show
from ..errors import ModelError


@dataclass(frozen=True)
class TokenizerKind:
    """title: for sentences. classes: of transformers, without "Fast". folders: names that hosts and repositories give
    the folder. needs: sets of files of which one must be there whole."""

    title: str
    classes: tuple[str, ...]
    folders: tuple[str, ...]
    needs: tuple[frozenset[str], ...]


_BPE = (frozenset({"vocab.json", "merges.txt"}), frozenset({"tokenizer.json"}))
_PIECES = (frozenset({"tokenizer.json"}), frozenset({"spiece.model"}), frozenset({"tokenizer.model"}))
KINDS = (
    TokenizerKind("CLIP's tokenizer", ("CLIPTokenizer",), ("sd1_tokenizer", "clip_tokenizer", "clip"), _BPE),
    TokenizerKind("T5's tokenizer", ("T5Tokenizer",), ("t5_tokenizer", "t5xxl_tokenizer", "t5"), _PIECES),
    TokenizerKind("Qwen's tokenizer", ("Qwen2Tokenizer",), ("qwen25_tokenizer", "qwen_tokenizer", "qwen"), _BPE),
    TokenizerKind("Gemma's tokenizer", ("GemmaTokenizer",), ("gemma_tokenizer", "gemma"), _PIECES),
)
_BELOW = ("", "text_encoders", "comfy", "comfy/text_encoders")


def find_tokenizer(component: str, class_name: str, folders: Iterable[str], who: str) -> Path:
    """The folder of a component's tokenizer. Raises ModelError, with where they are found, if none of `folders` has it.

    Of a diffusers folder, the component's own; else a folder by one of the kind's names, or `folders` themselves.
    """
    kind = next((kind for kind in KINDS if class_name.removesuffix("Fast") in kind.classes), None)
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in folders]
    if kind is not None:
        for place in _places(component, kind, folders):
            if _is_one(place, kind):
                return place
    title = kind.title if kind is not None else f"a tokenizer ({class_name})"
    looked = f" {' or '.join(show(folder) for folder in folders)} doesn't hold it." if folders else ""
    raise ModelError(
        f"{who} needs {title}, which files of weights don't contain.{looked} Name a folder that has it: the `comfy` "
        "folder of ComfyUI, or a diffusers folder of a model with the same text encoder (--tokenizers FOLDER)."
    )


def _places(component: str, kind: TokenizerKind, folders: Iterable[str]) -> Iterator[Path]:
    for folder in map(Path, folders):
        for entry in [component, *_components(folder, kind)]:
            yield folder / entry
        for below in _BELOW:
            for name in kind.folders:
                yield folder / below / name
        yield folder


def _components(folder: Path, kind: TokenizerKind) -> list[str]:
    """Tokenizers of this kind in a diffusers folder, by the name of their component."""
    index = _read(folder / "model_index.json")
    return [
        name
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and str(value[1]).removesuffix("Fast") in kind.classes
    ]


def _is_one(place: Path, kind: TokenizerKind) -> bool:
    if not any(all((place / name).is_file() for name in files) for files in kind.needs):
        return False
    said = str(_read(place / "tokenizer_config.json").get("tokenizer_class") or "")
    return not said or said.removesuffix("Fast") in kind.classes


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
