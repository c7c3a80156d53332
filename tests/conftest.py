"""What holds for all tests: no model hub, no terminal, and the checkout's root is a plain folder to pytest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PHASE_OFFLOAD_CACHE"] = str(Path(tempfile.gettempdir()) / "phase-offload-tests")  # never a person's own
if "PYTEST_XDIST_WORKER" in os.environ:  # the tests share the cores already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)


class RootIsNoPackage:
    """Collects the root as a folder although it has an `__init__.py`.

    That file is ComfyUI's door to the pack and works only inside ComfyUI, where the checkout has a package name. A
    hook in a conftest below the root isn't asked about the root; that of a registered plugin is.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsNoPackage())
