"""Embeddings and latents: found by what was asked, saved whole, refused when they don't fit, never lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload_core as po
from offload_core.tiny_models import save_tiny
from offload_core.tiny_models.running import align
from staging import job, one_shot, staged, tiny_model, words


def handle_of(name: str, **options: Any) -> po.Handle:
    return po.load(tiny_model(name), device="cpu", **options)


def forwards(session: po.Session, phase: str) -> list[dict[str, int]]:
    return [report.forwards for report in session.report.phases if report.name == phase]


def test_records_are_found_by_what_was_asked_and_not_by_order() -> None:
    # Positive and negative change places in Denoise: both were encoded, so no encoder runs again.
    path, call = tiny_model("flux"), job("flux", guided=True)
    handle, session = po.load(path, device="cpu"), po.Session()
    embeds = po.encode(handle, "a red circle", "a blue star", session=session)
    swapped = {"prompt": "a blue star", "negative_prompt": "a red circle"}
    latents = po.denoise(handle, embeds, seed=3, session=session, **swapped, **call)
    expected, _ = one_shot(path, dtype=torch.float32, seed=3, **swapped, **call)
    assert torch.equal(po.decode(handle, latents, "pt"), expected)
    assert len(forwards(session, "encode")) == 1


def test_what_encode_did_not_encode_is_encoded_again() -> None:
    path, call = tiny_model("sd15"), job("sd15", guided=True)
    handle, session = po.load(path, device="cpu"), po.Session()
    embeds = po.encode(handle, "a red circle", "fog", session=session)
    latents = po.denoise(handle, embeds, seed=3, session=session, prompt="two stars", **call)
    expected, _ = one_shot(path, dtype=torch.float32, seed=3, prompt="two stars", negative_prompt="fog", **call)
    assert torch.equal(po.decode(handle, latents, "pt"), expected)
    first, second = forwards(session, "encode")
    assert first == {"text_encoder": 2}
    assert second == {"text_encoder": 1}  # the negative prompt was there
    assert any("run again" in note for phase in session.report.phases for note in phase.notes)


def test_what_encode_did_not_encode_is_a_sentence_if_it_may_not_be_made_again() -> None:
    handle = handle_of("sd15", settings=po.OffloadSettings(encode_missing=False))
    embeds = po.encode(handle, "a red circle")
    with pytest.raises(po.MissingRecordError, match="text_encoder.*prompt.*same arguments"):
        po.denoise(handle, embeds, prompt="two stars", **job("sd15", guided=True))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("sdxl", {"clip_skip": 1}),
        pytest.param("flux2_klein", {"text_encoder_out_layers": (3, 6, 9)}, marks=pytest.mark.slow),
    ],
)
def test_a_part_of_an_answer_that_was_not_kept_is_encoded_again(name: str, option: dict[str, Any]) -> None:
    path, call = tiny_model(name), job(name, guided=True) | option
    handle, session = po.load(path, device="cpu"), po.Session()
    latents = po.denoise(handle, po.encode(handle, **words(name)), seed=1, session=session, **call)
    expected, _ = one_shot(path, dtype=torch.float32, seed=1, **words(name), **call)
    assert torch.equal(po.decode(handle, latents, "pt"), expected)
    assert any("Every encoder was run again" in note for phase in session.report.phases for note in phase.notes)


def test_a_models_own_defaults_do_not_travel_in_the_embeddings(tmp_path: Path) -> None:
    import shutil

    for steps in (1, 3):
        folder = Path(shutil.copytree(tiny_model("sd15"), tmp_path / str(steps)))
        (folder / "phase_offload.json").write_text(
            json.dumps({"num_inference_steps": steps, "height": 48, "width": 64})
        )
    first, second = (po.load(tmp_path / str(steps), device="cpu") for steps in (1, 3))
    session = po.Session()
    po.denoise(second, po.encode(first, "a star"), session=session)
    assert session.report.phases[-1].forwards["unet"] == 3


def test_pictures_of_every_mode_come_back_as_they_were() -> None:
    from PIL import Image

    from offload_core.phases._plain import from_plain, to_plain

    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = Image.linear_gradient("L").convert(mode) if mode != "I;16" else Image.new("I;16", (4, 4), 40_000)
        back = from_plain(to_plain(image, "image"), torch.device("cpu"))
        assert back.mode == mode
        assert (
            back.convert("RGBA" if mode != "I;16" else mode).tobytes()
            == image.convert("RGBA" if mode != "I;16" else mode).tobytes()
        )
    with pytest.raises(po.RecordError, match="mode CMYK; convert it to RGB"):
        to_plain(Image.new("CMYK", (4, 4)), "image")


def test_bare_latents_of_an_sdxl_vae_that_overflows_decode_in_float32() -> None:
    handle = po.load(tiny_model("sdxl_fp16_force_upcast"), device="cpu", dtype="float16")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("sdxl_fp16_force_upcast", guided=False))
    bare = po.latents_from_samples(handle, latents.samples)
    assert bare.dtype == latents.dtype == "float32"
    assert torch.equal(po.decode(handle, bare, "pt"), po.decode(handle, latents, "pt"))


def test_embeddings_of_other_encoders_are_refused_by_field() -> None:
    embeds = po.encode(handle_of("sd15"), "a red circle")
    with pytest.raises(po.RecordError, match="field encoders"):
        po.denoise(handle_of("sd15", dtype="bfloat16"), embeds)
    with pytest.raises(po.RecordError, match="field encoders"):
        po.denoise(handle_of("flux"), embeds)


@pytest.mark.parametrize(
    "name",
    [
        "sd15",
        "flux2_klein",
        pytest.param("z_image", marks=pytest.mark.slow),
        pytest.param("wan22_a14b", marks=pytest.mark.slow),
    ],
)
def test_saved_embeddings_and_latents_give_the_same_picture(name: str, tmp_path: Path) -> None:
    path, call = tiny_model(name), job(name, guided=True, images=2)
    expected, _ = one_shot(path, dtype=torch.bfloat16, seed=2, **words(name), **call)
    handle = po.load(path, device="cpu", dtype="bfloat16")
    po.encode(handle, **words(name)).save(tmp_path / "embeds.safetensors")
    embeds = po.Embeds.load(tmp_path / "embeds.safetensors")
    po.denoise(handle, embeds, seed=2, **call).save(tmp_path / "latents.safetensors")
    latents = po.Latents.load(tmp_path / "latents.safetensors")
    assert torch.equal(torch.as_tensor(po.decode(handle, latents, "pt")).float(), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["embeds.safetensors", "latents.safetensors"]


def test_records_hold_fresh_plain_cpu_tensors_only() -> None:
    handle = handle_of("qwen_image")
    with torch.inference_mode():
        embeds = po.encode(handle, **words("qwen_image"))
        latents = po.denoise(handle, embeds, **job("qwen_image", guided=False))
    tensors = [t for record in [*embeds.records.values(), embeds.call, latents.decode] for t in record.tensors]
    assert tensors
    for tensor in tensors:
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
        assert not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len(repr(embeds)) < 160
    assert len(repr(latents)) < 160


def test_a_language_model_used_as_encoder_keeps_only_the_layers_that_are_read() -> None:
    embeds = po.encode(handle_of("flux2_klein"), "a red circle")
    layers = 28 + 1
    for record in embeds.records.values():
        assert 0 < len(record.tensors) == 3 < layers  # hidden states 9, 18 and 27, and no logits


def test_a_failing_decode_never_costs_the_denoise_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import AutoencoderKL

    handle, session = handle_of("sd15"), po.Session()
    latents = po.denoise(handle, po.encode(handle, "a star"), session=session, **job("sd15", guided=False))
    before = latents.samples
    with monkeypatch.context() as broken:
        broken.setattr(AutoencoderKL, "_decode", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            po.decode(handle, latents, session=session)
    assert torch.equal(latents.samples, before)
    expected = staged(tiny_model("sd15"), {"prompt": "a star"}, job("sd15", guided=False), dtype="auto", seed=0)[0]
    assert torch.equal(po.decode(handle, latents, "pt", session=session), expected)
    assert [f for f in forwards(session, "decode") if "unet" in f] == []
    assert len(forwards(session, "denoise")) == 1


def test_out_of_memory_in_decode_is_answered_by_smaller_and_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import AutoencoderKL

    handle, session, tried = handle_of("sdxl"), po.Session(), []
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("sdxl", guided=False))
    decode = AutoencoderKL._decode

    def scarce(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        tried.append(self.tile_sample_min_size if self.use_tiling else None)
        if tried[-1] != 256:
            raise torch.OutOfMemoryError("pretend")
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "_decode", scarce)
    assert len(po.decode(handle, latents, session=session)) == 1
    assert tried == [None, 512, 256]
    assert session.report.phases[-1].notes == ("Decoded in tiles of 512 pixels.", "Decoded in tiles of 256 pixels.")
    with pytest.raises(po.InsufficientMemoryError, match=r"out of memory on cpu \(pretend\).*with tiling, or"):
        po.decode(handle, latents, tiling="off")


def test_a_vae_whose_file_is_wider_than_the_denoisers_decodes_in_its_own_dtype(tmp_path: Path) -> None:
    """FLUX.2-dev is published like that, and its pipeline hands its VAE the denoiser's dtype."""
    from diffusers import AutoencoderKLFlux2

    path = save_tiny("flux2_klein", tmp_path / "model", torch.bfloat16)
    shutil.rmtree(path / "vae")
    shutil.copytree(tiny_model("flux2_klein") / "vae", path / "vae")
    handle = po.load(path, device="cpu")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("flux2_klein", guided=False))
    (z,) = (tensor for tensor in latents.decode.tensors if tensor.is_floating_point())
    assert z.dtype == torch.bfloat16
    vae = AutoencoderKLFlux2.from_pretrained(path / "vae").requires_grad_(False)
    align(vae)
    expected = (vae.decode(z.float()).sample / 2 + 0.5).clamp(0, 1)
    assert torch.equal(po.decode(handle, latents, "pt"), expected)


