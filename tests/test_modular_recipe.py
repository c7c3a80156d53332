"""Modular Diffusers under the engine: text block, denoise block and decode block, each with only its components.

The pictures equal those of the classic pipeline bit for bit where both do the same sums. Under guidance diffusers' own
two ways differ for SDXL (one batch, or two calls) and Z-Image (another formula); there the reference is the whole
modular pipeline.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline

from modular_models import SEED, as_blocks, guiders, picture, run, seeded, tiny_anima, whole
from offload_core import (
    OffloadSettings,
    config_only,
    enable_offload,
    enable_pipeline_offload,
    from_pretrained_with_dynamic_offload,
    modular_blocks,
    open_block,
)
from offload_core.errors import BudgetError, ColdWeightError, InputError, ModelError
from offload_core.streaming import is_streamed
from offload_core.tiny_models.pictures import picture as image
from staging import FAMILIES, one_shot, tiny_model

# Everything but the smallest weights is streamed.
SETTINGS = OffloadSettings(execution_device="cpu", resident_memory=0, resident_below=1024)
# Scale of the guider in the place of the classic call's scale; None where the family has no guider.
PLAIN = {"sdxl": 1.0, "flux": None, "z_image": 1.0, "qwen_image": 1.0}
GUIDED = {"qwen_image": 4.0, "wan22_a14b": 5.0}
GUIDED_UNLIKE_CLASSIC = {"sdxl": 5.0, "z_image": 6.0}
FAST = ("flux", "wan22_a14b")


def by_name(families: dict[str, Any]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in families]


def call_of(name: str, *, guided: bool) -> dict[str, Any]:
    """A family's call without the scales, which modular pipelines keep in a guider (FLUX's is no such scale)."""
    call = dict(FAMILIES[name].guided_call if guided else FAMILIES[name].call)
    for key in ("guidance_scale", "true_cfg_scale"):
        call.pop(key, None)
    return call


TEXT_TO_IMAGE = ("text_encoder", "denoise", "decode")


def block_by_block(
    model: Path, call: dict[str, Any], scale: float | None, names: Sequence[str] = TEXT_TO_IMAGE
) -> torch.Tensor:
    """The recipe of the docs. Every block that draws goes on with the same generator."""
    state, call = None, {**call, "generator": seeded()}
    for name in names:
        listed = ModularPipeline.from_pretrained(model).blocks.sub_blocks[name].component_names
        given = {part: ClassifierFreeGuidance(scale) for part in listed if part.startswith("guider")}
        with open_block(model, name, settings=SETTINGS, components=given) as pipe:
            state = run(pipe, call, state)
        assert not any(pipe.components.values())
    return picture(state)


def by_hand(model: Path, call: dict[str, Any], scale: float | None) -> torch.Tensor:
    """The same with diffusers' own loader, for those who compose blocks themselves."""
    blocks, state = ModularPipeline.from_pretrained(model).blocks.sub_blocks, None
    for name in TEXT_TO_IMAGE:
        pipe = blocks[name].init_pipeline(str(model))
        pipe.load_components()
        for part, guider in guiders(pipe, scale).items():
            pipe.update_components(**{part: guider})
        results = enable_pipeline_offload(pipe, settings=SETTINGS)
        state = run(pipe, call, state)
        assert any(result.report().read_bytes for result in results.values())
        del results, pipe
    return picture(state)


@functools.cache
def classic(name: str, guided: bool) -> torch.Tensor:
    call = FAMILIES[name].guided_call if guided else FAMILIES[name].call
    return one_shot(tiny_model(name), dtype=torch.float32, seed=SEED, **call)[0]


@pytest.mark.parametrize("name", by_name(PLAIN))
def test_blocks_one_by_one_equal_the_classic_pipeline(name: str) -> None:
    found = block_by_block(tiny_model(name), call_of(name, guided=False), PLAIN[name])
    assert torch.equal(found, classic(name, guided=False))


@pytest.mark.parametrize("name", by_name(GUIDED))
def test_guided_blocks_one_by_one_equal_the_classic_pipeline(name: str) -> None:
    found = block_by_block(tiny_model(name), call_of(name, guided=True), GUIDED[name])
    assert torch.equal(found, classic(name, guided=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN | GUIDED)
def test_blocks_that_diffusers_loads_equal_the_classic_pipeline_under_the_engine(name: str) -> None:
    guided = name in GUIDED
    found = by_hand(tiny_model(name), call_of(name, guided=guided), (PLAIN | GUIDED)[name])
    assert torch.equal(found, classic(name, guided=guided))


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDED_UNLIKE_CLASSIC)
def test_guided_blocks_one_by_one_equal_the_whole_modular_pipeline(name: str) -> None:
    call, scale = call_of(name, guided=True), GUIDED_UNLIKE_CLASSIC[name]
    assert torch.equal(block_by_block(tiny_model(name), call, scale), whole(tiny_model(name), call, scale))


@pytest.mark.slow
def test_all_blocks_in_their_order_make_a_picture_of_a_picture() -> None:
    model, call = tiny_model("flux"), call_of("flux", guided=False) | {"image": image("fox"), "strength": 0.9}
    found = block_by_block(model, call, None, list(modular_blocks(model)))
    assert torch.equal(found, whole(model, call, None))
    assert not torch.equal(found, classic("flux", guided=False))


