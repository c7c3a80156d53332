"""ControlNet and IP-Adapter in phases: the bits of the one-shot pipeline, in a budget, and what a cancel leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core as po
from control_models import CONTROLLED, tiny_controlnet, tiny_image_encoder, tiny_ip_adapter
from offload_core.tiny_models import picture
from offload_core.tiny_models.running import align, load_tiny
from staging import job, often, staged, tiny_model, words

EDGES, FACE = picture("edges"), picture("face", 40, 40)


def in_a_budget(name: str, denoiser: str, more_bytes: int = 0) -> po.OffloadSettings:
    """Room for 40 % of the weights that Denoise uses, and what is added to the denoiser whole."""
    weights = po.load(tiny_model(name), device="cpu").source().components[denoiser].weight_bytes
    room = int(weights * 0.4) + more_bytes
    return po.OffloadSettings(device_memory=max(room, 60 << 10), resident_below=1024, activation_memory=0)


def control_call(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Encode and Denoise are given."""
    call = job(name, guided=True)
    picture_argument = "control_image" if name == "flux" else "image"
    shown = {picture_argument: EDGES, "height": call.pop("height"), "width": call.pop("width")}
    return words(name) | shown, call | {"controlnet_conditioning_scale": 0.8}


def one_shot_controlled(name: str, seed: int, **call: Any) -> torch.Tensor:
    cls, plain = CONTROLLED[name], load_tiny(tiny_model(name), dtype=torch.float32)
    controlnet = po.load(tiny_model(name), device="cpu", controlnet=tiny_controlnet(name)).source().components
    from offload_core.phases import from_files

    module = align_whole(from_files(controlnet["controlnet"], torch.float32))
    options = {"requires_safety_checker": False} if name == "sd15" else {}
    pipeline = cls(**plain.components, controlnet=module, **options)
    return run(pipeline, seed, **call)


def align_whole(module: torch.nn.Module) -> torch.nn.Module:
    align(module)
    return module