@pytest.mark.parametrize(
    ("fails", "tiles", "notes"),
    [
        pytest.param(1, [None, None], 1, marks=pytest.mark.slow),
        pytest.param(2, [None, None, 512], 2, marks=pytest.mark.slow),
        (4, [None, None, 512, 256, 128], 4),
        (5, [None, None, 512, 256, 128], None),
    ],
)
def test_decode_gives_everything_else_back_before_it_tiles_and_never_loses_the_latents(
    fails: int, tiles: list[int | None], notes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VAE's own weights are streamed from then on, and a host is asked once for what its models hold."""
    from diffusers import AutoencoderKL

    settings = po.OffloadSettings(resident_below=1024)
    handle = po.load(tiny_model("sdxl"), device="cpu", settings=settings)
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("sdxl", guided=False))
    expected, tried, asked = po.decode(handle, latents, "pt"), [], []
    decode = AutoencoderKL._decode

    class Host(po.SilentObserver):
        def make_room(self) -> bool:
            asked.append(len(tried))
            return True

    def scarce(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        tried.append(self.tile_sample_min_size if self.use_tiling else None)
        if len(tried) <= fails:
            raise torch.OutOfMemoryError("pretend")
        return decode(self, z, *args, **kwargs)

    session = po.Session(Host())
    with monkeypatch.context() as patched:
        patched.setattr(AutoencoderKL, "_decode", scarce)
        if notes is None:
            with pytest.raises(po.InsufficientMemoryError, match="The latents are kept"):
                po.decode(handle, latents, "pt", session=session)
        else:
            assert torch.equal(po.decode(handle, latents, "pt", session=session), expected)  # smaller than a tile
    assert tried == tiles and asked == [1]
    report = session.report.phases[-1]
    assert report.leaked_bytes == 0
    if notes is not None:
        assert report.streamed_bytes > 0 and len(report.notes) == notes
        assert "of its weights were streamed from then on and others gave back theirs" in report.notes[0]
    assert torch.equal(po.decode(handle, latents, "pt"), expected)


def test_tiles_take_effect_on_a_vae_whose_sample_size_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # AutoencoderKL takes its tile size from sample_size (1024 on real SDXL), so enable_tiling() alone does nothing.
    from diffusers import AutoencoderKL

    from offload_core.phases._tiling import tile

    vae = AutoencoderKL(sample_size=1024, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1).eval()
    vae.down_block_types = None
    z = torch.randn(1, 4, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = vae.decode(z).sample
        vae.enable_tiling()
        assert torch.equal(vae.decode(z).sample, whole)
        assert tile(vae, 64)
        calls: list[Any] = []
        monkeypatch.setattr(vae.decoder, "forward", lambda x, *_: calls.append(x.shape) or torch.zeros(1, 3, 64, 64))
        vae.decode(z)
    assert len(calls) > 4


def test_samples_are_unscaled_latents_as_comfyui_holds_them() -> None:
    # host-contract: LATENT = latents / scale + shift, [B, C, H/8, W/8], float32.
    handle = handle_of("flux", dtype="bfloat16")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("flux", guided=False))
    samples, (recorded,) = latents.samples, latents.decode.tensors
    assert samples.dtype == torch.float32
    assert torch.equal(samples, recorded.float())
    assert not latents.is_stale(samples)
    assert latents.is_stale(samples + 1)
    assert latents.is_stale(samples[:, :, :2])


def test_flux2_samples_are_normalised_and_patchified_and_come_back() -> None:
    handle = handle_of("flux2_klein")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("flux2_klein", guided=False))
    with po.open_phase(handle) as phase:
        vae = phase.pipeline.vae
        mean, var, eps = vae.bn.running_mean.clone(), vae.bn.running_var.clone(), vae.config.batch_norm_eps
    z = latents.decode.tensors[0]
    b, c, h, w = z.shape
    packed = z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
    expected = (packed - mean.view(1, -1, 1, 1)) / torch.sqrt(var.view(1, -1, 1, 1) + eps)
    torch.testing.assert_close(latents.samples, expected)
    back = latents.with_samples(latents.samples).decode.tensors[0]
    torch.testing.assert_close(back, z)


