"""Sequential offload on the pretend device: what is there, what is copied, what is pinned, and what is left."""

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


def _weights(module: Any) -> int:
    return sum({p.data_ptr(): p.nbytes for p in module.parameters()}.values())


def swaps_from_ram(pin_memory: bool) -> dict[str, Any]:
    """Two rounds through encoders, DiTs and VAE, each in its turn."""
    import torch

    from offload_core.sequential import apply_sequential_offload, remove_sequential_offload
    from sequential_models import Pipeline, traces

    device, expected, pipeline = _setup(), Pipeline(width=192)(), Pipeline(width=192)
    modules = list(pipeline.modules().values())
    dits = [pipeline.transformer, pipeline.transformer_2]
    encoders = [pipeline.text_encoder, pipeline.image_encoder]
    pipeline.vae.to("vgpu")  # it isn't managed: it stays where it was sent
    before, current, pins = [traces(module) for module in modules], device.current(), device.operation_counts()["pin"]
    apply_sequential_offload(dits, encoders, torch.device("vgpu"), pin_memory)
    buffers = device.current() - current
    device.reset_peak()
    equal = [torch.equal(pipeline("vgpu"), expected)]
    per_round = device.counters()
    first_pins = device.operation_counts()["pin"]
    equal.append(torch.equal(pipeline("vgpu"), expected))
    after = device.counters()
    peak = device.peak() - current - buffers
    facts = {
        "equal": all(equal),
        "peak": peak,
        "largest": max(_weights(Pipeline(width=192).transformer), 0),
        "both": 2 * _weights(Pipeline(width=192).transformer),
        "to the device in a round": after["h2d"] - per_round["h2d"],
        "weights": sum(_weights(part) for part in Pipeline(width=192).modules().values()),
        "back from the device in a round": after["d2h"] - per_round["d2h"],
        "result": expected.nbytes,
        "pinned": device.pinned_bytes(),
        "pins": [first_pins - pins, device.operation_counts()["pin"] - first_pins],
        "device": [str(module.first.weight.device) for module in dits],
    }
    assert pipeline.transformer.to("vgpu") is pipeline.transformer
    try:
        pipeline.transformer.to("cpu")
        facts["refused"] = False
    except Exception as error:
        facts["refused"] = "under offload" in str(error)
    remove_sequential_offload([*dits, *encoders])
    facts["restored"] = [traces(module) for module in modules] == before
    facts["left"] = [device.current() - current, device.pinned_bytes()]
    pipeline.vae.to("cpu")
    facts["after"] = torch.equal(pipeline(), expected)
    facts["races"] = device.races()[:1]
    return facts


@pytest.mark.parametrize("pin_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_swap_sends_weights_one_way_pins_nothing_anew_and_leaves_nothing(pin_memory: bool) -> None:
    facts = run_on_vgpu(swaps_from_ram, pin_memory)
    assert facts["equal"]
    assert facts["peak"] < 1.2 * facts["largest"] < facts["both"]
    assert facts["weights"] * 0.7 < facts["to the device in a round"] < facts["weights"] * 1.5
    ids = 2 * 6 * 8  # rows of the two tables are gathered on the host
    assert facts["back from the device in a round"] == facts["result"] + ids  # and no weight
    assert facts["pins"][1] == 0
    assert (facts["pinned"] > 0) == (facts["pins"][0] > 0) == pin_memory
    assert facts["device"] == ["vgpu:0"] * 2
    assert facts["refused"]
    assert facts["restored"]
    assert facts["left"] == [0, 0]
    assert facts["after"]
    assert facts["races"] == []


def modules_that_were_on_the_device(strict: bool) -> dict[str, Any]:
    import torch

    from offload_core.sequential import ModelLevelOffloadBackend, OffloadConfig, OffloadStrategy
    from sequential_models import Pipeline, traces

    device, expected, pipeline = _setup(), Pipeline()(), Pipeline()
    start = device.current()
    for module in pipeline.modules().values():
        module.to("vgpu")
    shared = pipeline.transformer.first.weight is pipeline.transformer.last.weight

    def state() -> list[Any]:
        kept = [traces(module) for module in pipeline.modules().values()]
        return [
            {name: entry if "attributes" in name or "forward" in name else (entry[0], *entry[2:])}
            for found in kept
            for name, entry in found.items()
        ]

    before, current = state(), device.current()
    backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL, strict=strict), torch.device("vgpu"))
    backend.enable(pipeline)
    at_rest = device.current() - start
    with torch.inference_mode():
        equal = torch.equal(pipeline("vgpu"), expected)
    with torch.no_grad():
        pipeline.transformer.conv.weight.add_(0)  # an edit that changes the version and no value
    equal &= torch.equal(pipeline("vgpu"), expected)
    backend.disable()
    facts = {
        "equal": equal,
        "at rest": at_rest,
        "all": current - start,
        "restored": state() == before,
        "tied": shared and pipeline.transformer.first.weight.data_ptr() == pipeline.transformer.last.weight.data_ptr(),
        "bytes": device.current() - current,
        "after": torch.equal(pipeline("vgpu"), expected),
    }
    backend.enable(pipeline)
    pipeline("vgpu")
    device.set_cap(device.current() + 1024)  # somebody took the room it had
    try:
        backend.disable()
        facts["no room"] = "restored"
    except Exception as error:
        facts["no room"] = type(error).__name__
    device.set_cap(None)
    for module in pipeline.modules().values():
        module.to("vgpu")
    facts["usable"] = torch.equal(pipeline("vgpu"), expected)
    facts["races"] = device.races()[:1]
    return facts


