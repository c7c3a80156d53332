"""Three phases give the bits of the one-shot pipeline, whatever Encode knew of what Denoise would ask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import offload_core as po
from offload_core.tiny_models import FAMILIES, as_pipeline
from offload_core.tiny_models.variants import VARIANTS
from staging import OFTEN, OTHERS, PROMISED, job, often, one_shot, staged, tiny_model, words

DTYPES = [torch.float32, torch.bfloat16]
# A UNet, a transformer, pictures beside the latents, and a video; the others are run by the slow tests.
VARIANTS_OFTEN = ("sd15_img2img", "sdxl_inpaint", "flux_kontext", "wan22_5b_i2v")
DEMO = Path(po.__file__).parent / "demo" / "model"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{kind}", marks=[] if seen else [pytest.mark.slow])
        for name in PROMISED
        for kind, dtype, seen in (
            ("float32", torch.float32, name in (*OFTEN, "sdxl")),
            ("bfloat16", torch.bfloat16, name in ("sd15", "flux2_klein")),
        )
    ],
)
def test_two_guided_pictures_in_phases_equal_the_one_shot_run(name: str, dtype: torch.dtype) -> None:
    path, call = tiny_model(name), job(name, guided=True, images=2)
    expected, ran = one_shot(path, dtype=dtype, seed=5, **words(name), **call)
    pictures, session = staged(path, words(name), call, dtype=dtype, seed=5)
    assert pictures.shape[0] == (2 if FAMILIES[name].count_argument else 1)
    assert torch.equal(pictures, expected)
    phases = {phase.name: phase for phase in session.report.phases}
    assert list(phases) == ["encode", "denoise", "decode"]
    assert all(phase.leaked_bytes == 0 for phase in phases.values())
    for phase in ("encode", "denoise"):
        assert phases[phase].forwards
        for component, count in phases[phase].forwards.items():
            assert count <= ran[component]


@pytest.mark.parametrize("name", often(PROMISED))
def test_embeddings_made_with_defaults_serve_an_unguided_denoise(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=False)
    expected, _ = one_shot(path, dtype=torch.float32, seed=6, **words(name), **call)
    pictures, session = staged(path, words(name), call, dtype="auto", seed=6)
    assert torch.equal(pictures, expected)
    assert [phase.name for phase in session.report.phases] == ["encode", "denoise", "decode"]


@pytest.mark.parametrize("name", often(OTHERS, ("sd15_safety", "ltx2")))
def test_other_families_in_phases_equal_the_one_shot_run(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=True)
    texts = words(name)
    if name == "hunyuan_video15":  # its default text length takes its tiny encoder minutes
        call["max_sequence_length"] = FAMILIES[name].call.get("max_sequence_length")
        call = {key: value for key, value in call.items() if value is not None}
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **texts | call)
    pictures, session = staged(path, texts, call, dtype="auto", seed=5)
    assert torch.equal(pictures, expected)
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)


def test_a_list_of_prompts_equals_the_one_shot_run() -> None:
    path, texts = tiny_model("flux"), {"prompt": ["a red circle", "two stars"], "negative_prompt": ["fog", "fog"]}
    call = job("flux", guided=True)
    expected, _ = one_shot(path, dtype=torch.float32, seed=1, **texts, **call)
    assert torch.equal(staged(path, texts, call, dtype="auto", seed=1)[0], expected)


def test_float16_sdxl_whose_vae_must_be_upcast_decodes_in_float32() -> None:
    path, call = tiny_model("sdxl_fp16_force_upcast"), job("sdxl_fp16_force_upcast", guided=True)
    texts = words("sdxl_fp16_force_upcast")
    expected, _ = one_shot(path, dtype=torch.float16, seed=2, **texts, **call)
    handle = po.load(path, device="cpu", dtype="float16")
    latents = po.denoise(handle, po.encode(handle, **texts), seed=2, **call)
    assert latents.dtype == "float32"
    assert torch.equal(po.decode(handle, latents, "pt").float(), expected)


def test_the_scale_of_a_missing_vae_is_never_guessed() -> None:
    # Wan 2.2 5B without its VAE silently makes latents of twice the size (scale 8 instead of 16).
    handle = po.load(tiny_model("wan22_5b"), device="cpu")
    call = job("wan22_5b", guided=False)
    samples = po.denoise(handle, po.encode(handle, **words("wan22_5b")), **call).samples
    assert samples.shape[-2:] == (call["height"] // 16, call["width"] // 16)


def test_encode_uses_the_defaults_of_the_call_not_those_of_encode_prompt() -> None:
    # WanPipeline.encode_prompt cuts at 226 tokens, its __call__ at 512: a prompt between the two tells them apart.
    text = " ".join(["red", "circle", "star"] * 100)
    path, call = tiny_model("wan22_a14b"), job("wan22_a14b", guided=False)
    expected, _ = one_shot(path, dtype=torch.float32, seed=3, prompt=text, **call)
    assert torch.equal(staged(path, {"prompt": text}, call, dtype="auto", seed=3)[0], expected)


@pytest.mark.parametrize("name", ["z_image", "wan22_a14b"])
def test_latents_keep_the_dtype_the_pipeline_gave_them(name: str) -> None:
    # Both run their loop in float32 in a bfloat16 pipeline and cast for the VAE themselves.
    handle = po.load(tiny_model(name), device="cpu", dtype="bfloat16")
    latents = po.denoise(handle, po.encode(handle, **words(name)), **job(name, guided=False))
    assert latents.decode.tensors[0].dtype == torch.bfloat16
    assert latents.samples.dtype == torch.float32


def test_stand_ins_have_the_config_of_what_they_stand_for() -> None:
    # LTX-2 reads its text encoder's config in the middle of the call: None there silently means another model.
    handle = po.load(tiny_model("flux"), device="cpu", dtype="bfloat16")
    with po.open_phase(handle) as phase:
        encoder = phase.pipeline.text_encoder_2
        assert encoder.config.d_model == handle.source().components["text_encoder_2"].config["d_model"]
        assert encoder.dtype == torch.bfloat16
        assert phase.pipeline.vae.config.scaling_factor == handle.source().components["vae"].config["scaling_factor"]


def test_the_seed_alone_makes_the_noise_and_the_global_generator_is_left_alone() -> None:
    path, call = tiny_model("sd15"), job("sd15", guided=False)
    torch.manual_seed(1)
    first, _ = staged(path, words("sd15"), call, dtype="auto", seed=2**64 - 1)
    torch.manual_seed(2)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    second, _ = staged(path, words("sd15"), call, dtype="auto", seed=2**64 - 1)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize("name", often(tuple(VARIANTS), VARIANTS_OFTEN))
def test_a_picture_is_encoded_once_and_replayed(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    path = as_pipeline(tiny_model(variant.family), variant.pipeline_class, tmp_path / "model")
    call = dict(variant.call)
    expected, _ = one_shot(path, dtype=torch.float32, seed=4, cls=variant.pipeline_class, **call)
    steps = {"num_inference_steps": call.pop("num_inference_steps")}
    pictures, session = staged(path, call, steps, dtype="auto", seed=4)
    assert torch.equal(pictures, expected)
    encode, denoise, _ = session.report.phases
    assert encode.forwards["vae"] >= 1
    assert "vae" not in denoise.forwards
    assert denoise.leaked_bytes == encode.leaked_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_demo_model_in_phases_equals_the_one_shot_run(dtype: torch.dtype) -> None:
    # The model's own defaults (size, steps, true CFG, text length) apply without being given.
    handle = po.load(DEMO, device="cpu", dtype=dtype)
    own = {name: handle.defaults[name] for name in handle.source().defaults if name in handle.defaults}
    assert own["num_inference_steps"] == 8
    expected, ran = one_shot(DEMO, dtype=dtype, seed=4, prompt="a red star on a white background", **own)
    pictures, session = staged(DEMO, {"prompt": "a red star on a white background"}, {}, dtype=dtype, seed=4)
    assert torch.equal(pictures, expected)
    assert session.report.phases[1].forwards["transformer"] == ran["transformer"]
