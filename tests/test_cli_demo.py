"""The command line over the real engine: the demo's pictures, a real Ctrl-C, and input that can't be used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offload_core import cli, demo


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from phase_offload_nodes.command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def test_demo_shows_what_its_captions_say(tmp_path: Path):
    from offload_core.demo.judge import judge
    from offload_core.demo.scenes import parse_caption

    done = command("demo", "--report", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "phase-offload-demo"
    captions = json.loads((demo.MODEL / "phase_offload.json").read_text("utf-8"))["example_prompts"]
    pictures = sorted(folder.glob("[0-9]-*.png"))
    assert len(pictures) == len(captions) == 6
    for caption, picture in zip(captions, pictures, strict=True):
        assert caption in done.stdout and picture.name in done.stdout
        verdict = judge(np.asarray(Image.open(picture)))
        assert verdict.shows(parse_caption(caption)), (caption, verdict)
    assert (folder / "captions.png").is_file()
    phases = json.loads((tmp_path / "r.json").read_text())["phases"]
    assert [phase["name"] for phase in phases] == ["encode", "denoise", "decode"]
    assert [phase["leaked_bytes"] for phase in phases] == [0, 0, 0]


@pytest.mark.slow
def test_demo_says_nothing_but_its_own_words(tmp_path: Path):
    """No bars, warnings or advice of the libraries below."""
    err = command("demo", "--captions", "a red star on a blue background", cwd=tmp_path).stderr
    own = ("encode:", "denoise:", "decode:")
    assert [line for line in err.splitlines() if not line.startswith(own)] == []


def test_demo_in_a_budget_below_its_weights_streams_them_and_draws_the_same(tmp_path: Path):
    for name, options in {"whole": (), "streamed": ("--device-memory", "2MiB")}.items():
        told = ("--captions", "a red star on a blue background", "--output-dir", str(tmp_path / name))
        assert cli.main(["demo", *told, "--report", str(tmp_path / f"{name}.json"), *options]) == 0
    pictures = [next((tmp_path / name).glob("[0-9]-*.png")).read_bytes() for name in ("whole", "streamed")]
    assert pictures[0] == pictures[1]
    denoise = json.loads((tmp_path / "streamed.json").read_text())["phases"][1]
    assert denoise["weight_bytes"] > 2 << 20
    assert denoise["streamed_bytes"] > denoise["weight_bytes"]
    assert denoise["reserved_peak_bytes"] <= denoise["device_budget_bytes"] == 2 << 20


RUN_THAT_TELLS_ITS_FIRST_STEP = """
import sys
from offload_core import _console, cli, demo

draw = _console.ProgressBars.progress

def draw_and_tell(self, event):
    draw(self, event)
    if event.stage == "step" and event.done == 1:
        print("stepping", flush=True)

_console.ProgressBars.progress = draw_and_tell
model = str(demo.MODEL)
argv = ["generate", "--model", model, "--prompt", "a red star on a blue background", "--steps", "900"]
sys.exit(cli.main(argv))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_in_mid_step_leaves_cleanly(tmp_path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", RUN_THAT_TELLS_ITS_FIRST_STEP],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None and child.stdout.readline() == "stepping\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.splitlines()[-1] == "phase-offload: Stopped by Ctrl-C. Nothing was written."
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from offload_core.tiny_models import save_tiny

    folder = tmp_path_factory.mktemp("models") / "flux"
    save_tiny("flux", folder)
    return folder


def test_two_runs_with_one_seed_give_one_picture(tiny_flux: Path, tmp_path: Path):
    argv = ["generate", "--model", str(tiny_flux), "--prompt", "a fox", "--steps", "2", "--width", "48", "--height"]
    for name in ("a.png", "b.png"):
        assert cli.main([*argv, "32", "--seed", "3", "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert Image.open(tmp_path / "a.png").size == (48, 32)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--model", "nowhere"), 4),
        (("--model", "."), 4),
        (("--width", "33"), 2),
        (("--height", "-16"), 2),
        (("--steps", "0"), 2),
        (("--seed", "-1"), 2),
        (("--seed", str(2**64)), 2),
        (("--num-images", "0"), 2),
        (("--dtype", "float31"), 2),
        (("--device", "cuda:99"), 2),
        (("--device", "nonsense"), 2),
        (("--frames", "5"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_input_that_cannot_be_used_is_one_sentence(
    options: tuple[str, ...],
    code: int,
    tiny_flux: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
):
    monkeypatch.chdir(tmp_path)
    argv = ["generate", "--model", str(tiny_flux), "--prompt", "a fox", "--steps", "1", "--width", "32"]
    assert cli.main([*argv, "--height", "32", *options]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("phase-offload: ") and "Unexpected" not in last
    assert os.listdir(tmp_path) == []
