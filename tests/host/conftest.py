"""Fixtures for tests against real ComfyUI servers.

COMFYUI_DIR names one checkout or several (separated like PATH); COMFYUI_PYTHON the Python of each, by default the one
that runs the tests. Without COMFYUI_DIR all these tests are skipped. COMFYUI_FRONTEND names the folder of another
release of ComfyUI's page (`static` of the package comfyui-frontend-package); by default each checkout has its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
    page = os.environ.get("COMFYUI_FRONTEND")
    with boot("--preview-method", "auto", *(("--front-end-root", page) if page else ())) as server:
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


# ComfyUI's page


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    from host.comfy_page import CHROMIUM_FLAGS

    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright isn't installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("Chromium isn't installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, headless=True, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def comfy_page(server: Server, chromium: Browser) -> Iterator[tuple[Page, list[str]]]:
    """ComfyUI's page, ready, with nothing to reach but the server; and the errors of its scripts from then on."""
    from host.comfy_page import LIMIT_MILLISECONDS, READY

    faults: list[str] = []
    page = chromium.new_page(viewport={"width": 1920, "height": 900})
    page.set_default_timeout(LIMIT_MILLISECONDS)
    own = (server.url, "data:", "blob:")
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(own) else route.abort())
    page.goto(server.url, wait_until="domcontentloaded")
    page.wait_for_function(READY)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page, faults
    page.close()


@pytest.fixture
def page(comfy_page: tuple[Page, list[str]]) -> Page:
    return comfy_page[0]


@pytest.fixture
def faults(comfy_page: tuple[Page, list[str]]) -> list[str]:
    """Errors of the page's scripts since this test began."""
    comfy_page[1].clear()
    return comfy_page[1]


@pytest.fixture
def workflow() -> dict[str, Any]:
    """The example workflow in the UI format, made quick."""
    from host.comfy_page import node_of_type

    workflow = json.loads((REPOSITORY / "example_workflows" / "text_to_image.json").read_text())
    denoise = node_of_type(workflow, "PhaseOffloadDenoise")
    denoise["widgets_values"][0] = 5  # the seed
    denoise["widgets_values"][1] = "fixed"
    return workflow
