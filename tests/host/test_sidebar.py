"""The pack's side panel, settings and notes in ComfyUI's real page, and its routes in the real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from host.comfy_page import (
    LIMIT_MILLISECONDS,
    READY,
    RUN_BUTTON,
    alerts,
    node_of_type,
    open_workflow,
    press_run,
    screenshot,
    set_setting,
)
from staging import tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from host.comfy_server import Checkout, Server

pytestmark = [pytest.mark.host, pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

TINY = {"Wan2.1-T2V-1.3B-Diffusers": "wan21"}
EXAMPLES = Path(__file__).absolute().parents[2] / "example_workflows"
BLUEPRINTS = EXAMPLES.parent / "subgraphs"
TOGGLE = "() => app.extensionManager.command.execute('Workspace.ToggleSidebarTab.phaseOffload')"
OPEN = f"() => document.querySelector('.po-panel') || ({TOGGLE})()"
HAS_TAB = """() => (app.extensionManager.sidebarTab?.sidebarTabs ?? app.extensionManager.getSidebarTabs?.() ?? [])
  .some(tab => tab.id == 'phaseOffload')"""
PHASES = """() => [...document.querySelectorAll('[data-part=last] .po-phase .po-row span:first-child')]
  .map(each => each.textContent)"""
LAST = "() => document.querySelector('[data-part=last]')?.innerText ?? ''"
COPIED = "() => { window.copied = []; navigator.clipboard.writeText = async text => { window.copied.push(text) } }"


@pytest.fixture(params=[False, True], ids=["canvas", "new-nodes"])
def new_nodes(request: pytest.FixtureRequest, page: Page, checkout: Checkout) -> Iterator[bool]:
    """Both ways in which ComfyUI draws nodes."""
    if request.param and checkout.version_numbers < (0, 3, 76):
        pytest.skip(f"ComfyUI {checkout.version} draws the new kind of nodes as an experiment only")
    set_setting(page, "Comfy.VueNodes.Enabled", request.param)
    yield request.param
    set_setting(page, "Comfy.VueNodes.Enabled", False)


@pytest.fixture
def panel(page: Page) -> Iterator[Any]:
    """The side panel, open."""
    page.evaluate(TOGGLE)
    panel = page.locator(".po-panel")
    panel.wait_for()
    yield panel
    page.evaluate(TOGGLE)
    panel.wait_for(state="detached")


def test_panel_shows_the_machine_and_the_phases_of_the_prompt(
    page: Page, panel: Any, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path,
    new_nodes: bool,
) -> None:  # fmt: skip
    node_of_type(workflow, "PhaseOffloadEncodePrompt")["widgets_values"][0] += f", {new_nodes}"  # runs anew
    open_workflow(page, workflow)
    assert press_run(page) == "execution_success"
    page.wait_for_function(f"() => ({LAST})().includes('done')")
    assert page.evaluate(PHASES) == ["Encode", "Denoise", "Decode"]
    page.locator("[data-part=machine]").get_by_text("free of").first.wait_for()
    assert page.locator("[data-part=last] svg polyline").count() >= 1
    screenshot(page, f"sidebar-{'new-nodes' if new_nodes else 'canvas'}", checkout, tmp_path)
    assert alerts(page) == []
    assert faults == []


def test_interrupted_and_failed_prompts_are_told_apart(
    page: Page, panel: Any, workflow: dict[str, Any], faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    denoise = node_of_type(workflow, "PhaseOffloadDenoise")
    denoise["widgets_values"][0], denoise["widgets_values"][2] = 31, 1000
    open_workflow(page, workflow)
    page.evaluate("() => { window.ends = []; app.api.addEventListener('execution_interrupted', () => ends.push(1)) }")
    page.locator(RUN_BUTTON).first.click()
    page.wait_for_function(f"() => ({LAST})().includes('of 1000')")
    screenshot(page, "sidebar-running", checkout, tmp_path)
    page.evaluate("() => app.api.interrupt()")
    page.wait_for_function("() => window.ends.length")
    page.wait_for_function(f"() => ({LAST})().includes('interrupted')")

    node_of_type(workflow, "PhaseOffloadLoad")["widgets_values"][3] = "16KiB"
    denoise["widgets_values"][2] = 2
    open_workflow(page, workflow)
    assert press_run(page) == "execution_error"
    page.wait_for_function(f"() => ({LAST})().includes('failed')")
    assert "Raise device_memory by" in page.evaluate(LAST)
    page.get_by_text("Not enough memory").first.wait_for()
    screenshot(page, "sidebar-refused", checkout, tmp_path)
    page.keyboard.press("Escape")
    close_notes(page)
    assert faults == []


def close_notes(page: Page) -> None:
    page.evaluate("() => app.extensionManager.toast.removeAll?.()")  # newer pages have none
    page.wait_for_function("() => !document.querySelector('.p-toast-message')")


def test_settings_of_the_page_reach_the_server(page: Page, server: Server, faults: list[str]) -> None:
    try:
        set_setting(page, "PhaseOffload.Preset", "low_ram_safe")
        set_setting(page, "PhaseOffload.HostMemory", "90%")
        set_setting(page, "PhaseOffload.Warm", True)
        wanted = {"preset": "low_ram_safe", "host_memory": "90%", "warm": True}
        wait_for_defaults(page, server, wanted)
        set_setting(page, "PhaseOffload.HostMemory", "lots")
        page.get_by_text("host_memory='lots' isn't a usable memory budget").first.wait_for()
        wait_for_defaults(page, server, wanted)
        close_notes(page)
    finally:
        for name, value in (("Preset", "plain"), ("HostMemory", "auto"), ("Warm", False)):
            set_setting(page, f"PhaseOffload.{name}", value)
        wait_for_defaults(page, server, {"preset": "plain", "host_memory": "auto", "warm": False})
    assert faults == []


def wait_for_defaults(page: Page, server: Server, wanted: dict[str, Any]) -> None:
    for _ in range(100):
        found = server.get("/phase_offload/state")["defaults"]
        if wanted.items() <= found.items():
            return
        page.wait_for_timeout(100)
    raise AssertionError(found)


def test_purge_and_copy_report_say_what_they_did(
    page: Page, panel: Any, server: Server, faults: list[str], workflow: dict[str, Any]
) -> None:
    page.evaluate(COPIED)
    page.get_by_role("button", name="Copy report").click()
    page.wait_for_function("() => window.copied.length")
    assert page.evaluate("window.copied")[0].startswith("Phase Offload ")
    page.get_by_role("button", name="Purge").click()
    page.get_by_text("ComfyUI unloads its models").first.wait_for()
    close_notes(page)
    assert faults == []


def test_panel_and_nodes_speak_the_persons_language(
    page: Page, chromium: Browser, server: Server, checkout: Checkout, tmp_path: Path, workflow: dict[str, Any]
) -> None:
    set_setting(page, "Comfy.Locale", "fr")
    french = chromium.new_page(viewport=page.viewport_size)
    french.set_default_timeout(LIMIT_MILLISECONDS)
    faults: list[str] = []
    french.on("pageerror", lambda error: faults.append(error.stack or str(error)))
    try:
        french.goto(server.url, wait_until="domcontentloaded")
        french.wait_for_function(READY)
        french.wait_for_function(HAS_TAB)
        french.evaluate(OPEN)
        french.locator(".po-panel").get_by_role("button", name="Copier le rapport").wait_for()
        open_workflow(french, workflow)
        titles = french.evaluate("() => app.graph.nodes.map(node => node.title)")
        screenshot(french, "sidebar-french", checkout, tmp_path)
        assert "Phase de débruitage" in titles
        assert [fault for fault in faults if "phase-offload" in fault] == []
    finally:
        french.close()
        set_setting(page, "Comfy.Locale", "en")


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.json")))
def test_every_template_opens_and_runs(
    page: Page, server: Server, name: str, faults: list[str], checkout: Checkout, tmp_path: Path, new_nodes: bool
) -> None:
    """Those whose model doesn't come along with a tiny one of its family under its name, at its size."""
    workflow = json.loads((EXAMPLES / f"{name}.json").read_text())
    model = node_of_type(workflow, "PhaseOffloadLoad")["widgets_values"][0]
    for node in workflow["nodes"]:
        if node["type"] == "PhaseOffloadDenoise":
            node["widgets_values"][:3] = [100 + new_nodes, "fixed", 4]
            if model in TINY:
                node["widgets_values"][4:6] = [64, 64]
    place = server.diffusers_folder / model
    if model in TINY and not place.exists():
        place.symlink_to(tiny_model(TINY[model]), target_is_directory=True)
    open_workflow(page, workflow)
    assert press_run(page) == "execution_success"
    screenshot(page, f"template-{name}-{'new-nodes' if new_nodes else 'canvas'}", checkout, tmp_path)
    assert alerts(page) == []
    assert faults == []


