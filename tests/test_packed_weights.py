"""Packed weights: 8 bits on disk, in RAM and on the device, the values of an unpacked twin in every operator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload_core as po
from lora_files import make_lora
from offload_core._report_table import human_bytes
from offload_core.errors import ManagedModuleError, ModelError
from offload_core.packing import FLOAT8_ROWS, pack_rows, packed_row_bytes, unpack
from offload_core.single_files import SplitFiles
from original_layout import TINY, Weights, original_weights
from staging import align, job, tiny_model, words
from vgpu.runner import run_on_vgpu

TIGHT = po.OffloadSettings(device_memory="150kB", resident_below=0, activation_memory=0)
BF16 = torch.bfloat16
_NOT_OF_THE_CALL = ("example_prompts", "latent_rgb_factors", "latent_rgb_bias")


def packed_like_comfy(
    weights: Weights,
    *,
    per_row: bool = False,
    scale_name: str = "scale_weight",
    scaled: bool = True,
    dtype: torch.dtype = BF16,
) -> tuple[Weights, Weights]:
    """Weights as ComfyUI's tools write them in 8 bits: matrices of linear layers with a scale. And what they mean."""
    packed: Weights = {}
    meant: Weights = {}
    for name, tensor in weights.items():
        meant[name] = packed[name] = tensor.to(BF16)
        meant[name] = meant[name].to(dtype)
        if tensor.dim() != 2 or not name.endswith(".weight") or not tensor.is_floating_point():
            continue
        values = tensor.float()
        dim = 1 if per_row else None
        scale = (values.abs().amax(dim=dim) / 448).clamp(min=1e-9) if scaled else torch.ones(())
        eight = (values / (scale[:, None] if per_row else scale)).to(torch.float8_e4m3fn)
        packed[name] = eight
        meant[name] = (eight.float() * (scale[:, None] if per_row else scale)).to(dtype)
        if scaled:
            packed[name.removesuffix("weight") + scale_name] = scale
    if scaled and scale_name == "scale_weight":
        packed["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return packed, meant


def packed_files(family: str, folder: Path, **how: Any) -> tuple[SplitFiles, SplitFiles]:
    """A tiny model in files of its own with packed denoiser and encoders, and its unpacked twin."""
    made: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name in TINY[family]:
        original = original_weights(family, name)
        pair = (original, original) if name == "vae" else packed_like_comfy(original, **how)
        for files, weights, kind in zip(made, pair, ("packed", "meant"), strict=True):
            path = folder / f"{kind}-{name}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in weights.items()}, path)
            if name.startswith("text_encoder"):
                files.setdefault("encoders", []).append(str(path))
            else:
                files["vae" if name == "vae" else "denoiser"] = str(path)
    return tuple(  # type: ignore[return-value]
        SplitFiles(**{**files, "encoders": tuple(files["encoders"])}, configs=str(tiny_model(family))) for files in made
    )


def run(
    files: Any, family: str, settings: Any = None, plan: Any = None, **load: Any
) -> tuple[torch.Tensor, po.Session]:
    session = po.Session()
    handle = po.load(files, device="cpu", settings=settings, **load)
    planned = {"session": session, "plan": plan}
    embeds = po.encode(handle, **words(family), **planned)
    latents = po.denoise(handle, embeds, seed=1, **job(family, guided=True), **planned)
    return torch.as_tensor(po.decode(handle, latents, "pt", **planned)).float(), session


# --------------------------------------------------------------------------------------------------- the arithmetic


def test_rows_are_packed_to_the_whole_range_and_unpacked_in_float32() -> None:
    values = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)) * 0.01
    values[3] = 0
    packed = pack_rows(values.to(BF16))
    assert packed.shape == (7, packed_row_bytes(40)) and packed.dtype == torch.uint8
    scale = values.to(BF16).float().abs().amax(1, keepdim=True) / 448
    expected = (values.to(BF16).float() / scale.clamp(min=1e-30)).to(torch.float8_e4m3fn).float() * scale
    found = unpack(FLOAT8_ROWS, packed, None, (7, 40), torch.float32)
    assert torch.equal(found, expected.nan_to_num())
    assert (found - values).norm() / values.norm() < 0.03  # three bits of mantissa