def test_modules_that_were_on_the_device_go_back_there() -> None:
    facts = run_on_vgpu(modules_that_were_on_the_device, True)
    assert facts["equal"]
    assert facts["at rest"] < 0.05 * facts["all"]
    assert facts["restored"]
    assert facts["tied"]
    assert facts["bytes"] == 0
    assert facts["after"]
    assert facts["no room"] == "InsufficientMemoryError"
    assert facts["usable"]
    assert facts["races"] == []


def pipeline_from_files(kind: str) -> dict[str, Any]:
    from tempfile import mkdtemp

    import torch

    from offload_core.sequential import OffloadConfig, OffloadStrategy, get_offload_backend
    from offload_core.tiny_models import FAMILIES, load_tiny, run_whole, save_tiny

    device, folder, call = _setup(), mkdtemp(prefix="sequential-"), FAMILIES["wan22_a14b"].call
    save_tiny("wan22_a14b", folder)
    expected = run_whole(load_tiny(folder, dtype=torch.float32), seed=1, **call)
    unaligned = run_whole(load_tiny(folder, dtype=torch.float32, aligned=False), seed=1, **call)
    start = device.current()
    pipeline = load_tiny(folder, dtype=torch.float32, aligned=False)  # its weights are mapped from the files
    backend = get_offload_backend(OffloadConfig(OffloadStrategy(kind)), torch.device("vgpu"))
    assert backend is not None
    backend.enable(pipeline)
    equal = [torch.equal(run_whole(pipeline, seed=1, **call).cpu(), expected)]
    exclusions = [each for each in (getattr(backend, name, None) for name in ("_exclusion", "_dits")) if each]
    read = exclusions[0]._scope.bytes_read
    equal.append(torch.equal(run_whole(pipeline, seed=1, **call).cpu(), expected))
    again = exclusions[0]._scope.bytes_read - read
    backend.disable()
    equal.append(torch.equal(run_whole(pipeline, seed=1, **call), unaligned))
    left = [device.current() - start, device.pinned_bytes()]
    return {"equal": equal, "read": read, "again": again, "left": left, "races": device.races()[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model_level", "layer_wise"])
def test_a_pipeline_with_two_dits_runs_from_its_files_and_reads_them_once(kind: str) -> None:
    facts = run_on_vgpu(pipeline_from_files, kind)
    assert facts["equal"] == [True] * 3
    assert facts["read"] > 0
    assert facts["again"] < 0.1 * facts["read"]
    assert facts["left"] == [0, 0]
    assert facts["races"] == []


def fault_sweep(kind: str, start_on_device: bool) -> dict[str, Any]:
    """Each k-th operation of a kind fails once, somewhere between apply and remove."""
    import gc

    import torch

    from offload_core.sequential import apply_sequential_offload, remove_sequential_offload
    from sequential_models import Pipeline, traces

    device, expected = _setup(), Pipeline()()
    outcomes: dict[str, int] = {}
    wrong: list[Any] = []

    def attempt(k: int) -> None:
        pipeline = Pipeline()
        modules = list(pipeline.modules().values())
        if start_on_device:
            for module in modules[:4]:
                module.to("vgpu")
        pipeline.vae.to("vgpu")
        before = [{name: entry for name, entry in traces(m).items() if "attr" in name} for m in modules]
        places = [str(next(m.parameters()).device) for m in modules]
        current = device.current()
        if k:
            device.fail_at(kind, k)
        outcome, removed = "ran", True
        try:
            apply_sequential_offload(modules[:2], modules[2:4], torch.device("vgpu"))
            if not torch.equal(pipeline("vgpu"), expected):
                outcome = "wrong bits"
        except Exception as error:
            outcome = type(error).__name__
            error.__traceback__ = None
            del error
        try:
            remove_sequential_offload(modules[:4])
        except Exception as error:
            outcome, removed = f"{type(error).__name__} in remove", False
            error.__traceback__ = None
            del error
        device.fail_at(None, 0)
        gc.collect()
        after = [{name: entry for name, entry in traces(m).items() if "attr" in name} for m in modules]
        if removed and places != [str(next(m.parameters()).device) for m in modules]:
            wrong.append((k, outcome, "devices"))
        if after != before or outcome == "wrong bits":
            wrong.append((k, outcome, "traces"))
        if removed and (device.current() != current or device.pinned_bytes()):
            wrong.append((k, outcome, device.current() - current, device.pinned_bytes()))
        for module in modules:
            module.to("vgpu")
        if not torch.equal(pipeline("vgpu"), expected):
            wrong.append((k, outcome, "retry"))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    started = device.operation_counts()[kind]
    attempt(0)
    total = device.operation_counts()[kind] - started
    chosen = sorted({*range(1, min(total, 10) + 1), *range(1, total + 1, max(total // 20, 1))})
    for k in chosen:
        attempt(k)
    return {"outcomes": outcomes, "wrong": wrong[:3], "swept": len(chosen), "races": device.races()[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("start_on_device", [False, True], ids=["from RAM", "from the device"])
@pytest.mark.parametrize("kind", ["alloc", "copy", "pin"])
def test_whichever_operation_fails_every_module_is_given_back(kind: str, start_on_device: bool) -> None:
    result = run_on_vgpu(fault_sweep, kind, start_on_device)
    assert result["wrong"] == []
    assert result["races"] == []
    assert result["swept"] >= (1 if kind == "pin" else 12)
