"""The command line: exit codes, sentences, files, progress, Ctrl-C. The engine is faked here, so that each error can
be had at will; test_cli_demo.py runs the real one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import types
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import offload_core
from offload_core import cli
from offload_core.errors import DeviceError, InputError, InsufficientMemoryError, ModelError, TraceError
from offload_core.report import PhaseReport
from offload_core.session import Progress, Session
from offload_core.settings import OffloadSettings


class FakeEngine:
    """Stands in for load, encode, denoise and decode; keeps what it was asked for."""

    def __init__(self, images_name: str | None = "num_images_per_prompt") -> None:
        self.handle = SimpleNamespace(
            guidance_name="guidance_scale",
            images_name=images_name,
            makes_video=False,
            only_sound=False,
            seconds_name=None,
        )
        self.asked: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.frames = 0
        self.sound: tuple[torch.Tensor, int] | None = None

    def load(self, model: str, **kwargs: Any) -> SimpleNamespace:
        self.asked["load"] = {"model": model} | kwargs
        return self.handle

    def foresee_job(self, model: Any, *_: Any, **kwargs: Any) -> Any:
        raise TraceError("m can't be traced.")

    def encode(
        self, handle: Any, prompt: Any, negative_prompt: Any = None, *, session: Session, plan: Any = None
    ) -> Any:
        self.asked["encode"] = (prompt, negative_prompt)
        session.observer.progress(Progress("encode", "load", 2**20, 2**20, "bytes"))
        session.report.phases.append(PhaseReport("encode", 1.0, 0.5, 2**20, 0, 2**28, 2**20, 0))
        return SimpleNamespace(count=len(prompt) if isinstance(prompt, list) else 1)

    def denoise(self, handle: Any, embeds: Any, *, seed: int, session: Session, plan: Any = None, **kwargs: Any) -> Any:
        self.asked["denoise"] = {"seed": seed} | kwargs
        for step in range(3):
            session.observer.progress(Progress("denoise", "step", step + 1, 3, "steps"))
        if self.error is not None:
            raise self.error
        return embeds

    def check_denoise(self, handle: Any, **kwargs: Any) -> None:
        self.asked["check"] = kwargs

    def decode(self, handle: Any, latents: Any, *, session: Session, plan: Any = None, **kwargs: Any) -> list[Any]:
        self.asked["decode"] = kwargs
        count = latents.count * self.asked["denoise"].get(self.handle.images_name, 1)
        pictures = [Image.new("RGB", (16, 16), (i, 0, 0)) for i in range(max(count, self.frames))]
        return [pictures] if self.frames else pictures

    def decode_sound(self, handle: Any, latents: Any, *, session: Session) -> Any:
        return self.sound


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    fake = FakeEngine()
    for name in ("load", "check_denoise", "foresee_job", "encode", "denoise", "decode", "decode_sound"):
        monkeypatch.setattr(offload_core, name, getattr(fake, name), raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


GENERATE = ("generate", "--model", "m", "--prompt", "a circle")


def run(*argv: str) -> int:
    """The exit code, whether argparse or the command gave it."""
    try:
        return cli.main(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_generate_writes_a_picture_and_says_where(engine: FakeEngine, tmp_path: Path, capsys: Any):
    assert run(*GENERATE, "--output", "a.png", "--report", "r.json") == 0
    assert sorted(os.listdir(tmp_path)) == ["a.png", "r.json"]
    out = capsys.readouterr().out
    assert "Wrote a.png" in out and "encode" in out


def test_options_that_were_not_given_are_left_to_the_model(engine: FakeEngine):
    assert run(*GENERATE) == 0
    how = {"settings": OffloadSettings(), "weight_storage": "as stored"}
    assert engine.asked["load"] == {"model": "m", "device": "auto", "dtype": "auto", **how}
    assert engine.asked["encode"] == ("a circle", None)
    assert engine.asked["denoise"] == {"seed": 0}
    assert engine.asked["decode"] == {"output_type": "pil", "tiling": "auto"}


def test_options_become_the_pipelines_own_arguments(engine: FakeEngine, tmp_path: Path):
    engine.handle.guidance_name = "true_cfg_scale"
    options = "--negative-prompt blur --width 96 --height 64 --steps 7 --guidance-scale 2.5 --seed 5 --num-images 2"
    assert run(*GENERATE, *options.split(), "--device", "cpu", "--dtype", "float32", "--tiling", "on") == 0
    how = {"settings": OffloadSettings(), "weight_storage": "as stored"}
    assert engine.asked["load"] == {"model": "m", "device": "cpu", "dtype": "float32", **how}
    assert engine.asked["encode"] == ("a circle", "blur")
    assert engine.asked["denoise"] == {
        "seed": 5,
        "width": 96,
        "height": 64,
        "num_inference_steps": 7,
        "true_cfg_scale": 2.5,
        "num_images_per_prompt": 2,
    }
    assert engine.asked["decode"]["tiling"] == "on"
    assert sorted(os.listdir(tmp_path)) == ["phase-offload-0.png", "phase-offload-1.png"]


def test_a_folder_for_the_prompt_cache_becomes_a_setting(engine: FakeEngine, tmp_path: Path):
    assert run(*GENERATE, "--prompt-cache", str(tmp_path / "answers")) == 0
    assert engine.asked["load"]["settings"] == OffloadSettings(prompt_cache_folder=str(tmp_path / "answers"))


@pytest.mark.parametrize("command", [GENERATE, ("demo", "--captions", "a red star on a blue background")])
def test_budgets_become_settings(engine: FakeEngine, command: tuple[str, ...]):
    assert run(*command, "--device-memory", "leave 2GiB", "--host-memory", "60%") == 0
    settings = OffloadSettings(device_memory="leave 2GiB", host_memory="60%")
    assert engine.asked["load"]["settings"] == settings


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_help_explains_budgets_in_a_group_of_their_own(command: str, capsys: Any):
    assert run(command, "--help") == 0
    _, _, group = capsys.readouterr().out.partition("memory budgets:\n")
    for word in ("--device-memory", "--host-memory", "6GiB", "60%", "leave 2GiB", "auto"):
        assert word in group


def test_report_file_holds_the_documented_names(engine: FakeEngine):
    assert run(*GENERATE, "--report", "r.json") == 0
    (phase,) = json.loads(Path("r.json").read_text())["phases"]
    documented = "name wall_s load_s weight_bytes device_peak_bytes host_peak_bytes bytes_read leaked_bytes"
    assert set(documented.split()) <= set(phase)


def test_progress_goes_to_stderr_and_results_to_stdout(engine: FakeEngine, capsys: Any):
    assert run(*GENERATE) == 0
    out, err = capsys.readouterr()
    assert "denoise: steps" in err and "3 / 3 steps" in err and "1.0 MiB" in err
    assert "steps" not in out


def test_a_video_is_written_as_one_animation(engine: FakeEngine):
    engine.handle.makes_video, engine.frames = True, 5
    assert run(*GENERATE, "--output", "v.gif", "--frames", "5") == 0
    assert engine.asked["denoise"]["num_frames"] == 5
    assert Image.open("v.gif").n_frames == 5
    assert not Path("v.wav").exists()


def test_the_sound_of_a_video_is_written_beside_it(engine: FakeEngine):
    engine.handle.makes_video, engine.frames = True, 5
    engine.sound = (torch.zeros(1, 2, 300), 100)
    assert run(*GENERATE, "--output", "v.gif") == 0
    with wave.open("v.wav") as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 100, 300)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("The width 33 is not a multiple of 16; use 32 or 48."), 2),
        (DeviceError("There is no device cuda:7; use cpu."), 2),
        (InsufficientMemoryError("Denoise needs more memory; use a smaller picture."), 3),
        (ModelError("The shard is truncated; download it again."), 4),
    ],
)
def test_errors_raised_on_purpose_are_their_own_sentence(engine: FakeEngine, error: Exception, code: int, capsys: Any):
    engine.error = error
    assert run(*GENERATE, "--output", "a.png") == code
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == f"phase-offload: {error}"
    assert "Traceback" not in err
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 3, "ran out of memory"),
        (OSError(28, "No space left on device", "x"), 1, "No space left on device (x)"),
        (RuntimeError("a fault\nwith details"), 1, "Unexpected RuntimeError: a fault (run again with --debug"),
    ],
)
def test_other_errors_are_one_sentence_too(engine: FakeEngine, error: Exception, code: int, words: str, capsys: Any):
    engine.error = error
    assert run(*GENERATE) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("phase-offload: ") and words in last


def test_debug_shows_the_traceback(engine: FakeEngine, capsys: Any):
    engine.error = RuntimeError("a fault")
    assert run(*GENERATE, "--debug") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_leaves_one_line_and_no_file(engine: FakeEngine, capsys: Any):
    engine.error = KeyboardInterrupt()
    assert run(*GENERATE) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "phase-offload: Stopped by Ctrl-C. Nothing was written."
    assert os.listdir() == []


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("generate", "--model", "m"),
        (*GENERATE, "--steps", "many"),
        (*GENERATE, "--tiling", "maybe"),
        (*GENERATE, "--num", "2"),
        (*GENERATE, "--output", "a.xyz"),
        (*GENERATE, "--output", "nowhere/a.png"),
        (*GENERATE, "--report", "nowhere/r.json"),
        ("demo", "--output-dir", "nowhere/deeper"),
    ],
)
def test_wrong_usage_is_code_2_before_the_model_is_touched(engine: FakeEngine, argv: tuple[str, ...], capsys: Any):
    assert run(*argv) == 2
    assert "phase-offload" in capsys.readouterr().err
    assert engine.asked == {}
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("option", "name"),
    [("--guidance-scale", "guidance_name"), ("--num-images", "images_name"), ("--frames", "images_name")],
)
def test_an_option_that_the_model_lacks_is_refused(engine: FakeEngine, option: str, name: str, capsys: Any):
    setattr(engine.handle, name, None)
    assert run(*GENERATE, option, "3") == 2
    assert f"leave {option} out" in capsys.readouterr().err
    assert "encode" not in engine.asked


def test_help_lists_the_exit_codes(capsys: Any):
    assert run("generate", "--help") == 0
    out = capsys.readouterr().out
    for code, meaning in cli.EXIT_CODES.items():
        assert f"{code} " in out and meaning in out


def test_readme_lists_the_same_exit_codes():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    for code, meaning in cli.EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in readme


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the benchmarks; what they were asked for is in the list."""
    asked: list[Any] = []
    package = types.ModuleType("offload_core.bench")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        asked.append("arguments")
        parser.add_argument("--json", type=Path)

    for name in ("offload", "foresight", "seeds"):
        room = types.ModuleType(f"offload_core.bench.{name}")
        vars(room).update(
            add_arguments=add_arguments,
            run=lambda args, terminal, name=name: asked.append((name, args.json, args.debug)),
        )
        setattr(package, name, room)
        monkeypatch.setitem(sys.modules, room.__name__, room)
    return asked


