"""ComfyUI's real page in Chromium, for tests: what it takes to open it, and what a person does there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from host.comfy_server import Checkout

CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-dev-shm-usage"]
CHROMIUM_FLAGS += ["--disable-quic", "--disable-background-networking", "--disable-component-update"]
LIMIT_MILLISECONDS = 120_000
RUN_BUTTON = "button[data-testid=queue-button], [data-testid=queue-button] button"

READY = "() => window.app?.extensionManager && window.app.graph && document.querySelector('canvas')"
LISTEN = """() => {
  window.ends = [];
  for (const type of ['execution_success', 'execution_error', 'execution_interrupted'])
    app.api.addEventListener(type, () => window.ends.push(type));
}"""
FIT_VIEW = """() => {
  const nodes = app.graph.nodes;
  const left = Math.min(...nodes.map(node => node.pos[0])), top = Math.min(...nodes.map(node => node.pos[1]));
  const right = Math.max(...nodes.map(node => node.pos[0] + node.size[0]));
  const scale = Math.min(1, (window.innerWidth - 220) / (right - left));
  app.canvas.ds.scale = scale;
  app.canvas.ds.offset = [80 / scale - left, 220 / scale - top];
  app.canvas.setDirty(true, true);
}"""


def node_of_type(workflow: dict[str, Any], type_: str) -> dict[str, Any]:
    (node,) = (node for node in workflow["nodes"] if node["type"] == type_)
    return node


def open_workflow(page: Page, workflow: dict[str, Any]) -> None:
    page.evaluate("async workflow => { await app.loadGraphData(workflow) }", workflow)
    page.wait_for_function("count => app.graph.nodes.length == count", arg=len(workflow["nodes"]))
    page.evaluate(FIT_VIEW)


def alerts(page: Page) -> list[str]:
    """The texts of the notes the page shows in a corner, such as one about a file that isn't a valid workflow."""
    return page.locator(".p-toast-message").all_inner_texts()


def press_run(page: Page) -> str:
    """Presses the Run button, waits until the graph has ended, and says how."""
    page.evaluate(LISTEN)
    page.locator(RUN_BUTTON).first.click()
    page.wait_for_function("() => window.ends.length")
    return page.evaluate("window.ends")[0]


def screenshot(page: Page, name: str, checkout: Checkout, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PHASE_OFFLOAD_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}-{checkout.version}.png")


def set_setting(page: Page, name: str, value: Any) -> None:
    page.evaluate("async ([name, value]) => { await app.extensionManager.setting.set(name, value) }", [name, value])
