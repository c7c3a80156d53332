"""Phases on a real accelerator: skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import offload_core as po
from offload_core.devices import reserved_bytes, resolve_device
from staging import job, tiny_model, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine"),
]


@pytest.mark.parametrize("name", ["sd15", "flux", "qwen_image", "wan22_a14b"])
def test_every_byte_of_the_device_comes_back(name: str) -> None:
    device = resolve_device("auto")
    memory = getattr(torch, device.type)
    handle, call = po.load(tiny_model(name)), job(name, guided=True)
    for _ in range(2):  # the first run starts the device's libraries
        gc.collect()
        before = memory.memory_allocated(device), reserved_bytes(device)
        session = po.Session()
        latents = po.denoise(handle, po.encode(handle, **words(name), session=session), session=session, **call)
        po.decode(handle, latents, session=session)
    assert (memory.memory_allocated(device), reserved_bytes(device)) <= before
    assert all(phase.leaked_bytes == 0 and phase.device_peak_bytes > 0 for phase in session.report.phases)


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_phases_equal_the_one_shot_run_on_the_device(name: str) -> None:
    from diffusers import DiffusionPipeline

    device, call = resolve_device("auto"), job(name, guided=True)
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name)).to(device)
    generator = torch.Generator("cpu").manual_seed(3)
    expected = pipeline(**words(name), **call, output_type="pt", generator=generator)[0].cpu()
    del pipeline
    handle = po.load(tiny_model(name), device=str(device))
    latents = po.denoise(handle, po.encode(handle, **words(name)), seed=3, **call)
    assert torch.equal(po.decode(handle, latents, "pt"), expected)


def flux_like(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A transformer of about 400 MB on disk, and inputs for which compute takes as long as its copies."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 8, "attention_head_dim": 128, "joint_attention_dim": 1024}
    model = FluxTransformer2DModel(num_layers=4, num_single_layers=10, pooled_projection_dim=256, **sizes)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    inputs = {
        "hidden_states": torch.randn(1, 4096, 64, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 512, 1024, dtype=torch.bfloat16),
        "pooled_projections": torch.randn(1, 256, dtype=torch.bfloat16),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_ids": torch.zeros(4096, 3),
        "txt_ids": torch.zeros(512, 3),
    }
    return tmp_path / "model", inputs


def load_flux(path: Path) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel.from_pretrained(path, dtype=torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("host_memory", ["auto", "256MiB"])
def test_a_streamed_transformer_equals_the_resident_one_within_its_budget(
    tmp_path: Path, share: float, host_memory: str
) -> None:
    device = resolve_device("auto")
    memory = getattr(torch, device.type)
    path, inputs = flux_like(tmp_path)
    there = {name: tensor.to(device) for name, tensor in inputs.items()}
    twin = load_flux(path).to(device)
    weights = sum(p.nbytes for p in twin.parameters())
    with torch.no_grad():
        twin(**there, return_dict=False)
        memory.reset_peak_memory_stats(device)
        before = memory.memory_allocated(device)
        expected = twin(**there, return_dict=False)[0]
        activations = memory.max_memory_allocated(device) - before
    del twin
    model, before = load_flux(path), memory.memory_allocated(device)
    budget = int(weights * share) + (64 << 20)
    settings = po.OffloadSettings(
        execution_device=str(device), device_memory=budget, host_memory=host_memory, activation_memory=0
    )
    memory.reset_peak_memory_stats(device)
    with po.enable_offload(model, settings=settings) as result, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(**there, return_dict=False)[0], expected)
        assert result.report().streamed_bytes > result.plan.streamed_bytes > 0
        assert memory.max_memory_allocated(device) - before <= budget + activations + (8 << 20)
    assert memory.memory_allocated(device) <= before


def test_copies_come_from_pinned_memory_and_run_beside_compute(tmp_path: Path) -> None:
    device = resolve_device("auto")
    path, inputs = flux_like(tmp_path)
    there = {name: tensor.to(device) for name, tensor in inputs.items()}
    model = load_flux(path)
    settings = po.OffloadSettings(execution_device=str(device), device_memory="192MiB", activation_memory=0)
    with po.enable_offload(model, settings=settings), torch.no_grad():
        for _ in range(2):  # the order is learnt, the pinned copies are made
            model(**there, return_dict=False)
        torch.accelerator.synchronize(device)
        with torch.profiler.profile() as profile:
            model(**there, return_dict=False)
            torch.accelerator.synchronize(device)
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name != "CPU"]
    copies = [span for span in spans if "Memcpy HtoD" in span[0]]
    kernels = [span for span in spans if "Memcpy" not in span[0]]
    assert copies
    assert all("Pinned" in name for name, _, _ in copies)
    beside = [c for c in copies if any(start < c[2] and c[1] < end for _, start, end in kernels)]
    assert len(beside) > len(copies) // 2
