"""Guests: components that a pipeline was built without and calls all the same. They come for the call alone."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import offload_core as po
from offload_core.ddo._guests import PipelineHost
from offload_core.errors import BudgetError, ColdWeightError
from offload_core.file_backing import read_mappings
from offload_core.model_source import resolve_components
from offload_core.phases import Guest, guest_of
from offload_core.streaming import OffloadScope, is_streamed
from offload_core.tiny_models.running import align
from offload_core.tiny_models.weights import denoiser, with_weights
from staging import tiny_model

CPU = torch.device("cpu")
SETTINGS = po.OffloadSettings(execution_device="cpu", device_memory="1MiB", resident_below=1024, activation_memory=0)


@pytest.fixture
def host() -> PipelineHost:
    return PipelineHost(SETTINGS, CPU)


def vae_guest(host: PipelineHost | None, dtype: torch.dtype = torch.float32) -> Guest:
    guest = Guest(resolve_components(tiny_model("sdxl"))["vae"], dtype, CPU)
    guest.host = host
    return guest


def resident_vae(dtype: torch.dtype = torch.float32) -> Any:
    vae = diffusers.AutoencoderKL.from_pretrained(tiny_model("sdxl"), subfolder="vae", dtype=dtype)
    align(vae)
    return vae


def encode(vae: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    picture = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.no_grad():
        found: torch.Tensor = vae.encode(picture).latent_dist.mode()
    return found


def holds_nothing(module: nn.Module) -> bool:
    mapped = [mapping.path for mapping in read_mappings() or () if "vae" in Path(mapping.path or "").parts]
    return all(is_streamed(weight) for weight in module.parameters()) and not mapped


# ------------------------------------------------------------------------------------------------ one guest


def test_a_guest_runs_as_the_resident_component_and_holds_nothing_afterwards(host: PipelineHost):
    gc.collect()
    guest = vae_guest(host)
    assert torch.equal(encode(guest.module), encode(resident_vae()))
    gc.collect()
    assert holds_nothing(guest.module)
    (visit,) = host.visits
    assert (visit.component, visit.method) == ("vae", "encode")
    assert 0 < visit.device_bytes <= 1 << 20 and visit.weight_bytes > 0


def test_a_guest_without_a_host_says_that_its_weights_are_not_there():
    with pytest.raises(ColdWeightError, match="vae"):
        encode(vae_guest(None).module)


def test_a_part_of_a_guest_can_be_called_by_itself(host: PipelineHost):
    vae, moments = vae_guest(host).module, torch.rand(1, 8, 4, 4)
    with torch.no_grad():
        assert torch.equal(vae.quant_conv(moments), resident_vae().quant_conv(moments))
    assert [visit.method for visit in host.visits] == ["quant_conv"]


def test_a_guest_that_was_upcast_runs_in_that_dtype(host: PipelineHost):
    """SDXL casts its VAE to float32 to encode, and back."""
    guest, twin = vae_guest(host, torch.bfloat16), resident_vae(torch.bfloat16)
    guest.module.to(dtype=torch.float32)
    found = encode(guest.module)
    assert found.dtype is torch.float32 and torch.equal(found, encode(twin.to(torch.float32)))
    guest.module.to(dtype=torch.bfloat16)
    twin = twin.to(torch.bfloat16)
    assert torch.equal(encode(guest.module, torch.bfloat16), encode(twin, torch.bfloat16))


def test_switches_that_were_set_on_a_guest_are_kept(host: PipelineHost):
    guest, twin = vae_guest(host), resident_vae()
    for vae in (guest.module, twin):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 4
    assert torch.equal(encode(guest.module), encode(twin))
    assert not torch.equal(encode(twin), encode(resident_vae()))
    assert guest.module.use_tiling


def test_a_visit_draws_nothing_from_the_global_generator(host: PipelineHost):
    before = torch.get_rng_state()
    encode(vae_guest(host).module)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_that_fails_gives_everything_back(host: PipelineHost):
    guest = vae_guest(host)
    with pytest.raises(RuntimeError):
        guest.module.encode(torch.rand(1, 7, 32, 48))
    assert all(is_streamed(weight) for weight in guest.module.parameters())
    assert torch.equal(encode(guest.module), encode(resident_vae()))


def test_a_budget_that_is_too_small_for_a_guest_is_refused_and_leaves_nothing(host: PipelineHost):
    host.settings = po.OffloadSettings(execution_device="cpu", device_memory="4KiB", activation_memory=0)
    guest = vae_guest(host)
    with pytest.raises(BudgetError, match="vae"):
        encode(guest.module)
    assert all(is_streamed(weight) for weight in guest.module.parameters())
    host.settings = SETTINGS
    assert torch.equal(encode(guest.module), encode(resident_vae()))


# ------------------------------------------------------------------------------------- beside a module that is attached


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(x)
        return found


@contextmanager
def denoiser_in(budget: int) -> Iterator[tuple[Denoiser, Any, OffloadScope]]:
    module = Denoiser()
    settings = po.OffloadSettings(
        execution_device="cpu", device_memory=budget, resident_below=1024, activation_memory=0
    )
    with po.enable_offload(module, settings=settings) as result:
        yield module, result, result._offload._managed.scope


def test_a_guest_takes_the_room_of_residents_for_the_time_of_its_visit_and_they_come_back():
    x = torch.rand(2, 128)
    twin = Denoiser()(x)
    with denoiser_in(600_000) as (module, _, scope):
        assert torch.equal(module(x), twin)
        resident = {entry for each in scope.modules for entry in each.entries if entry.resident}
        assert sum(entry.nbytes for entry in resident) > 500_000
        guest = vae_guest(PipelineHost(SETTINGS, CPU, scope))
        assert torch.equal(encode(guest.module), encode(resident_vae()))
        assert scope.ledger.peak("device") <= 600_000
        assert [each.name for each in scope.modules] == ["model"]
        assert {entry for each in scope.modules for entry in each.entries if entry.resident} == resident
        read = scope.cache.counts.fetched_bytes
        assert torch.equal(module(x), twin)
        once = scope.cache.counts.fetched_bytes
        assert torch.equal(module(x), twin)
        assert once > read and scope.cache.counts.fetched_bytes == once  # hot again, and they stay
        assert scope.ledger.used("device") <= 600_000


def test_a_guest_that_fits_beside_the_others_disturbs_nobody():
    x = torch.rand(2, 128)
    with denoiser_in(1 << 20) as (module, _, scope):
        module(x)
        read, used = scope.cache.counts.fetched_bytes, scope.ledger.used("device")
        encode(vae_guest(PipelineHost(SETTINGS, CPU, scope)).module)
        visited = scope.cache.counts.fetched_bytes
        assert scope.ledger.used("device") == used
        module(x)
        assert visited > read and scope.cache.counts.fetched_bytes == visited


def test_a_guest_whose_host_has_ended_gets_a_budget_of_its_own():
    with denoiser_in(600_000) as (_, _, scope):
        guest = vae_guest(PipelineHost(SETTINGS, CPU, scope))
    assert torch.equal(encode(guest.module), encode(resident_vae()))


# ------------------------------------------------------------------------------------------------ of a pipeline


def wan_21(folder: Path) -> Path:
    """A tiny Wan 2.1 image to video model, as no other of the table has an image encoder."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    base = diffusers.WanImageToVideoPipeline.from_pretrained(tiny_model("wan22_i2v_a14b"))
    config = dict(base.transformer.config) | {"num_layers": 2, "image_dim": 16, "added_kv_proj_dim": 32}
    size = {"height": 16, "width": 16}
    parts = {name: part for name, part in base.components.items() if name not in ("transformer", "transformer_2")}
    parts |= {
        "transformer": denoiser(diffusers.WanTransformer3DModel(**config), "wan21.transformer"),
        "image_encoder": with_weights(CLIPVisionModel(vision), "wan21.image_encoder"),
        "image_processor": CLIPImageProcessor(size=size, crop_size=size),
    }
    diffusers.WanImageToVideoPipeline(**parts).save_pretrained(folder)
    return folder