@pytest.mark.parametrize("what", ["offload", "foresight", "seeds"])
def test_bench_is_asked_for_its_options_and_run(what: str, bench: list[Any]):
    assert run("bench", what, "--json", "rows.json") == 0
    assert bench[-1] == (what, Path("rows.json"), False)


@pytest.mark.parametrize("argv", [("--debug", "offload"), ("offload", "--debug")])
def test_bench_takes_debug_before_and_after_its_subject(argv: tuple[str, ...], bench: list[Any]):
    assert run("bench", *argv) == 0
    assert bench[-1] == ("offload", None, True)


@pytest.mark.parametrize("argv", [("--help",), ("demo", "--help"), (*GENERATE, "--steps", "x"), ()])
def test_other_commands_never_touch_the_benchmark(bench: list[Any], argv: tuple[str, ...], capsys: Any):
    run(*argv)
    assert bench == []


def test_the_real_benchmark_has_a_help_page(capsys: Any):
    assert run("bench", "--help") == 0
    out = capsys.readouterr().out
    assert all(what in out for what in ("offload", "foresight", "seeds"))
    for what in ("offload", "foresight", "seeds"):
        assert run("bench", what, "--help") == 0
        out = capsys.readouterr().out
        assert "--json" in out and "--report" not in out


def test_help_lists_every_command(capsys: Any):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in ("generate", "demo", "bench"))


