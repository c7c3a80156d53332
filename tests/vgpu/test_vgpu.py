"""The pretend accelerator does what the other tests take for granted."""

from __future__ import annotations

from vgpu.runner import run_on_vgpu


def a_linear_layer_on_both() -> dict[str, object]:
    import torch

    import vgpu

    ext = vgpu.install()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32), torch.randn(8, 64)
    before = ext.current()
    with torch.no_grad():
        expected = layer(x)
        result = layer.to("vgpu")(x.to("vgpu"))
    equal = torch.equal(result.cpu(), expected)
    device, accelerator = str(result.device), str(torch.accelerator.current_accelerator())
    del layer, result
    return {"equal": equal, "device": device, "accelerator": accelerator, "left": ext.current() - before}


def test_results_equal_the_cpu_and_memory_comes_back():
    answer = run_on_vgpu(a_linear_layer_on_both)
    assert answer == {"equal": True, "device": "vgpu:0", "accelerator": "vgpu", "left": 0}


def allocate_under_a_cap(cap: int, count: int) -> str:
    import torch

    import vgpu

    vgpu.install().set_cap(cap)
    try:
        torch.empty(count, dtype=torch.uint8, device="vgpu")
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return "fits"


def test_the_cap_is_exact():
    assert run_on_vgpu(allocate_under_a_cap, 4096, 4096) == "fits"
    assert run_on_vgpu(allocate_under_a_cap, 4095, 4096) == "OutOfMemoryError"


def add_across_devices() -> str:
    import torch

    try:
        torch.ones(2, device="vgpu") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_operands_on_two_devices_are_refused_as_cuda_refuses_them():
    assert "Expected all tensors to be on the same device" in run_on_vgpu(add_across_devices)


def read_a_late_copy_without_waiting() -> list[bool]:
    import torch

    import vgpu

    vgpu.install().set_lazy(True)
    source, target = torch.ones(16).pin_memory(), torch.zeros(16, device="vgpu")
    stream = torch.Stream(device="vgpu")
    with stream:
        target.copy_(source, non_blocking=True)
    early = bool(target.cpu().isnan().all())
    torch.accelerator.current_stream().wait_stream(stream)
    return [early, torch.equal(target.cpu(), source)]


def test_a_missing_wait_shows():
    assert run_on_vgpu(read_a_late_copy_without_waiting) == [True, True]