def wan_call(pipe: Any) -> torch.Tensor:
    from offload_core.tiny_models import picture

    width = pipe.transformer.config.text_dim
    embeds = torch.rand(1, 512, width, generator=torch.Generator().manual_seed(1))
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"height": 48, "width": 64, "num_frames": 5, "num_inference_steps": 1}
    call |= {"image": picture("fox"), "prompt_embeds": embeds, "guidance_scale": 1.0, "output_type": "latent"}
    found: torch.Tensor = pipe(**call, generator=torch.Generator().manual_seed(2))[0]
    return found


WITHOUT = dict.fromkeys(("text_encoder", "tokenizer", "vae", "image_encoder"))


WAYS: dict[str, Callable[[Any], Any]] = {
    "engine": lambda pipe: po.enable_offload(pipe.transformer, settings=SETTINGS),
    "pipeline": lambda pipe: po.enable_pipeline_offload(pipe, settings=SETTINGS)["transformer"],
    "group": lambda pipe: po.enable_diffusers_group_offload(pipe.transformer, onload_device="cpu"),
    "whole": lambda pipe: po.enable_offload(pipe.transformer, settings=SETTINGS, route="none"),
}


@pytest.mark.parametrize(
    "way", ["pipeline", "group", *(pytest.param(way, marks=pytest.mark.slow) for way in ("engine", "whole"))]
)
def test_vae_and_image_encoder_come_when_the_pipeline_calls_them(way: str, tmp_path: Path):
    folder = wan_21(tmp_path)
    whole = diffusers.WanImageToVideoPipeline.from_pretrained(folder)
    for component in whole.components.values():
        if isinstance(component, nn.Module):
            align(component)
    twin = wan_call(whole)
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(folder, **WITHOUT)
    align(pipe.transformer)
    result = WAYS[way](pipe)
    assert torch.equal(wan_call(pipe), twin)
    assert [(visit.component, visit.method) for visit in result.visits] == [("image_encoder", ""), ("vae", "encode")]
    assert pipe.text_encoder is None
    for guest in (pipe.vae, pipe.image_encoder):
        assert all(is_streamed(weight) for weight in guest.parameters())
    result.release()


