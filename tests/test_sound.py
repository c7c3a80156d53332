"""Models that make sound alone: phases give the bits of the one-shot pipeline, the end of its call included."""

from __future__ import annotations

import functools
import wave
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_oobleck import OobleckDecoder

import offload_core as po
from offload_core import cli
from offload_core._plan_command import _seconds
from offload_core.errors import InputError, InsufficientMemoryError, RecordError
from offload_core.phases._records import read_plains, write_plains
from offload_core.phases._waveforms import Ending, check_ending, finished
from offload_core.settings import OffloadSettings
from offload_core.sound_chart import envelope, waveform_picture
from offload_core.tiny_models import FAMILIES
from phase_offload_nodes.calls import run_node
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.state import PackState
from staging import job, often, one_shot, staged, tiny_model, words

SOUNDS = tuple(name for name, family in FAMILIES.items() if family.makes_sound)
every_family = pytest.mark.parametrize("name", SOUNDS)
# Of what is alike for all of them, the default tests run one, and what the table of families checks runs with the slow
# ones.
stable_audio_often = pytest.mark.parametrize("name", often(SOUNDS, ("stable_audio",)))


def handle_of(name: str, **settings: Any) -> po.Handle:
    return po.load(tiny_model(name), device="cpu", settings=OffloadSettings(execution_device="cpu", **settings))


@functools.cache
def embeds_of(name: str) -> po.Embeds:
    return po.encode(handle_of(name), **words(name))


@functools.cache
def latents_of(name: str) -> po.Latents:
    return po.denoise(handle_of(name), embeds_of(name), seed=5, **job(name, guided=True))


# ------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
    ],
)
@every_family
def test_guided_sounds_in_phases_equal_the_one_shot_run(name: str, dtype: torch.dtype) -> None:
    path, call = tiny_model(name), job(name, guided=True, images=2)
    expected, ran = one_shot(path, dtype=dtype, seed=5, **words(name) | call)
    sounds, session = staged(path, words(name), call, dtype=dtype, seed=5)
    assert sounds.shape[:2] == (2 if FAMILIES[name].count_argument else 1, 2)
    assert torch.equal(sounds, expected)
    phases = {phase.name: phase for phase in session.report.phases}
    assert list(phases) == ["encode", "denoise", "decode"]
    assert all(phase.leaked_bytes == 0 for phase in phases.values())
    assert set(phases["decode"].forwards) == {"vae"}
    assert phases["denoise"].forwards["transformer"] == ran["transformer"]
    assert "condition_encoder" not in phases["denoise"].forwards


@pytest.mark.slow
@every_family
def test_a_list_of_prompts_without_guidance_equals_the_one_shot_run(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=False)
    texts = words(name) | {"prompt": ["a red fox", "rain"]}
    if "negative_prompt" in texts:
        texts["negative_prompt"] = ["noise", "noise"]
    if "lyrics" in texts:
        texts["lyrics"] = call["lyrics"] = ["la la", ""]
    expected, _ = one_shot(path, dtype=torch.float32, seed=1, **texts | call)
    assert torch.equal(staged(path, texts, call, dtype="auto", seed=1)[0], expected)
    assert len(expected) == 2


@pytest.mark.slow
@every_family
def test_a_streamed_denoiser_makes_the_same_sound(name: str) -> None:
    path, call = tiny_model(name), job(name, guided=True)
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **words(name) | call)
    weights = (handle_of(name).source().components["transformer"]).weight_bytes
    tight = OffloadSettings(
        execution_device="cpu", device_memory=int(0.7 * weights), activation_memory=0, resident_below=1024
    )
    handle, session = handle_of(name), po.Session()
    latents = po.denoise(replace(handle, settings=tight), embeds_of(name), seed=5, session=session, **call)
    assert session.report.phases[-1].streamed_bytes
    found = po.decode_sound(handle, latents)
    assert found is not None
    assert torch.equal(found[0], expected)


@pytest.mark.slow
def test_the_length_of_stable_audio_is_chosen_in_denoise_and_no_encoder_runs_again() -> None:
    path, call = tiny_model("stable_audio"), job("stable_audio", guided=True)
    call |= {"audio_start_in_s": 0.25, "audio_end_in_s": 0.9}
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **words("stable_audio"), **call)
    sounds, session = staged(path, words("stable_audio"), call, dtype="auto", seed=5)
    assert torch.equal(sounds, expected)
    assert sounds.shape[-1] == int(0.9 * 441) - int(0.25 * 441)
    assert [phase.name for phase in session.report.phases] == ["encode", "denoise", "decode"]
    assert "text_encoder" not in session.report.phases[1].forwards


