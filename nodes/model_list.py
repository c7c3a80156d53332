"""The models a person can choose: the diffusers folders below the host's roots, and the demo model of this pack."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from offload_core import demo
from offload_core.errors import ModelError

DEMO_MODEL = "phase-offload-demo"
NO_MODEL = "no model found (run to see where to put one)"
FRESH_S = 2.0  # ComfyUI asks for the list once for every node of a prompt


class ModelList:
    """Names and folders of the models below some roots. Walks again when a root changed, or after two seconds."""

    def __init__(self, roots: Callable[[], Sequence[Path]]) -> None:
        self._roots = roots
        self._models: dict[str, Path] = {}
        self._seen: dict[Path, int] | None = None  # root -> time of its last change, at the last walk
        self._walked_s = 0.0

    def names(self) -> list[str]:
        """Names to choose from. Never empty."""
        return list(self._all()) or [NO_MODEL]

    def folder(self, name: str) -> Path:
        """The folder of a model. Raises ModelError if the name isn't in the list."""
        from offload_core import model_list

        models = self._all()
        if name in models:
            return models[name]
        roots = list(self._roots())
        if name == NO_MODEL:
            raise ModelError(
                f"{model_list.no_models_sentence(roots)} To get one: `hf download OWNER/NAME --local-dir FOLDER/NAME`; "
                "then reload the node list."
            )
        return model_list.choose_model(name, roots)

    def _all(self) -> dict[str, Path]:
        from offload_core import model_list

        roots = {root: changed_ns(root) for root in self._roots()}
        if roots != self._seen or time.monotonic() - self._walked_s > FRESH_S:
            self._models = model_list.list_models(roots)
            self._seen, self._walked_s = roots, time.monotonic()
        ours = demo_model_folder()
        return self._models if ours is None else {**self._models, DEMO_MODEL: self._models.get(DEMO_MODEL, ours)}


def demo_model_folder() -> Path | None:
    """The folder of the model that comes with this pack, or None where it was left out."""
    return demo.MODEL if (demo.MODEL / "model_index.json").is_file() else None


def changed_ns(root: Path) -> int:
    """When an entry of the folder came or went the last time; 0 if it isn't there."""
    try:
        return root.stat().st_mtime_ns
    except OSError:
        return 0
