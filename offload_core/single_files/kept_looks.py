"""What was seen in the headers of files, kept on disk, so that a list after a restart reads none of them again.

The first list of a host's folders is made while its page waits. What is kept is found by a file's path, size and time,
and by what recognises files: this package and the descriptions of models. It is for lists alone: a file that is chosen
is read and checked in full.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..small_files import read_json, write_json

if TYPE_CHECKING:
    from .listing import ListedFile

MOST_FILES = 20_000  # those that were listed last stay
Looks = dict[Path, tuple[int, int, "ListedFile"]]  # path -> size, time of the last change, what it is


def kept_looks(file: Path) -> Looks:
    """What `file` keeps; nothing if it is damaged, or made by other rules than those of now."""
    from .listing import ListedFile

    kept = read_json(file)
    if kept.get("made_by") != _made_by() or not isinstance(kept.get("files"), dict):
        return {}
    found: Looks = {}
    for path, item in kept["files"].items():
        try:
            size, changed_ns, seen = item
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in seen.items()
            }
            found[Path(path)] = (int(size), int(changed_ns), ListedFile(path=Path(path), **fields))
        except (TypeError, ValueError, AttributeError):
            continue
    return found


def keep_looks(file: Path, looks: Mapping[Path, tuple[int, int, ListedFile]]) -> None:
    """Keeps these in `file` beside what it has of other files, but for files that are gone."""
    others = {path: look for path, look in kept_looks(file).items() if path not in looks and os.path.exists(path)}
    together = list({**others, **looks}.items())[-MOST_FILES:]
    write_json(file, {"made_by": _made_by(), "files": {str(path): _plain(look) for path, look in together}})


def _plain(look: tuple[int, int, ListedFile]) -> list[Any]:
    size, changed_ns, seen = look
    fields = asdict(seen)
    del fields["path"]
    return [size, changed_ns, fields]


def _made_by() -> str:
    """The rules of now, as a number."""
    here, mark = Path(__file__).parent, hashlib.sha256()
    for source in sorted((*here.glob("*.py"), *here.glob("layouts/*.py"), *here.parent.glob("known/models/*.json"))):
        mark.update(source.read_bytes())
    return mark.hexdigest()
