"""`phase-offload plan` answers without loading anything, in words, in JSON and by its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import offload_core as po
from offload_core.cli import main
from offload_core.errors import TraceError
from offload_core.foresight import foresee_job
from offload_core.known import known_models
from offload_core.plan import Rates
from offload_core.settings import OffloadSettings
from offload_core.tiny_models import picture
from staging import job, often, tiny_model, words

DEMO = str(Path(po.__file__).parent / "demo" / "model")
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
PHASE_KEYS = (
    "name weight_bytes resident_bytes streamed_bytes ring_bytes activation_peak_bytes device_peak_bytes "
    "host_peak_bytes load_s step_s reasons"
).split()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("offload_core.rates.measure", lambda *_: RATES)


def plan(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_job_that_fits_is_told_by_phase_and_loads_no_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_load(*_: Any) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr("offload_core.phases._components.from_files", no_load)
    file = tmp_path / "plan.json"
    chart = tmp_path / "plan.svg"
    words = ("--model", DEMO, "--device", "cpu", "--json", str(file), "--chart", str(chart))
    code, out, _ = plan(*words, capsys=capsys)
    assert code == 0
    assert out.splitlines()[-2:] == [f"Wrote {file}", f"Wrote {chart}"]
    assert chart.read_bytes().startswith(b"<?xml") and b"denoise" in chart.read_bytes()
    assert [line.split()[0] for line in out.splitlines()[2:6]] == ["encode", "denoise", "decode", "all"]
    found = json.loads(file.read_text("utf-8"))
    assert found["fits"] is True and found["smallest_budget_bytes"] > 0
    assert [phase["name"] for phase in found["phases"]] == ["encode", "denoise", "decode"]
    assert all(set(PHASE_KEYS) <= set(phase) for phase in found["phases"])
    assert found["phases"][1]["components"]["transformer"]["times"] > 1


def test_a_job_that_does_not_fit_is_exit_code_3_with_the_smallest_budget_that_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    words = ("--model", DEMO, "--device", "cpu", "--json", str(file))
    chart = tmp_path / "plan.PNG"
    code, out, err = plan(*words, "--device-memory", "100KiB", "--chart", str(chart), capsys=capsys)
    assert code == 3
    assert Image.open(chart).format == "PNG"
    assert "doesn't fit 100.0 KiB" in err and "Raise device_memory" in out
    least = json.loads(file.read_text("utf-8"))["smallest_budget_bytes"]
    assert plan(*words, "--device-memory", str(least), capsys=capsys)[0] == 0
    assert plan(*words, "--device-memory", str(least - 1), capsys=capsys)[0] == 3


def test_a_known_model_on_a_known_card_is_answered_without_a_file_of_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = plan("--model", "pixart-sigma", "--hardware", "rtx4060-8gb", "--steps", "2", capsys=capsys)
    assert code == 0
    assert "streams" in out  # its text encoder is larger than the card
    assert "NVIDIA GeForce RTX 4060" in out and "not measured" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", known_models())
def test_every_known_model_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan("--model", name, "--hardware", "rtx4090", "--steps", "2", capsys=capsys)
    if name == "qwen-image-edit":  # its processor looks at the picture, and comes with the model
        assert code == 2 and "processor" in err
    else:
        rows = [line.split()[0] for line in out.splitlines() if line]
        assert code in (0, 3) and {"encode", "denoise", "decode"} <= set(rows)


def test_a_negative_prompt_replaces_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image's usual negative prompt met the caller's, given twice to the trace."""
    asked: list[str | None] = []

    def foresee(handle: Any, prompt: str, negative: str | None, **_: Any) -> Any:
        asked.append(negative)
        raise TraceError("seen")

    monkeypatch.setattr("offload_core.phases.foresee", foresee)
    for negative in (None, "blurry"):
        with pytest.raises(TraceError, match="seen"):
            foresee_job("qwen-image", "a cat", negative, hardware="rtx4090")
    assert asked == [" ", "blurry"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--model", DEMO, "--hardware", "rtx9"), 2, "No machine 'rtx9' is known"),
        (("--model", "no-such-model"), 4, "There is no model folder"),
        ((), 2, "Give a model"),
        (("--model", DEMO, "--device-memory", "many"), 2, "device_memory"),
        (("--model", DEMO, "--width", "63"), 2, "width is 63"),
        (("--model", DEMO, "--scheduler", "list"), 2, "scheduler"),
        (("--model", DEMO, "--image", "gone.png"), 2, "There is no picture gone.png"),
        (("--model", DEMO, "--strength", "0.5"), 2, "give --image"),
        (("--model", DEMO, "--lora", "a", "much"), 2, "--lora takes a file and one number"),
    ],
)
def test_bad_input_gets_a_sentence(
    words: tuple[str, ...], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = plan(*words, "--device", "cpu", capsys=capsys)
    assert found == code and sentence in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("plan.jpg", "Can't write a chart of type '.jpg'"),
        ("plan", "Can't write a chart without an extension"),
        ("nowhere/plan.png", "nowhere doesn't exist"),
    ],
)
def test_a_chart_that_cannot_be_written_is_refused_before_any_work(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr("offload_core.foresight.foresee_job", no_work)
    code, _, err = plan("--model", DEMO, "--chart", str(tmp_path / name), capsys=capsys)
    assert code == 2 and sentence in err and "Traceback" not in err


def test_what_is_known_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan("--list", capsys=capsys)
    assert code == 0 and "flux.1-dev" in out and "rtx4090" in out


@pytest.mark.parametrize("name", often(("sd15", "flux", "wan22_5b"), ("sd15",)))
def test_a_plan_with_a_picture_foretells_what_encoding_and_using_it_reserve(name: str) -> None:
    fox, asked = picture("fox"), {"images": picture("fox"), "rates": RATES, "height": 64, "width": 64}
    call: dict[str, Any] = {"num_inference_steps": 4, "strength": 0.5}
    frames: dict[str, Any] = {}
    if name == "wan22_5b":
        frames = {"num_frames": 5}
        call = {"num_inference_steps": 2}
    settings = OffloadSettings(execution_device="cpu", host_memory="1GiB", resident_below=1024)
    roomy = foresee_job(tiny_model(name), "a red fox", "", settings=settings, **asked, **call, **frames).plan
    assert [phase.name for phase in roomy.phases] == ["images", "encode", "denoise", "decode"]
    assert roomy.phases[2].steps == 2
    settings = replace(settings, device_memory=roomy.smallest_budget_bytes)
    plan = foresee_job(tiny_model(name), "a red fox", "", settings=settings, **asked, **call, **frames).plan
    session, handle = po.Session(), po.load(tiny_model(name), device="cpu", settings=settings)
    images = po.encode_images(handle, fox, height=64, width=64, session=session, plan=plan, **frames)
    embeds = po.encode(handle, "a red fox", "", session=session, plan=plan)
    latents = po.denoise(handle, embeds, images=images, session=session, plan=plan, **call)
    po.decode(handle, latents, session=session, plan=plan)
    for phase, planned in zip(session.report.phases, plan.phases, strict=True):
        assert phase.name == planned.name
        close = 0.8 if phase.name == "images" else 0.97  # the VAE's other half is planned, too, and isn't read
        assert close * planned.device_peak_bytes <= phase.reserved_peak_bytes <= planned.device_peak_bytes


def test_the_command_plans_a_scheduler_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture("fox").save(tmp_path / "fox.png")
    words = ("--model", str(tiny_model("sd15")), "--device", "cpu", "--steps", "4", "--json", str(tmp_path / "plan"))
    twice_a_step = ("--scheduler", "HeunDiscreteScheduler")
    assert plan(*words, *twice_a_step, capsys=capsys)[0] == 0
    denoise = json.loads((tmp_path / "plan").read_text("utf-8"))["phases"][1]
    assert denoise["components"]["unet"]["times"] == 7
    code, out, _ = plan(*words, "--image", str(tmp_path / "fox.png"), "--strength", "0.5", capsys=capsys)
    assert code == 0 and out.splitlines()[2].split()[0] == "images"


@pytest.mark.parametrize(
    ("name", "above"),
    [
        *(("flux", above) for above in (1.0, 1.3, 3.0)),
        ("wan22_a14b", 1.0),
        *(pytest.param("wan22_a14b", above, marks=pytest.mark.slow) for above in (1.3, 3.0)),
    ],
)
def test_a_phase_reserves_what_was_planned_and_not_a_byte_more(name: str, above: float) -> None:
    """The smallest budget that is foretold works, and the peak of each phase is the one that is foretold."""
    path, texts, call = tiny_model(name), words(name), job(name, guided=True)
    base = OffloadSettings(execution_device="cpu", host_memory="1GiB", resident_below=1024)
    asked = {**texts, **call}
    prompt, negative = asked.pop("prompt"), asked.pop("negative_prompt", None)

    def foreseen(budget: int) -> Any:
        settings = po.OffloadSettings(**{**vars(base), "device_memory": budget})
        return foresee_job(path, prompt, negative, settings=settings, rates=RATES, **asked).plan

    least = foreseen(1 << 30).smallest_budget_bytes
    plan = foreseen(int(least * above))
    assert plan.fits
    settings = po.OffloadSettings(**{**vars(base), "device_memory": int(least * above)})
    session = po.Session()
    handle = po.load(path, device="cpu", settings=settings)
    embeds = po.encode(handle, prompt, negative, session=session, plan=plan)
    latents = po.denoise(handle, embeds, session=session, plan=plan, **call)
    po.decode(handle, latents, session=session, plan=plan)
    for phase, planned in zip(session.report.phases, plan.phases, strict=True):
        assert phase.reserved_peak_bytes <= planned.device_peak_bytes
        assert phase.reserved_peak_bytes >= 0.97 * planned.device_peak_bytes
        assert phase.predicted["device_peak_bytes"] == planned.device_peak_bytes
