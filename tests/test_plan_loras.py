"""Plans of jobs with LoRAs: what they foretell is what the phases reserve and what the denoiser allocates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import make_lora
from offload_core.errors import TraceError
from offload_core.foresight import foresee_denoise, foresee_encode, foresee_job
from offload_core.memory_count import MemoryCount
from offload_core.phases import foresee, trace_denoise
from offload_core.plan import PhasePlan, Plan, Rates
from offload_core.plan_timeline import memory_timeline
from offload_core.trace_blocks import _Blocks
from staging import job, tiny_model, words

pytest.importorskip("peft")

RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
SETTINGS = po.OffloadSettings(execution_device="cpu", host_memory="1GiB", resident_below=1024)
DENOISER = {"flux": "transformer", "sdxl": "unet"}
ATTENTION = ["to_q", "to_k", "to_v"]
WIDEST = {"flux": ["proj_mlp", "proj_out"], "sdxl": ["conv1", "ff.net.0.proj"]}  # where activations peak


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))


def large_lora(name: str, folder: Path) -> Path:
    return make_lora(name, DENOISER[name], folder / "large.safetensors", ATTENTION, rank=64)


@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_denoiser_with_a_lora_reserves_what_was_planned(name: str, tmp_path: Path) -> None:
    """In the smallest budget that is foretold, and above it. The LoRA is large beside the model: without it the figures
    would be wrong by more than what is allowed here."""
    file, call = large_lora(name, tmp_path), job(name, guided=True)
    bare = po.load(tiny_model(name), device="cpu", settings=SETTINGS)
    handle = po.load(tiny_model(name), device="cpu", settings=SETTINGS, loras=[(file, 0.7)])
    embeds = po.encode(bare, **words(name))

    def planned(handle: po.Handle) -> PhasePlan:
        return foresee_denoise(handle, embeds, rates=RATES, **call).plan.phases[0]

    added = sum(value.nbytes for value in load_file(file).values())
    without, roomy = planned(bare), planned(handle)
    assert [component.added_bytes for component in roomy.components] == [added]
    assert roomy.weight_bytes == without.weight_bytes + added
    assert added > 0.1 * without.device_peak_bytes
    assert roomy.smallest_budget_bytes >= without.smallest_budget_bytes + added
    for above in (1.0, 1.3, 3.0):
        budget = int(roomy.smallest_budget_bytes * above)
        here = replace(handle, settings=replace(SETTINGS, device_memory=budget))
        plan, session = planned(here), po.Session()
        assert plan.fits
        po.denoise(here, embeds, session=session, plan=Plan((plan,), budget), **call)
        (phase,) = session.report.phases
        assert 0.97 * plan.device_peak_bytes <= phase.reserved_peak_bytes <= plan.device_peak_bytes
        assert phase.weight_bytes == plan.weight_bytes
        assert (phase.streamed_bytes > 0) is (plan.streamed_bytes > 0)
    assert plan.streamed_bytes == 0


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_the_activations_of_a_denoiser_with_a_lora_are_foretold_to_the_byte(name: str, tmp_path: Path) -> None:
    widest = make_lora(name, DENOISER[name], tmp_path / "widest.safetensors", WIDEST[name])
    loras = [(large_lora(name, tmp_path), 0.7), (widest, 1.0)]
    call = {**words(name), **job(name, guided=True)}
    real = real_peaks(name, loras, call)
    handle = po.load(tiny_model(name), device="cpu", dtype="float32", loras=loras)
    prompt, negative = call.pop("prompt"), call.pop("negative_prompt", None)
    with_loras, without = (
        next(iter(foresee(each, prompt, negative, **call)[1])) for each in (handle, replace(handle, loras=()))
    )
    assert {traced.trace.peak_bytes for traced in with_loras.calls} == real
    assert {traced.trace.peak_bytes for traced in without.calls} != real
    for traced, bare in zip(with_loras.calls, without.calls, strict=True):
        assert traced.trace.flops > bare.trace.flops
        assert {weight.name for weight in traced.trace.weights} > {weight.name for weight in bare.trace.weights}
    assert [c.parts for c in with_loras.job.components] == [c.parts for c in without.job.components]


def real_peaks(name: str, loras: list[tuple[Path, float]], call: dict[str, Any]) -> set[int]:
    """Peaks of the denoiser's activations in the plain pipeline, one for each kind of call, counted on real tensors."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for index, (file, _) in enumerate(loras):
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=str(index))
    pipeline.set_adapters([str(index) for index in range(len(loras))], [scale for _, scale in loras])
    module, count, peaks = getattr(pipeline, DENOISER[name]), MemoryCount(), set()
    before = [0]

    def entered(*_: Any) -> None:
        before[0] = count.live_bytes
        count.high_bytes()

    module.register_forward_pre_hook(entered)
    module.register_forward_hook(lambda *_: peaks.add(count.high_bytes() - before[0]))
    with count, torch.no_grad():
        pipeline(**call, output_type="pt", generator=torch.Generator("cpu").manual_seed(5))
    count.forget()
    return peaks