def test_changed_samples_win_over_the_record() -> None:
    handle = handle_of("sd15")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("sd15", guided=False))
    flipped = latents.samples.flip(-1)
    other = po.decode(handle, latents.with_samples(flipped), "pt")
    assert torch.equal(other, po.decode(handle, po.latents_from_samples(handle, flipped), "pt"))
    assert not torch.equal(other, po.decode(handle, latents, "pt"))


def test_bare_samples_decode_as_the_record_does() -> None:
    handle = handle_of("qwen_image")
    latents = po.denoise(handle, po.encode(handle, "a star"), **job("qwen_image", guided=False))
    bare = po.latents_from_samples(handle, latents.samples)
    assert torch.equal(po.decode(handle, bare, "pt"), po.decode(handle, latents, "pt"))


def test_latents_that_decode_cannot_undo_are_refused_by_field() -> None:
    latents = po.denoise(handle_of("sd15"), po.encode(handle_of("sd15"), "a star"), **job("sd15", guided=False))
    with pytest.raises(po.RecordError, match="field vae"):
        po.decode(handle_of("flux"), latents)
    with pytest.raises(po.RecordError, match="field samples.*channels"):
        po.latents_from_samples(handle_of("sd15"), torch.zeros(1, 16, 8, 8))
    with pytest.raises(po.RecordError, match="field samples"):
        latents.with_samples(torch.zeros(1, 4, 2, 8, 8))
    with pytest.raises(po.InputError, match="latents that Denoise made"):
        po.decode(handle_of("sd15"), latents.samples)  # type: ignore[arg-type]


