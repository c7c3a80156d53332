"""The files of one kind that a person can choose: those below some folders whose names end as the kind's do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload_core.errors import InputError

from .model_list import changed_ns

NONE = "none"  # a choice of no file
FRESH_S = 2.0  # ComfyUI asks for the list once for every node of a prompt

Places = Callable[[], Sequence[tuple[str, Path]]]


class FileList:
    """Names and paths of files below some folders. Walks again when a folder changed, or after two seconds.

    kind: what such a file is, for sentences. ending: of their names, from the dot on; may be several. places: pairs of
    a mark and a folder; a file is named by its path below the folder, with / on every system, and the mark behind it,
    or before it with mark_first. The first of two equal names counts. A name that isn't in the list is never opened, so
    no path leaves the folders.
    """

    def __init__(self, kind: str, ending: str | tuple[str, ...], places: Places, *, mark_first: bool = False) -> None:
        self.kind, self._places, self._mark_first = kind, places, mark_first
        self._endings = (ending,) if isinstance(ending, str) else ending
        self._files: Mapping[str, Path] = {}
        self._seen: list[tuple[str, Path, int]] | None = None  # with the time of each folder's last change
        self._walked_s = 0.0

    @property
    def nothing(self) -> str:
        """What the list holds where there is no file: a list of choices must not be empty."""
        return f"no {self.kind} found (run to see where to put one)"

    def names(self) -> list[str]:
        """Names to choose from. Never empty."""
        return list(self._all()) or [self.nothing]

    def names_or_none(self) -> list[str]:
        """Names to choose from, after the one for no file at all."""
        return [NONE, *self._all()]

    def file(self, name: str) -> Path:
        """The path of a file in the list. Raises InputError for any other name."""
        files = self._all()
        if name not in files:
            files = self._all(again=True)  # it may have been saved a moment ago
        if name in files:
            return files[name]
        folders = " or ".join(str(folder) for _, folder in self._places()) or "no folder at all"
        if not files or name == self.nothing:
            raise InputError(f"There is no {self.kind} yet: put a *{self._endings[0]} file into {folders}.")
        raise InputError(f"There is no {self.kind} {name!r} in {folders}: choose one of {', '.join(files)}.")

    def _all(self, *, again: bool = False) -> Mapping[str, Path]:
        places = [(mark, folder, changed_ns(folder)) for mark, folder in self._places()]
        if again or places != self._seen or time.monotonic() - self._walked_s > FRESH_S:
            found: dict[str, Path] = {}
            for mark, folder, _ in places:
                for path in _files_below(folder, self._endings):
                    below = path.relative_to(folder).as_posix()
                    found.setdefault(mark + below if self._mark_first else below + mark, path)
            self._files, self._seen, self._walked_s = found, places, time.monotonic()
        return self._files


def _files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Sorted. Links to folders are followed, as the host does, but never in a circle."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for where, folders, files in os.walk(folder, followlinks=True):
        at = os.stat(where)
        if (at.st_dev, at.st_ino) in seen:
            folders.clear()
            continue
        seen.add((at.st_dev, at.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in files if name.lower().endswith(endings) and not name.startswith(".")]
    return sorted(found)