def test_large_weight_is_unpacked_piece_by_piece_to_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, 6, 3, 3)
    data = values.to(torch.float8_e5m2).view(torch.uint8).view(50, -1)
    scale = torch.rand(50)
    whole = unpack("float8_e5m2", data, scale, values.shape, BF16)
    monkeypatch.setattr("offload_core.packing._CHUNK_ELEMENTS", 100)
    assert torch.equal(unpack("float8_e5m2", data, scale, values.shape, BF16), whole)
    assert torch.equal(whole, (values.to(torch.float8_e5m2).float() * scale.view(50, 1, 1, 1)).to(BF16))


# ---------------------------------------------------------------------------------------------- files that are packed


@pytest.mark.parametrize(
    "how",
    [{}, {"per_row": True, "scale_name": "weight_scale"}, pytest.param({"scaled": False}, marks=pytest.mark.slow)],
    ids=str,
)
def test_packed_files_give_the_picture_of_their_unpacked_twin(how: dict[str, Any], tmp_path: Path) -> None:
    """FLUX: fused rows with scales of their own, two encoders, tables of embeddings."""
    packed, meant = packed_files("flux", tmp_path, **how)
    expected, whole = run(meant, "flux")
    found, _ = run(packed, "flux")
    streamed, session = run(packed, "flux", TIGHT)
    assert torch.equal(found, expected)
    assert torch.equal(streamed, expected)
    phase = next(phase for phase in session.report.phases if phase.name == "denoise")
    before = next(phase for phase in whole.report.phases if phase.name == "denoise")
    assert phase.streamed_bytes > 0
    assert phase.weight_bytes < 0.62 * before.weight_bytes  # nothing is unpacked for good


def test_checkpoint_that_is_8_bits_throughout_works(tmp_path: Path) -> None:
    """SD 1.5 as a plain cast: convolutions, norms and biases too."""
    parts = {prefix: original_weights("sd15", name) for name, (prefix, _, _) in TINY["sd15"].items()}
    eight = {
        prefix + name: tensor.to(torch.float8_e4m3fn) if tensor.is_floating_point() and "vae" not in prefix else tensor
        for prefix, weights in parts.items()
        for name, tensor in weights.items()
    }
    meant = {name: tensor.to(BF16) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in eight.items()}
    save_file(eight, tmp_path / "eight.safetensors")
    save_file(meant, tmp_path / "meant.safetensors")
    configs = str(tiny_model("sd15"))
    files = [
        SplitFiles(checkpoint=str(tmp_path / f"{name}.safetensors"), configs=configs) for name in ("eight", "meant")
    ]
    expected, _ = run(files[1], "sd15")
    assert torch.equal(run(files[0], "sd15")[0], expected)
    assert torch.equal(run(files[0], "sd15", replace(TIGHT, device_memory="500kB"))[0], expected)


def test_values_follow_the_dtype_that_is_computed_in(tmp_path: Path) -> None:
    """In float32 a packed weight is what its 8 bits and its scale say, not that rounded to bfloat16."""
    packed, meant = packed_files("flux", tmp_path, dtype=torch.float32)
    found, _ = run(packed, "flux", dtype="float32")
    assert torch.equal(found, run(meant, "flux", dtype="float32")[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda packed, name: packed.pop(name), "is missing"),
        (lambda packed, name: packed.update({name: torch.ones(3)}), "3 numbers of F32"),
        (lambda packed, name: packed.update({name.replace("scale_weight", "weight_scale_2"): torch.ones(1)}), "a kind"),
    ],
    ids=["no scale", "scales of blocks", "unknown scale"],
)
def test_weight_whose_scale_is_missing_or_unknown_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    packed, _ = packed_files("flux", tmp_path)
    weights, _ = packed_like_comfy(original_weights("flux", "transformer"))
    change(weights, next(name for name in weights if name.endswith("scale_weight")))
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, str(packed.denoiser))
    with pytest.raises(ModelError, match=says) as refused:
        po.load(packed)
    assert str(refused.value).endswith("or the bfloat16 file of the model.")


