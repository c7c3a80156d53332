"""The pack in ComfyUI's real page, in Chromium: the example workflow opens, runs and shows its picture.

PHASE_OFFLOAD_SCREENSHOTS names a folder that gets the screenshots; without it they go to the test's own folder.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from host.comfy_page import (
    alerts,
    node_of_type,
    open_workflow,
    press_run,
    screenshot,
    set_setting,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from host.comfy_server import Checkout, Server

pytestmark = [pytest.mark.host, pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).absolute().parents[2]
SHOWN_PICTURES = """() => app.graph.nodes.filter(node => node.type == 'SaveImage')
  .flatMap(node => node.imgs ?? []).map(image => [image.naturalWidth, image.naturalHeight])"""
VISIBLE_PICTURES = """() => [...document.querySelectorAll('[data-node-id] img')].map(image =>
  [image.naturalWidth, image.naturalHeight])"""
ERROR_DETAILS = re.compile("View details|See Error", re.IGNORECASE)  # of the note about a failed run
LOAD_WIDGETS = """() => app.graph.nodes.find(node => node.type == 'PhaseOffloadLoad')
  .widgets.map(widget => widget.value)"""
ONLY_PLAN = """steps => {
  for (const node of [...app.graph.nodes]) if (node.type != 'PhaseOffloadLoad') app.graph.remove(node);
  const [load] = app.graph.nodes;
  const plan = LiteGraph.createNode('PhaseOffloadPlanPreview');
  plan.pos = [load.pos[0] + load.size[0] + 60, load.pos[1]];
  plan.widgets.find(widget => widget.name == 'steps').value = steps;
  app.graph.add(plan);
  load.connect(0, plan, 0);
  app.canvas.ds.scale = 0.7;
  app.canvas.ds.offset = [120 - load.pos[0], 120 - load.pos[1]];
}"""
PHASES = ["encode", "denoise", "decode", "all"]
PLAN_TABLE = """() => [...document.querySelectorAll('pre')].map(each => each.textContent)
  .find(text => text.includes('device peak'))"""
PLAN_SAVED = """() => app.graph.serialize().nodes.find(node => node.type == 'PhaseOffloadPlanPreview').widgets_values"""
PLAN_PICTURES = """() => app.graph.nodes.filter(node => node.type == 'PhaseOffloadPlanPreview')
  .flatMap(node => node.imgs ?? []).map(image => [image.naturalWidth, image.naturalHeight])"""


def test_example_workflow_runs_in_the_page(
    page: Page, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    open_workflow(page, workflow)
    assert press_run(page) == "execution_success"
    page.wait_for_function(f"() => ({SHOWN_PICTURES})().some(([width]) => width > 0)")
    screenshot(page, "text-to-image", checkout, tmp_path)
    assert alerts(page) == []
    assert faults == []


def test_example_workflow_runs_with_the_new_kind_of_nodes(
    page: Page, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    """ComfyUI draws nodes on a canvas or, if the person chose so, as elements of the page."""
    known = page.evaluate("() => 'Comfy.VueNodes.Enabled' in app.ui.settings.settingsLookup")
    if not known:
        pytest.skip(f"ComfyUI {checkout.version} draws nodes on a canvas only")
    node_of_type(workflow, "PhaseOffloadDenoise")["widgets_values"][0] = 6  # else all is cached
    set_setting(page, "Comfy.VueNodes.Enabled", True)
    try:
        open_workflow(page, workflow)
        assert press_run(page) == "execution_success"
        page.wait_for_function(f"() => ({VISIBLE_PICTURES})().some(([width]) => width > 0)")
        screenshot(page, "text-to-image-new-nodes", checkout, tmp_path)
        assert faults == []
    finally:
        set_setting(page, "Comfy.VueNodes.Enabled", False)


@pytest.mark.parametrize("new_nodes", [False, True], ids=["canvas", "new-nodes"])
def test_plan_preview_shows_table_and_chart_on_the_node(
    page: Page, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path, new_nodes: bool
) -> None:
    if new_nodes and checkout.version_numbers < (0, 3, 76):
        pytest.skip(f"ComfyUI {checkout.version} draws the new kind of nodes as an experiment only")
    steps = 3 if new_nodes else 2  # else all is cached
    set_setting(page, "Comfy.VueNodes.Enabled", new_nodes)
    try:
        open_workflow(page, workflow)
        page.evaluate(ONLY_PLAN, steps)
        assert press_run(page) == "execution_success"
        pictures = VISIBLE_PICTURES if new_nodes else PLAN_PICTURES
        page.wait_for_function(f"() => ({pictures})().some(([width]) => width == 1800)")
        page.wait_for_function(PLAN_TABLE)
        assert [line.split()[0] for line in page.evaluate(PLAN_TABLE).splitlines()[2:6]] == PHASES
        screenshot(page, f"plan-preview-{'new-nodes' if new_nodes else 'canvas'}", checkout, tmp_path)
        saved = page.evaluate(PLAN_SAVED)
        assert saved[:6] == ["", steps, -1, 0, 0, 1] and "device peak" not in str(saved)  # the table isn't saved
        if checkout.version_numbers >= (0, 3, 76):  # older pages forget what nodes showed, pictures too
            own = page.evaluate("() => app.extensionManager.workflow.activeWorkflow.filename")
            page.get_by_text("Unsaved Workflow", exact=True).first.click()
            page.wait_for_function("() => !app.graph.nodes.some(node => node.type == 'PhaseOffloadPlanPreview')")
            page.get_by_text(own, exact=True).first.click()
            page.wait_for_function(PLAN_TABLE)
        assert faults == []
    finally:
        set_setting(page, "Comfy.VueNodes.Enabled", False)


def test_workflow_saved_before_there_were_budgets_opens_and_runs(
    page: Page, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    load = node_of_type(workflow, "PhaseOffloadLoad")
    names = ["device_memory", "host_memory", "warm", "settings", "weight_storage"]
    load["inputs"] = [entry for entry in load["inputs"] if entry["name"] not in names]
    load["widgets_values"], load["size"] = load["widgets_values"][:3], [370, 130]
    node_of_type(workflow, "PhaseOffloadDenoise")["widgets_values"][0] = 7  # else all is cached
    open_workflow(page, workflow)
    screenshot(page, "older-workflow", checkout, tmp_path)
    assert page.evaluate(LOAD_WIDGETS) == [*load["widgets_values"], "auto", "auto", False, "as stored"]
    assert press_run(page) == "execution_success"
    assert alerts(page) == []
    assert faults == []


def test_unusable_budget_is_shown_to_the_person(
    page: Page, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    node_of_type(workflow, "PhaseOffloadLoad")["widgets_values"][3] = "lots"
    open_workflow(page, workflow)
    assert press_run(page) == "execution_error"
    shown = page.get_by_text("device_memory='lots' isn't a usable memory budget")
    if not shown.count():
        page.get_by_text(ERROR_DETAILS).first.click()
    shown.first.wait_for()
    screenshot(page, "unusable-budget", checkout, tmp_path)
    page.keyboard.press("Escape")  # else the dialog covers the page in the tests that follow
    page.locator(".p-dialog-mask").first.wait_for(state="hidden")
    assert faults == []


@pytest.mark.parametrize("node_type", ["Load", "EncodePrompt", "Denoise", "PurgeCache", "VAEDecode"])
def test_help_page_of_a_node_is_shown(page: Page, workflow: dict[str, Any], faults: list[str], node_type: str) -> None:
    title = help_title(f"PhaseOffload{node_type}")
    open_workflow(page, workflow)
    select_node(page, f"PhaseOffload{node_type}")
    page.get_by_test_id("info-button").click()
    page.locator(".node-help-content").get_by_role("heading", name=title, exact=True).first.wait_for()
    assert faults == []


def help_title(node_type: str) -> str:
    first_line = (REPOSITORY / "web" / "docs" / f"{node_type}.md").read_text().splitlines()[0]
    assert first_line.startswith("# ")
    return first_line.removeprefix("# ").strip()


def select_node(page: Page, node_type: str) -> None:
    page.evaluate("type => app.canvas.selectNode(app.graph.nodes.find(node => node.type == type))", node_type)


def test_failed_node_is_shown_to_the_person(
    page: Page, workflow: dict[str, Any], checkout: Checkout, tmp_path: Path, server: Server
) -> None:
    """A model whose weights can't be read: the page must say so, whichever node finds it out."""
    broken = server.diffusers_folder / f"broken-{tmp_path.name}"
    shutil.copytree(REPOSITORY / "offload_core" / "demo" / "model", broken)
    for weights in broken.rglob("*.safetensors"):
        weights.write_bytes(b"not a safetensors file")
    try:
        node_of_type(workflow, "PhaseOffloadLoad")["widgets_values"][0] = broken.name
        open_workflow(page, workflow)
        assert press_run(page) == "execution_error"
        screenshot(page, "broken-model", checkout, tmp_path)
    finally:
        shutil.rmtree(broken)


def test_example_is_offered_in_the_templates_dialog(page: Page, checkout: Checkout, tmp_path: Path) -> None:
    from host.comfy_server import PACK_FOLDER

    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_text(PACK_FOLDER, exact=True).first.click()
    page.get_by_text("text_to_image", exact=True).first.click()
    page.wait_for_function("() => app.graph.nodes.some(node => node.type == 'PhaseOffloadLoad')")