@pytest.mark.slow
def test_without_a_length_stable_audio_makes_its_longest() -> None:
    path, call = tiny_model("stable_audio"), {"num_inference_steps": 2}
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **words("stable_audio"), **call)
    assert torch.equal(staged(path, words("stable_audio"), call, dtype="auto", seed=5)[0], expected)


@pytest.mark.slow
def test_the_length_of_ace_step_is_in_its_prompt_and_denoise_follows_encode() -> None:
    path, steps = tiny_model("ace_step"), {"num_inference_steps": 2}
    texts = words("ace_step") | {"audio_duration": 3.0}
    expected, _ = one_shot(path, dtype=torch.float32, seed=5, **texts, **steps)
    sounds, session = staged(path, texts, steps, dtype="auto", seed=5)
    assert torch.equal(sounds, expected)
    assert sounds.shape[-1] == 3 * 160
    assert len(session.report.phases) == 3


# ------------------------------------------------------------------------------------------ latents and their end


@stable_audio_often
def test_latents_on_disk_keep_what_is_left_to_do(name: str, tmp_path: Path) -> None:
    latents, handle = latents_of(name), handle_of(name)
    found = po.Latents.load(latents.save(tmp_path / "sound.safetensors"))
    assert found.only_sound
    assert found.sound is not None and latents.sound is not None
    assert found.sound.ending == latents.sound.ending
    assert found.sound.decode is found.decode  # they are written once
    here, there = po.decode_sound(handle, latents), po.decode_sound(handle, found)
    assert here is not None and there is not None
    assert torch.equal(here[0], there[0])
    assert here[1] == handle.source().components["vae"].config["sampling_rate"]


def test_an_ending_of_another_version_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = latents_of("stable_audio").save(tmp_path / "sound.safetensors")
    meta, plains = read_plains(file, "latents")
    for ending in ({"kind": "echo"}, {"kind": "cut", "start_sample": "0"}, {"kind": "cut", "echo": 1}, 7):
        write_plains(file, "latents", meta | {"ending": ending}, plains)
        with pytest.raises(RecordError, match="field ending"):
            po.Latents.load(file)


def test_decode_of_sound_refuses_and_names_what_decodes_it() -> None:
    latents = latents_of("stable_audio")
    with pytest.raises(InputError, match="makes sound and no picture: decode these latents with decode_sound"):
        po.decode(handle_of("stable_audio"), latents)


@stable_audio_often
def test_latents_that_were_changed_and_bare_ones_are_decoded(name: str) -> None:
    latents, handle = latents_of(name), handle_of(name)
    samples = latents.samples
    assert samples.ndim == 3
    assert not latents.is_stale(samples)
    changed = po.decode_sound(handle, latents.with_samples(samples * 0.5))
    bare = po.decode_sound(handle, po.latents_from_samples(handle, samples * 0.5))
    assert changed is not None and bare is not None
    start, length = 0, changed[0].shape[-1]
    assert torch.equal(bare[0][:, :, start:length], changed[0])
    assert bare[0].shape[-1] >= length
    with pytest.raises(RecordError, match="3-dimensional latents"):
        po.latents_from_samples(handle, torch.zeros(1, 4, 8, 8))


def test_a_long_sound_can_be_decoded_in_pieces() -> None:
    handle, session = handle_of("stable_audio"), po.Session()
    samples = torch.randn(1, 4, 700, generator=torch.Generator().manual_seed(1))
    latents = po.latents_from_samples(handle, samples)
    whole, pieces = po.decode_sound(handle, latents), po.decode_sound(handle, latents, tiling="on", session=session)
    assert whole is not None and pieces is not None
    assert session.report.phases[0].notes == ("Decoded in tiles of 512 latent frames.",)
    assert whole[0].shape == pieces[0].shape == (1, 2, 700 * 8)
    assert torch.allclose(whole[0], pieces[0], atol=1e-4)  # the overlap is longer than the decoder's reach
    with pytest.raises(InputError, match="tiling is 'maybe'"):
        po.decode_sound(handle, latents, tiling="maybe")