def test_a_door_can_add_commands(engine: FakeEngine, capsys: Any):
    command = cli.Command(
        "greet", "say hello", lambda parser: parser.add_argument("who"), lambda args, term: term.say(args.who)
    )
    assert cli.main(["greet", "[you]"], extra_commands=[command]) == 0
    assert capsys.readouterr().out == "[you]\n"


def test_demo_writes_a_picture_per_caption_and_a_sheet(engine: FakeEngine, tmp_path: Path, capsys: Any):
    assert run("demo", "--captions", "a red star on a blue background", "nonsense / ..") == 0
    folder = tmp_path / "phase-offload-demo"
    assert sorted(os.listdir(folder)) == ["1-a-red-star-on-a-blue-background.png", "2-nonsense.png", "captions.png"]
    out, err = capsys.readouterr()
    assert "phase-offload-demo/captions.png" in out
    assert "may miss this one" in err and "nonsense" in err


def test_a_failed_demo_leaves_no_folder_that_it_made(engine: FakeEngine):
    engine.error = ModelError("The model is damaged.")
    assert run("demo", "--captions", "a red star on a blue background") == 4
    assert os.listdir() == []


SLOW_RUN = """
import sys, time
from types import SimpleNamespace
import offload_core
from offload_core import cli

def denoise(handle, embeds, *, session, **options):
    print("running", flush=True)
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass  # as a finalizer or a callback would
        session.observer.check_interrupt()

offload_core.load = lambda model, **options: SimpleNamespace(
    guidance_name=None, images_name=None, makes_video=False, only_sound=False, seconds_name=None
)
offload_core.check_denoise = lambda *positional, **options: None
offload_core.encode = lambda *positional, **options: None
offload_core.denoise = denoise
sys.exit(cli.main(["generate", "--model", "m", "--prompt", "p", "--output", "a.png", "--no-plan"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_stops_a_run_even_where_the_interrupt_was_swallowed(tmp_path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.splitlines()[-1] == "phase-offload: Stopped by Ctrl-C. Nothing was written."
    assert os.listdir(tmp_path) == []
