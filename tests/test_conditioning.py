"""Embeddings to ComfyUI's CONDITIONING and back: the same picture, or a sentence why there is no exact way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import offload_core as po
from offload_core.errors import InputError
from offload_core.tiny_models.running import align
from staging import job, often, one_shot, tiny_model, words

EXACT = ("sd15", "sdxl", "sd3", "flux", "wan22_a14b")
# What encode_prompt must be told besides the texts, to do what the pipeline's call does.
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sd15": {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True},
    "sdxl": {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True},
    "sd3": {"prompt_2": None, "prompt_3": None},
    "flux": {"prompt_2": None, "device": "cpu"},
    "wan22_a14b": {"max_sequence_length": 512},
}
REFUSED = {
    "qwen_image": "a mask beside",
    "chroma": "a mask beside",
    "z_image": "a list of texts",
    "flux2_klein": "nobody has shown",
}


@pytest.mark.parametrize("name", often(EXACT, ("sd15", "flux")))
def test_embeds_as_conditioning_and_back_give_the_pipelines_picture(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=True)
    expected, _ = one_shot(path, dtype=torch.float32, seed=3, **words(name), **call)
    handle, session = po.load(path, device="cpu"), po.Session()
    positive, negative = po.conditioning_of(handle, po.encode(handle, **words(name)))
    assert positive.tokens.dtype == torch.float32
    embeds = po.embeds_from_conditioning(handle, positive, negative, session=session)
    latents = po.denoise(handle, embeds, seed=3, session=session, **call)
    assert torch.equal(torch.as_tensor(po.decode(handle, latents, "pt")).float(), expected)
    assert not any(part.startswith("text_encoder") for phase in session.report.phases for part in phase.forwards)


def test_a_model_with_a_negative_prompt_of_its_own_takes_that_of_the_conditioning() -> None:
    handle = po.load(Path(po.__file__).parent / "demo" / "model", device="cpu")
    embeds = po.encode(handle, "a large red circle on a blue background", "a star")
    back = po.embeds_from_conditioning(handle, *po.conditioning_of(handle, embeds))
    made = [po.denoise(handle, each, seed=4, num_inference_steps=2).samples for each in (embeds, back)]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", often(EXACT, ("sdxl",)))
def test_a_conditioning_is_what_the_pipelines_own_encoders_give(name: str) -> None:
    path, texts = tiny_model(name), words(name)
    pipeline: Any = DiffusionPipeline.from_pretrained(path)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    asked = {"flux": {"prompt": texts["prompt"]}}.get(name, texts)
    with torch.no_grad():
        answers = pipeline.encode_prompt(**asked, **OWN_ARGUMENTS[name])
    handle = po.load(path, device="cpu")
    positive, negative = po.conditioning_of(handle, po.encode(handle, **texts))
    assert torch.equal(positive.tokens, answers[0])
    if name != "flux":
        assert negative is not None and torch.equal(negative.tokens, answers[1])
    pooled = {"flux": 1, "sdxl": 2, "sd3": 2}.get(name)
    assert (positive.pooled is None) == (pooled is None)
    if pooled is not None:
        assert positive.pooled is not None and torch.equal(positive.pooled, answers[pooled])


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_a_family_without_an_exact_way_is_refused_with_the_reason(name: str, why: str) -> None:
    handle = po.load(tiny_model(name), device="cpu")
    with pytest.raises(InputError, match=f"There is no exact way .*{why}"):
        po.embeds_from_conditioning(handle, po.Conditioning(torch.zeros(1, 4, 32)))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("sd15", po.Conditioning(torch.zeros(1, 77, 31)), "positive conditioning has shape .*another model's encoders"),
        ("flux", po.Conditioning(torch.zeros(1, 16, 32)), "pooled output of shape None"),
        ("flux", po.Conditioning(torch.zeros(1, 16, 32), torch.zeros(1, 31)), r"reads \(texts, 32\)"),
    ],
)
def test_a_conditioning_of_another_model_is_refused_by_its_shape(
    name: str, text: po.Conditioning, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        po.embeds_from_conditioning(po.load(tiny_model(name), device="cpu"), text)


def test_texts_of_two_lengths_are_refused_where_they_share_a_batch() -> None:
    long, short = (po.Conditioning(torch.zeros(1, count, 32)) for count in (154, 77))
    with pytest.raises(InputError, match="have 154 and 77 tokens"):
        po.embeds_from_conditioning(po.load(tiny_model("sd15"), device="cpu"), long, short)
