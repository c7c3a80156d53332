"""Bad input gets one sentence before anything is loaded, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core as po
from staging import job, tiny_model, words


def handle_of(name: str = "sd15") -> po.Handle:
    return po.load(tiny_model(name), device="cpu")


@pytest.fixture(scope="module")
def embeds() -> po.Embeds:
    return po.encode(handle_of(), "a star")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dtype": "float8"}, po.InputError, "'float8' isn't a dtype.*auto, float32, bfloat16, float16"),
        ({"device": "gpu please"}, po.InputError, "isn't a device"),
        ({"device": "cuda:0"}, po.DeviceError, "cuda:0 isn't available"),
        ({"settings": po.OffloadSettings(vae_tiling="maybe")}, po.InputError, "vae_tiling is 'maybe'"),
        (
            {"settings": po.OffloadSettings(device_memory="6 parsecs")},
            po.InputError,
            "device_memory='6 parsecs' isn't a",
        ),
        ({"settings": po.OffloadSettings(host_memory="0%")}, po.InputError, "host_memory='0%' isn't a usable memory"),
        ({"settings": po.OffloadSettings(device_memory=0)}, po.InputError, "device_memory=0 isn't a usable memory"),
        ({"settings": po.OffloadSettings(activation_memory="lots")}, po.InputError, "activation_memory='lots' isn't"),
        ({"settings": po.OffloadSettings(direct_io="maybe")}, po.InputError, "direct_io is 'maybe'; use auto, on or"),
        ({"settings": po.OffloadSettings(resident_below=-1)}, po.InputError, "resident_below is -1; use a whole num"),
        ({"settings": po.OffloadSettings(read_threads=True)}, po.InputError, "read_threads is True; use a whole num"),
        ({"settings": po.OffloadSettings(offload_device="disk")}, po.InputError, "offload_device is 'disk'; .* to cpu"),
        ({"loras": ["nowhere.safetensors"]}, po.ModelError, "no LoRA file nowhere.safetensors"),
    ],
)
def test_load_refuses_what_it_cannot_use(options: dict[str, Any], error: type[Exception], says: str) -> None:
    if options.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has cuda:0")
    with pytest.raises(error, match=says):
        po.load(tiny_model("sd15"), **{"device": "cpu", **options})


@pytest.mark.parametrize(
    "changes",
    [
        {"device_memory": 2**33, "host_memory": "leave 2 GiB"},
        {"device_memory": " 60% ", "host_memory": "AUTO", "activation_memory": 0},
        {"activation_memory": "0", "direct_io": "off", "resident_below": 0, "read_threads": 0},
    ],
)
def test_load_takes_every_spelling_of_a_budget_and_reads_no_machine(changes: dict[str, Any]) -> None:
    settings = po.OffloadSettings(**changes)
    assert po.load(tiny_model("sd15"), device="cpu", settings=settings).settings == settings


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"prompt": ["a", 3]}, "prompt must be a text"),
        ({"prompt": []}, "prompt must be a text or a non-empty list"),
        ({"prompt": None}, "needs a prompt"),
        ({"prompt": ["a", "b"], "negative_prompt": ["c"]}, "2 prompts and 1 negative"),
        ({"prompt": "a", "guidance_scal": 3}, "no argument 'guidance_scal'. Did you mean guidance_scale"),
        ({"prompt": "a", "output_type": "latent"}, "output_type is set by the phases"),
        ({"prompt": "a", "ip_adapter_image": None, "generator": 1}, "generator is set by the phases"),
    ],
)
def test_encode_refuses_what_it_cannot_use(call: dict[str, Any], says: str) -> None:
    session = po.Session()
    with pytest.raises(po.InputError, match=says):
        po.encode(handle_of(), **call, session=session)
    assert session.report.phases == []


def test_a_negative_prompt_for_a_model_that_takes_none_is_refused_unless_empty() -> None:
    with pytest.raises(po.InputError, match="takes no negative_prompt"):
        po.encode(handle_of("flux2_klein"), "a star", "fog")
    assert po.encode(handle_of("flux2_klein"), "a star", "").records


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7"])
def test_seeds_out_of_range_are_refused(seed: Any, embeds: po.Embeds) -> None:
    with pytest.raises(po.InputError, match=r"seed is .*0 to 18446744073709551615"):
        po.denoise(handle_of(), embeds, seed=seed)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("flux", {"width": 70}, "width is 70.*multiple of 8: use 64 or 72"),
        ("sd15", {"height": 0}, "height is 0.*above 0"),
        ("sd15", {"height": 50.0}, "height is 50.0"),
        ("wan22_5b", {"width": 40}, "width is 40.*multiple of 32: use 32 or 64"),
        ("sd15", {"num_inference_steps": 0}, "num_inference_steps is 0"),
        ("sd15", {"num_images_per_prompt": -2}, "num_images_per_prompt is -2"),
    ],
)
def test_sizes_and_counts_the_pipeline_would_round_or_fail_on_are_refused(
    name: str, size: dict[str, Any], says: str
) -> None:
    handle = handle_of(name)
    session = po.Session()
    with pytest.raises(po.InputError, match=says):
        po.denoise(handle, po.encode(handle, **words(name)), session=session, **job(name, guided=False) | size)
    assert session.report.phases[-1].weight_bytes == 0


def test_an_empty_prompt_runs_and_says_so() -> None:
    session = po.Session()
    embeds = po.encode(handle_of(), "", session=session)
    assert embeds.records
    assert session.report.phases[0].notes == ("The prompt is empty: nothing guides the picture.",)


def test_a_prompt_of_5000_words_runs_and_says_what_was_cut() -> None:
    session = po.Session()
    text = " ".join(["star"] * 5000)
    embeds = po.encode(handle_of(), text, session=session)
    (note,) = session.report.phases[0].notes
    assert "tokens and the model reads the first 77" in note
    assert embeds.notes == (note,)
    assert po.encode(handle_of(), "a star").notes == ()


@pytest.mark.parametrize(
    ("options", "says"),
    [({"output_type": "latent"}, "output_type is 'latent'"), ({"tiling": "perhaps"}, "tiling is 'perhaps'")],
)
def test_decode_refuses_what_it_cannot_use(options: dict[str, Any], says: str, embeds: po.Embeds) -> None:
    latents = po.denoise(handle_of(), embeds, **job("sd15", guided=False))
    with pytest.raises(po.InputError, match=says):
        po.decode(handle_of(), latents, **options)


def test_open_phase_names_the_components_there_are() -> None:
    with pytest.raises(po.InputError, match="no component 'unett'.*unet"):
        po.open_phase(handle_of(), "unett")


def test_errors_of_the_library_pass_through_with_their_place_as_a_note(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, po.open_phase(handle_of()):
        1 / 0  # noqa: B018
    assert any("Inside the phase" in note and "1 / 0" in note for note in caught.value.__notes__)
