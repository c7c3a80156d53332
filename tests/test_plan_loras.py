"""Plans of jobs with LoRAs: what they foretell is what the phases reserve and what the denoiser allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import encoder_loras_work, make_lora
from offload_core.errors import TraceError
from offload_core.foresight import Foresight, foresee_denoise, foresee_encode, foresee_job
from offload_core.memory_count import MemoryCount
from offload_core.phases import as_loras, trace_denoise
from offload_core.plan import PhasePlan, Plan, Rates
from offload_core.plan_table import plan_json, plan_table
from offload_core.plan_timeline import memory_timeline
from offload_core.streaming import OffloadScope, part_sizes
from offload_core.trace_blocks import _Blocks
from staging import job, tiny_model, words
from streaming_models import BY_NAME

pytest.importorskip("peft")

RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
SETTINGS = po.OffloadSettings(execution_device="cpu", host_memory="1GiB", resident_below=1024)
DENOISER = {"flux": "transformer", "sd15": "unet", "sdxl": "unet"}
ATTENTION = ["to_q", "to_k", "to_v"]
UNET = ["conv1", "ff.net.0.proj"]
WIDEST = {"flux": ["proj_mlp", "proj_out"], "sd15": UNET, "sdxl": UNET}  # where activations peak


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))


def large_lora(name: str, folder: Path) -> Path:
    return make_lora(name, DENOISER[name], folder / "large.safetensors", ATTENTION, rank=64)


@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_a_denoiser_with_a_lora_reserves_what_was_planned(name: str, tmp_path: Path) -> None:
    """In the smallest budget that is foretold, and above it. The LoRA is large: without it the figures would be wrong
    by more than what is allowed here."""
    file, call = large_lora(name, tmp_path), job(name, guided=False)
    handle = po.load(tiny_model(name), device="cpu", settings=SETTINGS, loras=[(file, 0.7)])
    embeds = po.encode(handle, **words(name))

    def planned(handle: po.Handle) -> PhasePlan:
        return foresee_denoise(handle, embeds, rates=RATES, **call).plan.phases[0]

    roomy, added = planned(handle), sum(value.nbytes for value in load_file(file).values())
    assert [component.added_bytes for component in roomy.components] == [added]
    assert added > 0.1 * roomy.device_peak_bytes
    for above in (1.0, 1.3, 3.0):
        budget = int(roomy.smallest_budget_bytes * above)
        here = replace(handle, settings=replace(SETTINGS, device_memory=budget))
        plan, session = planned(here), po.Session()
        assert plan.fits
        po.denoise(here, embeds, session=session, plan=Plan((plan,), budget), **call)
        (phase,) = session.report.phases
        assert 0.97 * plan.device_peak_bytes <= phase.reserved_peak_bytes <= plan.device_peak_bytes
        assert phase.weight_bytes == plan.weight_bytes
        assert (phase.streamed_bytes > 0) is (plan.streamed_bytes > 0) is (above < 3)


@pytest.mark.parametrize("name", ["sd15", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "sdxl"))])
def test_the_activations_of_a_denoiser_with_loras_are_foretold_to_the_byte(name: str, tmp_path: Path) -> None:
    widest = make_lora(name, DENOISER[name], tmp_path / "widest.safetensors", WIDEST[name])
    loras, call = [(large_lora(name, tmp_path), 0.7), (widest, 1.0)], job(name, guided=False)
    handle = po.load(tiny_model(name), device="cpu", dtype="float32", loras=loras)
    traced = trace_denoise(handle, po.encode(handle, **words(name)), **call)
    assert {each.trace.peak_bytes for each in traced.calls} == real_peaks(name, loras, words(name) | call)


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


def test_a_lora_adds_work_and_weights_to_a_trace_but_no_kinds_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that differ in the numbers of their LoRA alone are traced once, as they are without."""
    blocks: list[Any] = []
    real = _Blocks._traced
    monkeypatch.setattr(_Blocks, "_traced", lambda self, *rest: blocks.append(rest) or real(self, *rest))
    plain = po.load(tiny_model("flux"), device="cpu")
    embeds, call = po.encode(plain, "a star"), job("flux", guided=False)
    bare = trace_denoise(plain, embeds, **call)
    kinds = len(blocks)
    given = trace_denoise(replace(plain, loras=as_loras([large_lora("flux", tmp_path)])), embeds, **call)
    assert len(blocks) - kinds == kinds < 5  # five blocks of two kinds
    (one,), (other,) = bare.calls, given.calls
    assert other.trace.flops > one.trace.flops
    assert {weight.name for weight in other.trace.weights} > {weight.name for weight in one.trace.weights}
    assert given.job.components[0].parts == bare.job.components[0].parts