@pytest.mark.slow
def test_lora_on_packed_weights_gives_the_picture_of_the_twin_with_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = make_lora("flux", "transformer", tmp_path / "lora.safetensors", ["to_q", "to_v", "to_k"])
    packed, meant = packed_files("flux", tmp_path)
    expected, _ = run(meant, "flux", loras=[(lora, 0.7)])
    assert torch.equal(run(packed, "flux", loras=[(lora, 0.7)])[0], expected)
    found, session = run(packed, "flux", replace(TIGHT, device_memory="170kB"), loras=[(lora, 0.7)])
    assert torch.equal(found, expected)
    assert session.report.phases[1].streamed_bytes > 0
    assert not torch.equal(expected, run(packed, "flux")[0])


def test_differences_on_packed_weights_give_the_picture_of_the_twin_with_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = {f"lokr_w{i}": torch.randn(size, size, generator=generator) * 0.1 for i, size in ((1, 4), (2, 8))}
    layers = [f"lycoris_transformer_blocks_{i}_attn_to_{part}" for i in range(2) for part in "qv"]
    lora = tmp_path / "lokr.safetensors"
    save_file({f"{layer}.{side}": tensor.clone() for layer in layers for side, tensor in sides.items()}, lora)
    packed, meant = packed_files("flux", tmp_path)
    expected, _ = run(meant, "flux", loras=[(lora, 0.7)])
    found, session = run(packed, "flux", replace(TIGHT, device_memory="170kB"), loras=[(lora, 0.7)])
    assert torch.equal(found, expected)
    assert session.report.phases[1].streamed_bytes > 0
    assert not torch.equal(expected, run(packed, "flux")[0])


def test_warm_copies_are_of_packed_bytes_and_spare_reading_the_files(tmp_path: Path) -> None:
    packed, _ = packed_files("flux", tmp_path)
    session, handle = po.Session(), po.load(packed, device="cpu", settings=po.OffloadSettings(warm=True))
    embeds = po.encode(handle, **words("flux"))
    first, second = (po.denoise(handle, embeds, seed=3, session=session, **job("flux", guided=True)) for _ in range(2))
    cold, warm = session.report.phases
    assert cold.bytes_read >= cold.weight_bytes > 0
    assert warm.bytes_read < cold.bytes_read / 4 and warm.warm_bytes > 0  # small scales are read each time
    assert torch.equal(first.samples, second.samples)


def test_no_phase_takes_more_than_its_plan_says(tmp_path: Path) -> None:
    packed, _ = packed_files("flux", tmp_path)
    settings = replace(TIGHT, activation_memory="auto", execution_device="cpu")
    call = job("flux", guided=True)

    def planned(nbytes: int) -> Any:
        return po.foresee_job(packed, settings=replace(settings, device_memory=nbytes), **words("flux"), **call).plan

    budget = planned(100_000).smallest_budget_bytes
    plan = planned(budget)
    assert plan.fits
    _, session = run(packed, "flux", replace(settings, device_memory=budget), plan)
    streamed = []
    for expected, phase in zip(plan.phases, session.report.phases, strict=True):
        assert phase.reserved_peak_bytes <= expected.device_peak_bytes <= budget
        assert phase.weight_bytes == expected.weight_bytes
        streamed.append(phase.streamed_bytes)
    assert any(streamed)


def packed_pictures_on_the_device(folder: str) -> list[bool]:
    import vgpu

    vgpu.install()
    packed, meant = packed_files("flux", Path(folder), per_row=True)
    found = []
    for settings in (replace(TIGHT, device_memory="1500kB"), None):
        results = []
        for files, where in ((packed, "auto"), (meant, "cpu")):
            handle = po.load(files, device=where, settings=settings if where == "auto" else None)
            embeds = po.encode(handle, **words("flux"))
            latents = po.denoise(handle, embeds, seed=1, **job("flux", guided=True))
            results.append(torch.as_tensor(po.decode(handle, latents, "pt")))
        found.append(torch.equal(*results))
    return found


@pytest.mark.slow
def test_packed_weights_are_unpacked_on_an_accelerator_to_the_cpus_bits(tmp_path: Path) -> None:
    assert run_on_vgpu(packed_pictures_on_the_device, str(tmp_path)) == [True, True]


# ------------------------------------------------------------------------------------------- packed on the way in


def packed_twin(model: torch.nn.Module, names: list[str]) -> None:
    for name in names:
        weight = model.get_parameter(name)
        rows = pack_rows(weight.detach().reshape(weight.shape[0], -1))
        weight.data = unpack(FLOAT8_ROWS, rows, None, weight.shape, weight.dtype)


