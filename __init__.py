"""ComfyUI's door to the pack: where its nodes and its web files are. Importing it loads nothing heavy.

ComfyUI imports a pack under the name of its path, while the engine is one package for everybody. So the door makes
the pack's own folders available under their top-level names, one module each: `offload_core` and
`phase_offload_nodes`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

_FOLDERS = {"offload_core": "offload_core", "phase_offload_nodes": "nodes"}


def _import_own(name: str, folder: Path) -> ModuleType:
    """The package in `folder` as the one module called `name`. Raises ImportError if another version has that name."""
    module = sys.modules.get(name)
    if module is not None:
        found = Path(next(iter(getattr(module, "__path__", ())), "."))
        version, own = getattr(module, "__version__", "unknown"), _version_in(folder.parent)
        if found.resolve() != folder and version != own:
            raise ImportError(
                f"{name} {version} was already imported from {found}, but this pack brings {own}: "
                "keep one copy of the pack, or make both the same version."
            )
    else:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _version_in(root: Path) -> str:
    """The version that the pack's own engine states, read without importing it."""
    for line in (root / "offload_core" / "__init__.py").read_text("utf-8").splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("\"'")
    return "unknown"


for _name, _folder in _FOLDERS.items():
    _import_own(_name, Path(__file__).resolve().parent / _folder)


async def comfy_entrypoint() -> Any:
    """Called by ComfyUI: the extension with all nodes."""
    from phase_offload_nodes.comfy_v3 import make_extension
    from phase_offload_nodes.host import ComfyHost
    from phase_offload_nodes.routes import ROUTES
    from phase_offload_nodes.state import PackState

    host = ComfyHost()
    state = PackState(host)
    host.serve(ROUTES, state)
    return make_extension(state)
