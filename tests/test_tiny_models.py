"""The tiny models are a fair stand-in: real folders, fixed bits, and results in which every input shows."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from transformers import PreTrainedTokenizerBase

from offload_core.tiny_models import FAMILIES, REQUIRED, VARIANTS, load_tiny, one_shot, picture, run_whole, save_tiny
from staging import OFTEN, often

OTHERS = tuple(name for name in FAMILIES if name not in REQUIRED)
OTHER_PROMPT = "a blue car"
SCALED = ("hidream",)  # their results are of another size than is asked for
VISIBLE = 1e-3  # mean difference of two pictures in 0 … 1 that no rounding explains in float32

# Of the others a few are run by default, the rest by the slow tests.
SEEN = ("sd15_safety", "ltx2")
VARIANTS_SEEN = ("sdxl_inpaint", "flux2_klein_edit")
every_family = pytest.mark.parametrize("name", [*often(tuple(REQUIRED), OFTEN), *often(OTHERS, SEEN)])
required_family = pytest.mark.parametrize("name", often(tuple(REQUIRED), OFTEN))


class Tiny:
    """The folders and pipelines of this file's tests, each made or loaded once."""

    def __init__(self, root: Path) -> None:
        self.folder: Callable[[str], Path] = functools.cache(lambda name: save_tiny(name, root / name))
        self.loaded = functools.cache(lambda name: load_tiny(self.folder(name), dtype=torch.float32))
        self.plain = functools.cache(self.run)

    def run(self, name: str, **changes: Any) -> torch.Tensor:
        """Return what a family's small call gives at seed 0, with some arguments changed."""
        return run_whole(self.loaded(name), **{"seed": 0, **FAMILIES[name].call, **changes})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().mean().item()


def without_text_length(name: str) -> dict[str, Any]:
    return {key: value for key, value in FAMILIES[name].call.items() if key != "max_sequence_length"}


