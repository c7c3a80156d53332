"""The names of DDO on the pretend device: modules go back where they were, and guests come and go."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.runner import run_on_vgpu


def _setup() -> Any:
    import torch

    import vgpu

    device = vgpu.install()
    torch.set_num_threads(1)
    device.set_lazy(True)
    device.set_poison(True)
    device.set_race_check(True)
    return device


def _places(module: Any) -> dict[str, Any]:
    """Traces without addresses: memory on a device is given back while a module is under offload."""
    from sequential_models import traces

    return {
        name: found if isinstance(found, set) or name.endswith(" forward") else (found[0], *found[2:])
        for name, found in traces(module).items()
    }


def modules_that_start_on_the_device() -> dict[str, Any]:
    import torch

    from offload_core import OffloadSettings, ddo, enable_offload, enable_pipeline_offload
    from sequential_models import Pipeline

    device, expected, pipeline = _setup(), Pipeline(width=192)(), Pipeline(width=192)
    before_all = device.current()
    for module in pipeline.modules().values():
        module.to("vgpu")
    weights = device.current() - before_all
    before, current = {name: _places(module) for name, module in pipeline.modules().items()}, device.current()
    settings = OffloadSettings(execution_device="vgpu", device_memory="700KiB", resident_below=0, activation_memory=0)
    results = enable_pipeline_offload(pipeline, settings=settings)
    attached = device.current() - before_all
    facts: dict[str, Any] = {"weights": weights, "attached": attached}
    facts["equal"] = [torch.equal(pipeline("vgpu"), expected)]
    with torch.no_grad():
        pipeline.transformer.conv.weight.mul_(2)
        pipeline.transformer.conv.weight.mul_(0.5)  # an edit that leaves the values
    facts["equal"].append(torch.equal(pipeline("vgpu"), expected))
    for result in results.values():
        result.release()
    facts["restored"] = [name for name, module in pipeline.modules().items() if _places(module) != before[name]]
    facts["bytes"] = device.current() - current
    facts["equal"].append(torch.equal(pipeline("vgpu"), expected))
    dit = pipeline.transformer
    facts["tied"] = dit.first.weight.data_ptr() == dit.last.weight.data_ptr()

    enable_offload(dit, settings=settings)
    ddo.remove_dynamic_offload(dit)  # without the result
    tight = OffloadSettings(execution_device="vgpu", device_memory="1KiB", resident_below=0, activation_memory=0)
    try:
        enable_offload(dit, settings=tight)
    except Exception as error:
        facts["refused"] = type(error).__name__
    facts["restored"] += [name for name, module in pipeline.modules().items() if _places(module) != before[name]]
    facts["bytes"] += device.current() - current
    facts["equal"].append(torch.equal(pipeline("vgpu"), expected))
    facts["races"] = device.races()[:1]
    return facts


def test_modules_that_start_on_the_device_leave_it_and_go_back() -> None:
    """They stayed there beside the budget, and were given back in RAM."""
    facts = run_on_vgpu(modules_that_start_on_the_device)
    assert facts["attached"] < 0.2 * facts["weights"]
    assert all(facts["equal"])
    assert facts["restored"] == []
    assert facts["bytes"] == 0
    assert facts["tied"]
    assert facts["refused"] == "BudgetError"
    assert facts["races"] == []


def other_routes(start: str) -> dict[str, Any]:
    import torch

    from offload_core import enable_diffusers_group_offload, enable_offload
    from sequential_models import Pipeline, traces

    device, expected, pipeline = _setup(), Pipeline()(), Pipeline()
    for module in pipeline.modules().values():
        module.to(start)
    dit = pipeline.transformer
    state = traces if start == "cpu" else _places
    before, current = state(dit), device.current()
    facts: dict[str, Any] = {"restored": [], "bytes": [], "equal": []}
    for way in ("none", "diffusers_group_offload", "function"):
        if way == "function":
            result: Any = enable_diffusers_group_offload(dit, onload_device="vgpu", use_stream=False)
        else:
            result = enable_offload(dit, route=way, execution_device="vgpu", use_stream=False, environ={})
        there = [part for name, part in pipeline.modules().items() if name != "transformer"]
        for module in there:
            module.to("vgpu")
        facts["equal"].append(torch.equal(pipeline("vgpu"), expected))
        for module in there:
            module.to(start)
        result.release()
        facts["restored"].append(state(dit) == before)
        facts["bytes"].append(device.current() - current)
    facts["equal"].append(torch.equal(pipeline(start), expected))
    with torch.no_grad():
        result = enable_offload(dit, route="none", execution_device="vgpu", environ={})
        dit.conv.weight.data = dit.conv.weight.data + 1
        result.release()
        facts["edited"] = [str(dit.conv.weight.device), bool((dit.conv.weight.mean() > 0.5).item())]
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("start", ["cpu", "vgpu"])
def test_modules_that_went_another_way_go_back_too(start: str) -> None:
    facts = run_on_vgpu(other_routes, start)
    assert facts["restored"] == [True] * 3
    assert facts["bytes"] == [0] * 3
    assert all(facts["equal"])
    assert facts["edited"] == ["cpu" if start == "cpu" else "vgpu:0", True]


def a_failing_operation(kind: str) -> dict[str, Any]:
    """Each k-th operation of a kind fails once, somewhere between attach and release of modules on the device."""
    import gc

    import torch

    from offload_core import OffloadSettings, ddo, enable_pipeline_offload
    from sequential_models import Pipeline

    device, expected = _setup(), Pipeline()()
    settings = OffloadSettings(execution_device="vgpu", device_memory="40KiB", resident_below=0, activation_memory=0)
    outcomes: dict[str, int] = {}
    wrong: list[Any] = []

    def attempt(k: int) -> None:
        pipeline = Pipeline()
        modules = list(pipeline.modules().values())
        for module in modules:
            module.to("vgpu")
        before, current = [_places(module) for module in modules], device.current()
        device.fail_at(kind if k else None, k)
        outcome, removed = "ran", True
        try:
            enable_pipeline_offload(pipeline, settings=settings)
            outcome = "ran" if torch.equal(pipeline("vgpu"), expected) else "wrong bits"
        except Exception as error:
            outcome = type(error).__name__
            error.__traceback__ = None
            del error
        for module in modules:
            try:
                ddo.remove_dynamic_offload(module)
            except Exception as error:
                outcome, removed = f"{type(error).__name__} in remove", False
                error.__traceback__ = None
                del error
        device.fail_at(None, 0)
        gc.collect()
        if removed and [_places(module) for module in modules] != before:
            wrong.append((k, outcome, "places"))
        if removed and (device.current() != current or device.pinned_bytes()):
            wrong.append((k, outcome, device.current() - current, device.pinned_bytes()))
        for module in modules:
            module.to("vgpu")
        if outcome == "wrong bits" or not torch.equal(pipeline("vgpu"), expected):
            wrong.append((k, outcome, "bits"))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    started = device.operation_counts()[kind]
    attempt(0)
    total = device.operation_counts()[kind] - started
    chosen = sorted({*range(1, min(total, 10) + 1), *range(1, total + 1, max(total // 20, 1))})
    for k in chosen:
        attempt(k)
    return {"outcomes": outcomes, "wrong": wrong[:3], "swept": len(chosen), "races": device.races()[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alloc", "copy"])
def test_whichever_operation_fails_every_module_is_on_the_device_again(kind: str) -> None:
    result = run_on_vgpu(a_failing_operation, kind)
    assert result["wrong"] == []
    assert result["races"] == []
    assert result["swept"] >= 12


def guests_on_the_device(route: str) -> dict[str, Any]:
    """SDXL image to image, its VAE left out, with its encoders given as embeddings."""
    from pathlib import Path
    from tempfile import mkdtemp

    import torch
    from diffusers import StableDiffusionXLImg2ImgPipeline

    from offload_core import enable_offload
    from offload_core.tiny_models import VARIANTS, load_tiny, save_tiny
    from offload_core.tiny_models.running import align

    device, call = _setup(), dict(VARIANTS["sdxl_img2img"].call)
    folder = save_tiny("sdxl", Path(mkdtemp(prefix="guests-")))
    whole = load_tiny(folder, dtype=torch.float32, pipeline_class=StableDiffusionXLImg2ImgPipeline)
    prompt, _, pooled, _ = whole.encode_prompt(call.pop("prompt"), do_classifier_free_guidance=False)

    def run(pipe: Any, there: str) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        embeds = {"prompt_embeds": prompt.to(there), "pooled_prompt_embeds": pooled.to(there)}
        generator = torch.Generator().manual_seed(1)
        found: torch.Tensor = pipe(**call, **embeds, output_type="latent", generator=generator)[0].cpu()
        return found

    expected = run(whole, "cpu")
    del whole
    start = device.current()
    names = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"))
    pipe = StableDiffusionXLImg2ImgPipeline.from_pretrained(folder, **names)
    align(pipe.unet)
    result = enable_offload(pipe.unet, route=route, execution_device="vgpu", use_stream=False, environ={})
    equal = [torch.equal(run(pipe, "vgpu"), expected) for _ in range(2)]
    visits = [(visit.component, visit.method) for visit in result.visits]
    result.release()
    return {"equal": equal, "visits": visits, "left": device.current() - start, "races": device.races()[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("route", ["auto", "group"])
def test_a_guest_runs_on_the_device_and_leaves_it(route: str) -> None:
    facts = run_on_vgpu(guests_on_the_device, route)
    assert facts["equal"] == [True, True]
    assert facts["visits"] == [["vae", "encode"]] * 2
    assert facts["left"] < 4096  # statistics of the stand-in
    assert facts["races"] == []
