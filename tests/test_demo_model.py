"""The shipped demo model: what it draws, what it was kept from seeing, and what is in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_core.demo.judge import accuracy
from offload_core.demo.scenes import (
    COLOURS,
    COMBINATIONS,
    HELD_OUT,
    SHAPES,
    caption,
    parse_caption,
    render,
    sample_scene,
)

MODEL = Path(__file__).parents[1] / "offload_core" / "demo" / "model"


@pytest.fixture(scope="module")
def pipe():
    from diffusers import FluxPipeline

    return FluxPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sidecar():
    return json.loads((MODEL / "phase_offload.json").read_text(encoding="utf-8"))


def test_every_caption_is_read_back_as_its_scene():
    rng = np.random.default_rng(1)
    for _ in range(200):
        scene = sample_scene(rng, COMBINATIONS)
        assert parse_caption(caption(scene)) == scene


def test_the_judge_passes_true_pictures_and_fails_shuffled_ones():
    rng = np.random.default_rng(2)
    scenes = [sample_scene(rng, COMBINATIONS) for _ in range(120)]
    pictures = np.stack([render(scene, rng) for scene in scenes])
    assert accuracy(pictures, scenes) == 1.0
    shuffled = [scenes[i] for i in rng.permutation(len(scenes))]
    alike = np.mean([a.combination == b.combination for a, b in zip(scenes, shuffled, strict=True)])
    assert accuracy(pictures, shuffled) == alike <= 0.05


def test_the_judge_fails_a_picture_without_a_shape_and_noise():
    rng = np.random.default_rng(3)
    scenes = [sample_scene(rng) for _ in range(10)]
    assert accuracy(np.full((10, 64, 64, 3), 245, np.uint8), scenes) == 0.0
    assert accuracy(rng.integers(0, 256, (10, 64, 64, 3), dtype=np.uint8), scenes) == 0.0


def test_training_never_draws_a_held_out_combination():
    from offload_core.demo.architecture import build
    from offload_core.demo.data import make_pool

    rng = np.random.default_rng(4)
    drawn = {sample_scene(rng).combination for _ in range(4_000)}
    pool = make_pool(build(seed=0), count=200, seed=1)
    assert len(HELD_OUT) in range(40, 50)
    assert drawn == set(COMBINATIONS) - set(HELD_OUT)
    assert not {scene.combination for scene in pool.scenes} & set(HELD_OUT)


def test_training_draws_each_pair_of_held_out_attributes():
    training = set(COMBINATIONS) - set(HELD_OUT)
    assert {(c, s) for c, s, _ in training} == {(c, s) for c in COLOURS for s in SHAPES}
    assert {(c, b) for c, _, b in training} == {(c, b) for c in COLOURS for b in COLOURS if b != c}
    assert {(s, b) for _, s, b in training} == {(s, b) for s in SHAPES for b in COLOURS}


def test_the_folder_is_small_and_holds_no_pickle():
    files = [file for file in MODEL.rglob("*") if file.is_file()]
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert sum(file.stat().st_size for file in weights) <= 16 * 2**20
    assert {file.suffix for file in files} <= {".safetensors", ".json"}


def test_tokenizers_survive_the_folder_and_know_every_word(pipe):
    from offload_core.demo.architecture import make_clip_tokenizer, make_t5_tokenizer

    texts = [caption(sample_scene(np.random.default_rng(i))) for i in range(30)] + ["", "A red star.", "two zebras"]
    for loaded, made in ((pipe.tokenizer, make_clip_tokenizer()), (pipe.tokenizer_2, make_t5_tokenizer())):
        assert loaded(texts).input_ids == made(texts).input_ids
        assert loaded.model_max_length == made.model_max_length
    assert len(pipe.tokenizer_2("a large red circle on a blue background").input_ids) == 8 + 1


def test_the_example_prompts_are_captions_of_the_grammar(sidecar):
    assert len(sidecar["example_prompts"]) == 6
    for prompt in sidecar["example_prompts"]:
        parse_caption(prompt)


def test_latent_preview_factors_show_the_right_colours(pipe, sidecar):
    rng = np.random.default_rng(5)
    pictures = np.stack([render(sample_scene(rng), rng) for _ in range(20)])
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        latents = pipe.vae.encode(pixels.bfloat16()).latent_dist.mean.float()
    factors, bias = torch.tensor(sidecar["latent_rgb_factors"]), torch.tensor(sidecar["latent_rgb_bias"])
    preview = torch.einsum("bchw,cr->brhw", latents, factors) + bias[:, None, None]
    small = torch.nn.functional.avg_pool2d(pixels, 8)
    assert torch.corrcoef(torch.stack([preview.flatten(), small.flatten()]))[0, 1] > 0.8


@pytest.mark.slow  # the six captions of the demo are judged by default, in test_cli_demo.py
def test_at_least_95_of_100_held_out_captions_are_drawn_right(pipe, sidecar):
    from offload_core.demo.evaluate import CallDefaults, held_out_score

    defaults = CallDefaults(**{name: sidecar[name] for name in CallDefaults.__dataclass_fields__})
    assert held_out_score(pipe, 100, seed=2024, defaults=defaults).all >= 0.95
