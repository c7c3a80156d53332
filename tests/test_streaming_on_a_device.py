"""The engine over an accelerator's side stream: equal bits, no race, no byte over budget, on the pretend device.

Copies are lazy (their target reads as NaN until something waits for them), memory is poisoned, and every access is
checked against the order that events and streams establish.
"""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.runner import run_on_vgpu


def _setup(dtype: str = "bfloat16") -> Any:
    """A small FLUX on disk, its inputs on the CPU and on the device, and the resident twin's answer."""
    from tempfile import mkdtemp

    import torch
    from diffusers import FluxTransformer2DModel

    import vgpu

    device = vgpu.install()
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=3,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        in_channels=16,
        axes_dims_rope=(8, 12, 12),
    )
    model = model.to(getattr(torch, dtype)).eval().requires_grad_(False)
    folder = mkdtemp(prefix="vgpu-flux-")
    model.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(model.dtype)

    inputs = {
        "hidden_states": some(1, 24, 16),
        "encoder_hidden_states": some(1, 8, 64),
        "pooled_projections": some(1, 32),
        "timestep": torch.tensor([0.5], dtype=model.dtype),
        "img_ids": torch.zeros(24, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    there = {name: tensor.to("vgpu") for name, tensor in inputs.items()}
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
    device.set_lazy(True)
    device.set_poison(True)
    device.set_race_check(True)
    return device, folder, there, expected


def _load(folder: str, dtype: str = "bfloat16", tier: str = "file") -> Any:
    import torch
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()
    if tier == "ram":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def _run(model: Any, inputs: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**inputs, return_dict=False)[0].cpu()


def budgets_and_tiers() -> list[dict[str, Any]]:
    import torch

    from offload_core import OffloadSettings
    from offload_core.streaming import enable_offload

    device, folder, inputs, expected = _setup()
    rows = []
    for host in ("2GiB", "4MiB"):
        for tier in ("file", "ram"):
            for share in (1.2, 0.6, 0.3, 0.12):
                if tier == "ram" and host == "4MiB":
                    continue
                model = _load(folder, tier=tier)
                total = sum(parameter.nbytes for parameter in model.parameters())
                budget, before = int(total * share), device.current()
                device.reset_peak()
                settings = OffloadSettings(
                    execution_device="vgpu",
                    device_memory=budget,
                    host_memory=host,
                    resident_below=2048,
                    activation_memory=0,
                )
                result = enable_offload(model, settings=settings)
                equal = [torch.equal(_run(model, inputs), expected) for _ in range(2)]
                with torch.inference_mode():
                    equal.append(torch.equal(model(**inputs, return_dict=False)[0].cpu(), expected))
                report = result.report()
                pinned = device.pinned_bytes()
                held = result.release()
                after = torch.equal(_run(model.to("vgpu"), inputs), expected)
                del model, result
                rows.append(
                    {
                        "share": share,
                        "host": host,
                        "tier": tier,
                        "equal": all(equal),
                        "after": after,
                        "budget": budget,
                        "reserved": report.peak_bytes,
                        "streamed": report.streamed_bytes - report.resident_bytes,
                        "read": report.read_bytes,
                        "total": total,
                        "pinned": pinned,
                        "host_peak": report.host_peak_bytes,
                        "left": [held, device.current() - before, device.pinned_bytes()],
                        "races": device.races()[:1],
                    }
                )
    return rows


def test_equal_bits_at_every_budget_and_tier_without_a_race_or_a_byte_left() -> None:
    rows = run_on_vgpu(budgets_and_tiers)
    assert len(rows) == 12
    for row in rows:
        assert row["equal"], row
        assert row["after"], row
        assert row["races"] == [], row
        assert row["left"] == [0, 0, 0], row
        assert row["reserved"] <= row["budget"], row
        if row["share"] < 1:
            assert row["streamed"] > 0, row
        if row["tier"] == "file" and row["host"] == "2GiB":  # what was read once stays in pinned memory
            assert row["read"] < 1.1 * row["total"], row
        if row["host"] == "4MiB":
            assert row["host_peak"] <= 4 << 20, row
            assert row["pinned"] <= 4 << 20, row


def casts_on_the_way() -> dict[str, Any]:
    import torch
    from torch import nn

    import vgpu
    from offload_core import OffloadSettings
    from offload_core.streaming import OffloadScope

    device = vgpu.install()
    device.set_lazy(True)
    device.set_poison(True)
    device.set_race_check(True)
    torch.manual_seed(0)
    results = {}
    for stored, run in (("float32", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32")):
        layers = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(6)]).requires_grad_(False)
        for layer in layers:
            layer.weight.data = (layer.weight.data * 8).to(getattr(torch, stored))
        dtype = getattr(torch, run)
        twin = [layer.weight.to(dtype) for layer in layers]
        x = torch.randn(3, 96).to(dtype)
        expected = x
        for weight in twin:
            expected = torch.tanh(expected @ weight.t())
        settings = OffloadSettings(device_memory=3 * 96 * 96 * dtype.itemsize, resident_below=0, activation_memory=0)
        scope = OffloadScope(settings, torch.device("vgpu", 0))
        managed = scope.attach(layers, name="layers", dtype_of=lambda *_, dtype=dtype: (dtype,))
        equal = []
        for _ in range(2):
            y = x.to("vgpu")
            for layer in layers:
                assert layer.weight.dtype == dtype
                y = torch.tanh(y @ layer.weight.t())
            equal.append(torch.equal(y.cpu(), expected))
        kinds = scope.ledger.by_kind("device")
        managed.release(restore=True)
        scope.close()
        streamed = scope.cache.counts.streamed_bytes
        results[f"{stored} as {run}"] = (all(equal), streamed, kinds.get("cast", 0), device.races()[:1])
    return results


def test_weights_are_cast_after_the_link_when_that_makes_them_wider_and_before_it_when_narrower() -> None:
    results = run_on_vgpu(casts_on_the_way)
    assert all(equal and streamed > 0 and not races for equal, streamed, _, races in results.values()), results
    assert results["float32 as bfloat16"][2] == 0  # cast in RAM: no buffer on the device
    assert results["float8_e4m3fn as bfloat16"][2] > 0  # cast on the device, in a buffer that is booked
    assert results["bfloat16 as float32"][2] > 0


def recurrent_layers() -> dict[str, Any]:
    import torch
    from torch import nn

    import vgpu
    from offload_core import OffloadSettings
    from offload_core.streaming import enable_offload

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.lstm(self.first(x))[0])

    device = vgpu.install()
    torch.manual_seed(0)
    model = Reader().eval().requires_grad_(False)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
        before = device.current()
        settings = OffloadSettings(
            execution_device="vgpu", device_memory=48 * 1024, resident_below=0, activation_memory=0
        )
        with enable_offload(model, settings=settings) as result:
            equal = torch.equal(model(x.to("vgpu")).cpu(), expected)
            streamed = result.report().streamed_bytes
        after = torch.equal(model(x), expected)
    return {"equal": equal, "after": after, "streamed": streamed, "left": device.current() - before}


def test_a_layer_that_keeps_a_second_list_of_its_weights_moves_whole_and_comes_back() -> None:
    result = run_on_vgpu(recurrent_layers)
    assert result["equal"]
    assert result["after"]
    assert result["streamed"] > 0
    assert result["left"] == 0


def fault_sweep(kind: str) -> dict[str, Any]:
    import gc
    import threading

    import torch

    from offload_core import OffloadSettings
    from offload_core.streaming import enable_offload

    device, folder, inputs, expected = _setup()
    settings = OffloadSettings(
        execution_device="vgpu", device_memory=1 << 20, host_memory="32MiB", resident_below=4096, activation_memory=0
    )
    outcomes: dict[str, int] = {}
    wrong: list[Any] = []

    def attempt(k: int) -> str:
        model, before, result = _load(folder), device.current(), None
        if k:
            device.fail_at(kind, k)
        try:
            result = enable_offload(model, settings=settings)
            outcome = "ran" if torch.equal(_run(model, inputs), expected) else "wrong bits"
        except Exception as error:
            outcome = type(error).__name__
            error.__traceback__ = None
            del error
        device.fail_at(None, 0)
        if result is not None:
            result.release()
        gc.collect()
        left = (device.current() - before, device.pinned_bytes())
        readers = [thread.name for thread in threading.enumerate() if thread.name.startswith("offload-reader")]
        if left != (0, 0) or readers or outcome == "wrong bits":
            wrong.append((k, outcome, left, readers))
        with enable_offload(model, settings=settings):
            if not torch.equal(_run(model, inputs), expected):
                wrong.append((k, outcome, "retry"))
        return outcome

    started = device.operation_counts()[kind]
    attempt(0)
    total = (device.operation_counts()[kind] - started) // 2  # it ran twice
    chosen = sorted({*range(1, min(total, 12) + 1), *range(1, total + 1, total // 12 + 1)})
    for k in chosen:
        outcome = attempt(k)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return {"outcomes": outcomes, "wrong": wrong[:3], "swept": len(chosen), "races": device.races()[:1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alloc", "copy", "pin"])
def test_whichever_operation_fails_nothing_stays_and_a_retry_gives_the_right_bits(kind: str) -> None:
    result = run_on_vgpu(fault_sweep, kind)
    assert result["wrong"] == []
    assert result["races"] == []
    assert result["swept"] >= (1 if kind == "pin" else 12)


def limits_and_cooling() -> dict[str, Any]:
    """What is pinned and resident under limits, and what stays when the result of an offload is deleted."""
    import torch

    import offload_core as po

    device, folder, inputs, expected = _setup()
    common = {"execution_device": "vgpu", "device_memory": "1MiB", "resident_below": 2048, "activation_memory": 0}
    rows: dict[str, Any] = {}
    for name, limits in {"auto": {}, "none": {"pinned_memory": 0, "resident_memory": 0}}.items():
        before = device.current()
        model = _load(folder)
        result = po.enable_offload(model, settings=po.OffloadSettings(**common, **limits))
        equal = torch.equal(_run(model, inputs), expected)
        plan, pinned = result.plan, device.pinned_bytes()
        small = plan.small_bytes
        ran = device.current() - before
        del result
        cool, cool_pinned = device.current() - before, device.pinned_bytes()
        equal &= torch.equal(_run(model, inputs), expected)
        po.remove_dynamic_offload(model)
        left = [device.current() - before, device.pinned_bytes()]
        rows[name] = {"equal": equal, "pinned": pinned, "resident": plan.resident_bytes, "small": small}
        rows[name] |= {"ran": ran, "cool": cool, "cool_pinned": cool_pinned, "left": left, "races": device.races()[:1]}
    return rows


def test_limits_of_pinned_and_resident_memory_hold_and_a_deleted_result_gives_both_back() -> None:
    rows = run_on_vgpu(limits_and_cooling)
    for row in rows.values():
        assert row["equal"] and row["races"] == [] and row["left"] == [0, 0]
        assert row["small"] <= row["cool"] < row["ran"]
    assert rows["auto"]["resident"] > 0 < rows["auto"]["pinned"]
    assert rows["auto"]["cool_pinned"] < rows["auto"]["pinned"]
    assert rows["none"]["resident"] == rows["none"]["pinned"] == 0


def missing_wait(which: str) -> str:
    import torch

    from offload_core import OffloadSettings
    from offload_core.streaming import enable_offload
    from offload_core.streaming._accelerator import AcceleratorCopies

    device, folder, inputs, expected = _setup()
    if which == "copy before compute":
        AcceleratorCopies.before_use = lambda self, entry: None
    elif which == "compute before copy":
        AcceleratorCopies.retire = lambda self, streams: None
    settings = OffloadSettings(
        execution_device="vgpu", device_memory=700_000, host_memory="2GiB", resident_below=2048, activation_memory=0
    )
    model = _load(folder)
    result = enable_offload(model, settings=settings)
    try:
        equal = all(torch.equal(_run(model, inputs), expected) for _ in range(3))
        return "equal" if equal else "wrong bits"
    except RuntimeError as error:
        return "race" if "race" in str(error) else str(error)
    finally:
        device.set_race_check(False)
        result.release()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["copy before compute", "compute before copy"])
def test_the_harness_notices_each_wait_that_is_taken_out(which: str) -> None:
    assert run_on_vgpu(missing_wait, "none") == "equal"
    assert run_on_vgpu(missing_wait, which) in ("race", "wrong bits")


def pinned_by_a_host() -> dict[str, Any]:
    import torch
    from torch import nn

    import vgpu
    from offload_core import OffloadSettings
    from offload_core.streaming import OffloadScope

    device = vgpu.install()
    device.set_poison(True)
    device.set_race_check(True)

    class Host:
        def __init__(self, grants: bool) -> None:
            self.grants, self.there, self.most = grants, {}, 0

        def pin(self, memory: torch.Tensor) -> bool:
            if self.grants:
                self.there[memory.data_ptr()] = memory
                self.most = max(self.most, sum(each.nbytes for each in self.there.values()))
            return self.grants

        def unpin(self, memory: torch.Tensor) -> None:
            del self.there[memory.data_ptr()]

    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(6)]).requires_grad_(False)
    x = torch.randn(3, 96)
    expected = layers(x)
    results = {}
    for grants in (True, False):
        host = Host(grants)
        settings = OffloadSettings(device_memory=3 * 96 * 96 * 4, resident_below=0, activation_memory=0)
        scope = OffloadScope(settings, torch.device("vgpu", 0), pins=host)
        managed = scope.attach(layers, name="layers")
        equal = [torch.equal(layers(x.to("vgpu")).cpu(), expected) for _ in range(2)]
        by_torch = device.pinned_bytes()
        managed.release(restore=True)
        scope.close()
        results[grants] = (all(equal), host.most, len(host.there), by_torch, device.races()[:1])
    return results


@pytest.mark.slow
def test_memory_is_pinned_by_a_host_that_grants_it_and_by_nobody_where_it_refuses() -> None:
    results = run_on_vgpu(pinned_by_a_host)
    granted, refused = results.values()
    assert granted[0] and granted[1] > 0
    assert refused[0] and refused[1] == 0
    for _, _, left, by_torch, races in results.values():
        assert (left, by_torch, races) == (0, 0, [])
