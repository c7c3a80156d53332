"""The files of weights below some folders, each with what it is. Meant for lists that a person chooses from.

A header is looked at once and again only if its file's size or time changed, and only as much of it is understood as
recognising takes: names by a search, the shapes of a few tensors. What is chosen is read and checked in full.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..checkpoint import MAX_HEADER_BYTES, Header, TensorEntry
from ..errors import ModelError
from ..gguf_file import SUFFIX, read_gguf_header
from ..known import known_models
from .kept_looks import Looks, keep_looks, kept_looks
from .recognise import find_parts
from .template import ALIKE, FAMILIES

SUFFIXES = (".safetensors", ".sft", ".gguf")
MAX_DEPTH = 6
MAX_FILES = 20_000

# With all of a tensor's entry: what it takes up needn't be searched for another name, which takes four times as long.
_ENTRY = re.compile(rb'"([^"]+)" ?: ?\{[^}]*\}')


@dataclass(frozen=True)
class ListedFile:
    """roles: what it holds, of denoiser, encoder and vae; empty for a file that isn't known. families: known models
    that its denoiser fits. titles: its parts in words. packed: whether some of its weights are 8-bit floats or blocks
    of GGUF."""

    path: Path
    roles: tuple[str, ...]
    families: tuple[str, ...]
    titles: tuple[str, ...]
    packed: bool

    @property
    def is_whole(self) -> bool:
        """Whether it may be used alone: it has a denoiser, an encoder and a VAE."""
        return {"denoiser", "encoder", "vae"} <= set(self.roles)


class ModelFiles:
    """Files below folders, with what was seen in their headers. Keep one for as long as lists are asked for.

    kept_in: a small file to keep it in from one start of the program to the next, too; damage to it does no harm.
    """

    def __init__(self, kept_in: Path | None = None) -> None:
        self._kept_in = kept_in
        self._seen: Looks | None = None if kept_in else {}

    def list(self, roots: Iterable[str | os.PathLike[str]]) -> dict[str, ListedFile]:
        """Every file by its name: the path below its root, with "/". If two roots have one name, the first wins.

        Files that can't be read or are damaged are listed without a role, so that choosing one says what is wrong.
        """
        found: dict[str, ListedFile] = {}
        seen: Looks = {}
        if self._seen is None:
            self._seen = kept_looks(self._kept_in) if self._kept_in else {}
        anew = False
        for root in roots:
            for name, entry in _below(Path(root)):
                if name in found:
                    continue
                path, status = Path(entry.path), entry.stat()
                known = self._seen.get(path)
                if known is None or known[:2] != (status.st_size, status.st_mtime_ns):
                    known, anew = (status.st_size, status.st_mtime_ns, _look_at(path)), True
                found[name], seen[path] = known[2], known
        self._seen = seen
        if anew and self._kept_in:
            keep_looks(self._kept_in, seen)
        return dict(sorted(found.items(), key=lambda item: item[0].casefold()))


def list_model_files(roots: Iterable[str | os.PathLike[str]]) -> dict[str, ListedFile]:
    """The files below the roots, looked at now. For lists that are asked for again and again keep a `ModelFiles`."""
    return ModelFiles().list(roots)


def _below(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(name, entry) of the files below a folder, links followed, no folder searched twice."""
    pending, searched, count = [("", str(root), 0)], set(), 0
    while pending:
        name, folder, depth = pending.pop()
        real = os.path.realpath(folder)
        if real in searched or depth > MAX_DEPTH:
            continue
        searched.add(real)
        try:
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        pending.append((f"{name}{entry.name}/", entry.path, depth + 1))
                    elif entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                        count += 1
                        yield f"{name}{entry.name}", entry
                        if count >= MAX_FILES:
                            return
        except OSError:
            continue


def _look_at(path: Path) -> ListedFile:
    raw = b""
    if path.suffix.lower() == SUFFIX:
        header = _gguf_header(path)
    else:
        raw = _raw_header(path)
        header = Header(cast(Any, _Glance(raw)), {}, 0, 0, "", 0)
    parts = find_parts(path, header)
    denoisers = [part for part in parts if part.layout.role == "denoiser"]
    families = [name for name in FAMILIES if name not in ALIKE and any(_fits(part, name) for part in denoisers)]
    return ListedFile(
        path=path,
        roles=tuple(dict.fromkeys(part.layout.role for part in parts)),
        families=tuple(families),
        titles=tuple(dict.fromkeys(part.layout.title for part in parts)),
        packed=b'"F8_' in raw or path.suffix.lower() == SUFFIX,
    )


def _fits(part: Any, family: str) -> bool:
    model = known_models()[family]
    configs = [c["config"] for c in model.components.values() if c["class"] in part.layout.classes]
    return any(part.misfit(config) is None for config in configs)


def _gguf_header(path: Path) -> Header:
    """An empty one for a damaged file: choosing it says what is wrong."""
    try:
        return read_gguf_header(path)
    except ModelError:
        return Header({}, {}, 0, 0, "", 0)


def _raw_header(path: Path) -> bytes:
    """The bytes of a header, nothing if there can't be one."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError:
        return b""


class _Glance(Mapping[str, TensorEntry]):
    """A header's tensors, each understood when it is asked for. Offsets are left out."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._found = dict.fromkeys(_ENTRY.findall(raw))

    def __getitem__(self, name: str) -> TensorEntry:
        quoted = f'"{name}"'.encode()
        start = self._raw.find(b"{", self._raw.find(quoted) + len(quoted))
        if name not in self:
            raise KeyError(name)
        try:
            entry = json.loads(self._raw[start : self._raw.index(b"}", start) + 1])
            return TensorEntry(str(entry["dtype"]), tuple(entry["shape"]), 0, 0)
        except (ValueError, TypeError) as error:
            raise KeyError(name) from error

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode("utf-8", "replace") in self._found

    def __iter__(self) -> Iterator[str]:
        return (name.decode("utf-8", "replace") for name in self._found)

    def __len__(self) -> int:
        return len(self._found)
