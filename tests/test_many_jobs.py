"""Several jobs in one phase: each gives the bits of its single run, and the weights are loaded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload_core as po
from offload_core.phases import _decode
from staging import job, tiny_model, words


def run_each(handle: po.Handle, texts: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[torch.Tensor]:
    pictures = []
    for text, call in zip(texts, calls, strict=True):
        latents = po.denoise(handle, po.encode(handle, **text), **call)
        pictures.append(po.decode(handle, latents, "pt"))
    return pictures


def run_all(
    handle: po.Handle, texts: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], po.Session]:
    session = po.Session()
    embeds = po.encode_many(handle, texts, session=session)
    jobs = [{"embeds": each, **call} for each, call in zip(embeds, calls, strict=True)]
    return po.decode_many(handle, po.denoise_many(handle, jobs, session=session), "pt", session=session), session


def three(name: str, **differ: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Three jobs that differ in prompt, seed and guidance, the last one in scheduler, too."""
    texts = [words(name) | {"prompt": prompt} for prompt in ("a fox", "a much longer prompt about a boat", "a fox")]
    calls = [job(name, guided=guided) | {"seed": seed} for guided, seed in ((True, 3), (False, 4), (True, 5))]
    calls[2] |= differ
    return texts, calls


@pytest.mark.parametrize(
    ("name", "differ"),
    [
        ("sd15", {"scheduler": "EulerAncestralDiscreteScheduler"}),
        pytest.param("flux", {"num_inference_steps": 3}, marks=pytest.mark.slow),
        pytest.param("wan22_a14b", {}, marks=pytest.mark.slow),
        pytest.param("qwen_image", {}, marks=pytest.mark.slow),
    ],
)
def test_jobs_of_one_phase_equal_their_single_runs(name: str, differ: dict[str, Any]) -> None:
    handle = po.load(tiny_model(name), device="cpu")
    texts, calls = three(name, **differ)
    expected = run_each(handle, texts, calls)
    pictures, session = run_all(handle, texts, calls)
    assert all(torch.equal(mine, single) for mine, single in zip(pictures, expected, strict=True))
    phases = session.report.phases
    assert [phase.name for phase in phases] == ["encode", "denoise", "decode"]
    assert all(phase.leaked_bytes == 0 for phase in phases)
    assert len({picture.untyped_storage().data_ptr() for picture in pictures}) == 3
    once = po.Session()
    po.encode(handle, **texts[0], session=once)
    assert phases[0].weight_bytes == once.report.phases[0].weight_bytes


def test_a_vae_that_is_upcast_is_so_for_every_job() -> None:
    """SDXL in float16 casts its VAE before it decodes; a pipeline that ran once has it cast already."""
    name = "sdxl_fp16_force_upcast"
    handle = po.load(tiny_model(name), device="cpu", dtype="float16")
    texts, calls = [words(name)] * 2, [job(name, guided=False) | {"seed": seed} for seed in (1, 2)]
    embeds = po.encode_many(handle, texts)
    many = po.denoise_many(handle, [{"embeds": e, **call} for e, call in zip(embeds, calls, strict=True)])
    for latents, call in zip(many, calls, strict=True):
        single = po.denoise(handle, embeds[0], **call)
        assert latents.dtype == single.dtype == "float32"
        assert torch.equal(latents.decode.tensors[0], single.decode.tensors[0])
        assert latents.decode.tensors[0].dtype == single.decode.tensors[0].dtype


def test_steps_of_all_jobs_are_counted_in_one_row() -> None:
    class Listener(po.SilentObserver):
        steps: list[tuple[int, int]] = []  # noqa: RUF012 - of this test alone

        def progress(self, event: po.Progress) -> None:
            if event.unit == "steps":
                self.steps.append((event.done, event.total))

    handle = po.load(tiny_model("sd15"), device="cpu")
    embeds = po.encode(handle, "a fox")
    call = {"embeds": embeds, "num_inference_steps": 2, "width": 32, "height": 32}
    po.denoise_many(handle, [call, call], session=po.Session(Listener()))
    assert [step for step in Listener.steps if step[0]] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.slow
def test_a_job_whose_embeds_lack_an_encoding_runs_by_itself() -> None:
    handle, session = po.load(tiny_model("sd15"), device="cpu"), po.Session()
    embeds = po.encode(handle, "a fox")
    size = {"num_inference_steps": 1, "width": 32, "height": 32}
    jobs = [{"embeds": embeds, "prompt": "another", **size}, {"embeds": embeds, **size}]
    first, second = po.denoise_many(handle, jobs, session=session)
    assert torch.equal(first.samples, po.denoise(handle, po.encode(handle, "another"), **size).samples)
    assert torch.equal(second.samples, po.denoise(handle, embeds, **size).samples)


def test_what_follows_a_picture_that_did_not_fit_is_decoded_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = po.load(tiny_model("sd15"), device="cpu")
    latents = po.denoise(handle, po.encode(handle, "a fox"), num_inference_steps=1, width=32, height=32)
    tried, session = [], po.Session()
    original = _decode._try

    def full(phase: Any, component: Any, *asked: Any) -> Any:
        tiled = component.module.use_tiling
        tried.append(tiled)
        return original(phase, component, *asked) if tiled else (None, "out of memory")

    monkeypatch.setattr(_decode, "_try", full)
    po.decode_many(handle, [latents, latents], "pt", session=session)
    assert tried == [False, True, True]
    assert session.report.phases[0].notes == ("Decoded in tiles of 512 pixels.",)


def test_no_jobs_and_a_wrong_one_are_sentences_before_anything_is_loaded() -> None:
    handle, session = po.load(tiny_model("sd15"), device="cpu"), po.Session()
    for run in (po.encode_many, po.denoise_many, po.decode_many):
        with pytest.raises(po.InputError, match="the list of jobs is empty"):
            run(handle, [], session=session)
    with pytest.raises(po.InputError, match="takes no argument 'colour'"):
        po.encode_many(handle, [{"prompt": "a"}, {"prompt": "b", "colour": 1}], session=session)
    with pytest.raises(po.InputError, match="The seed is -1"):
        po.denoise_many(handle, [{"embeds": None, "seed": -1}], session=session)
    assert session.report.phases == []
