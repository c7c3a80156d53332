"""`phase-offload models`: which models are here, fetching one from the Hub, and whether one is sound."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._console import Terminal
from ._report_table import human_bytes
from .errors import InputError, OffloadError

if TYPE_CHECKING:
    from .model_source import ModelSource

_SUBJECTS = {
    "list": "list models: diffusers folders, files of weights, and what the Hub's cache holds",
    "add": "fetch a model from the Hub; says first what it would fetch",
    "check": "read a model's configs and headers, and say what is wrong with it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="WHAT")
    made = {
        name: subjects.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
        for name, says in _SUBJECTS.items()
    }
    listing, adding, checking = made["list"], made["add"], made["check"]
    listing.add_argument("folders", nargs="*", metavar="DIR", help="folders to look in, beside the Hub's cache")
    listing.add_argument("--json", action="store_true", help="as JSON, for other programs")
    adding.add_argument("model", metavar="OWNER/NAME", help="the model's id on the Hub")
    adding.add_argument("--into", type=Path, metavar="DIR", help="a folder to be made for it (the Hub's cache)")
    adding.add_argument("--revision", metavar="NAME", help="a branch, tag or commit (the main one)")
    adding.add_argument("--variant", metavar="NAME", help="of weights, as fp16, where a component has it")
    adding.add_argument("--yes", action="store_true", help="fetch without asking")
    checking.add_argument("model", metavar="MODEL", help="a folder, a file, or the id of a model in the Hub's cache")
    for each in made.values():
        each.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks and warnings"
        )


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    {"list": _list, "add": _add, "check": _check}[args.subject](args, terminal)


def _list(args: argparse.Namespace, terminal: Terminal) -> None:
    rows = model_rows([Path(folder) for folder in args.folders])
    if args.json:
        terminal.say(json.dumps(rows, indent=2))
        return
    if not rows:
        terminal.say(
            "No models were found. Name a folder that has some, or fetch one: phase-offload models add OWNER/NAME"
        )
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        size = human_bytes(row["bytes"]) if row["bytes"] else ""
        terminal.say(f"{row['name']:{width}}  {size:>10}  {row['what']}")


def model_rows(folders: list[Path]) -> list[dict[str, Any]]:
    """Every model below the folders and in the Hub's cache: name, bytes of weights, and what it is or what is wrong."""
    from .model_source import list_models
    from .single_files import list_model_files

    rows = []
    for name, path in {**cached_models(), **list_models(folders)}.items():
        try:
            source = _resolved(path)
            rows.append({"name": name, "bytes": source.weight_bytes, "what": _what(source), "path": str(path)})
        except OffloadError as error:
            rows.append({"name": name, "bytes": 0, "what": f"unusable: {error}", "path": str(path)})
    for name, file in list_model_files(folders).items():
        if file.roles and not any(file.path.is_relative_to(str(row["path"])) for row in rows):
            packed = ", packed" if file.packed else ""
            what = f"{' and '.join(file.titles)}{packed}"
            rows.append({"name": name, "bytes": file.path.stat().st_size, "what": what, "path": str(file.path)})
    return rows


def cached_models() -> dict[str, Path]:
    """Diffusers models in the Hub's cache: id -> snapshot."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from .model_source import INDEX, MODULAR_INDEX

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError):
        return {}
    found: dict[str, Path] = {}
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified):
            if any((revision.snapshot_path / index).is_file() for index in (INDEX, MODULAR_INDEX)):
                found.setdefault(repo.repo_id, revision.snapshot_path)
    return found


def _add(args: argparse.Namespace, terminal: Terminal) -> None:
    from .downloads import download, plan_download

    plan = plan_download(args.model, revision=args.revision, variant=args.variant, into=args.into)
    terminal.say(plan.sentence())
    if plan.left_out:
        terminal.say(f"Left out: {len(plan.left_out)} files of other formats or variants.")
    if plan.missing_bytes and not args.yes and not _asked(terminal):
        terminal.say("Nothing was fetched.")
        return
    with terminal.session() as session:
        folder = download(plan, session=session)
    terminal.say(f"Ready. Use it as: --model {folder if args.into or args.revision else args.model}")


def _asked(terminal: Terminal) -> bool:
    import sys

    if not sys.stdin.isatty():
        raise InputError("Nobody is there to ask: add --yes to fetch it.")
    return input("Fetch it? [y/N] ").strip().lower() in ("y", "yes")


def _check(args: argparse.Namespace, terminal: Terminal) -> None:
    source = _resolved(args.model)
    terminal.say(f"{_what(source)}: {len(source.components)} components, {human_bytes(source.weight_bytes)} of weights")
    for name, part in source.components.items():
        size = f"{human_bytes(part.weight_bytes)} in {part.dtype}" if part.has_weights else ""
        terminal.say(f"  {name:20} {part.class_name:36} {size}")
    for note in source.notes:
        terminal.say(note)
    terminal.say("Every file that loading needs is there and sound, as far as configs and headers tell.")


def _resolved(model: Any) -> ModelSource:
    from .model_source import component_class, resolve_model

    source = resolve_model(model)
    for part in source.components.values():
        component_class(part)
    return source


def _what(source: ModelSource) -> str:
    return re.sub(r"Pipeline$", "", source.pipeline_class) or source.pipeline_class