def test_a_sound_that_doesnt_fit_whole_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, session = handle_of("stable_audio"), po.Session()
    latents = po.latents_from_samples(handle, torch.randn(1, 4, 700, generator=torch.Generator().manual_seed(1)))
    pieces = po.decode_sound(handle, latents, tiling="on")
    forward = OobleckDecoder.forward

    def fails_above_600_frames(self: OobleckDecoder, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-1] > 600:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, hidden)

    monkeypatch.setattr(OobleckDecoder, "forward", fails_above_600_frames)
    found = po.decode_sound(handle, latents, session=session)
    assert found is not None and pieces is not None
    assert torch.equal(found[0], pieces[0])
    assert session.report.phases[0].notes[-1] == "Decoded in tiles of 512 latent frames."
    with pytest.raises(InsufficientMemoryError, match="with tiling"):
        po.decode_sound(handle, latents, tiling="off")


def test_several_sounds_are_decoded_in_one_phase_as_they_are_one_by_one() -> None:
    handle, session, first = handle_of("ace_step"), po.Session(), latents_of("ace_step")
    second = first.with_samples(first.samples * 0.5)
    found = po.decode_sound_many(handle, [first, second], session=session)
    assert len(session.report.phases) == 1
    for latents, (waveform, rate) in zip((first, second), found, strict=True):
        alone = po.decode_sound(handle, latents)
        assert alone is not None
        assert torch.equal(alone[0], waveform)
        assert alone[1] == rate
    pictures = replace(first, sound=None)
    with pytest.raises(InputError, match="makes more than sound"):
        po.decode_sound_many(handle, [first, pictures])


def test_a_cut_keeps_the_stretch_and_a_level_brings_each_sound_to_one_decibel_below_full() -> None:
    waveform = torch.tensor([[[0.5, -0.25, 0.1, 0.0]], [[3.0, -1.5, 0.0, 0.0]]], dtype=torch.bfloat16)
    cut = finished(waveform, Ending("cut", 1, 3))
    assert torch.equal(cut, waveform[:, :, 1:3].float())
    level = finished(waveform, Ending("level"))
    assert level.dtype == torch.float32
    assert level.abs().amax(dim=(1, 2)).tolist() == pytest.approx([10 ** (-1 / 20)] * 2)
    assert torch.equal(finished(torch.zeros(1, 2, 8), Ending("level")), torch.zeros(1, 2, 8))


def test_a_pipeline_of_sound_whose_end_nobody_wrote_down_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"OtherPipeline makes sound.*Those that can are StableAudioPipeline"):
        check_ending("OtherPipeline")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "3"])
def test_a_length_that_isnt_one_is_a_sentence_before_anything_runs(seconds: Any) -> None:
    with pytest.raises(InputError, match="number of seconds above 0"):
        po.encode(handle_of("ace_step"), "a fox", audio_duration=seconds)


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.slow
@every_family
def test_a_job_of_sound_is_foretold_and_runs_by_its_plan(name: str) -> None:
    call, session = FAMILIES[name].guided_call, po.Session()
    settings = OffloadSettings(execution_device="cpu", device_memory="1GiB", host_memory="2GiB")
    prompt, negative = call.pop("prompt"), call.pop("negative_prompt", None)
    found = po.foresee_job(tiny_model(name), prompt, negative, settings=settings, **call)
    assert found.plan.fits
    assert [phase.name for phase in found.plan.phases] == ["encode", "denoise", "decode"]
    handle = po.load(tiny_model(name), device="cpu", settings=settings)
    embeds = po.encode(handle, prompt, negative, session=session, plan=found.plan, **call)
    latents = po.denoise(handle, embeds, session=session, plan=found.plan, **call)
    assert po.decode_sound(handle, latents, session=session, plan=found.plan) is not None
    assert all(phase.predicted for phase in session.report.phases)


def test_plan_takes_seconds_by_the_name_that_the_model_has_for_them() -> None:
    assert _seconds(None, tiny_model("sd15")) == {}
    assert _seconds(2.0, tiny_model("stable_audio")) == {"audio_end_in_s": 2.0}
    for model in (tiny_model("sd15"), "flux-dev"):
        with pytest.raises(InputError, match="leave --seconds out"):
            _seconds(2.0, model)


# ------------------------------------------------------------------------------------------------ files


def generated(folder: Path, name: str, *options: str) -> int:
    base = ("generate", "--model", str(tiny_model(name)), "--prompt", "a red fox", "--device", "cpu", "--steps", "2")
    return cli.main([*base, "--output", str(folder / "song.wav"), *options])