def test_a_lora_is_in_the_table_the_chart_and_the_kept_trace(tmp_path: Path) -> None:
    handle = po.load(tiny_model("flux"), device="cpu", loras=[large_lora("flux", tmp_path)])
    call = {**words("flux"), **job("flux", guided=False)}
    prompt, negative = call.pop("prompt"), call.pop("negative_prompt")

    def found() -> Foresight:
        given = {"settings": SETTINGS, "rates": RATES, "loras": handle.loras, **call}
        return foresee_job(tiny_model("flux"), prompt, negative, **given)

    first = found()
    denoise = first.plan.phases[1]
    data = plan_json(first)["phases"][1]["components"]["transformer"]
    assert data["added_bytes"] == denoise.components[0].added_bytes > 0
    assert data["resident_bytes"] == data["weight_bytes"] == denoise.weight_bytes
    assert "of LoRA weights, which stay." in plan_table(first)
    assert memory_timeline(first).phases[1].peak_bytes == denoise.device_peak_bytes
    assert found().plan == first.plan


def sayings(*asked: Callable[[], Any]) -> set[str]:
    said = set()
    for ask in asked:
        with pytest.raises(po.ModelError) as caught:
            ask()
        said.add(str(caught.value))
    return said


def test_a_lora_of_another_kind_of_model_is_refused_alike_before_and_in_a_phase(tmp_path: Path) -> None:
    file = make_lora("sd15", "unet", tmp_path / "other.safetensors", ["to_q"])
    path, call = tiny_model("flux"), job("flux", guided=False)
    handle = po.load(path, device="cpu", loras=[file])
    embeds = po.encode(replace(handle, loras=()), "a star")
    (sentence,) = sayings(
        lambda: po.encode(handle, "a star"),
        lambda: po.denoise(handle, embeds, **call),
        lambda: foresee_encode(handle, "a star", rates=RATES),
        lambda: foresee_denoise(handle, embeds, rates=RATES, **call),
        lambda: foresee_job(path, "a star", settings=SETTINGS, rates=RATES, loras=[file], **call),
    )
    assert sentence.startswith("The LoRA other.safetensors is for another kind of model")


def test_a_lora_of_other_sizes_is_refused_alike_before_and_in_a_phase(tmp_path: Path) -> None:
    file = make_lora("sd15", "unet", tmp_path / "wide.safetensors", ["to_q"])
    wide = {key: torch.zeros(*(2 * size for size in value.shape)) for key, value in load_file(file).items()}
    save_file(wide, file)
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[file])
    embeds, call = po.encode(handle, "a star"), job("sd15", guided=False)
    (sentence,) = sayings(
        lambda: po.denoise(handle, embeds, **call), lambda: foresee_denoise(handle, embeds, rates=RATES, **call)
    )
    assert sentence.startswith("The LoRA wide.safetensors doesn't fit unet of this model")


@pytest.mark.skipif(not encoder_loras_work(), reason="the installed transformers needs a newer peft for its models")
def test_a_lora_of_a_text_encoder_is_in_the_plan_of_encode(tmp_path: Path) -> None:
    file = make_lora("sd15", "text_encoder", tmp_path / "words.safetensors", ["q_proj", "v_proj"], rank=16)
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[file], settings=SETTINGS)
    plan, session = foresee_encode(handle, **words("sd15"), rates=RATES).plan, po.Session()
    (component,) = plan.phases[0].components
    assert component.added_bytes == sum(value.nbytes for value in load_file(file).values())
    po.encode(handle, **words("sd15"), session=session, plan=plan)
    (phase,) = session.report.phases
    assert phase.reserved_peak_bytes == plan.phases[0].device_peak_bytes
    assert phase.weight_bytes == plan.phases[0].weight_bytes


def test_weights_beyond_what_was_said_make_room_too() -> None:
    """A file may hold more than the phase counted in it; nothing lies on the device that isn't booked."""
    module = BY_NAME["flux"].build().requires_grad_(False)
    said, all_of_it = 4096, 65536
    budget = sum(part.nbytes for part in part_sizes(module)) + said
    settings = replace(SETTINGS, device_memory=budget, activation_memory=0, resident_below=0)
    scope = OffloadScope(settings, torch.device("cpu"))
    try:
        managed = scope.attach(module, name="module", added_bytes=said)
        assert managed.plan.whole and managed.plan.small_bytes >= said
        assert scope.ledger.by_kind("device")["adapters"] == said
        module.register_parameter("more", torch.nn.Parameter(torch.zeros(all_of_it // 4), requires_grad=False))
        managed.book_new(module)
        assert scope.ledger.by_kind("device")["adapters"] == all_of_it
        with torch.no_grad():
            BY_NAME["flux"].calls[0](module)
        assert scope.ledger.peak("device") <= budget
        assert scope.cache.counts.streamed_bytes > 0
    finally:
        scope.close()


def test_a_lora_that_is_made_of_the_models_weights_runs_without_a_plan(tmp_path: Path) -> None:
    file = make_lora("flux", "transformer", tmp_path / "dora.safetensors", ["to_q"], use_dora=True)
    handle = po.load(tiny_model("flux"), device="cpu", loras=[file])
    embeds, call = po.encode(handle, "a star"), job("flux", guided=False)
    with pytest.raises(TraceError, match="LoRAs of transformer can't be applied without its weights"):
        foresee_denoise(handle, embeds, rates=RATES, **call)
    assert po.denoise(handle, embeds, **call).samples.isfinite().all()
