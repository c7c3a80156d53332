"""Videos: sound beside the picture, frame rates, and decoding that makes no second copy of a clip."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

import fake_engine
import offload_core as po
from offload_core.errors import NumericalError, RecordError
from offload_core.phases import _frames
from offload_core.phases._ports import Gate, RunPort
from offload_core.phases._sound import frame_rate_of
from offload_core.phases._stretches import can_stretch, decode_in_stretches
from offload_core.tiny_models.running import load_tiny
from phase_offload_nodes.calls import run_node
from phase_offload_nodes.local_host import LocalHost, Video
from phase_offload_nodes.state import PackState
from staging import job, often, tiny_model, words


@pytest.mark.slow
def test_sound_is_decoded_beside_the_picture_as_the_pipeline_does_and_both_stay_on_disk(tmp_path: Path) -> None:
    path, call, session = tiny_model("ltx2"), job("ltx2", guided=False), po.Session()
    pipeline = load_tiny(path, dtype=torch.float32)
    generator = torch.Generator("cpu").manual_seed(5)
    video, audio = pipeline(**words("ltx2"), **call, output_type="pt", return_dict=False, generator=generator)
    model = po.load(path, device="cpu")
    made = po.denoise(model, po.encode(model, **words("ltx2")), seed=5, session=session, **call)
    latents = po.Latents.load(made.save(tmp_path / "latents.safetensors"))
    found = po.decode_sound(model, latents, session=session)
    assert found is not None
    assert torch.equal(found[0], audio.float())
    assert found[1] == pipeline.vocoder.config.output_sampling_rate
    assert torch.equal(po.decode(model, latents, "pt").float(), video.float())
    assert latents.frame_rate == 24.0
    assert set(session.report.phases[1].forwards) == {"audio_vae", "vocoder"}
    assert session.report.phases[1].leaked_bytes == 0
    with pytest.raises(RecordError, match="field sound"):
        po.decode_sound(po.load(tiny_model("wan22_5b"), device="cpu"), latents)


def test_a_video_s_frame_rate_is_the_call_s_else_the_model_s_own() -> None:
    assert frame_rate_of(po.load(tiny_model("ltx")).source(), {}) == 25
    assert frame_rate_of(po.load(tiny_model("ltx")).source(), {"frame_rate": 30}) == 30
    assert frame_rate_of(po.load(tiny_model("wan22_a14b")).source(), {}) == 16
    assert frame_rate_of(po.load(tiny_model("wan22_5b")).source(), {}) == 24
    assert frame_rate_of(po.load(tiny_model("flux")).source(), {}) is None


@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
def test_frames_are_finished_a_few_at_a_time_as_the_processor_finishes_them_all(
    monkeypatch: pytest.MonkeyPatch, output_type: str
) -> None:
    monkeypatch.setattr(_frames, "PART_BYTES", 3 * 3 * 6 * 8 * 4)  # three frames, then two
    video = torch.randn(2, 3, 5, 6, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    processor = VideoProcessor()
    expected = processor.postprocess_video(video, output_type=output_type)
    found = _frames.finished_frames(processor, video, output_type)
    assert np.array_equal(np.asarray(_whole(found)), np.asarray(_whole(expected)))
    assert type(found) is type(expected)


def _whole(frames: Any) -> Any:
    return frames.float() if isinstance(frames, torch.Tensor) else [np.asarray(clip) for clip in frames]


def test_a_single_value_that_is_no_number_is_found() -> None:
    pixels = torch.zeros(1, 3, 2, 4, 4)
    _frames.check_finite(pixels)
    for wrong in (float("nan"), float("inf"), float("-inf")):
        pixels[0, 1, 1, 2, 3] = wrong
        with pytest.raises(NumericalError):
            _frames.check_finite(pixels)


def test_decode_gives_picture_sound_and_video_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.install(monkeypatch)
    state = PackState(LocalHost())
    made = fake_engine.Latents(torch.rand(2, 4, 4, 6), frame_rate=16.0)
    model = fake_engine.Handle("m", "cpu", "auto")
    latent = {"samples": made.samples, "phase_offload": made}

    def decoded(**inputs: Any) -> Any:
        return run_node(
            "PhaseOffloadVAEDecode",
            state,
            state.host.observer("x"),
            {"model": model, "latent": latent, "tiling": "auto", **inputs},
        ).values

    image, audio, video = decoded()
    assert audio is None
    assert (video.image is image, video.frame_rate, video.audio) == (True, 16.0, None)
    assert decoded(frame_rate=12.5)[2].frame_rate == 12.5
    sounding = fake_engine.Latents(made.exact, sound=SimpleNamespace())
    latent = {"samples": made.samples, "phase_offload": sounding}
    monkeypatch.setattr(po, "decode_sound", lambda *_, **__: (torch.zeros(1, 2, 8), 16000))
    image, audio, video = decoded()
    assert audio == {"waveform": audio["waveform"], "sample_rate": 16000}
    assert isinstance(video, Video)
    assert video.audio is audio
    assert video.frame_rate == 24.0
    assert engine.phases.count("decode") == 3


def test_a_vae_that_blends_parts_of_a_clip_is_found_out_and_decodes_whole() -> None:
    vae = load_tiny(tiny_model("hunyuan_video"), dtype=torch.float32).vae
    latents = torch.randn(1, vae.config.latent_channels, 6, 2, 2, generator=torch.Generator().manual_seed(1))
    assert not can_stretch(vae, [latents])
    with torch.no_grad():
        found = decode_in_stretches(vae, Gate(RunPort()), [latents], {})  # as if nothing were known of it
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, vae.decode(latents).sample)


@pytest.mark.parametrize("name", often(("wan22_5b", "wan22_a14b", "cogvideox", "hunyuan_video"), ("hunyuan_video",)))
def test_a_clip_decoded_a_stretch_at_a_time_is_the_one_that_the_vae_decodes_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload_core.phases import _decode

    model = po.load(tiny_model(name), device="cpu", dtype="bfloat16")
    config = model.source().components["vae"].config or {}
    channels = config.get("z_dim") or config["latent_channels"]
    samples = torch.randn(1, channels, 6, 2, 4, generator=torch.Generator().manual_seed(1))
    latents = po.latents_from_samples(model, samples)
    session = po.Session()
    by_stretches = po.decode(model, latents, "np", session=session)
    assert session.report.phases[0].forwards == {"vae": 1}  # finishing a stretch isn't counted as another
    assert session.report.phases[0].leaked_bytes == 0
    monkeypatch.setattr(_decode, "can_stretch", lambda *_: False)
    assert np.array_equal(po.decode(model, latents, "np"), by_stretches)