def test_blocks_that_differ_in_the_numbers_of_their_lora_are_traced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    real = _Blocks._traced
    monkeypatch.setattr(_Blocks, "_traced", lambda self, *rest: traced.append(rest) or real(self, *rest))
    embeds = po.encode(po.load(tiny_model("flux"), device="cpu"), "a star")
    times = []
    for loras in ((), (large_lora("flux", tmp_path),)):
        trace_denoise(po.load(tiny_model("flux"), device="cpu", loras=loras), embeds, **job("flux", guided=False))
        times.append(len(traced))
        traced.clear()
    assert times[1] == times[0] < 5  # it has five of two kinds


def test_a_lora_is_in_the_chart_the_table_and_the_kept_trace(tmp_path: Path) -> None:
    from offload_core.plan_table import plan_json, plan_table

    loras = [large_lora("flux", tmp_path)]
    call = {**words("flux"), **job("flux", guided=True)}
    prompt, negative = call.pop("prompt"), call.pop("negative_prompt")
    asked = {"settings": SETTINGS, "rates": RATES, **call}
    found = foresee_job(tiny_model("flux"), prompt, negative, loras=loras, **asked)
    denoise = found.plan.phases[1]
    data = plan_json(found)["phases"][1]["components"]["transformer"]
    added = denoise.components[0].added_bytes
    assert data["added_bytes"] == added and data["resident_bytes"] == denoise.weight_bytes == data["weight_bytes"]
    assert "of LoRA weights, which stay." in plan_table(found)
    assert memory_timeline(found).phases[1].peak_bytes == denoise.device_peak_bytes
    assert foresee_job(tiny_model("flux"), prompt, negative, loras=loras, **asked).plan == found.plan
    handle = po.load(tiny_model("flux"), device="cpu", loras=loras, settings=SETTINGS)
    embeds = po.encode(handle, prompt, negative)
    assert foresee_denoise(handle, embeds, rates=RATES, **call).plan.phases == (denoise,)
    assert foresee_job(tiny_model("flux"), prompt, negative, loras=handle.loras, **asked).plan == found.plan


def sayings(path: Path, lora: Path, **call: Any) -> list[str]:
    """What a LoRA that doesn't fit is refused with: by each phase, and when it is asked before."""
    handle = po.load(path, device="cpu", loras=[lora])
    embeds = po.encode(replace(handle, loras=()), "a star")
    said = []
    for ask in (
        lambda: (po.encode(handle, "a star"), po.denoise(handle, embeds, **call)),
        lambda: (foresee_encode(handle, "a star", rates=RATES), foresee_denoise(handle, embeds, rates=RATES, **call)),
        lambda: foresee_job(path, "a star", settings=SETTINGS, rates=RATES, loras=[lora], **call),
    ):
        with pytest.raises(po.ModelError) as caught:
            ask()
        said.append(str(caught.value))
    return said


def test_a_lora_that_does_not_fit_gets_the_same_sentence_before_and_in_the_phase(tmp_path: Path) -> None:
    other = make_lora("sd15", "unet", tmp_path / "other.safetensors", ["to_q"])
    (sentence,) = set(sayings(tiny_model("flux"), other, **job("flux", guided=False)))
    assert sentence.startswith("The LoRA other.safetensors is for another kind of model")
    wide = {key: torch.zeros(*(2 * size for size in value.shape)) for key, value in load_file(other).items()}
    save_file(wide, tmp_path / "wide.safetensors")
    (sentence,) = set(sayings(tiny_model("sd15"), tmp_path / "wide.safetensors", **job("sd15", guided=False)))
    assert sentence.startswith("The LoRA wide.safetensors doesn't fit unet of this model")


def test_a_lora_that_is_made_of_the_models_weights_runs_without_a_plan(tmp_path: Path) -> None:
    file = make_lora("flux", "transformer", tmp_path / "dora.safetensors", ["to_q"], use_dora=True)
    handle = po.load(tiny_model("flux"), device="cpu", loras=[file])
    embeds, call = po.encode(handle, "a star"), job("flux", guided=False)
    with pytest.raises(TraceError, match="LoRAs of transformer can't be applied without its weights"):
        foresee_denoise(handle, embeds, rates=RATES, **call)
    assert po.denoise(handle, embeds, **call).samples.isfinite().all()