def run(pipeline: Any, seed: int, **call: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.as_tensor(pipeline(**call, output_type="pt", generator=generator)[0]).float()


@pytest.mark.parametrize("name", often(tuple(CONTROLLED), ("sd15",)))
def test_a_controlnet_belongs_to_denoise_and_gives_the_bits_of_the_one_shot_run(name: str) -> None:
    texts, call = control_call(name)
    expected = one_shot_controlled(name, 5, **texts, **call)
    options: dict[str, Any] = {"dtype": "auto", "seed": 5, "controlnet": tiny_controlnet(name)}
    pictures, session = staged(tiny_model(name), texts, call, **options)
    encode, denoise, decode = session.report.phases
    assert torch.equal(pictures, expected)
    assert "controlnet" in denoise.forwards
    assert "controlnet" not in encode.forwards
    assert encode.forwards.get("vae", 0) == (1 if name == "flux" else 0)  # FLUX's ControlNet reads latents
    assert encode.leaked_bytes == denoise.leaked_bytes == decode.leaked_bytes == 0
    plain, _ = staged(tiny_model(name), words(name), job(name, guided=True), dtype="auto", seed=5)
    assert not torch.equal(pictures, plain)
    streamed, session = staged(tiny_model(name), texts, call, **options, settings=in_a_budget(name, denoiser_of(name)))
    assert torch.equal(streamed, expected)
    denoise = session.report.phases[1]
    assert denoise.streamed_bytes > 0
    assert denoise.reserved_peak_bytes <= denoise.device_budget_bytes


def denoiser_of(name: str) -> str:
    return "transformer" if name == "flux" else "unet"


def adapter(name: str, scale: float = 0.7) -> po.IPAdapter:
    return po.IPAdapter(tiny_ip_adapter(name), scale, tiny_image_encoder())


def one_shot_adapted(name: str, seed: int, scale: float, **call: Any) -> torch.Tensor:
    pipeline, file = load_tiny(tiny_model(name), dtype=torch.float32), tiny_ip_adapter(name)
    folder = tiny_image_encoder()
    if name == "flux":
        where = {"image_encoder_pretrained_model_name_or_path": str(folder), "weight_name": file.name}
        pipeline.load_ip_adapter(str(file.parent), image_encoder_dtype=torch.float32, **where)
    else:
        from transformers import CLIPVisionModelWithProjection

        encoder = CLIPVisionModelWithProjection.from_pretrained(folder)
        pipeline.register_modules(image_encoder=encoder)
        pipeline.load_ip_adapter(str(file.parent), subfolder="", weight_name=file.name)
    align(pipeline.image_encoder)
    align(getattr(pipeline, denoiser_of(name)))
    pipeline.set_ip_adapter_scale(scale)
    return run(pipeline, seed, **call)


@pytest.mark.parametrize("name", often(tuple(CONTROLLED), ("sd15",)))
def test_an_ip_adapter_s_encoder_belongs_to_encode_and_its_layers_to_the_denoiser(name: str) -> None:
    texts, call = words(name) | {"ip_adapter_image": FACE}, job(name, guided=True)
    if name == "flux":
        texts["negative_ip_adapter_image"] = EDGES
    expected = one_shot_adapted(name, 5, 0.7, **texts, **call)
    options: dict[str, Any] = {"dtype": "auto", "seed": 5, "ip_adapter": adapter(name)}
    pictures, session = staged(tiny_model(name), texts, call, **options)
    assert torch.equal(pictures, expected)
    encode, denoise, decode = session.report.phases
    assert encode.forwards["image_encoder"] >= 1
    assert "image_encoder" not in denoise.forwards
    assert encode.leaked_bytes == denoise.leaked_bytes == decode.leaked_bytes == 0
    plain, _ = staged(tiny_model(name), words(name), call, dtype="auto", seed=5)
    assert not torch.equal(pictures, plain)
    more = Path(tiny_ip_adapter(name)).stat().st_size
    settings = in_a_budget(name, denoiser_of(name), more)
    streamed, session = staged(tiny_model(name), texts, call, **options, settings=settings)
    assert torch.equal(streamed, expected)
    assert session.report.phases[1].streamed_bytes > 0


@pytest.mark.parametrize("stage", often(("encode", "denoise", "decode"), ("denoise",)))
def test_a_cancel_in_any_phase_gives_the_adapter_and_the_controlnet_back(stage: str) -> None:
    model = po.load(tiny_model("sd15"), device="cpu", controlnet=tiny_controlnet("sd15"), ip_adapter=adapter("sd15"))
    texts, call = control_call("sd15")
    session = po.Session(Stops(stage))
    with pytest.raises(StopError):
        embeds = po.encode(model, **texts, ip_adapter_image=FACE, session=session)
        latents = po.denoise(model, embeds, session=session, **call)
        po.decode(model, latents, session=session)
    assert session.report.phases[-1].name == stage
    assert session.report.phases[-1].leaked_bytes == 0


class StopError(Exception):
    """As a host interrupts."""


class Stops(po.SilentObserver):
    """Interrupts in the middle of a phase."""

    def __init__(self, stage: str) -> None:
        self.stage, self.there = stage, False

    def progress(self, event: po.Progress) -> None:
        self.there = self.there or event.phase == self.stage

    def check_interrupt(self) -> None:
        if self.there:
            raise StopError


def test_a_plan_foretells_the_controlnet_and_the_adapter() -> None:
    model = po.load(tiny_model("sd15"), device="cpu", controlnet=tiny_controlnet("sd15"), ip_adapter=adapter("sd15"))
    texts, call = control_call("sd15")
    session = po.Session()
    embeds = po.encode(model, **texts, ip_adapter_image=FACE, session=session)
    foretold = po.foresee_denoise(model, embeds, **call)
    (denoise,) = foretold.plan.phases
    assert {"unet", "controlnet"} <= {component.name for component in denoise.components}
    po.denoise(model, embeds, plan=foretold.plan, session=session, **call)
    report = session.report.phases[-1]
    assert 0 < report.reserved_peak_bytes <= denoise.device_peak_bytes


def test_a_picture_or_an_adapter_of_another_kind_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(po.InputError, match="no Flux2KleinControlNetPipeline"):
        po.load(tiny_model("flux2_klein"), device="cpu", controlnet=tiny_controlnet("flux"))
    with pytest.raises(po.ModelError, match="no controlnet in 'nothing'"):
        po.load(tiny_model("sd15"), device="cpu", controlnet=tmp_path / "nothing")
    pickled = tmp_path / "ip.bin"
    pickled.write_bytes(b"x")
    with pytest.raises(po.ModelError, match=r"ip\.bin isn't a safetensors file"):
        po.load(tiny_model("sd15"), device="cpu", ip_adapter=po.IPAdapter(pickled))
    blind = po.load(tiny_model("sd15"), device="cpu", ip_adapter=po.IPAdapter(tiny_ip_adapter("sd15")))
    with pytest.raises(po.InputError, match="no image encoder for the IP-Adapter"):
        po.encode(blind, "a fox", ip_adapter_image=FACE)
    wrong = po.IPAdapter(tiny_ip_adapter("sdxl"), 1.0, tiny_image_encoder())
    with pytest.raises(po.ModelError, match="doesn't fit UNet2DConditionModel"):
        po.encode(po.load(tiny_model("sd15"), device="cpu", ip_adapter=wrong), "a fox", ip_adapter_image=FACE)
    with pytest.raises(po.InputError, match="takes no IP-Adapter"):
        po.encode(po.load(tiny_model("z_image"), device="cpu", ip_adapter=adapter("sd15")), "a fox")
