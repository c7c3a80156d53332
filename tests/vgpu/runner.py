"""Runs a function of a test file in a fresh process that has the pretend accelerator, and hands its result back."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vgpu

TESTS = Path(__file__).parents[1]


def run_on_vgpu(function: Callable[..., Any], *args: Any, timeout_s: float = 240, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` in a fresh process with "vgpu" installed.

    The function has to stand at the top level of its file; arguments and result have to be JSON values. An exception
    in it fails the test with the child's output. Skips the test where the accelerator can't be built.
    """
    reason = vgpu.why_not()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        result_file = Path(folder) / "result.json"
        call = {
            "file": inspect.getsourcefile(inspect.unwrap(function)),
            "function": function.__qualname__,
            "args": args,
            "kwargs": kwargs,
            "result": str(result_file),
        }
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        child = subprocess.run(
            [sys.executable, "-m", "vgpu.runner", json.dumps(call)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if child.returncode != 0:
            how = f"signal {signal.Signals(-child.returncode).name}" if child.returncode < 0 else child.returncode
            pytest.fail(f"{function.__qualname__} ended with {how} on the pretend accelerator:\n{child.stdout[-6000:]}")
        return json.loads(result_file.read_text())


def _run_call(call: dict[str, Any]) -> None:
    """The child's side."""
    vgpu.install()
    spec = importlib.util.spec_from_file_location("test_file_on_vgpu", call["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["function"])(*call["args"], **call["kwargs"])
    Path(call["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    _run_call(json.loads(sys.argv[1]))
