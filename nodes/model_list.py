"""The models a person can choose: the diffusers folders below the host's roots, the demo model of this pack, and
checkpoints that hold a whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload_core import demo
from offload_core.checkpoint import show
from offload_core.errors import ModelError

if TYPE_CHECKING:
    from offload_core.single_files import ModelFiles

DEMO_MODEL = "phase-offload-demo"
NO_MODEL = "no model found (run to see where to put one)"
CHECKPOINTS = "checkpoints/"  # what names of single files begin with
FRESH_S = 2.0  # ComfyUI asks for the list once for every node of a prompt

Roots = Callable[[], Sequence[Path]]


class ModelList:
    """Names and places of the models below some roots. Walks again when a root changed, or after two seconds.

    roots: where diffusers folders are. checkpoints: where single files are. Of those only the headers of new and
    changed ones are read, and only those with a denoiser, an encoder and a VAE are listed, after all folders. A folder
    goes before a file of the same name, so that graphs go on meaning what they meant.
    """

    def __init__(self, roots: Roots, checkpoints: Roots = tuple) -> None:
        self._roots, self._checkpoint_roots = roots, checkpoints
        self._files: ModelFiles | None = None  # made when it is asked for: it needs torch
        self._models: dict[str, Path] = {}
        self._checkpoints: dict[str, Path] = {}
        self._unknown: dict[str, Path] = {}  # files that aren't listed because nothing known was found in them
        self._seen: dict[Path, int] | None = None  # root -> time of its last change, at the last walk
        self._walked_s = 0.0

    def names(self) -> list[str]:
        """Names to choose from. Never empty."""
        return [*self.folders(), *self._single_files()] or [NO_MODEL]

    def folders(self) -> dict[str, Path]:
        """The diffusers folders by name, the demo model last."""
        self._look()
        ours = demo_model_folder()
        return self._models if ours is None else {**self._models, DEMO_MODEL: self._models.get(DEMO_MODEL, ours)}

    def folder(self, name: str) -> Path:
        """The folder of a model. Raises ModelError if the name isn't that of a folder in the list."""
        from offload_core import model_list

        models = self.folders()
        if name in models:
            return models[name]
        roots = list(self._roots())
        if name == NO_MODEL:
            raise ModelError(
                f"{model_list.no_models_sentence(roots)} To get one: `hf download OWNER/NAME --local-dir FOLDER/NAME`; "
                "then reload the node list."
            )
        return model_list.choose_model(name, roots)

    def checkpoint(self, name: str) -> Path | None:
        """The file that the name stands for, None if it is to be the name of a folder.

        Raises ModelError for a name that begins as those of files do and isn't in the list.
        """
        from offload_core import model_list

        if name in self.folders() or not name.startswith(CHECKPOINTS):
            return None
        if name not in self._single_files():
            self._seen = None  # it may have been saved a moment ago
        folders, files = self.folders(), self._single_files()
        if name in files:
            return files[name]
        if name in self._unknown:
            return self._unknown[name]  # whoever loads it says what is wrong with it
        if any(folder.startswith(CHECKPOINTS) for folder in folders):
            return None
        near = model_list.near_names(name, (*folders, *files))
        raise ModelError(
            f"There is no checkpoint of a whole model called {show(name)}. "
            + (f"Did you mean {near}? " if near else "")
            + "Choose one from the list; a file that holds only a part of a model goes into Load Split Files."
        )

    def _single_files(self) -> dict[str, Path]:
        self._look()
        return {name: path for name, path in self._checkpoints.items() if name not in self._models}

    def _look(self) -> None:
        from offload_core import model_list

        roots, below = tuple(self._roots()), tuple(self._checkpoint_roots())
        changed = {root: changed_ns(root) for root in (*roots, *below)}
        if changed == self._seen and time.monotonic() - self._walked_s <= FRESH_S:
            return
        self._models = model_list.list_models(roots)
        if self._files is None:
            from offload_core.single_files import ModelFiles
            from offload_core.small_files import cache_folder

            self._files = ModelFiles(cache_folder() / "model_files.json")
        files = self._files.list(below)
        self._checkpoints = {CHECKPOINTS + name: file.path for name, file in files.items() if file.is_whole}
        self._unknown = {CHECKPOINTS + name: file.path for name, file in files.items() if not file.roles}
        self._seen, self._walked_s = changed, time.monotonic()


def demo_model_folder() -> Path | None:
    """The folder of the model that comes with this pack, or None where it was left out."""
    return demo.MODEL if (demo.MODEL / "model_index.json").is_file() else None


def changed_ns(root: Path) -> int:
    """When an entry of the folder came or went the last time; 0 if it isn't there."""
    try:
        return root.stat().st_mtime_ns
    except OSError:
        return 0