def test_a_folder_with_only_a_modular_index_is_run_by_its_blocks(tmp_path: Path) -> None:
    model = as_blocks("flux", tmp_path / "model")
    assert modular_blocks(model) == {
        "text_encoder": ("text_encoder", "text_encoder_2"),
        "vae_encoder": ("vae",),
        "denoise": ("transformer",),
        "decode": ("vae",),
    }
    assert torch.equal(block_by_block(model, call_of("flux", guided=False), None), classic("flux", guided=False))


@pytest.mark.slow
def test_a_family_that_exists_only_as_blocks_has_its_phases_from_them() -> None:
    model = tiny_anima()
    assert modular_blocks(model)["denoise"] == ("text_conditioner", "transformer")
    call = {"prompt": "a red fox", "negative_prompt": "blurry", "height": 48, "width": 64, "num_inference_steps": 2}
    found = block_by_block(model, call, 4.0)
    assert found.shape[-2:] == (48, 64) and found.std() > 0.01
    assert torch.equal(found, whole(model, call, 4.0))


# ----------------------------------------------------------------------------------------------- the trap


def denoise_block(name: str) -> Any:
    """A denoise block as diffusers gives it, loaded, without a VAE."""
    model = tiny_model(name)
    pipe = ModularPipeline.from_pretrained(model).blocks.sub_blocks["denoise"].init_pipeline(str(model))
    pipe.load_components()
    return pipe


def test_a_block_without_its_vae_learns_the_latent_grid_when_its_denoiser_is_attached() -> None:
    pipe = denoise_block("flux")
    assert pipe.vae_scale_factor == 8  # a guess
    with enable_offload(pipe.transformer, settings=SETTINGS):
        assert pipe.vae_scale_factor == 2 ** (len(config_only(tiny_model("flux")).config.block_out_channels) - 1) != 8
        assert "vae" not in pipe.components
        with pytest.raises(ColdWeightError, match="vae"):
            pipe.vae.decode(torch.zeros(1, pipe.vae.config.latent_channels, 2, 2))


def test_a_block_given_its_denoiser_after_it_was_attached_says_so_once_and_is_right_then() -> None:
    loaded = from_pretrained_with_dynamic_offload(
        tiny_model("flux"), model_loader=diffusers.FluxTransformer2DModel, subfolder="transformer"
    )
    model = tiny_model("flux")
    with open_block(model, "text_encoder", settings=SETTINGS) as text:
        state = run(text, call_of("flux", guided=False))
    with enable_offload(loaded.module, settings=SETTINGS):
        pipe = ModularPipeline.from_pretrained(model).blocks.sub_blocks["denoise"].init_pipeline(str(model))
        pipe.load_components(["scheduler"])
        pipe.transformer = loaded.module
        with pytest.raises(InputError, match="vae_scale_factor 8, it is"):
            run(pipe, call_of("flux", guided=False), state)
        latents = run(pipe, call_of("flux", guided=False), state).get("latents")
    assert latents.shape[-2:] == (48 // pipe.vae_scale_factor, 64 // pipe.vae_scale_factor)


def test_a_block_whose_folder_is_not_known_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pipe = denoise_block("flux")
    pipe._pretrained_model_name_or_path = None
    pipe.transformer.register_to_config(_name_or_path="")
    with caplog.at_level(logging.WARNING), enable_offload(pipe.transformer, settings=SETTINGS):
        assert pipe.vae_scale_factor == 8
    assert "config_only" in caplog.text


# -------------------------------------------------------------------------------------------- what it refuses


def test_a_block_that_ends_in_an_error_lets_go_of_its_components() -> None:
    with pytest.raises(KeyboardInterrupt), open_block(tiny_model("flux"), "decode", settings=SETTINGS) as pipe:
        vae = pipe.vae
        assert any(map(is_streamed, vae.parameters()))
        raise KeyboardInterrupt
    assert pipe.vae is None and not any(map(is_streamed, vae.parameters()))


def test_a_budget_that_is_too_small_for_a_block_is_refused_with_what_is_missing() -> None:
    tight = OffloadSettings(execution_device="cpu", device_memory=20_000)
    with pytest.raises(BudgetError, match="Raise device_memory by"):
        open_block(tiny_model("flux"), "denoise", settings=tight).__enter__()


def test_a_block_or_component_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InputError, match="no block 'unet'.*text_encoder, vae_encoder, denoise, decode"):
        open_block(tiny_model("flux"), "unet").__enter__()
    with pytest.raises(InputError, match="no component 'guider'.*transformer"):
        open_block(tiny_model("flux"), "denoise", components={"guider": None}).__enter__()


def test_a_family_without_blocks_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="no blocks"):
        modular_blocks(tiny_model("sd15"))


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    spec = {"type_hint": ["diffusers", "AutoencoderKL"], "subfolder": "../elsewhere"}
    index = {"_class_name": "FluxModularPipeline", "vae": ["diffusers", "AutoencoderKL", spec]}
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'\.\./elsewhere'.*no plain folder name"):
        modular_blocks(tmp_path)