WITH_ENDS = """() => {
  const [phases] = app.graph.nodes;
  const load = LiteGraph.createNode('PhaseOffloadLoad'), save = LiteGraph.createNode('SaveImage');
  for (const [node, x] of [[load, -450], [save, 500]]) { node.pos = [x, 0]; app.graph.add(node); }
  load.connect(0, phases, 0);
  phases.connect(0, save, 0);
  const set = (name, value) => { phases.widgets.find(widget => widget.name == name).value = value };
  set('prompt', 'a small green square on a white background');
  set('steps', 4);
}"""


def test_blueprint_is_offered_opens_and_runs(
    page: Page, server: Server, faults: list[str], checkout: Checkout, tmp_path: Path
) -> None:
    if checkout.version_numbers < (0, 3, 76):
        pytest.skip(f"ComfyUI {checkout.version} has no blueprints of packs")
    (file,) = BLUEPRINTS.glob("*.json")
    assert file.stem in [entry["name"] for entry in server.get("/global_subgraphs").values()]
    open_workflow(page, json.loads(file.read_text()))
    page.evaluate(WITH_ENDS)
    assert press_run(page) == "execution_success"
    screenshot(page, "blueprint", checkout, tmp_path)
    assert alerts(page) == []
    assert faults == []


# The routes


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_routes_answer_with_json(server: Server, prefix: str) -> None:
    assert server.get(f"{prefix}/phase_offload/state")["machine"]["host"]["total"] > 0
    assert isinstance(server.get(f"{prefix}/phase_offload/history")["runs"], list)
    assert server.get(f"{prefix}/phase_offload/report")["text"].startswith("Phase Offload ")
    assert server.post(f"{prefix}/phase_offload/purge", {}) == {"warm_bytes": 0}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json", "Origin": "http://elsewhere.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
    ids=["another-site", "a-form"],
)
def test_other_sites_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    request = urllib.request.Request(f"{server.url}/phase_offload/purge", b"{}", headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.code == status