def fingerprint(pipeline: DiffusionPipeline) -> str:
    digest = hashlib.sha256()
    for name, module in sorted(pipeline.components.items()):
        if isinstance(module, torch.nn.Module):
            for key, tensor in sorted(module.state_dict().items()):
                digest.update(f"{name}.{key}{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@every_family
def test_two_builds_have_the_same_bits_whatever_the_global_seed(name: str) -> None:
    torch.manual_seed(1)
    first = fingerprint(FAMILIES[name].build())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert fingerprint(FAMILIES[name].build()) == first
    assert torch.equal(torch.get_rng_state(), state)


@every_family
def test_a_folder_gives_back_what_was_built(name: str, tiny: Tiny) -> None:
    built, loaded = FAMILIES[name].build(), tiny.loaded(name)
    assert type(loaded) is type(built)
    assert fingerprint(loaded) == fingerprint(built)
    for key, tokenizer in built.components.items():
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            assert loaded.components[key]("A red fox, 3 times!").input_ids == tokenizer("A red fox, 3 times!").input_ids
            assert tokenizer(OTHER_PROMPT).input_ids != tokenizer(FAMILIES[name].call["prompt"]).input_ids


@required_family
def test_a_bfloat16_folder_holds_bfloat16_safetensors_and_runs(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / name, dtype=torch.bfloat16)
    assert not [*path.rglob("*.bin"), *path.rglob("*.pt")]
    pipeline = load_tiny(path, dtype=torch.bfloat16)
    assert pipeline.vae.dtype is torch.bfloat16
    assert torch.isfinite(run_whole(pipeline, seed=0, **FAMILIES[name].call)).all()


@required_family
def test_one_shot_repeats_itself_and_is_not_a_flat_picture(name: str, tiny: Tiny) -> None:
    call, result = FAMILIES[name].call, tiny.plain(name)
    assert torch.equal(one_shot(tiny.folder(name), dtype=torch.float32, seed=0, **call), result)
    assert torch.equal(tiny.run(name), result)
    assert result.shape[-2:] == (call["height"], call["width"])
    assert result.ndim == (5 if FAMILIES[name].makes_video else 4)
    assert result.std() > 0.1
    assert ((result > 0) & (result < 1)).float().mean() > 0.6


@required_family
def test_prompt_and_seed_show_in_the_result(name: str, tiny: Tiny) -> None:
    assert distance(tiny.run(name, prompt=OTHER_PROMPT), tiny.plain(name)) > VISIBLE
    assert distance(tiny.run(name, seed=1), tiny.plain(name)) > VISIBLE


@required_family
def test_guidance_its_scale_and_the_negative_prompt_show_in_the_result(name: str, tiny: Tiny) -> None:
    guidance = FAMILIES[name].guidance
    guided = tiny.run(name, **guidance)
    assert distance(guided, tiny.plain(name)) > VISIBLE
    for key, value in {"guidance_scale": 2.0, "true_cfg_scale": 2.0, "negative_prompt": "green"}.items():
        if key in guidance:
            assert distance(tiny.run(name, **{**guidance, key: value}), guided) > VISIBLE, key


@required_family
def test_two_of_a_prompt_are_two_different_results(name: str, tiny: Tiny) -> None:
    pair = tiny.run(name, **{FAMILIES[name].count_argument: 2})
    assert len(pair) == 2
    assert distance(pair[0], pair[1]) > VISIBLE


@required_family
def test_the_default_text_length_works(name: str, tiny: Tiny) -> None:
    assert torch.isfinite(run_whole(tiny.loaded(name), seed=0, **without_text_length(name))).all()


@pytest.mark.parametrize("name", often(OTHERS, SEEN))
def test_everything_shows_in_the_result_of_the_other_families_too(name: str, tiny: Tiny) -> None:
    family, result = FAMILIES[name], tiny.plain(name)
    if "height" in family.call and name not in SCALED:
        assert result.shape[-2:] == (family.call["height"], family.call["width"])
    assert ((result > (-1 if family.makes_sound else 0)) & (result < 1)).float().mean() > 0.6
    for change in filter(None, ({"prompt": OTHER_PROMPT}, {"seed": 1}, family.guidance)):
        assert distance(tiny.run(name, **change), result) > VISIBLE, change
    if family.count_argument:
        assert len(tiny.run(name, **{family.count_argument: 2})) == 2


@pytest.mark.parametrize("name", often(tuple(VARIANTS), VARIANTS_SEEN))
def test_the_picture_and_the_prompt_show_in_a_picture_conditioned_call(name: str, tiny: Tiny) -> None:
    variant = VARIANTS[name]
    pipeline = load_tiny(tiny.folder(variant.family), dtype=torch.float32, pipeline_class=variant.pipeline_class)
    start = variant.call["image"]
    first = start[0] if isinstance(start, list) else start
    other = picture("other", first.height, first.width)
    other = [other, *start[1:]] if isinstance(start, list) else other
    result = run_whole(pipeline, seed=0, **variant.call)
    assert distance(run_whole(pipeline, seed=0, **{**variant.call, "image": other}), result) > VISIBLE
    assert distance(run_whole(pipeline, seed=0, **{**variant.call, "prompt": OTHER_PROMPT}), result) > VISIBLE


def test_both_wan_experts_work_in_the_small_call() -> None:
    pipeline = FAMILIES["wan22_a14b"].build()
    calls: list[str] = []
    for expert in ("transformer", "transformer_2"):
        getattr(pipeline, expert).register_forward_hook(lambda *_, expert=expert: calls.append(expert))
    pipeline.set_progress_bar_config(disable=True)
    pipeline(**FAMILIES["wan22_a14b"].call)
    assert calls == ["transformer", "transformer_2"]


def test_the_safety_checker_blacks_out_one_seed_and_passes_another(tiny: Tiny) -> None:
    assert torch.equal(tiny.plain("sd15_safety"), tiny.plain("sd15"))
    assert not tiny.run("sd15_safety", seed=3).any()


def test_force_upcast_decodes_a_float16_run_in_float32(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    decode = AutoencoderKL.decode

    def noting_decode(self: AutoencoderKL, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z.dtype)
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "decode", noting_decode)
    for name in ("sdxl_fp16_force_upcast", "sdxl"):
        one_shot(tiny.folder(name), dtype=torch.float16, seed=0, **FAMILIES[name].call)
    assert seen == [torch.float32, torch.float16]


def test_qwen_templates_start_with_the_thirty_four_tokens_the_pipeline_cuts_off() -> None:
    pipeline = FAMILIES["qwen_image"].build()
    head = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer(head).input_ids) == pipeline.prompt_template_encode_start_idx
