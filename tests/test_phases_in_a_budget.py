"""Phases inside a budget smaller than their weights: the same bits, and never a byte more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core as po
from staging import OTHERS, PROMISED, job, often, one_shot, staged, tiny_model, words

KIB = 1024
SDXL = (400 * KIB, 60 * KIB)  # of denoise and decode


def budgets(**more: Any) -> po.OffloadSettings:
    """A budget of a few hundred KiB, so that every tiny component is streamed through a ring."""
    options: dict[str, Any] = {"device_memory": 400 * KIB, "resident_below": 4 * KIB, "activation_memory": 0}
    return po.OffloadSettings(**{**options, **more})


def smallest(path: Path, texts: dict[str, Any], call: dict[str, Any], **load: Any) -> po.OffloadSettings:
    """The smallest of a few budgets that all three phases accept."""
    for kib in (60, 100, 150, 200, 300, 400, 600, 900, 1400, 2100):
        settings = budgets(device_memory=kib * KIB)
        try:
            staged(path, texts, call, seed=5, settings=settings, **load)
        except po.InsufficientMemoryError:
            continue
        return settings
    raise AssertionError("no budget works")


@pytest.mark.parametrize("name", often(PROMISED, ("sd15", "flux", "wan22_a14b")))
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
def test_streamed_phases_equal_the_one_shot_run_and_keep_their_budget(name: str, dtype: torch.dtype) -> None:
    path, call = tiny_model(name), job(name, guided=True)
    settings = smallest(path, words(name), call, dtype=dtype)
    expected, _ = one_shot(path, dtype=dtype, seed=5, **words(name), **call)
    pictures, session = staged(path, words(name), call, dtype=dtype, seed=5, settings=settings)
    assert torch.equal(pictures, expected)
    for phase in session.report.phases:
        assert 0 < phase.reserved_peak_bytes <= phase.device_budget_bytes == settings.device_memory
        assert phase.leaked_bytes == 0
    denoise = session.report.phases[1]
    assert denoise.streamed_bytes > 0
    assert denoise.bytes_read >= denoise.streamed_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_streamed_equal_the_one_shot_run(name: str) -> None:
    path, call, texts = tiny_model(name), job(name, guided=True), words(name)
    if name == "hunyuan_video15":
        return
    settings = smallest(path, texts, call, dtype="auto")
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **texts | call)
    pictures, session = staged(path, texts, call, dtype="auto", seed=5, settings=settings)
    assert torch.equal(pictures, expected)
    assert session.report.phases[1].streamed_bytes > 0


@pytest.mark.parametrize("name", ["sdxl", "sdxl_fp16_force_upcast"])
def test_float16_and_an_upcast_vae_are_streamed_with_the_same_casts(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=True)
    expected, _ = one_shot(path, dtype=torch.float16, seed=5, **words(name), **call)
    session = po.Session()
    small, smaller = (po.load(path, device="cpu", dtype="float16", settings=budgets(device_memory=b)) for b in SDXL)
    embeds = po.encode(small, **words(name), session=session)
    latents = po.denoise(small, embeds, seed=5, session=session, **call)
    pictures = po.decode(smaller, latents, "pt", session=session)
    assert torch.equal(pictures.float(), expected)
    assert all(phase.streamed_bytes > 0 for phase in session.report.phases[1:])


def test_a_budget_too_small_is_refused_with_the_smallest_that_works_and_that_one_works() -> None:
    path, call = tiny_model("flux"), job("flux", guided=False)
    with pytest.raises(po.BudgetError, match="Raise device_memory by") as refused:
        staged(path, words("flux"), call, dtype="auto", seed=1, settings=budgets(device_memory=8 * KIB))
    assert "text_encoder" in str(refused.value)
    assert refused.value.exit_code == 3


def test_a_file_replaced_between_two_steps_is_an_error_and_never_a_picture(tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model("flux"), tmp_path / "model")
    call = job("flux", guided=False)
    handle = po.load(path, device="cpu", settings=budgets(device_memory=250 * KIB))
    embeds = po.encode(handle, **words("flux"))
    weights = path / "transformer" / "diffusion_pytorch_model.safetensors"

    class Overwrites(po.SilentObserver):
        def progress(self, event: po.Progress) -> None:
            if event.stage == "step":
                with weights.open("r+b") as file:
                    file.seek(-64, 2)
                    file.write(bytes(64))

    with pytest.raises(po.ModelError, match="changed while it was in use"):
        po.denoise(handle, embeds, session=po.Session(Overwrites()), **call)


def test_the_denoiser_is_retried_once_after_the_device_ran_out_and_the_report_says_so() -> None:
    path, call = tiny_model("flux"), job("flux", guided=False)
    handle = po.load(path, device="cpu", settings=po.OffloadSettings(resident_below=4 * KIB))
    embeds = po.encode(handle, **words("flux"))
    expected = po.denoise(handle, embeds, seed=4, **call)
    failures = iter([True])

    class FailsOnce(po.SilentObserver):
        """An interrupt point is inside the forward, where an allocation would fail."""

        since_step = -1

        def progress(self, event: po.Progress) -> None:
            if event.stage == "step":
                self.since_step = 0

        def check_interrupt(self) -> None:
            self.since_step += self.since_step >= 0
            if self.since_step > 2 and next(failures, False):
                raise torch.OutOfMemoryError("made for this test")

    session = po.Session(FailsOnce())
    again = po.denoise(handle, embeds, seed=4, session=session, **call)
    assert torch.equal(again.decode.tensors[0], expected.decode.tensors[0])
    report = session.report.phases[-1]
    assert "ran out of memory on cpu" in report.notes[0]
    assert report.streamed_bytes > 0
    assert report.leaked_bytes == 0
