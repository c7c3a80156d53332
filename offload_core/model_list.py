"""The model folders below some roots, and the one that a name means. Looks for their indexes, opens nothing."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from .checkpoint import show
from .errors import ModelError
from .model_folder import plain_parts

MAX_DEPTH = 6
MAX_ENTRIES_PER_FOLDER = 2_000  # a folder with more holds pictures, not models
MAX_FOLDERS = 20_000
_INDEXES = ("model_index.json", "modular_model_index.json")
_SKIPPED = {"blobs", "refs", "node_modules", "__pycache__"}

Roots = Iterable[str | os.PathLike[str]]


def list_models(roots: Roots) -> dict[str, Path]:
    """Every diffusers model folder below the roots: name -> path, sorted by name.

    A name is the path below its root, with "/" on every system; a root that is a model itself goes by its own name. If
    two roots have one name, the first root wins. Links are followed and loops end: a folder reached twice is searched
    once, under its unlinked name if it has one. Models, hidden folders and very full ones are not searched. Roots that
    don't exist are skipped.
    """
    models: dict[str, Path] = {}
    for root in roots:
        for name, path in _models_below(Path(root)).items():
            models.setdefault(name, path)
    return dict(sorted(models.items(), key=lambda item: item[0].casefold()))


def choose_model(name: str, roots: Roots) -> Path:
    """The folder of the model called `name` in `list_models(roots)`; both slash styles mean the same.

    Raises ModelError for any other name, with up to three near ones, or with where to put a model if there are none.
    """
    roots = list(roots)
    models = list_models(roots)
    if name in models:
        return models[name]
    parts = plain_parts(name.strip().rstrip("/\\"))
    if parts is None:
        raise ModelError(
            f"{show(name)} is no model name: names are those of the list, without '..', drive or leading slash. "
            "Choose one from the list."
        )
    wanted = "/".join(parts)
    if wanted in models:
        return models[wanted]
    same = [path for known, path in models.items() if _composed(known) == _composed(wanted)]
    if len(same) == 1:
        return same[0]
    if not models:
        raise ModelError(no_models_sentence(roots))
    near = near_names(wanted, models)
    hint = f"Did you mean {near}?" if near else "Choose one from the list."
    raise ModelError(f"There is no model called {show(name)}. {hint}")


def no_models_sentence(roots: Roots) -> str:
    """What to do when `list_models(roots)` is empty. Names the roots as the caller wrote them."""
    places = " or ".join(show(os.fspath(root)) for root in roots)
    if not places:
        return "No folder for models is set. Name one that holds diffusers model folders."
    return f"No model was found. Put a diffusers model folder, one with a model_index.json, into {places}."


def near_names(wanted: str, names: Iterable[str]) -> str:
    """Up to three names that look like `wanted`, or whose last part does, quoted, with "or" between; may be ""."""
    wanted = wanted.casefold()
    scores = []
    for name in names:
        forms = {name.casefold(), name.casefold().rsplit("/", 1)[-1]}
        ratio = max(difflib.SequenceMatcher(None, wanted, form).ratio() for form in forms)
        if any(wanted in form or form in wanted for form in forms):
            ratio = max(ratio, 0.8)
        if ratio >= 0.6:
            scores.append((-ratio, name))
    return " or ".join(show(name) for _, name in sorted(scores)[:3])


def _composed(name: str) -> str:
    """macOS stores accents apart from their letters, other systems don't."""
    return unicodedata.normalize("NFC", name)


def _models_below(root: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    seen: set[str] = set()
    plain = [("", root, 0)]
    linked: list[tuple[str, Path, int]] = []  # searched last, so that a folder goes by its unlinked name
    while (plain or linked) and len(seen) < MAX_FOLDERS:
        name, folder, depth = plain.pop() if plain else linked.pop(0)
        listing = _list_folder(folder)
        if listing is None:
            continue
        is_model, folders, links = listing
        if is_model:
            found[name or root.resolve().name] = folder
            continue
        real = os.path.realpath(folder)
        if real in seen or depth == MAX_DEPTH:
            continue
        seen.add(real)
        below = f"{name}/" if name else ""
        plain += [(below + child, folder / child, depth + 1) for child in folders]
        linked += [(below + child, folder / child, depth + 1) for child in links]
    return found


def _list_folder(folder: Path) -> tuple[bool, list[str], list[str]] | None:
    """(holds an index, plain folders, linked folders), or None if the folder can't or needn't be searched."""
    folders: list[str] = []
    links: list[str] = []
    try:
        if any((folder / index).is_file() for index in _INDEXES):
            return True, [], []
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_ENTRIES_PER_FOLDER:
                    return None
                if entry.name.startswith(".") or entry.name in _SKIPPED or not entry.is_dir():
                    continue
                (links if entry.is_symlink() else folders).append(entry.name)
    except OSError:
        return None
    return False, sorted(folders), sorted(links)