def test_generate_writes_a_wav_of_the_seconds_that_were_asked_for(tmp_path: Path, capsys: Any) -> None:
    assert generated(tmp_path, "stable_audio", "--seconds", "0.5", "--seed", "5") == 0
    handle = handle_of("stable_audio")
    steps = {"num_inference_steps": 2, "audio_end_in_s": 0.5}
    found = po.decode_sound(handle, po.denoise(handle, po.encode(handle, "a red fox"), seed=5, **steps))
    assert found is not None
    with wave.open(str(tmp_path / "song.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 3, 441)
        assert file.getnframes() == 220
        written = _samples(file.readframes(220), channels=2)
    assert np.allclose(written, found[0][0].clamp(-1, 1).numpy(), atol=2**-23)
    assert "song.wav" in capsys.readouterr().out


def _samples(data: bytes, channels: int) -> np.ndarray:
    """(channels, samples) of 24-bit PCM."""
    low = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
    numbers = (low[:, 0] << 8 | low[:, 1] << 16 | low[:, 2] << 24) >> 8
    return (numbers / (2**23 - 1)).reshape(-1, channels).T


def test_options_of_pictures_are_refused_for_sound_and_those_of_sound_for_pictures(tmp_path: Path, capsys: Any) -> None:
    for name in ("width", "height", "frames"):
        assert generated(tmp_path, "stable_audio", f"--{name}", "64") == InputError.exit_code
        assert f"makes sound, which has no {name}; leave --{name} out" in capsys.readouterr().err
    assert generated(tmp_path, "stable_audio", "--output", str(tmp_path / "a.png")) == InputError.exit_code
    assert "Can't write a sound of type '.png'" in capsys.readouterr().err.replace("\n", " ")
    assert generated(tmp_path, "sd15", "--output", str(tmp_path / "a.png"), "--seconds", "2") == InputError.exit_code
    assert "leave --seconds out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_several_sounds_become_several_files(tmp_path: Path) -> None:
    assert generated(tmp_path, "stable_audio", "--num-images", "2", "--no-plan") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["song-0.wav", "song-1.wav"]


# ------------------------------------------------------------------------------------------------ nodes


def test_nodes_give_the_sound_and_a_picture_of_its_waveform() -> None:
    state = PackState(LocalHost())

    def ran(node: str, **inputs: Any) -> Any:
        return run_node(node, state, state.host.observer("x"), inputs).values

    model = handle_of("ace_step")
    texts = {"prompt": "a red fox", "negative_prompt": ""}
    (embeds,) = ran("PhaseOffloadEncodePrompt", model=model, **texts, seconds=2.0)
    sizes = {"steps": 2, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    (latent,) = ran("PhaseOffloadDenoise", model=model, embeds=embeds, seed=5, **sizes)
    image, audio, video = ran("PhaseOffloadVAEDecode", model=model, latent=latent, tiling="auto")
    expected, _ = one_shot(
        tiny_model("ace_step"),
        dtype=torch.float32,
        seed=5,
        prompt="a red fox",
        audio_duration=2.0,
        num_inference_steps=2,
    )
    assert torch.equal(audio["waveform"], expected)
    assert audio["sample_rate"] == 160
    assert image.shape == (1, 320, 896, 3)
    assert video is None
    with pytest.raises(InputError, match="makes sound: leave width and height at 0"):
        ran("PhaseOffloadDenoise", model=model, embeds=embeds, seed=5, **sizes | {"width": 64})


def test_a_model_of_pictures_says_that_it_has_no_seconds() -> None:
    from phase_offload_nodes.catalog._job import add_seconds

    options: dict[str, Any] = {}
    assert add_seconds(options, SimpleNamespace(seconds_name=None), 3.0) == [
        "This model makes more than sound: 3 seconds were not used."
    ]
    assert add_seconds(options, SimpleNamespace(seconds_name="audio_duration"), 3.0) == []
    assert options == {"audio_duration": 3.0}


def test_a_waveform_is_drawn_where_it_is_loud() -> None:
    sound = torch.zeros(1, 1000)
    sound[:, 500:] = torch.sin(torch.arange(500.0))
    pixels = np.asarray(waveform_picture(sound, 100)).astype(int)
    blue = (pixels[:, :, 2] - pixels[:, :, 0] > 60).sum(0)  # by column
    assert blue[100:440].max() <= 4
    assert blue[520:860].mean() > 100
    low, high = envelope(np.array([0.0, -1.0, 0.5, 0.25]), 2)
    assert (low.tolist(), high.tolist()) == ([-1.0, 0.25], [0.0, 0.5])
    assert waveform_picture(torch.zeros(2, 0), 100).size == (896, 320)
