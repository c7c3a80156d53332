"""The pack as the Comfy registry takes it: metadata, what is packed and what isn't, pictures, readable files."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def tracked_files() -> list[str]:
    """What `comfy node pack` starts from: files of git, else what a source archive holds."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this isn't a git checkout")
    return [name for name in listed if (ROOT / name).is_file()]


def packed_files() -> list[str]:
    """Those that .comfyignore leaves. Its lines are folders of the root and patterns of names."""
    lines = (ROOT / ".comfyignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    folders, names = [rule for rule in rules if rule.endswith("/")], [rule for rule in rules if not rule.endswith("/")]
    return [
        name
        for name in tracked_files()
        if not name.startswith(tuple(folders)) and not any(fnmatch.fnmatch(Path(name).name, rule) for rule in names)
    ]


def test_metadata_is_what_the_registry_asks_for() -> None:
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert "comfy" not in project["name"] and len(project["name"]) < 100
    assert len(project["version"].split(".")) == 3
    assert project["description"] and project["license"] == "Apache-2.0"
    assert comfy["PublisherId"] and comfy["DisplayName"] == "Phase Offload"
    assert comfy["requires-comfyui"] == ">=0.3.64"
    assert "web" not in comfy  # the door says where it is; both would serve it twice
    known = ("Environment :: GPU", "Environment :: NPU")
    assert all(c.startswith(known) for c in project["classifiers"] if c.startswith("Environment ::"))


def test_the_pack_holds_what_it_needs_and_no_tests_or_docs() -> None:
    packed = set(packed_files())
    needed = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md"}
    for folder in ("nodes", "offload_core", "web", "locales", "example_workflows", "subgraphs"):
        needed |= {name for name in tracked_files() if name.startswith(f"{folder}/")}
    assert needed <= packed
    assert packed - needed <= {".comfyignore", ".gitignore", "CHANGELOG.md"}


def test_every_template_has_a_picture() -> None:
    examples = ROOT / "example_workflows"
    for workflow in examples.glob("*.json"):
        with Image.open(workflow.with_suffix(".jpg")) as picture:
            assert picture.size == (512, 512)
            assert workflow.with_suffix(".jpg").stat().st_size < 50_000


def test_icon_and_banner_have_the_registrys_sizes() -> None:
    with Image.open(ROOT / "docs" / "images" / "icon.png") as icon:
        assert icon.size[0] == icon.size[1] <= 400
    with Image.open(ROOT / "docs" / "images" / "banner.png") as banner:
        assert banner.size[0] * 9 == banner.size[1] * 21


def test_no_file_of_the_pack_holds_what_comfy_test_forbids() -> None:
    """A pack's modules would take ComfyUI's layers; the engine has no ComfyUI and builds none but for measuring."""
    words = r"\.cuda\s*\(", r"\.to\s*\(\s*[\"']cuda", r"torch\.autocast\s*\(", r"torch\.load\s*\("
    layers = r"(?<![\w.])(torch\.)?nn\.(Linear|Conv|LayerNorm|GroupNorm|Embedding)\w*\s*\("
    forbidden = re.compile("|".join((*words, layers)))
    faults = []
    for name in packed_files():
        lines = (ROOT / name).read_text("utf-8").splitlines() if name.endswith(".py") else []
        code = [line for line in lines if not line.lstrip().startswith("#")]
        faults += [f"{name}: {line.strip()}" for line in code if forbidden.search(line)]
    assert faults == []


def test_python_files_can_be_read_on_every_windows() -> None:
    """A console or editor there may still use the code page 1252: other letters are written as escapes."""
    faults = []
    for name in tracked_files():
        if name.endswith(".py"):
            try:
                (ROOT / name).read_text("utf-8").encode("cp1252")
            except UnicodeEncodeError as error:
                faults.append(f"{name}: {error.object[error.start]!a}")
    assert faults == []
