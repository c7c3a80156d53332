"""A model folder that is never left: every name that comes from a file is checked before anything is opened."""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any

from .checkpoint import DuplicateKeyError, describe_impostor, show, unique_dict
from .errors import ModelError

MAX_TEXT_BYTES = 64 << 20


class ModelFolder:
    """Paths and JSON of one model, confined to its folder after links are resolved.

    The folder itself may be a link: the user chose it. Links inside it must end inside it, with one exception: in the
    Hub's cache a model folder is `models--org--name/snapshots/<commit>` and its files are links to
    `models--org--name/blobs`, so for such a folder, and only for it, that blobs folder counts as inside.
    """

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self.name = self.root.name
        self._allowed = [self.root]
        cache = self.root.parent.parent
        if self.root.parent.name == "snapshots" and cache.name.startswith("models--"):
            self._allowed.append(cache / "blobs")
            self.name = cache.name.removeprefix("models--").replace("--", "/")

    def relative(self, path: Path) -> str:
        """`path` below the root with "/" between its parts, for messages and fingerprints."""
        return path.relative_to(self.root).as_posix()

    def error(self, path: Path, what: str, advice: str) -> ModelError:
        """One sentence about a file of this model, and one with what to do."""
        return ModelError(f"{self.relative(path)} of the model {show(self.name)} {what}. {advice}")

    def inside(self, path: Path) -> Path:
        """`path`, if it ends inside the model after resolving links. Opens nothing; the target isn't named."""
        real = Path(os.path.realpath(path))
        if not any(real == place or place in real.parents for place in self._allowed):
            advice = "Put a copy of its target in its place, or link the whole model folder."
            raise self.error(path, "is a link that leads out of the model folder", advice)
        return path

    def child(self, directory: Path, name: str, said_by: Path) -> Path:
        """The path that `name`, written in the file `said_by`, means below `directory`. It needn't exist.

        Both slash styles are the same. Anything but a plain relative name is refused before it touches the disk.
        """
        parts = plain_parts(name)
        if parts is None:
            what = f"names {show(name)}, which is no plain name inside the model folder"
            raise self.error(said_by, what, "Get the model from a source that you trust.")
        return self.inside(directory.joinpath(*parts))

    def files(self, directory: Path) -> dict[str, Path]:
        """The regular files in a folder, by name. A link that leads out is an error; a dead one is no file."""
        self.inside(directory)
        found = {}
        try:
            for path in sorted(directory.iterdir()):
                if path.is_symlink():
                    self.inside(path)
                if path.is_file():
                    found[path.name] = path
        except OSError as error:
            raise self.error(directory, f"can't be listed ({error.strerror})", "Check its permissions.") from None
        return found

    def read_json(self, path: Path, *, encoding: str = "utf-8") -> dict[str, Any]:
        """The JSON object in a file of the model. A key given twice is an error: no reader may choose for the user."""
        raw = self.read_bytes(path)
        advice = "Correct it, or download it again."
        try:
            document = json.loads(raw.decode(encoding), object_pairs_hook=unique_dict)
        except DuplicateKeyError as error:
            raise self.error(path, f"says two things: {error}", advice) from None
        except (ValueError, RecursionError) as error:
            known = describe_impostor(raw[:512]) if not raw.lstrip().startswith(b"{") else None
            if known:
                raise self.error(path, f"is {known[0]}", known[1]) from None
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
            raise self.error(path, f"is not valid JSON ({reason})", advice) from None
        if not isinstance(document, dict):
            raise self.error(path, f"holds a JSON {type(document).__name__} instead of an object", advice)
        return document

    def read_bytes(self, path: Path) -> bytes:
        """The content of a small file of the model."""
        self.inside(path)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise self.error(path, "is not a regular file", "Download it again.")
            if status.st_size > MAX_TEXT_BYTES:
                what = f"has {status.st_size:,} bytes, too many for a text file (limit {MAX_TEXT_BYTES:,})"
                raise self.error(path, what, "Download it again.")
            return path.read_bytes()
        except FileNotFoundError:
            raise self.error(path, "is missing", "Download it again.") from None
        except OSError as error:
            raise self.error(path, f"can't be read ({error.strerror})", "Check its permissions.") from None


def plain_parts(name: str) -> list[str] | None:
    """The parts of a plain relative name, or None if it could mean anything else on any system.

    Refused: empty parts (so absolute and UNC paths), ".", "..", a colon (drive letters, NTFS streams) and control
    characters. Backslashes count as slashes.
    """
    parts = name.replace("\\", "/").split("/")
    if any(part in ("", ".", "..") or ":" in part for part in parts):
        return None
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return None
    return parts
