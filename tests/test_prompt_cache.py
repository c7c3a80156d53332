"""The prompt cache: an encoder is loaded only for what it wasn't asked before, and no answer is ever a wrong one."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import make_lora
from offload_core.phases._answers import encoder_mark
from offload_core.phases._plain import Plain
from offload_core.phases._ports import RecordingPort, Records
from offload_core.plan import Rates
from offload_core.plan_table import plan_line
from offload_core.prompt_cache import PromptCache
from staging import job, staged, tiny_model, words

SMALL = {"height": 32, "width": 32, "num_inference_steps": 1}
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
ON_CPU = po.OffloadSettings(execution_device="cpu")
TEXT = {"prompt": "a red circle", "negative_prompt": "fog"}


def encode(session: po.Session, path: Path, asked: dict[str, Any] | None = None, **load: Any) -> po.Embeds:
    return po.encode(po.load(path, device="cpu", **load), **(asked or TEXT), session=session)


def loaded(session: po.Session) -> list[str]:
    """Which components the last phase ran, after it was checked that it read nothing if it ran none."""
    phase = session.report.phases[-1]
    assert bool(phase.forwards) == bool(phase.weight_bytes) == bool(phase.bytes_read)
    return sorted(phase.forwards)


def contents(embeds: po.Embeds) -> dict[str, str]:
    return {key: record.key() for key, record in embeds.records.items()}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))


# --- what is answered without an encoder ------------------------------------------------------------------------------


SLOW = ("flux", "sdxl", "sd3", "qwen_image", "z_image", "wan22_5b", "ltx2")


@pytest.mark.parametrize("name", ["sd15", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_same_prompt_again_loads_nothing_and_gives_the_same_bits(name: str) -> None:
    path, session = tiny_model(name), po.Session()
    handle, call = po.load(path, device="cpu"), job(name, guided=True)
    encode(session, path, words(name))
    embeds = encode(session, path, words(name))
    assert loaded(session) == []
    assert "from the cache" in " ".join(session.report.phases[-1].notes)
    pictures = po.decode(handle, po.denoise(handle, embeds, seed=8, session=session, **call), "pt")
    assert torch.equal(torch.as_tensor(pictures).float(), staged(path, words(name), call, dtype="auto", seed=8)[0])


def test_a_new_size_loads_no_encoder() -> None:
    session = po.Session()
    encode(session, tiny_model("sd15"), TEXT | {"height": 64, "width": 64})
    encode(session, tiny_model("sd15"), TEXT | {"height": 32, "width": 96})
    assert loaded(session) == []


@pytest.mark.slow
def test_where_a_picture_is_encoded_a_new_size_loads_only_what_encodes_it() -> None:
    session, asked = po.Session(), words("wan22_i2v_a14b")
    encode(session, tiny_model("wan22_i2v_a14b"), asked)
    assert "text_encoder" in loaded(session)
    encode(session, tiny_model("wan22_i2v_a14b"), asked | {"height": asked["height"] + 16})
    assert loaded(session) == ["vae"]


@pytest.mark.slow
def test_what_denoise_encodes_again_is_kept_too() -> None:
    session, call = po.Session(), job("sd15", guided=True)
    handle = po.load(tiny_model("sd15"), device="cpu")
    embeds = encode(session, tiny_model("sd15"))
    for _ in range(2):
        po.denoise(handle, embeds, prompt="two stars", session=session, **call)
    encodes = [phase.forwards for phase in session.report.phases if phase.name == "encode"]
    assert encodes == [{"text_encoder": 2}, {"text_encoder": 1}, {}]


def test_another_denoiser_or_a_lora_on_it_needs_no_encoder(copied: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    session = po.Session()
    encode(session, copied)
    file = next((copied / "unet").glob("*.safetensors"))
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    encode(session, copied, loras=[make_lora("sd15", "unet", tmp_path / "lora.safetensors", ["to_q"])])
    assert loaded(session) == []


def test_a_plan_says_that_nothing_is_loaded_and_the_run_keeps_to_it() -> None:
    session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu")
    before = po.foresee_encode(handle, **TEXT, session=session, rates=RATES)
    po.encode(handle, **TEXT, session=session)
    after = po.foresee_encode(handle, **TEXT, session=session, rates=RATES)
    other = po.foresee_encode(handle, "two stars", session=session, rates=RATES)
    assert before.plan.phases[0].weight_bytes == other.plan.phases[0].weight_bytes > 0
    assert after.plan.phases[0].weight_bytes == after.plan.phases[0].streamed_bytes == 0
    assert plan_line(after.plan) == "Plan: nothing is loaded, the embeds are in the cache."
    po.encode(handle, **TEXT, session=session, plan=after.plan)
    assert loaded(session) == []
    assert session.report.phases[-1].predicted["streamed_bytes"] == 0


@pytest.mark.slow
def test_a_plan_of_a_whole_job_says_it_too() -> None:
    session, path = po.Session(), tiny_model("sd15")
    encode(session, path)
    whole = po.foresee_job(path, *TEXT.values(), session=session, settings=ON_CPU, rates=RATES, **SMALL)
    assert [phase.weight_bytes > 0 for phase in whole.plan.phases] == [False, True, True]


# --- what isn't -------------------------------------------------------------------------------------------------------


def test_another_prompt_or_dtype_or_encoder_file_is_asked_anew(copied: Path) -> None:
    session = po.Session()
    encode(session, copied)
    encode(session, copied, {"prompt": "a blue star"})
    assert loaded(session) == ["text_encoder"]
    encode(session, copied, dtype="bfloat16")
    assert loaded(session) == ["text_encoder"]
    file = next((copied / "text_encoder").glob("*.safetensors"))
    save_file({name: value * 1.5 for name, value in load_file(file).items()}, file, {"format": "pt"})
    embeds = encode(session, copied)
    assert loaded(session) == ["text_encoder"]
    assert contents(embeds) == contents(encode(po.Session(), copied))


def test_a_lora_of_the_encoder_and_its_scale_make_it_another_one(tmp_path: Path) -> None:
    file, layer = tmp_path / "words.safetensors", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    save_file({f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}, file)
    plain, scaled = (po.load(tiny_model("sd15"), device="cpu", loras=loras) for loras in ([], [(file, 0.7)]))
    part = plain.source().components["text_encoder"]
    scales = [{}, {"cross_attention_kwargs": {"scale": 0.5}}, {"cross_attention_kwargs": {"scale": 1.0}}]
    marks = [encoder_mark(handle, part, call) for handle in (plain, scaled) for call in scales]
    assert len(set(marks[:3])) == 1  # without a LoRA nothing is scaled
    assert len(set(marks)) == 4


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("sdxl", {"clip_skip": 1}),
        pytest.param("flux2_klein", {"text_encoder_out_layers": (3, 6, 9)}, marks=pytest.mark.slow),
    ],
)
def test_a_part_of_an_answer_that_was_not_kept_is_asked_anew(name: str, option: dict[str, Any]) -> None:
    path, session, asked = tiny_model(name), po.Session(), words(name) | option
    encode(session, path, words(name))
    found = po.foresee_encode(po.load(path, device="cpu"), **asked, session=session, rates=RATES)
    assert found.plan.phases[0].weight_bytes > 0
    embeds = encode(session, path, asked)
    assert contents(embeds) == contents(encode(po.Session(), path, asked))


def test_an_answer_that_random_numbers_were_drawn_for_is_not_kept() -> None:
    records = Records()
    port = RecordingPort("encoder", records, torch.device("cpu"))
    for name, run in (("plain", torch.ones_like), ("random", torch.rand_like)):
        port.call(torch.nn.Identity(), name, run, (torch.zeros(2),), {})
    assert [key.partition(":")[0] for key in records.drawn] == ["encoder.random"]


def test_a_later_run_never_changes_what_came_out_before() -> None:
    session = po.Session()
    first = encode(session, tiny_model("sd15"))
    before = contents(first)
    for record in first.records.values():
        for tensor in record.tensors:
            tensor.fill_(7)
    second = encode(session, tiny_model("sd15"))
    third = encode(session, tiny_model("sd15"))
    assert contents(second) == before
    for key, record in third.records.items():
        mine, theirs = record.tensors[0], second.records[key].tensors[0]
        assert mine.untyped_storage()._cdata != theirs.untyped_storage()._cdata


# --- memory -----------------------------------------------------------------------------------------------------------


def name_of(number: int) -> str:
    return f"{'0' * 64}-{number:064x}"


def answer(nbytes: int = 100) -> Plain:
    return Plain({"tensor": 0}, (torch.zeros(nbytes, dtype=torch.uint8),))


def test_memory_is_bounded_and_the_longest_unused_go_first() -> None:
    cache = PromptCache(memory_bytes=300)
    for number in (1, 2, 3):
        cache.put(name_of(number), answer())
    cache.get(name_of(1))
    cache.put(name_of(4), answer())
    assert [cache.get(name_of(number)) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    cache.put(name_of(5), answer(301))
    assert cache.held_bytes == 0  # larger than all of it: nothing is kept, and nothing is wrong
    cache.put(name_of(6), answer())
    assert cache.release() == 100
    assert cache.held_bytes == 0


# --- disk -------------------------------------------------------------------------------------------------------------


def on_disk(folder: Path) -> po.OffloadSettings:
    return po.OffloadSettings(prompt_cache_folder=str(folder))


def test_another_process_finds_the_answers_in_the_folder_and_no_words_of_the_prompt(tmp_path: Path) -> None:
    settings = on_disk(tmp_path / "answers")
    first = encode(po.Session(), tiny_model("sd15"), settings=settings)
    session = po.Session()
    second = encode(session, tiny_model("sd15"), settings=settings)
    assert loaded(session) == []
    assert [record.key() for record in first.records.values()] == [record.key() for record in second.records.values()]
    files = list((tmp_path / "answers").iterdir())
    assert len(files) == len(first.records)
    for file in files:
        assert file.suffix == ".safetensors"
        assert b"circle" not in file.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "changed", "swapped", "other", "huge", "folder"])
def test_a_damaged_or_foreign_file_is_no_answer_and_is_written_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PromptCache().put(name_of(1), answer(), str(tmp_path))
    PromptCache().put(name_of(2), answer(50), str(tmp_path))
    first, second = sorted(tmp_path.iterdir())
    data = first.read_bytes()
    if damage == "cut":
        first.write_bytes(data[:-5])
    elif damage == "changed":
        first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "swapped":
        first.write_bytes(second.read_bytes())
    elif damage == "other":
        save_file({"answer/0": torch.ones(3)}, first)
    elif damage == "huge":
        os.truncate(first, 1 << 30)
    else:
        first.unlink()
        first.mkdir()
    with caplog.at_level(logging.WARNING, "offload_core.prompt_cache"):
        assert PromptCache().get(name_of(1), str(tmp_path)) is None
    assert damage == "folder" or first.name in caplog.text
    PromptCache().put(name_of(1), answer(), str(tmp_path))
    if damage != "folder":  # that stays, with a line in the log
        assert PromptCache().get(name_of(1), str(tmp_path)).key() == answer().key()


def test_a_link_in_the_folder_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    folder, outside = tmp_path / "answers", tmp_path / "outside"
    PromptCache().put(name_of(1), answer(), str(folder))
    file = folder / f"{name_of(1)}.safetensors"
    data = file.read_bytes()
    outside.write_bytes(data)
    file.unlink()
    file.symlink_to(outside)
    assert PromptCache().get(name_of(1), str(folder)) is None
    PromptCache().put(name_of(1), answer(7), str(folder))
    assert outside.read_bytes() == data
    assert not file.is_symlink()


def test_a_folder_is_bounded_and_only_its_own_files_are_deleted(tmp_path: Path) -> None:
    cache = PromptCache(disk_bytes=1)
    (tmp_path / "mine.safetensors").write_bytes(b"x" * 100)
    for number in (1, 2):
        cache.put(name_of(number), answer(), str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.safetensors"]


def test_a_name_leads_nowhere_outside_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="isn't the name"):
        PromptCache().get("../../x", str(tmp_path))
