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
    """title: for sentences. classes: of transformers, without "Fast". encoders: what the names of the text encoders
    that it is for begin with, "" for any. folders: names that hosts and repositories give the folder. needs: sets of
    files of which one must be there whole. mark: a token that tells it from another of its class; unlike: one that the
    other has. least_bytes: of its largest file, where only the size of the vocabulary tells it from another."""

    title: str
    classes: tuple[str, ...]
    encoders: str
    folders: tuple[str, ...]
    needs: tuple[frozenset[str], ...]
    mark: str = ""
    unlike: str = ""
    least_bytes: int = 0


_BPE = (frozenset({"vocab.json", "merges.txt"}), frozenset({"tokenizer.json"}))
_PIECES = (frozenset({"tokenizer.json"}), frozenset({"spiece.model"}), frozenset({"tokenizer.model"}))
KINDS = (
    TokenizerKind("CLIP's tokenizer", ("CLIPTokenizer",), "", ("sd1_tokenizer", "clip_tokenizer", "clip"), _BPE),
    # umT5 has a vocabulary of 256,384 pieces, T5 of 32,128: files of 16.8 and 4.5 MB where T5's have 2.4 and 0.8.
    TokenizerKind(
        "umT5's tokenizer", ("T5Tokenizer",), "UMT5", ("umt5_tokenizer", "umt5"), _PIECES, least_bytes=4_000_000
    ),
    TokenizerKind("T5's tokenizer", ("T5Tokenizer",), "", ("t5_tokenizer", "t5xxl_tokenizer", "t5"), _PIECES),
    # Qwen3's has tokens that Qwen2.5's hasn't. ComfyUI's folder has them, with Qwen2.5's chat template.
    TokenizerKind(
        "Qwen3's tokenizer", ("Qwen2Tokenizer",), "Qwen3", ("qwen3_tokenizer", "qwen25_tokenizer"), _BPE, "<think>"
    ),
    # Gemma 3's has tokens for pictures. ComfyUI keeps both as tensors in the files of the encoders.
    TokenizerKind(
        "Gemma 3's tokenizer",
        ("GemmaTokenizer",),
        "Gemma3",
        ("gemma3_tokenizer", "gemma3"),
        _PIECES,
        "<start_of_image>",
    ),
    TokenizerKind(
        "Gemma 2's tokenizer",
        ("GemmaTokenizer",),
        "Gemma2",
        ("gemma2_tokenizer", "gemma2"),
        _PIECES,
        unlike="<start_of_image>",
    ),
    # AuraFlow's encoder is a T5 that was trained on the Pile, with Llama's kind of tokenizer.
    TokenizerKind("Pile-T5's tokenizer", ("LlamaTokenizer",), "UMT5", ("t5_pile_tokenizer",), _PIECES),
    TokenizerKind("Llama 3's tokenizer", ("LlamaTokenizer",), "Llama", ("llama_tokenizer",), _PIECES, "<|eot_id|>"),
    # Of models that read pictures: a tokenizer with what prepares a picture for the encoder.
    TokenizerKind("Qwen2.5-VL's processor", ("Qwen2VLProcessor",), "", (), (frozenset({"preprocessor_config.json"}),)),
    TokenizerKind("Qwen2.5's tokenizer", ("Qwen2Tokenizer",), "", ("qwen25_tokenizer", "qwen25"), _BPE),
)
# What Qwen3's own chat template (https://huggingface.co/Qwen/Qwen3-4B, tokenizer_config.json) makes of messages without
# tools: no system message of its own, and an empty thought where thinking is off.
_QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

_SPECIAL = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")
_BELOW = ("", "text_encoders", "comfy", "comfy/text_encoders")


def find_tokenizer(component: str, class_name: str, encoder: str, folders: Iterable[str], who: str) -> Path:
    """The folder of a component's tokenizer; `encoder` is the class that it is for.

    Of a diffusers folder it is the component's own; else a folder by one of the kind's names, or one of `folders`
    itself. Raises ModelError, with where tokenizers are found, if there is none.
    """
    plain = class_name.removesuffix("Fast")
    kind = next((kind for kind in KINDS if plain in kind.classes and encoder.startswith(kind.encoders)), None)
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in folders]
    if kind is not None:
        for place in _places(component, kind, folders):
            if _is_one(place, kind):
                return place
    title = kind.title if kind is not None else f"a tokenizer ({class_name})"
    looked = f" {' or '.join(show(folder) for folder in folders)} doesn't hold it." if folders else ""
    raise ModelError(
        f"{who} needs {title}, which files of weights don't contain.{looked} Name a folder that has it: the `comfy` "
        "folder of ComfyUI, or a diffusers folder of a model with the same text encoder (tokenizers)."
    )


def tokenizer_options(place: Path, encoder: str) -> dict[str, str]:
    """What a tokenizer's loader has to be told beside the model's own options: a chat template, if that isn't there."""
    own = place / "chat_template.jinja"
    files = (own,) if own.is_file() else (place / "tokenizer_config.json", place / "tokenizer.json")
    if not encoder.startswith("Qwen3") or any(_holds(file, "enable_thinking") for file in files):
        return {}
    return {"chat_template": _QWEN3_TEMPLATE}


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
    files = [place / name for files in kind.needs for name in files if (place / name).is_file()]
    if max(file.stat().st_size for file in files) < kind.least_bytes:
        return False
    if kind.mark and not any(_holds(place / name, kind.mark) for name in _SPECIAL):
        return False
    if kind.unlike and any(_holds(place / name, kind.unlike) for name in _SPECIAL):
        return False
    config = _read(place / "tokenizer_config.json")
    said = str(config.get("processor_class" if "Processor" in kind.classes[0] else "tokenizer_class") or "")
    return not said or said.removesuffix("Fast") in kind.classes


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and text.encode() in file.read_bytes()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
