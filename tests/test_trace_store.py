"""Traces are kept on disk by what decides them, and a job like one before is foreseen without tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core as po
from offload_core import trace_store
from offload_core.foresight import foresee_decode, foresee_denoise, foresee_encode, foresee_job
from offload_core.phases import PhaseTrace, TracedCall
from offload_core.phases._companions import Companion
from offload_core.plan import ComponentJob, PhaseJob, Rates
from offload_core.small_files import cache_folder
from offload_core.streaming import PartSize, WeightSize
from offload_core.trace import Stretch, Trace, TracedWeight, Tracer
from offload_core.trace_store import TraceStore, asked_of, asked_values
from staging import job, tiny_model, words

RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)


def way(pixels: int | None = None) -> PhaseTrace:
    weights = (TracedWeight("vae.a", 8), TracedWeight("vae.b", 16, lookup_only=True))
    trace = Trace(weights, (Stretch((0, 1), 5, 6, 7, 8), Stretch((), 1, 1, 1, 1)), 9, "half of it is guessed")
    parts = (PartSize((WeightSize("a", 8, "g"),), 8), PartSize((), 4, stays=True, is_norm=True))
    component = ComponentJob("vae", "float32", parts, ((trace, 3),), stored=0.5, alone=True)
    calls = (TracedCall("vae", "decode", 3, trace),)
    return PhaseTrace(PhaseJob("decode", 100, (component,), 2, pixels, ("something",)), calls)


def test_ways_come_back_as_they_were_and_only_missing_ones_are_made(tmp_path: Path) -> None:
    store, made = TraceStore(tmp_path), []

    def make() -> Iterator[PhaseTrace]:
        for pixels in (None, 512, 256):
            made.append(pixels)
            yield way(pixels)

    assert next(store.ways("job", make)) == way()
    assert made == [None]
    first = store.ways("job", make)
    assert [next(first), next(first)] == [way(), way(512)]
    assert made == [None, None, 512]
    assert list(store.ways("job", make)) == [way(), way(512), way(256)]
    made.clear()
    assert list(store.ways("job", make)) == [way(), way(512), way(256)]
    assert made == []
    list(store.ways("another job", make))
    assert made == [None, 512, 256]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"ways": [{}], "whole": true}', '{"ways": 3, "whole": true}'])
def test_a_damaged_file_is_made_again(content: str, tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    list(store.ways("job", lambda: [way()]))
    (file,) = tmp_path.iterdir()
    file.write_text(content, "utf-8")
    assert list(store.ways("job", lambda: [way()])) == [way()]
    assert json.loads(file.read_text("utf-8"))["whole"] is True


def test_the_files_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "MOST_FILES", 3)
    for number in range(6):
        list(TraceStore(tmp_path).ways(number, lambda: [way()]))
    assert len(list(tmp_path.iterdir())) == 3


def test_other_libraries_mean_other_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TraceStore(tmp_path)
    list(store.ways("job", lambda: [way()]))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99")
    assert list(store.ways("job", lambda: [way(512)])) == [way(512)]


def test_what_a_model_is_loaded_with_means_other_traces() -> None:
    """Another ControlNet or IP-Adapter makes the same pipeline of the same folder."""
    model = po.load(tiny_model("sd15"), device="cpu")
    controlled, other = (
        replace(model, companions=(Companion("controlnet", "folder", "diffusers", print_),)) for print_ in "ab"
    )
    adapted, again = (replace(model, ip_adapter=po.IPAdapter("file", fingerprint=print_)) for print_ in "ab")
    asked = [asked_of(handle) for handle in (model, controlled, other, adapted, again)]
    assert all(one not in asked[:place] for place, one in enumerate(asked))


def test_tensors_and_pictures_are_asked_for_by_their_layout_and_masks_by_their_values() -> None:
    from PIL import Image

    def same(first: Any, second: Any) -> bool:
        return bool(asked_values({"x": first}) == asked_values({"x": second}))

    assert same(torch.zeros(3), torch.ones(3)) and not same(torch.zeros(3), torch.zeros(4))
    assert not same(torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert same([Image.new("RGB", (4, 4))], [Image.new("RGB", (4, 4), "red")])
    assert not same(Image.new("RGB", (4, 4)), Image.new("RGB", (4, 8)))
    assert not same("a", "b")


def test_a_job_is_traced_once_and_each_of_its_phases_by_itself_gives_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new seed or prompt of the same length needs no trace of Denoise and Decode either."""
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path))
    path, texts, call = tiny_model("flux"), words("flux"), job("flux", guided=True)
    prompt, negative = texts["prompt"], texts["negative_prompt"]
    settings = po.OffloadSettings(execution_device="cpu", device_memory="2MiB", resident_below=1024)
    traced: list[str] = []
    real = Tracer._trace
    monkeypatch.setattr(Tracer, "_trace", lambda self, name, *rest: traced.append(name) or real(self, name, *rest))

    def whole() -> po.Plan:
        return foresee_job(path, prompt, negative, settings=settings, rates=RATES, **call).plan

    first = whole()
    assert traced and cache_folder() == tmp_path
    traced.clear()
    assert whole() == first and traced == []

    handle = po.load(path, device="cpu", settings=settings)
    embeds = po.encode(handle, prompt, negative)
    latents = po.denoise(handle, embeds, **call)
    for turn in range(2):
        plans = (
            foresee_encode(handle, prompt, negative, rates=RATES),
            foresee_denoise(handle, embeds, seed=turn, rates=RATES, **call),
            foresee_decode(handle, latents, rates=RATES),
        )
        assert tuple(found.plan.phases[0] for found in plans) == first.phases
        assert bool(traced) is (turn == 0)
        traced.clear()
    other = po.encode(handle, prompt[::-1], negative[::-1])
    foresee_denoise(handle, other, rates=RATES, **call)
    foresee_decode(handle, po.denoise(handle, other, seed=3, **call), rates=RATES)
    assert traced == []
    foresee_denoise(handle, other, rates=RATES, **{**call, "height": call["height"] + 16})
    assert traced != []
