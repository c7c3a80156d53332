"""Runs a function of a test file in a fresh process that has the pretend accelerator, and hands its result back.

The processes are copies of one that has imported the libraries and nothing else, so that each starts in a moment.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import vgpu

TESTS = Path(__file__).parents[1]
#: What the process that is copied imports: the libraries of nearly every function, by the helpers that need them.
PRELOADED = ("vgpu.runner", "staging")


def run_on_vgpu(function: Callable[..., Any], *args: Any, timeout_s: float = 240, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` in a fresh process with "vgpu" installed.

    The function has to stand at the top level of its file; arguments and result have to be JSON values. An exception
    in it fails the test with the child's output. Skips the test where the accelerator can't be built.
    """
    reason = vgpu.why_not()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        call = {
            "file": inspect.getsourcefile(inspect.unwrap(function)),
            "function": function.__qualname__,
            "args": args,
            "kwargs": kwargs,
            "result": str(Path(folder) / "result.json"),
            "output": str(Path(folder) / "output.txt"),
        }
        child = _fresh_processes().Process(target=_run_call, args=(json.dumps(call),))
        child.start()
        child.join(timeout_s)
        ended = child.exitcode
        if ended is None:
            child.kill()
            child.join()
        if ended != 0:
            output = Path(call["output"])
            said = output.read_text(errors="replace")[-6000:] if output.exists() else ""
            pytest.fail(f"{function.__qualname__} on the pretend accelerator: {_how(ended)}\n{said}")
        return json.loads(Path(call["result"]).read_text())


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "its time ran out"
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


@functools.cache
def _fresh_processes() -> Any:
    """Starts processes, each a copy of one that only imported PRELOADED. There is one such for each test process."""
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(list(PRELOADED))
    # One compute thread: a pool of them wouldn't live on in a copy, which would wait for it forever.
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), *sys.path])), "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _run_call(text: str) -> None:
    """The child's side."""
    call = json.loads(text)
    output = os.open(call["output"], os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    vgpu.install()
    spec = importlib.util.spec_from_file_location("test_file_on_vgpu", call["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["function"])(*call["args"], **call["kwargs"])
    Path(call["result"]).write_text(json.dumps(result))
