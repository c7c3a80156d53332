"""Phases on a real accelerator: skipped where there is none."""

from __future__ import annotations

import gc

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
