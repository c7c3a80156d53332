"""The two nodes between embeds and ComfyUI's CONDITIONING: the same picture, and sentences for what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core
from node_graphs import SIZE, SpokenHost, call
from offload_core.errors import InputError
from phase_offload_nodes.graph_runner import GraphRunner
from staging import tiny_model

TO, FROM = "PhaseOffloadEmbedsToConditioning", "PhaseOffloadConditioningToEmbeds"
TOKENS = torch.zeros(1, 77, 32)


@pytest.fixture
def runner(tmp_path: Path) -> GraphRunner:
    return GraphRunner(SpokenHost(tmp_path / "models", "sd15"), output_dir=tmp_path / "out")


@pytest.fixture
def model() -> offload_core.Handle:
    return offload_core.load(tiny_model("sd15"), device="cpu")


def test_there_and_back_the_picture_is_the_same_and_no_text_encoder_is_loaded(
    runner: GraphRunner, model: offload_core.Handle
) -> None:
    embeds = offload_core.encode(model, "a red fox", "blurry")
    positive, negative = call(runner, TO, model=model, embeds=embeds)
    ((tokens, more),) = positive
    assert tokens.shape == (1, 77, 32) and more == {}
    positive[0][1]["pooled_output"] = torch.zeros(1, 768)  # as CLIP Text Encode gives it; SD 1.5 doesn't read it
    (back,) = call(runner, FROM, model=model, positive=positive, negative=negative)
    job = {"num_inference_steps": 2, "guidance_scale": 5.0, **SIZE}
    expected = offload_core.denoise(model, embeds, seed=7, **job)
    assert torch.equal(offload_core.denoise(model, back, seed=7, **job).samples, expected.samples)


@pytest.mark.parametrize(
    ("conditioning", "sentence"),
    [
        ([], "holds no conditioning"),
        ([[TOKENS, {}], [TOKENS, {}]], "holds 2 texts that were combined"),
        ([[TOKENS, {"area": (1, 1, 0, 0), "strength": 1.0}]], "carries area, strength"),
        ([[TOKENS, {"guidance": 3.5}]], "carries guidance"),
        ([[TOKENS, {"attention_mask": torch.tensor([[1, 0]])}]], "carries attention_mask"),
        ([["words", {}]], "holds no tensor"),
    ],
)
def test_what_a_pipeline_cannot_be_told_is_refused(
    runner: GraphRunner, model: offload_core.Handle, conditioning: Any, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        call(runner, FROM, model=model, positive=conditioning)


def test_a_mask_that_hides_nothing_is_no_obstacle(runner: GraphRunner, model: offload_core.Handle) -> None:
    text = [[TOKENS, {"attention_mask": torch.ones(1, 77), "pooled_output": None}]]
    (embeds,) = call(runner, FROM, model=model, positive=text, negative=text)
    assert isinstance(embeds, offload_core.Embeds)