def test_saved_records_keep_the_layout_of_their_tensors(tmp_path: Path) -> None:
    # A channels-last picture makes a channels-last encoding, and kernels choose by strides: other bits otherwise.
    from offload_core.phases._plain import Plain, to_plain

    value = torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last)
    embeds = po.Embeds("X", "mark", to_plain({}, "call"), {"a": to_plain([value, value[:, :0], torch.ones(())], "a")})
    embeds.save(tmp_path / "e.safetensors")
    loaded = po.Embeds.load(tmp_path / "e.safetensors").records["a"]
    assert isinstance(loaded, Plain)
    assert torch.equal(loaded.tensors[0], value)
    assert loaded.tensors[0].stride() == value.stride()


def damage(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other format":
        save_file(load_file(path), path, {"format": "phase-offload-embeds-1"})
    else:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata())
        meta = json.loads(metadata["meta"])
        del meta[how]
        save_file(load_file(path), path, metadata | {"meta": json.dumps(meta)})


@pytest.mark.parametrize("how", ["cut", "empty", "other format", "vae", "dtype", "layout"])
def test_a_damaged_file_of_latents_is_one_sentence(how: str, tmp_path: Path) -> None:
    path = tmp_path / "latents.safetensors"
    handle = handle_of("sd15")
    po.denoise(handle, po.encode(handle, "a star"), **job("sd15", guided=False)).save(path)
    damage(path, how)
    with pytest.raises(
        po.RecordError, match=f"latents.safetensors.*{how if how in ('vae', 'dtype', 'layout') else ''}"
    ):
        po.Latents.load(path)


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    embeds = po.encode(handle_of("sd15"), "a star")
    with pytest.raises(po.InputError, match="no folder"):
        embeds.save(tmp_path / "nowhere" / "embeds.safetensors")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        embeds.save(tmp_path / "embeds.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_numbers_stop_the_run_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    handle = handle_of("sd15")
    embeds = po.encode(handle, "a star")
    latents = po.denoise(handle, embeds, **job("sd15", guided=False))
    with monkeypatch.context() as broken:
        forward = UNet2DConditionModel.forward
        broken.setattr(
            UNet2DConditionModel, "forward", lambda self, *a, **k: (forward(self, *a, **k)[0] * float("nan"),)
        )
        with pytest.raises(po.NumericalError, match="Denoise produced"):
            po.denoise(handle, embeds, **job("sd15", guided=False))
    decode = AutoencoderKL.decode
    monkeypatch.setattr(AutoencoderKL, "decode", lambda *a, **k: (decode(*a, **k)[0] * float("nan"),))
    with pytest.raises(po.NumericalError, match="Decode produced"):
        po.decode(handle, latents)
