"""Fixtures for tests against real ComfyUI servers.

COMFYUI_DIR names one checkout or several (separated like PATH); COMFYUI_PYTHON the Python of each, by default the one
that runs the tests. Without COMFYUI_DIR all these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

if TYPE_CHECKING:
    from host.comfy_server import Checkout, Server

REPOSITORY = Path(__file__).absolute().parents[2]
LINKED_MODEL = "linked/demo"

Boot = Callable[..., "AbstractContextManager[Server]"]


def _checkouts() -> list[Checkout | None]:
    if not os.environ.get("COMFYUI_DIR"):
        return [None]
    from host.comfy_server import checkouts_from_environment

    return list(checkouts_from_environment())


@pytest.fixture(scope="session", params=_checkouts(), ids=lambda checkout: checkout.version if checkout else "no-host")
def checkout(request: pytest.FixtureRequest) -> Checkout:
    """Each checkout of ComfyUI in turn."""
    if request.param is None:
        pytest.skip("COMFYUI_DIR names no ComfyUI checkout")
    return request.param


@pytest.fixture(scope="session")
def boot(checkout: Checkout, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """`with boot("--flag", ...) as server`: a server of this checkout with the pack and a linked model. packs: other
    packs that are linked beside it."""
    from host.comfy_server import running_server

    def boot(*flags: str, packs: Sequence[Path] = ()) -> AbstractContextManager[Server]:
        base = tmp_path_factory.mktemp(f"comfyui-{checkout.version}")
        link = base / "models" / "diffusers" / LINKED_MODEL
        link.parent.mkdir(parents=True)
        link.symlink_to(demo_model, target_is_directory=True)
        (base / "custom_nodes").mkdir()
        for other in packs:
            (base / "custom_nodes" / other.name).symlink_to(other, target_is_directory=True)
        return running_server(checkout, REPOSITORY, base, flags)

    return boot


@pytest.fixture(scope="session")
def server(boot: Boot) -> Iterator[Server]:
    """A server with the default flags and previews on."""
    with boot("--preview-method", "auto") as server:
        yield server


@pytest.fixture
def graph() -> dict[str, dict[str, Any]]:
    """The example graph in API format."""
    return json.loads((REPOSITORY / "example_workflows" / "api" / "text_to_image.json").read_text())


@pytest.fixture
def run_on_the_command_line(checkout: Checkout, tmp_path: Path) -> Callable[[dict[str, Any]], Image.Image]:
    """Runs a graph with `phase-offload run`, under the server's own Python, and gives the picture it saves."""

    def run(graph: dict[str, Any]) -> Image.Image:
        packages = tmp_path / "packages"  # the names under which the pack's folders are installed
        packages.mkdir()
        for name, folder in (("offload_core", "offload_core"), ("phase_offload_nodes", "nodes")):
            (packages / name).symlink_to(REPOSITORY / folder, target_is_directory=True)
        file, output = tmp_path / "graph.json", tmp_path / "pictures"
        file.write_text(json.dumps(graph))
        start = "import sys; from phase_offload_nodes.command import main; sys.exit(main())"
        subprocess.run(
            [checkout.python, "-c", start, "run", str(file), "--output-dir", str(output)],
            env=os.environ | {"PYTHONPATH": str(packages)},
            cwd=tmp_path,
            check=True,
        )
        (picture,) = output.glob("**/*.png")
        return Image.open(picture)

    return run


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the model that comes with the pack."""
    return REPOSITORY / "offload_core" / "demo" / "model"