def test_a_pipeline_that_has_the_config_alone_gets_the_weights_when_it_calls():
    folder = tiny_model("wan22_i2v_a14b")
    vae = po.config_only(folder, "vae", device="cpu")
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(folder, **WITHOUT | {"vae": vae}, transformer_2=None)
    with po.enable_offload(pipe.transformer, settings=SETTINGS) as result:
        wan_call(pipe)
        assert pipe.vae is vae and len(result.visits) == 1
        assert result.metrics_snapshot().as_dict()["runtime"]["visits"][0]["method"] == "encode"


def test_a_guest_is_attached_to_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="offload_core")
    vae = po.config_only(tiny_model("sdxl"), "vae", device="cpu")
    result = po.enable_offload(vae, settings=SETTINGS, component="vae")
    assert result.plan is None and guest_of(vae) is not None and "Nothing of vae was attached" in caplog.text
    result.release()


def test_deleting_a_pipeline_with_a_guest_frees_its_denoiser_without_the_collector():
    folder = tiny_model("wan22_i2v_a14b")
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(folder, **WITHOUT, transformer_2=None)
    result = po.enable_offload(pipe.transformer, settings=SETTINGS)
    pipe.vae.encode(torch.rand(1, 3, 1, 16, 16))
    assert len(result.visits) == 1
    watched = [weakref.ref(pipe.transformer), weakref.ref(result._offload._managed.scope)]
    gc.collect()
    gc.disable()
    try:
        del result, pipe
        assert [ref() for ref in watched if ref() is not None] == []
    finally:
        gc.enable()


def test_where_no_folder_is_known_a_warning_says_what_to_do(caplog: pytest.LogCaptureFixture):
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(
        tiny_model("wan22_i2v_a14b"), **WITHOUT, transformer_2=None
    )
    for part in (pipe, pipe.transformer):
        part.register_to_config(_name_or_path="")
    po.enable_diffusers_group_offload(pipe.transformer, onload_device="cpu")
    assert pipe.vae is None
    assert "can't encode a picture. Build it with vae=config_only(folder)" in caplog.text
