"""Which files hold a component's weights: the exact set, every tensor in exactly one of them, headers only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint import Header, read_header, show
from .errors import ModelError
from .model_folder import ModelFolder

# What the two libraries call their weight files (diffusers.utils.constants, transformers.utils).
BASE_NAMES = {"diffusers": ("diffusion_pytorch_model",), "transformers": ("model",)}
ALL_BASE_NAMES = ("diffusion_pytorch_model", "model")

_BASE = "(?P<base>diffusion_pytorch_model|model)"
# base.safetensors, base.fp16.safetensors, base-00001-of-00002.safetensors, base.fp16-00001-of-00002.safetensors, and
# the old base-00001-of-00002.fp16.safetensors
_WEIGHTS = re.compile(
    _BASE + r"(\.(?P<variant>[^.-]+))?(?P<shard>-\d{5,}-of-\d{5,})?(\.(?P<old_variant>[^.-]+))?\.safetensors"
)
_INDEX = re.compile(_BASE + r"\.safetensors\.index(\.(?P<variant>[^.]+))?\.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".gguf", ".onnx", ".msgpack", ".h5", ".flashpack", ".safetensors", ".incomplete")

_AGAIN = "Download the model again."


@dataclass(frozen=True)
class WeightFiles:
    """headers: by file. index: of a sharded set. variant: "fp16" of model.fp16.safetensors, None for plain names."""

    headers: dict[Path, Header] = field(repr=False)
    index: Path | None
    variant: str | None
    notes: tuple[str, ...]


@dataclass
class _Candidate:
    """The files of one base name and variant that lie in a folder."""

    base: str
    variant: str | None
    single: Path | None = None
    index: Path | None = None
    shards: list[Path] = field(default_factory=list)

    def any_file(self) -> Path:
        file = self.single or self.index or self.shards[0]
        assert file is not None
        return file


def has_weight_files(names: Iterable[str]) -> bool:
    """Whether a folder with these file names looks like one that holds weights, of any format."""
    return any(_WEIGHTS.fullmatch(name) or _INDEX.fullmatch(name) or name.endswith(_PICKLES) for name in names)


def choose_weight_names(names: Iterable[str], library: str, variant: str | None = None) -> tuple[list[str], list[str]]:
    """Of a folder's file names those of the weights that a load would read, with their index, and those of other
    weights (pickles, other variants and formats). variant: preferred where the folder has it."""
    names = list(names)
    bases = BASE_NAMES.get(library, ALL_BASE_NAMES)
    candidates = _candidates({name: Path(name) for name in names}, bases)
    wanted = [candidate for candidate in candidates if candidate.variant == variant]
    best = wanted or [candidate for candidate in candidates if candidate.variant is None] or candidates
    chosen: list[str] = []
    for candidate in best[:1]:
        whole = candidate.single if candidate.index is None else None
        files = [whole] if whole is not None else [candidate.index, *candidate.shards]
        chosen = [file.name for file in files if file is not None]
    known = [name for name in names if _WEIGHTS.fullmatch(name) or _INDEX.fullmatch(name)]
    others = {*known, *(name for name in names if name.endswith((*_PICKLES, *_OTHERS)))} - set(chosen)
    return chosen, sorted(others)


def find_weight_files(folder: ModelFolder, directory: Path, base_names: tuple[str, ...]) -> WeightFiles:
    """Decides which files hold the weights in `directory` and checks them, their index and their keys.

    A plain set is preferred to a variant (a note says so); a variant is used if it is the only one. Raises ModelError
    if the set is missing, ambiguous, incomplete, or holds a tensor twice or one that the index doesn't name.
    """
    files = folder.files(directory)
    candidates = _candidates(files, base_names)
    if not candidates:
        raise _no_weights(folder, directory, list(files))
    chosen, notes = _choose(folder, candidates)
    if chosen.single and (chosen.index or chosen.shards):
        other = chosen.index or chosen.shards[0]
        what = f"lies beside {other.name}, so the weights are there twice, whole and in parts"
        raise folder.error(chosen.single, what, "Remove one of the two.")
    if chosen.single:
        return WeightFiles({chosen.single: read_header(chosen.single)}, None, chosen.variant, notes)
    if chosen.index is None:
        what = f"is a part of a set whose index ({_index_name(chosen)}) is missing"
        raise folder.error(chosen.shards[0], what, "Download the index too.")
    promised = _read_index(folder, directory, chosen.index)
    stray = [path.name for path in chosen.shards if path not in promised]
    if stray:
        what = f"doesn't name {_list(stray)}, which lies beside it"
        raise folder.error(chosen.index, what, "Remove what is left from another download, or get the matching index.")
    headers = {path: read_header(path) for path in promised}
    _check_keys(folder, promised, headers)
    return WeightFiles(headers, chosen.index, chosen.variant, notes)


def _candidates(files: dict[str, Path], base_names: tuple[str, ...]) -> list[_Candidate]:
    found: dict[tuple[str, str | None], _Candidate] = {}
    for name, path in files.items():
        weights, index = _WEIGHTS.fullmatch(name), _INDEX.fullmatch(name)
        match = weights or index
        if match is None or match["base"] not in base_names:
            continue
        variant = match["variant"] or (weights["old_variant"] if weights else None)
        candidate = found.setdefault((match["base"], variant), _Candidate(match["base"], variant))
        if index:
            candidate.index = path
        elif match["shard"]:
            candidate.shards.append(path)
        else:
            candidate.single = path
    return list(found.values())


def _choose(folder: ModelFolder, candidates: list[_Candidate]) -> tuple[_Candidate, tuple[str, ...]]:
    plain = [candidate for candidate in candidates if candidate.variant is None]
    best = plain or candidates
    if len(best) > 1:
        names = [candidate.any_file().name for candidate in best]
        what = f"is one of {len(best)} sets of weights ({_list(names)}), and nothing says which is meant"
        raise folder.error(best[0].any_file(), what, "Keep one of them, with a plain name.")
    chosen = best[0]
    notes = tuple(
        f"{folder.relative(other.any_file())} is not used: {chosen.any_file().name} is preferred."
        for other in candidates
        if other is not chosen
    )
    return chosen, notes


def _index_name(candidate: _Candidate) -> str:
    ending = f".{candidate.variant}.json" if candidate.variant else ".json"
    return f"{candidate.base}.safetensors.index{ending}"


def _no_weights(folder: ModelFolder, directory: Path, names: list[str]) -> ModelError:
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        what = f"holds its weights only as pickle ({_list(pickles)}), which can run code and is never opened"
        advice = "Choose a model with safetensors files, or convert this one to safetensors where it may run code."
        return folder.error(directory, what, advice)
    others = [name for name in names if name.endswith(_OTHERS)]
    found = f": it has only {_list(others)}" if others else ""
    return folder.error(directory, f"has a config but no safetensors weights that diffusers would load{found}", _AGAIN)


def _read_index(folder: ModelFolder, directory: Path, index: Path) -> dict[Path, set[str]]:
    """The shards that an index names, each with the tensors it promises. All names are checked before any is opened."""
    weight_map = folder.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise folder.error(index, "has no weight_map that says which file holds which tensor", _AGAIN)
    paths: dict[str, Path] = {}
    promised: dict[Path, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise folder.error(index, f"names {show(name)} instead of a file for the tensor {show(key)}", _AGAIN)
        if name not in paths:
            paths[name] = folder.child(directory, name, index)
            if not name.endswith(".safetensors"):
                what = f"names {show(name)}, which is no safetensors file and is never opened"
                raise folder.error(index, what, "Choose a model with safetensors files.")
        promised.setdefault(paths[name], set()).add(key)
    missing = [folder.relative(path) for path in promised if not path.is_file()]
    if missing:
        what = f"names {len(promised)} files, of which {len(missing)} {_is(missing)} missing: {_list(missing)}"
        raise folder.error(index, what, "Finish the download.")
    return promised


def _check_keys(folder: ModelFolder, promised: dict[Path, set[str]], headers: dict[Path, Header]) -> None:
    """Every tensor that the index promises comes from exactly one file, and no file holds others."""
    owner: dict[str, Path] = {}
    for path, header in headers.items():
        doubled = [key for key in header.tensors if key in owner]
        if doubled:
            what = f"holds {_list(doubled)}, which {owner[doubled[0]].name} holds too"
            raise folder.error(path, what, _AGAIN)
        owner.update(dict.fromkeys(header.tensors, path))
    for path, keys in promised.items():
        here = headers[path].tensors.keys()
        missing, extra = sorted(keys - here), sorted(here - keys)
        if missing:
            raise folder.error(path, f"lacks {_list(missing)}, which the index says it holds", _AGAIN)
        if extra:
            raise folder.error(path, f"holds {_list(extra)}, which the index doesn't name", _AGAIN)


def _list(names: list[str]) -> str:
    shown = ", ".join(show(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
