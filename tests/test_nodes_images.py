"""The nodes with pictures: image to image, inpainting and references, as the engine does them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline

import offload_core
from offload_core.errors import InputError
from offload_core.tiny_models import mask, one_shot, picture
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.pictures import mask_as_picture, picture_as_image, pictures_of
from staging import tiny_model
from test_nodes import call, node, results_of

FOX = picture("fox")


@pytest.fixture
def runner(tmp_path: Path) -> GraphRunner:
    (tmp_path / "models").mkdir()
    for name in ("flux", "sd15"):
        (tmp_path / "models" / name).symlink_to(tiny_model(name))
    (tmp_path / "in").mkdir()
    FOX.save(tmp_path / "in" / "fox.png")
    return GraphRunner(LocalHost([tmp_path / "models"]), output_dir=tmp_path / "out", input_dir=tmp_path / "in")


def graph(model: str, **denoise: Any) -> dict[str, Any]:
    """Image to image as a person wires it."""
    job = {"seed": 7, "steps": 4, "guidance": -1.0, "width": 0, "height": 0, "batch": 1} | denoise
    return {
        "load": node("PhaseOffloadLoad", model=model, dtype="auto", device="auto"),
        "picture": node("LoadImage", image="fox.png"),
        "image": node("PhaseOffloadEncodeImage", model=["load", 0], image=["picture", 0]),
        "encode": node("PhaseOffloadEncodePrompt", model=["load", 0], prompt="a red fox", negative_prompt=""),
        "denoise": node(
            "PhaseOffloadDenoise", model=["load", 0], embeds=["encode", 0], images=["image", 0], strength=0.6, **job
        ),
        "decode": node("PhaseOffloadVAEDecode", model=["load", 0], latent=["denoise", 0], tiling="auto"),
        "preview": node("PreviewImage", images=["decode", 0]),
    }


def test_image_to_image_in_a_graph_is_the_pipeline_s_own_and_another_strength_encodes_nothing_again(
    runner: GraphRunner,
) -> None:
    image = results_of(runner, graph("flux"))["decode"].values[0]
    expected = one_shot(
        tiny_model("flux"),
        dtype=torch.float32,
        seed=7,
        pipeline_class=FluxImg2ImgPipeline,
        prompt="a red fox",
        image=FOX,
        height=48,
        width=64,
        num_inference_steps=4,
        strength=0.6,
    )
    assert torch.equal(image, expected.movedim(1, -1))
    other = graph("flux")
    other["denoise"]["inputs"]["strength"] = 0.3
    assert set(runner.run(other).executed) == {"denoise", "decode", "preview"}


@pytest.mark.slow
def test_a_latent_of_core_s_vae_encode_starts_a_denoise_and_its_noise_mask_repaints(runner: GraphRunner) -> None:
    model = offload_core.load(tiny_model("sd15"), device="cpu")
    embeds = offload_core.encode(model, "a red fox")
    samples = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(1))
    noise_mask = torch.zeros(1, 1, 48, 64)
    noise_mask[..., 32:] = 1
    job = {"seed": 1, "steps": 2, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    latent = {"samples": samples, "noise_mask": noise_mask}
    made = call(runner, "PhaseOffloadDenoise", model=model, embeds=embeds, latent=latent, **job)[0]["samples"]
    images = offload_core.images_from_samples(model, samples, mask())
    assert torch.equal(made, offload_core.denoise(model, embeds, images=images, seed=1, num_inference_steps=2).samples)
    with pytest.raises(InputError, match="take one of the two off"):
        call(runner, "PhaseOffloadDenoise", model=model, embeds=embeds, latent=latent, images=images, **job)
    with pytest.raises(InputError, match="The size comes from the picture"):
        call(runner, "PhaseOffloadDenoise", model=model, embeds=embeds, images=images, **{**job, "width": 64})


@pytest.mark.slow
def test_a_batch_of_frames_and_a_latent_of_several_are_a_clip_for_a_video_model(runner: GraphRunner) -> None:
    model = offload_core.load(tiny_model("wan21"), device="cpu")
    clip = [picture(f"frame {number}") for number in range(5)]
    embeds = offload_core.encode(model, "a red fox")
    (images,) = call(
        runner, "PhaseOffloadEncodeImage", model=model, image=torch.cat([picture_as_image(each) for each in clip])
    )
    job = {"embeds": embeds, "seed": 1, "steps": 4, "guidance": 1.0, "width": 0, "height": 0, "batch": 1}
    made = call(runner, "PhaseOffloadDenoise", model=model, images=images, strength=0.5, **job)[0]
    options = {"seed": 1, "num_inference_steps": 4, "guidance_scale": 1.0, "strength": 0.5}
    expected = offload_core.denoise(model, embeds, images=offload_core.encode_images(model, clip), **options)
    assert torch.equal(made["samples"], expected.samples)
    again = call(runner, "PhaseOffloadDenoise", model=model, latent=made, strength=0.5, **job)[0]["samples"]
    images = offload_core.images_from_samples(model, made["samples"])
    assert torch.equal(again, offload_core.denoise(model, embeds, images=images, **options).samples)
    with pytest.raises(InputError, match="makes one video of a clip"):
        call(runner, "PhaseOffloadDenoise", model=model, images=images, **job | {"batch": 2})


def test_plan_preview_plans_the_picture_the_strength_and_the_scheduler_of_a_job(
    runner: GraphRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    model = offload_core.load(tiny_model("sd15"), device="cpu")
    job = {"prompt": "", "steps": 4, "guidance": -1.0, "width": 0, "height": 0, "batch": 1, "strength": 0.5}
    image, white = picture_as_image(FOX), torch.ones(1, 48, 64)
    asked = {**job, "scheduler": "HeunDiscreteScheduler"}
    report, _ = call(runner, "PhaseOffloadPlanPreview", model=model, image=image, mask=white, **asked)
    assert [line.split()[0] for line in report.splitlines()[2:6]] == ["images", "encode", "denoise", "decode"]
    report, _ = call(runner, "PhaseOffloadPlanPreview", model=model, **job)
    assert "strength 0.5 was not used" in report
    with pytest.raises(InputError, match="a mask and no picture"):
        call(runner, "PhaseOffloadPlanPreview", model=model, mask=white, **job)


def test_pictures_and_masks_come_out_of_a_host_s_tensors_as_they_were_in_their_files() -> None:
    assert np.array_equal(np.asarray(pictures_of(picture_as_image(FOX))[0]), np.asarray(FOX))
    whole = torch.from_numpy(np.asarray(mask(), dtype=np.float32) / 255)
    assert np.array_equal(np.asarray(mask_as_picture(whole.expand(3, -1, -1))), np.asarray(mask()))
    with pytest.raises(InputError, match="3 masks that differ"):
        mask_as_picture(torch.rand(3, 4, 4))
    with pytest.raises(InputError, match="must be"):
        pictures_of(torch.zeros(4, 4, 3))
