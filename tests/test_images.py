"""Pictures to start from: the model's sibling pipeline in phases gives the bits of its own one-shot run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline
from PIL import Image

import offload_core as po
from offload_core.errors import InputError, RecordError
from offload_core.tiny_models import mask, picture
from offload_core.tiny_models.variants import VARIANTS
from staging import job, one_shot, tiny_model, words

FOX = picture("fox")
OF_PICTURES = ("image", "mask_image", "height", "width", "num_frames", "max_area", "_auto_resize", "image_crf")
OF_TEXTS = ("prompt", "negative_prompt", "max_sequence_length")
SLOW_LATENTS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl_img2img", "flux_img2img", "z_image_img2img")
]
LATENT_CASES = ["sd15_img2img", *SLOW_LATENTS]


def split(call: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Takes these arguments out of a call."""
    return {name: call.pop(name) for name in names if name in call}


@functools.cache
def handle(name: str) -> po.Handle:
    return po.load(tiny_model(name), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_for_texts_takes_a_picture_as_its_sibling_pipeline_does(name: str) -> None:
    variant = VARIANTS[name]
    path = tiny_model(variant.family)
    call = dict(variant.call)
    expected, _ = one_shot(path, dtype=torch.float32, seed=4, cls=variant.pipeline_class, **call)
    model, session, texts = po.load(path, device="cpu"), po.Session(), split(call, OF_TEXTS)
    pictures = split(call, OF_PICTURES)
    image, masked = pictures.pop("image"), pictures.pop("mask_image", None)
    images = po.encode_images(model, image, mask=masked, session=session, **pictures)
    latents = po.denoise(
        model, po.encode(model, **texts, session=session), images=images, seed=4, session=session, **call
    )
    assert torch.equal(torch.as_tensor(po.decode(model, latents, "pt")).float(), expected)
    seen, encode, denoise = session.report.phases
    assert images.pipeline == variant.pipeline_class.__name__
    assert set(seen.forwards) == {"vae"}  # the text encoders aren't loaded to encode a picture
    assert "vae" not in encode.forwards
    assert "vae" not in denoise.forwards
    assert seen.leaked_bytes == encode.leaked_bytes == denoise.leaked_bytes == 0


@pytest.mark.slow
def test_any_strength_number_of_steps_and_seed_use_the_picture_as_it_was_encoded_once() -> None:
    # At strength 1 the inpainting pipeline doesn't ask for the picture, and below it does.
    model, path = handle("sd15"), tiny_model("sd15")
    images, embeds = po.encode_images(model, FOX, mask=mask()), po.encode(model, **words("sd15"))
    for strength, steps, seed in ((1.0, 2, 1), (0.3, 4, 2)):
        call = {"strength": strength, "num_inference_steps": steps, "guidance_scale": 4.0}
        session = po.Session()
        latents = po.denoise(model, embeds, images=images, seed=seed, session=session, **call)
        assert list(session.report.phases[0].forwards) == ["unet"]
        shown = {**words("sd15"), "image": FOX, "mask_image": mask(), "height": 48, "width": 64}
        expected, _ = one_shot(
            path, dtype=torch.float32, seed=seed, cls=StableDiffusionInpaintPipeline, **shown, **call
        )
        assert torch.equal(po.decode(model, latents, "pt"), expected)


def encoding_of(name: str, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
    """A LATENT of the picture, as core's VAE Encode makes it, and the same as the pipeline's own latents."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tiny_model(name) / "vae")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        samples = vae.encode(pixels).latent_dist.mode()
    return samples, (samples - (vae.config.shift_factor or 0)) * vae.config.scaling_factor


@pytest.mark.parametrize("name", LATENT_CASES)
def test_a_latent_is_a_start_as_it_is_for_the_pipeline_and_loads_no_vae(name: str) -> None:
    variant = VARIANTS[name]
    samples, scaled = encoding_of(variant.family, FOX)
    call = {key: value for key, value in variant.call.items() if key not in OF_PICTURES}
    shown = {"height": 48, "width": 64} if "height" in variant.call else {}
    expected, _ = one_shot(
        tiny_model(variant.family),
        dtype=torch.float32,
        seed=4,
        cls=variant.pipeline_class,
        image=scaled,
        **call,
        **shown,
    )
    model, texts = handle(variant.family), split(call, OF_TEXTS)
    images, session = po.images_from_samples(model, samples), po.Session()
    latents = po.denoise(model, po.encode(model, **texts), images=images, seed=4, session=session, **call)
    assert "vae" not in session.report.phases[0].forwards
    assert torch.equal(po.decode(model, latents, "pt").float(), expected)


@pytest.mark.slow
def test_a_latent_with_a_mask_keeps_what_the_mask_leaves_alone() -> None:
    samples, _ = encoding_of("sd15", FOX)
    images = po.images_from_samples(handle("sd15"), samples, mask())
    assert images.pipeline == "StableDiffusionInpaintPipeline"
    embeds = po.encode(handle("sd15"), "a red fox")
    made = po.denoise(handle("sd15"), embeds, images=images, num_inference_steps=2, strength=1.0).samples
    kept = samples.shape[-1] // 2
    assert torch.allclose(made[..., :kept], samples[..., :kept], atol=1e-5)
    assert not torch.allclose(made[..., kept:], samples[..., kept:], atol=0.1)


@pytest.mark.slow
def test_the_result_has_the_picture_s_size_rounded_down_unless_another_is_asked_for() -> None:
    images = po.encode_images(handle("flux"), picture("odd", 51, 70))
    assert [images.call.structure["dict"][i][1] for i in (1, 2)] == [48, 64]
    small = po.encode_images(handle("sd15"), FOX, height=24, width=32)  # a pipeline that takes its picture's size
    made = po.denoise(handle("sd15"), po.encode(handle("sd15"), "fox"), images=small, num_inference_steps=2)
    pictures = po.decode(handle("sd15"), made)
    assert pictures[0].size == (32, 24)
    call = {"num_inference_steps": 2, "image": FOX.resize((32, 24), Image.Resampling.LANCZOS)}
    twin = StableDiffusionImg2ImgPipeline
    expected, _ = one_shot(tiny_model("sd15"), dtype=torch.float32, seed=0, cls=twin, prompt="fox", **call)
    assert torch.equal(po.decode(handle("sd15"), made, "pt"), expected)


@pytest.mark.slow
def test_embeddings_carry_the_pictures_that_encode_was_given() -> None:
    model = handle("sd15")
    images = po.encode_images(model, FOX)
    call = {"num_inference_steps": 4, "strength": 0.6}
    session = po.Session()
    embeds = po.encode(model, "a red fox", images=images, session=session)
    made = po.denoise(model, embeds, session=session, **call)
    assert ["vae" in phase.forwards for phase in session.report.phases] == [False, False]
    apart = po.denoise(model, po.encode(model, "a red fox"), images=images, **call)
    assert torch.equal(made.samples, apart.samples)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("sana", {"images": FOX}, "SanaPipeline has no image-to-image"),
        ("sana", {"images": FOX, "mask": mask()}, "SanaPipeline has no inpaint"),
        ("wan22_a14b", {"images": FOX}, "WanPipeline has no image-to-video"),  # other weights than for texts
        ("wan22_5b", {"images": [FOX, FOX, FOX]}, "takes one picture at a time and there are 3"),
        ("flux", {"images": []}, "needs a picture"),
        ("flux", {"images": FOX, "task": "paint"}, "no task 'paint'"),
        ("flux", {"images": FOX, "height": 48}, "both height and width"),
        ("wan22_5b", {"images": FOX, "mask": mask()}, "takes no mask"),
    ],
)
def test_what_a_model_cannot_do_with_a_picture_is_a_sentence(name: str, arguments: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        po.encode_images(handle(name), **arguments)


@pytest.mark.slow
def test_pictures_of_another_model_are_refused() -> None:
    images = po.encode_images(handle("sd15"), FOX)
    embeds = po.encode(handle("sdxl"), "a red fox")
    with pytest.raises((InputError, RecordError)):
        po.denoise(handle("sdxl"), embeds, images=images)
    with pytest.raises(RecordError, match="field encoders"):
        po.denoise(po.load(tiny_model("sd15"), device="cpu", dtype="bfloat16"), embeds, images=images)


@pytest.mark.parametrize("name", ["sd15", pytest.param("flux", marks=pytest.mark.slow)])
def test_each_of_several_pictures_is_a_start_of_its_own(name: str) -> None:
    twin = {"sd15": StableDiffusionImg2ImgPipeline, "flux": FluxImg2ImgPipeline}[name]
    pair, call = [FOX, picture("owl")], {"num_inference_steps": 4, "strength": 0.5}
    shown = {"image": pair, **({"height": 48, "width": 64} if name == "flux" else {})}
    expected, _ = one_shot(
        tiny_model(name), dtype=torch.float32, seed=4, cls=twin, prompt="fox", num_images_per_prompt=2, **shown, **call
    )
    images, embeds = po.encode_images(handle(name), pair), po.encode(handle(name), "fox")
    assert images.starts == 2
    latents = po.denoise(handle(name), embeds, images=images, seed=4, **call)
    assert torch.equal(po.decode(handle(name), latents, "pt").float(), expected)
    assert po.denoise(handle(name), embeds, images=images, num_images_per_prompt=4, **call).samples.shape[0] == 4
    with pytest.raises(InputError, match="2 pictures to start from and num_images_per_prompt is 3"):
        po.denoise(handle(name), embeds, images=images, num_images_per_prompt=3, **call)
    with pytest.raises(InputError, match="differ in size"):
        po.encode_images(handle(name), [FOX, picture("owl", 64, 64)])


@pytest.mark.slow
def test_each_latent_of_a_batch_is_a_start_of_its_own() -> None:
    both = [encoding_of("sd15", image) for image in (FOX, picture("owl"))]
    call = {"num_inference_steps": 4, "strength": 0.5}
    expected, _ = one_shot(
        tiny_model("sd15"),
        dtype=torch.float32,
        seed=4,
        cls=StableDiffusionImg2ImgPipeline,
        prompt="fox",
        image=torch.cat([scaled for _, scaled in both]),
        num_images_per_prompt=2,
        **call,
    )
    images = po.images_from_samples(handle("sd15"), torch.cat([samples for samples, _ in both]))
    latents = po.denoise(handle("sd15"), po.encode(handle("sd15"), "fox"), images=images, seed=4, **call)
    assert torch.equal(po.decode(handle("sd15"), latents, "pt").float(), expected)


def test_latents_that_cannot_stand_for_a_picture_are_refused() -> None:
    with pytest.raises(InputError, match="holds 3 frames of a video"):
        po.images_from_samples(handle("wan22_5b"), torch.zeros(1, 48, 3, 4, 4))
    with pytest.raises(InputError, match="a latent isn't enough"):
        po.images_from_samples(po.load(tiny_model("wan22_i2v_a14b"), device="cpu"), torch.zeros(1, 16, 1, 6, 8))


def test_saved_pictures_are_the_start_that_they_were(tmp_path: Path) -> None:
    model = handle("sd15")
    images = po.encode_images(model, FOX, mask=mask())
    images.save(tmp_path / "fox.images.safetensors")
    back = po.Images.load(tmp_path / "fox.images.safetensors")
    embeds, call, session = po.encode(model, "a red fox"), {"num_inference_steps": 2, "strength": 0.6}, po.Session()
    made = po.denoise(model, embeds, images=back, session=session, **call)
    assert "vae" not in session.report.phases[0].forwards
    assert torch.equal(made.samples, po.denoise(model, embeds, images=images, **call).samples)
    assert back.pictures[0].tobytes() == FOX.tobytes()
    embeds.save(tmp_path / "words")
    with pytest.raises(RecordError, match="doesn't hold images"):
        po.Images.load(tmp_path / "words")


def test_a_handle_says_which_pipeline_does_a_task() -> None:
    assert handle("flux").for_task("inpaint").pipeline == "FluxInpaintPipeline"
    assert handle("chroma").for_task("image-to-image").pipeline == "ChromaImg2ImgPipeline"
    assert handle("flux2_klein").for_task("image-to-image") == handle("flux2_klein")
    assert handle("ltx").for_task("image-to-video").pipeline == "LTXImageToVideoPipeline"
    assert handle("flux").for_task("inpaint").for_task("image-to-image").pipeline == "FluxImg2ImgPipeline"


@pytest.mark.slow
def test_foretold_peaks_of_a_job_with_a_picture_are_near_what_happens() -> None:
    model, session = handle("sd15"), po.Session()
    foretold = po.foresee_images(model, FOX)
    assert [component.name for component in foretold.plan.phases[0].components] == ["vae"]
    images = po.encode_images(model, FOX, plan=foretold.plan, session=session)
    embeds = po.encode(model, **words("sd15"), session=session)
    call = {**job("sd15", guided=True), "strength": 0.5, "num_inference_steps": 4}
    del call["height"], call["width"]
    foretold = po.foresee_denoise(model, embeds, images=images, **call)
    assert foretold.plan.phases[0].steps == 2
    po.denoise(model, embeds, images=images, plan=foretold.plan, session=session, **call)
    assert session.report.phases[0].predicted
    assert session.report.phases[-1].predicted
