"""The package: dependencies, what is in a wheel, how fast it imports, and that the root stays out of pytest's way."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
IMPORT_LIMIT_S = 0.3


def python(code: str, **options: Any) -> Any:
    """What a fresh interpreter printed as JSON, started in a folder that has nothing to import."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_requirements_equal_the_projects_dependencies():
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == PROJECT["project"]["dependencies"]


def test_torch_is_an_open_range():
    (torch,) = [line for line in PROJECT["project"]["dependencies"] if line.startswith("torch")]
    assert torch.startswith("torch>=") and "<" not in torch and "==" not in torch


def test_version_is_stated_once_more_only_in_the_package():
    import offload_core

    assert offload_core.__version__ == PROJECT["project"]["version"]


def test_every_package_is_listed():
    """Setuptools can't find packages by itself where a folder is installed under another name."""
    found = set()
    for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.slow
def test_wheel_holds_both_packages_and_the_demo_model(tmp_path: Path):
    """Built by this interpreter's setuptools from a copy, so that nothing is left in the checkout."""
    import shutil
    import zipfile

    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("offload_core", "nodes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(repr(build_meta.build_wheel('..')))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("phase_offload-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"offload_core/cli.py", "offload_core/py.typed", "phase_offload_nodes/command.py"}
    expected |= {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_core/demo/model").rglob("*") if path.is_file()
    }
    assert expected <= names
    assert "offload_core/demo/model/model_index.json" in names
    assert not [name for name in names if name.startswith(("nodes/", "tests/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


# ------------------------------------------------------------------------------------------------ imports

IMPORT_ENGINE = """
import json, sys, time
import torch
start = time.perf_counter()
import offload_core
seconds = time.perf_counter() - start
heavy = [name for name in ("diffusers", "transformers", "accelerate", "matplotlib") if name in sys.modules]
print(json.dumps([seconds, heavy]))
"""

#: As ComfyUI imports a pack: by the path of its folder, under a name that no import statement could write.
IMPORT_PACK = f"""
import importlib.util, json, sys, time
import torch
start = time.perf_counter()
name = "custom_nodes_x_phase-offload"
spec = importlib.util.spec_from_file_location(name, {str(ROOT / "__init__.py")!r})
pack = importlib.util.module_from_spec(spec)
sys.modules[name] = pack
spec.loader.exec_module(pack)
seconds = time.perf_counter() - start
heavy = [name for name in ("diffusers", "transformers", "accelerate", "matplotlib") if name in sys.modules]
"""


@pytest.mark.parametrize(
    "code", [IMPORT_ENGINE, IMPORT_PACK + "print(json.dumps([seconds, heavy]))"], ids=["engine", "pack"]
)
def test_import_takes_a_moment_and_loads_no_model_library_and_none_to_draw(code: str, tmp_path: Path):
    """The best of three, so that a busy machine doesn't matter."""
    runs = [python(code, cwd=tmp_path) for _ in range(3)]
    assert all(heavy == [] for _, heavy in runs)
    assert min(seconds for seconds, _ in runs) < IMPORT_LIMIT_S


def test_pack_and_installed_engine_are_one_module(tmp_path: Path):
    compare = """
import offload_core, phase_offload_nodes
from offload_core.errors import OffloadError
from phase_offload_nodes.catalog import load
print(json.dumps({
    "engine": offload_core.__file__,
    "nodes": phase_offload_nodes.__file__,
    "one class": load.OffloadError is OffloadError,
    "copies": [name for name in sys.modules if name.endswith(("errors", "catalog")) and "offload" in name],
    "nodes is free": "nodes" not in sys.modules,
}))
"""
    answer = python(IMPORT_PACK + compare, cwd=tmp_path)
    assert answer == {
        "engine": str(ROOT / "offload_core" / "__init__.py"),
        "nodes": str(ROOT / "nodes" / "__init__.py"),
        "one class": True,
        "copies": ["offload_core.errors", "phase_offload_nodes.catalog"],
        "nodes is free": True,
    }


def test_every_name_of_the_engine_loads_when_it_is_asked_for(tmp_path: Path):
    code = """
import json
import offload_core
print(json.dumps({name: getattr(offload_core, name).__name__ for name in offload_core.__all__}))
"""
    names = python(code, cwd=tmp_path)
    assert all(name == own for name, own in names.items())
    assert {"enable_offload", "BudgetError", "ManagedModuleError", "OffloadSettings"} <= set(names)


def test_command_starts_without_torch(tmp_path: Path):
    """So `--help` and a wrong option answer at once."""
    code = """
import json, sys
from phase_offload_nodes.command import main
try:
    main(["generate", "--help"])
except SystemExit as leaving:
    sys.stdout = sys.__stdout__
    code = leaving.code
print(json.dumps([code, "torch" in sys.modules]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [0, False]


# ------------------------------------------------------------------------------------------------- sources


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", sources("offload_core"), ids=lambda path: str(path.relative_to(ROOT)))
def test_engine_knows_no_host_and_never_prints(path: Path):
    host = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "nodes", "phase_offload_nodes"}
    assert not imported_names(path) & host
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


TALKS_TO_COMFYUI = ("host.py", "comfy_memory.py", "comfy_v3.py")


@pytest.mark.parametrize("path", sources("nodes"), ids=lambda path: str(path.relative_to(ROOT)))
def test_comfyui_is_imported_in_few_modules_and_only_when_it_is_asked(path: Path):
    host = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "nodes"}
    assert path.name in TALKS_TO_COMFYUI or not imported_names(path) & host
    at_import = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Import)]
    assert not {alias.name.partition(".")[0] for node in at_import for alias in node.names} & host


DRAWS = ("_charts.py", "plan_chart.py", "report_chart.py", "sound_chart.py")


@pytest.mark.parametrize("path", [*sources("offload_core"), *sources("nodes")], ids=lambda p: str(p.relative_to(ROOT)))
def test_matplotlib_comes_only_where_something_is_drawn(path: Path):
    """Modules that draw import it, and others import these inside the function that asks for a drawing."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {id(node) for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) for node in ast.walk(part)}
    at_once = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in inside]
    if path.name not in DRAWS:
        assert "matplotlib" not in imported_names(path)
        names = {name for node in at_once for name in (node.module or "", *(alias.name for alias in node.names))}
        assert not {name.rpartition(".")[2] + ".py" for name in names} & set(DRAWS)
    assert "pyplot" not in path.read_text("utf-8").replace("without pyplot", "")


# ---------------------------------------------------------------------------------------- pytest and the root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose root ends the run if anything imports it, with this project's settings and conftest."""
    root = tmp_path / "phase-offload.checkout"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('the root was imported')\n")
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"))
    (root / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    (root / "tests" / "helper.py").write_text("ANSWER = 42\n")
    test = "from helper import ANSWER\n\ndef test_it():\n    assert ANSWER == 42\n"
    (root / "tests" / "test_one.py").write_text(test)
    return root


@pytest.mark.parametrize(
    ("folder", "arguments"),
    [
        (".", []),
        pytest.param(".", ["."], marks=pytest.mark.slow),
        pytest.param(".", ["tests"], marks=pytest.mark.slow),
        (".", ["tests/test_one.py::test_it"]),
        pytest.param("tests", [], marks=pytest.mark.slow),
        pytest.param("tests", ["-k", "it"], marks=pytest.mark.slow),
    ],
)
def test_pytest_never_imports_the_root(checkout: Path, folder: str, arguments: list[str]):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=checkout / folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