def test_weights_are_packed_on_their_way_in_with_the_fine_ones_left_alone(tmp_path: Path) -> None:
    """The demo model, from its own folder: the same latents as a twin whose large weights were packed by hand."""
    from diffusers import DiffusionPipeline

    from offload_core.demo import MODEL
    from offload_core.phases._weight_storage import _coarse

    job = {"num_inference_steps": 2, "guidance_scale": 1.0}
    session = po.Session()
    results = []
    for memory in ("auto", "leave 0"):
        settings = po.OffloadSettings(device_memory="3MiB" if memory != "auto" else memory, activation_memory=0)
        handle = po.load(MODEL, device="cpu", dtype="float32", settings=settings, weight_storage="fp8")
        embeds = po.encode(handle, "a red circle", session=session)
        latents = po.denoise(handle, embeds, seed=1, session=session, **job)
        results.append(torch.as_tensor(po.decode(handle, latents, "pt", session=session)))
    twin = DiffusionPipeline.from_pretrained(MODEL, dtype=torch.float32)
    names = _coarse(twin.transformer)
    assert len(names) > 20 and not any("embed" in name for name in names)
    packed_twin(twin.transformer, names)
    for name in ("text_encoder", "text_encoder_2", "vae", "transformer"):
        component = getattr(twin, name)
        packed_twin(component, _coarse(component) if name not in ("vae", "transformer") else [])
        align(component)
    twin.set_progress_bar_config(disable=True)
    defaults = json.loads((MODEL / "phase_offload.json").read_text())
    job = {name: value for name, value in defaults.items() if name not in _NOT_OF_THE_CALL} | job
    expected = twin("a red circle", generator=torch.Generator().manual_seed(1), output_type="pt", **job).images
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], expected)
    stored = po.load(MODEL, device="cpu", dtype="float32")
    plain = po.decode(stored, po.denoise(stored, po.encode(stored, "a red circle"), seed=1, **job), "pt")
    assert not torch.equal(torch.as_tensor(plain), results[0])


def test_plan_says_what_packing_saves_and_holds() -> None:
    from offload_core.demo import MODEL

    asked: dict[str, Any] = {"num_inference_steps": 1}
    stored = po.foresee_job(MODEL, "a red circle", dtype="float32", **asked).plan
    packed = po.foresee_job(MODEL, "a red circle", dtype="float32", weight_storage="fp8", **asked).plan
    before, after = stored.phase("denoise"), packed.phase("denoise")
    assert before is not None and after is not None
    assert after.weight_bytes < 0.7 * before.weight_bytes
    assert after.resident_bytes == after.weight_bytes  # what unpacking takes isn't a weight
    saved = human_bytes(before.weight_bytes - after.weight_bytes)
    assert f"transformer is packed to 8 bits on its way in, which saves {saved}." in after.reasons
    assert not any("packed" in reason for reason in before.reasons)
    session = po.Session()
    handle = po.load(MODEL, device="cpu", dtype="float32", weight_storage="fp8")
    po.denoise(handle, po.encode(handle, "a red circle", session=session), seed=1, session=session, **asked)
    ran = next(phase for phase in session.report.phases if phase.name == "denoise")
    assert ran.weight_bytes == after.weight_bytes


def test_packed_weight_cant_be_written_to(tmp_path: Path) -> None:
    from offload_core.phases import open_phase

    packed, _ = packed_files("flux", tmp_path)
    handle = po.load(packed, device="cpu")
    with open_phase(handle, "transformer") as phase:
        phase.components["transformer"].load()
        transformer = phase.modules["transformer"]
        weight = transformer.transformer_blocks[0].attn.to_q.weight
        with pytest.raises(ManagedModuleError, match="can't be changed"), torch.no_grad():
            weight.mul_(2)
        with pytest.raises(ManagedModuleError, match="can't be changed"):
            weight.data = torch.zeros(weight.shape)
        assert weight.dtype == BF16


def test_storage_that_isnt_one_is_said() -> None:
    from offload_core.demo import MODEL

    with pytest.raises(po.InputError, match="use 'as stored' or 'fp8'"):
        po.load(MODEL, weight_storage="int4")
