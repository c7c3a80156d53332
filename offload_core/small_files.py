"""Small JSON files in the user's cache folder: what was measured, learnt or traced, and may be made again."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where they are: PHASE_OFFLOAD_CACHE, else `phase-offload` in the system's folder for a user's caches."""
    asked = os.environ.get("PHASE_OFFLOAD_CACHE")
    if asked:
        return Path(asked)
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phase-offload"


def read_json(file: Path) -> dict[str, Any]:
    """What a file holds; nothing if it isn't there or isn't an object."""
    try:
        kept = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def write_json(file: Path, data: dict[str, Any], *, indent: int | None = None) -> None:
    """Whole or not at all; that nothing can be kept is no reason to fail."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as part:
            json.dump(data, part, indent=indent)
        os.replace(name, file)
