"""Clips to start from: video to video in phases gives the bits of the sibling pipeline's one-shot run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan, CogVideoXVideoToVideoPipeline, WanVideoToVideoPipeline
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput

import offload_core as po
from offload_core.errors import InputError, RecordError
from offload_core.tiny_models import picture
from staging import one_shot, tiny_model

TWINS: dict[str, Any] = {"wan21": WanVideoToVideoPipeline, "cogvideox": CogVideoXVideoToVideoPipeline}
VAES: dict[str, Any] = {"wan21": AutoencoderKLWan, "cogvideox": AutoencoderKLCogVideoX}
CLIP = [picture(f"frame {number}") for number in range(9)]
LENGTHS = {"wan21": 5, "cogvideox": 9}  # that come back as many
SIZE = {"height": 48, "width": 64}
TEXTS = {"prompt": "a red fox", "negative_prompt": "rain"}
CALL = {"num_inference_steps": 4, "strength": 0.5, "guidance_scale": 3.0}


@functools.cache
def handle(name: str) -> po.Handle:
    return po.load(tiny_model(name), device="cpu")


@functools.cache
def embeds(name: str) -> po.Embeds:
    return po.encode(handle(name), **TEXTS)


def frames(model: po.Handle, latents: po.Latents) -> torch.Tensor:
    return torch.as_tensor(po.decode(model, latents, "pt")).float()


def latent_of(name: str, clip: list[Any]) -> torch.Tensor:
    """A LATENT of the clip, (1, C, T, h, w), as core's VAE Encode makes it."""
    vae = VAES[name].from_pretrained(tiny_model(name) / "vae")
    pixels = torch.from_numpy(np.stack([np.array(frame) for frame in clip])).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        return vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()


@pytest.mark.parametrize("name", TWINS)
def test_a_clip_is_made_anew_as_the_sibling_pipeline_does_it(name: str) -> None:
    clip = CLIP[: LENGTHS[name]]
    expected, _ = one_shot(
        tiny_model(name), dtype=torch.float32, seed=4, cls=TWINS[name], video=clip, **SIZE, **TEXTS, **CALL
    )
    model, session = handle(name), po.Session()
    images = po.encode_images(model, clip, session=session)
    latents = po.denoise(model, embeds(name), images=images, seed=4, session=session, **CALL)
    assert torch.equal(frames(model, latents), expected)
    assert images.pipeline == TWINS[name].__name__
    assert [list(phase.forwards) for phase in session.report.phases] == [["vae"], ["transformer"]]
    assert [phase.leaked_bytes for phase in session.report.phases] == [0, 0]
    assert [frame.tobytes() for frame in images.pictures] == [frame.tobytes() for frame in clip]


def test_a_latent_of_several_frames_is_the_clip_it_was_made_of_and_loads_no_vae() -> None:
    model, session = handle("wan21"), po.Session()
    seen = po.denoise(model, embeds("wan21"), images=po.encode_images(model, CLIP[:5]), seed=4, **CALL)
    images = po.images_from_samples(model, latent_of("wan21", CLIP[:5]))
    latents = po.denoise(model, embeds("wan21"), images=images, seed=4, session=session, **CALL)
    assert list(session.report.phases[0].forwards) == ["transformer"]
    assert torch.equal(latents.samples, seen.samples)


def test_a_latent_is_taken_as_it_is_where_the_pipeline_would_draw_from_the_encoding() -> None:
    samples = latent_of("cogvideox", CLIP)
    pipeline = CogVideoXVideoToVideoPipeline.from_pretrained(tiny_model("cogvideox"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.encode = lambda clip: AutoencoderTinyOutput(latents=samples)
    generator = torch.Generator().manual_seed(4)
    expected = pipeline(video=CLIP, **SIZE, **TEXTS, **CALL, generator=generator, output_type="pt")[0]
    model = handle("cogvideox")
    images = po.images_from_samples(model, samples)
    latents = po.denoise(model, embeds("cogvideox"), images=images, seed=4, **CALL)
    assert torch.equal(frames(model, latents), torch.as_tensor(expected).float())


@pytest.mark.slow
def test_latents_of_a_video_model_start_another_pass() -> None:
    model = handle("wan21")
    first = po.denoise(model, embeds("wan21"), num_frames=5, num_inference_steps=2, **SIZE)
    again = po.denoise(model, embeds("wan21"), images=po.images_from_samples(model, first.samples), **CALL)
    assert again.samples.shape == first.samples.shape


def test_frames_that_the_model_would_leave_out_are_left_out_with_a_note() -> None:
    model = handle("wan21")
    images = po.encode_images(model, CLIP[:7])
    assert len(images.pictures) == 5
    assert images.notes == ("The clip has 7 frames and this model takes 1 and a multiple of 4: the first 5 count.",)
    whole = po.encode_images(model, CLIP[:5])
    made = [po.denoise(model, embeds("wan21"), images=each, **CALL).samples for each in (images, whole)]
    assert torch.equal(*made)


@pytest.mark.slow
def test_a_saved_clip_is_the_start_that_it_was(tmp_path: Path) -> None:
    model = handle("wan21")
    images = po.encode_images(model, CLIP[:5])
    back = po.Images.load(images.save(tmp_path / "clip.images.safetensors"))
    made = [po.denoise(model, embeds("wan21"), images=each, **CALL).samples for each in (images, back)]
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("wan22_5b", (1, 48, 3, 4, 4), "3 frames of a video. WanPipeline has no video-to-video: .*image-to-video"),
        ("wan22_a14b", (1, 16, 3, 6, 8), "WanPipeline has no video-to-video"),  # it would run one expert only
        ("ltx", (1, 16, 3, 2, 2), "LTXPipeline has no video-to-video"),
        ("flux", (1, 4, 3, 6, 8), "FluxPipeline has no video-to-video"),
        ("wan21", (2, 16, 3, 6, 8), "holds 2 videos, and Denoise starts from one at a time"),
    ],
)
def test_a_latent_of_several_frames_that_a_model_cannot_start_from_is_a_sentence(
    name: str, shape: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        po.images_from_samples(handle(name), torch.zeros(shape))


def test_what_a_clip_cannot_be_is_a_sentence() -> None:
    model = handle("wan21")
    with pytest.raises(InputError, match="there are 3, and it has no video-to-video. Choose one"):
        po.encode_images(handle("wan22_5b"), CLIP[:3])
    with pytest.raises(InputError, match="WanVideoToVideoPipeline takes no mask"):
        po.encode_images(model, CLIP[:5], mask=CLIP[0].convert("L"))
    with pytest.raises(InputError, match="differ in size"):
        po.encode_images(model, [*CLIP[:4], picture("wide", 48, 96)])
    images = po.encode_images(model, CLIP[:5])
    with pytest.raises(InputError, match="makes one video of a clip"):
        po.denoise(model, embeds("wan21"), images=images, num_videos_per_prompt=2, **CALL)
    with pytest.raises(InputError, match="needs a picture"):
        po.denoise(model.for_task("video-to-video"), embeds("wan21"))
    with pytest.raises((InputError, RecordError)):
        po.denoise(handle("cogvideox"), embeds("cogvideox"), images=images)


def test_foretold_steps_and_components_of_a_clip_are_those_that_run() -> None:
    model = handle("wan21")
    foretold = po.foresee_images(model, CLIP[:5])
    assert [component.name for component in foretold.plan.phases[0].components] == ["vae"]
    images = po.encode_images(model, CLIP[:5])
    assert po.foresee_denoise(model, embeds("wan21"), images=images, **CALL).plan.phases[0].steps == 2
