"""Warm weights: the next phase takes from RAM what it would read, never what changed, and never another one's room."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import make_lora
from offload_core.file_reader import FileIdentity, FileRange, ReadBuffer, WeightFile
from offload_core.ledger import Ledger
from offload_core.settings import OffloadSettings
from offload_core.streaming._masters import FileMaster
from offload_core.warm import WarmKey, WarmStore, content_sum
from staging import job, tiny_model, words

WARM = OffloadSettings(warm=True)
STREAMED = OffloadSettings(
    warm=True, device_memory=400 << 10, host_memory=1 << 30, resident_below=4096, activation_memory=0
)
CALL = job("sd15", guided=True)


@pytest.fixture(scope="module")
def embeds() -> po.Embeds:
    return po.encode(po.load(tiny_model("sd15"), device="cpu"), **words("sd15"))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("sd15"), tmp_path / "model"))


def encoder_weights(session: po.Session, path: Path, **load: Any) -> dict[str, torch.Tensor]:
    """Copies of a text encoder's weights, as a phase has them."""
    load = {"settings": WARM} | load
    with po.open_phase(po.load(path, device="cpu", **load), "text_encoder", session=session) as phase:
        phase.components["text_encoder"].load()
        return {name: value.clone() for name, value in phase.modules["text_encoder"].named_parameters()}


def read(session: po.Session) -> int:
    return session.report.phases[-1].bytes_read


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# --- what it saves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WARM, STREAMED], ids=["resident", "streamed"])
def test_the_second_denoise_reads_nothing_from_files_and_gives_the_same_bits(
    settings: OffloadSettings, embeds: po.Embeds
) -> None:
    session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu", settings=settings)
    first, second = (po.denoise(handle, embeds, seed=3, session=session, **CALL) for _ in range(2))
    cold, warm = session.report.phases
    assert cold.bytes_read >= cold.weight_bytes > 0
    assert warm.bytes_read == 0
    assert warm.warm_bytes >= warm.weight_bytes == cold.weight_bytes
    assert warm.streamed_bytes == cold.streamed_bytes
    assert bool(warm.streamed_bytes) == (settings is STREAMED)
    assert any("weren't read from files" in note for note in warm.notes)
    assert cold.leaked_bytes == warm.leaked_bytes == 0
    plain = po.denoise(po.load(tiny_model("sd15"), device="cpu"), embeds, seed=3, **CALL)
    assert torch.equal(first.samples, second.samples)
    assert torch.equal(second.samples, plain.samples)


def test_weights_that_are_cast_are_warm_as_stored() -> None:
    session = po.Session()
    first, second = (encoder_weights(session, tiny_model("sd15"), dtype="bfloat16") for _ in range(2))
    assert read(session) == 0
    assert same(first, second)
    third = encoder_weights(session, tiny_model("sd15"))  # in another dtype, from the same copies
    assert read(session) == 0
    assert all(value.dtype == torch.float32 for value in third.values())


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    session = po.Session()
    encoder_weights(session, tiny_model("sd15"), settings=OffloadSettings())
    assert session.warm.held_bytes == 0
    assert session.report.phases[-1].warm_bytes == 0


def test_purge_gives_warm_copies_and_prompts_back_and_says_so() -> None:
    session = po.Session()
    encoder_weights(session, tiny_model("sd15"))
    po.encode(po.load(tiny_model("sd15"), device="cpu"), "a star", session=session)
    assert min(session.warm.held_bytes, session.prompt_cache.held_bytes) > 0
    report = po.purge("cpu", session=session)
    assert session.warm.held_bytes == session.prompt_cache.held_bytes == 0
    assert [row.what for row in report.rows][:2] == ["warm copies", "prompt cache"]
    assert report.sentence().startswith("Freed ")


# --- never stale, never edited ----------------------------------------------------------------------------------------


def test_a_file_that_changed_is_read_anew(copied: Path) -> None:
    session, file = po.Session(), next((copied / "text_encoder").glob("*.safetensors"))
    encoder_weights(session, copied)
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    changed = encoder_weights(session, copied)
    assert read(session) == session.report.phases[0].bytes_read > 0
    assert same(changed, encoder_weights(po.Session(), copied))


def test_a_file_that_changes_while_its_copy_is_used_is_an_error(tmp_path: Path) -> None:
    path, store, buffer = tmp_path / "weights", WarmStore(), ReadBuffer()
    path.write_bytes(bytes(range(64)))
    use = store.use(lambda: 1000)
    with WeightFile(path) as file:
        master = FileMaster(file, FileRange(path, 0, 64), torch.uint8, use)
        for _ in range(2):
            master.read_into(torch.empty(64, dtype=torch.uint8), buffer)
        assert (file.bytes_read, use.taken_bytes) == (64, 64)
        path.write_bytes(bytes(64))
        os.utime(path, ns=(0, 0))
        with pytest.raises(po.ModelError, match="changed while it was in use"):
            master.read_into(torch.empty(64, dtype=torch.uint8), buffer)


def edit(module: torch.nn.Module, how: str) -> int:
    """Changes the largest weight of a module and returns its bytes."""
    weight = max(module.parameters(), key=torch.numel)
    if how == "in place":
        weight += 1
    elif how == "by its data":
        weight.data.mul_(2)
    else:
        places = weight.data.view(-1)
        places[:4] = places[:4].flip(0)
    return weight.nbytes


@pytest.mark.parametrize("how", ["in place", "by its data", "values that change places"])
def test_an_edited_weight_is_never_kept(how: str) -> None:
    session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu", settings=WARM)
    with po.open_phase(handle, "text_encoder", session=session) as phase:
        phase.components["text_encoder"].load()
        edited = edit(phase.modules["text_encoder"], how)
    report = session.report.phases[-1]
    assert report.leaked_bytes == 0
    assert session.warm.held_bytes == report.bytes_read - edited
    again = encoder_weights(session, tiny_model("sd15"))
    assert read(session) == edited
    assert same(again, encoder_weights(po.Session(), tiny_model("sd15")))


def test_a_lora_leaves_no_trace_in_warm_weights(embeds: po.Embeds, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = make_lora("sd15", "unet", tmp_path / "lora.safetensors", ["to_q", "to_v"], alpha=16)
    session = po.Session()
    plain = po.load(tiny_model("sd15"), device="cpu", settings=WARM)
    po.denoise(po.load(tiny_model("sd15"), device="cpu", settings=WARM, loras=[file]), embeds, session=session, **CALL)
    warm = po.denoise(plain, embeds, session=session, **CALL)
    assert read(session) == 0
    assert torch.equal(warm.samples, po.denoise(plain, embeds, **CALL).samples)


def test_a_weight_that_somebody_holds_is_reported_and_not_kept() -> None:
    session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu", settings=WARM)
    with po.open_phase(handle, "text_encoder", session=session) as phase:
        phase.components["text_encoder"].load()
        kept = max(phase.modules["text_encoder"].parameters(), key=torch.numel).detach()
    report = session.report.phases[-1]
    assert report.leaked_bytes == kept.nbytes
    assert session.warm.held_bytes == report.bytes_read - kept.nbytes


def test_a_content_sum_tells_small_changes_apart() -> None:
    memory = torch.arange(3 << 20, dtype=torch.int32).view(torch.uint8)[: (9 << 20) + 3]
    totals = {content_sum(memory)}
    for place in (0, 7, 1 << 20, memory.numel() - 1):
        changed = memory.clone()
        changed[place] ^= 1
        totals.add(content_sum(changed))
    pieces = memory.clone()
    pieces[: 1 << 20], pieces[1 << 20 : 2 << 20] = memory[1 << 20 : 2 << 20], memory[: 1 << 20]
    totals.add(content_sum(pieces))
    assert len(totals) == 6
    assert content_sum(memory.clone()) in totals


# --- evictable first --------------------------------------------------------------------------------------------------


def key(number: int, nbytes: int = 100) -> WarmKey:
    return WarmKey("file", FileIdentity(1000, 1, 1), number, nbytes)


def fill(store: WarmStore, numbers: range, room: int = 1000) -> None:
    use = store.use(lambda: room)
    for number in numbers:
        use.keep(key(number), torch.zeros(100, dtype=torch.uint8))


def test_a_reservation_gets_the_place_of_warm_copies_before_it_is_granted() -> None:
    store = WarmStore()
    fill(store, range(8))
    ledger = Ledger(device=500, host=1000, shared=True, evictable=store)
    assert ledger.free("device") == 500  # warm copies count as free
    first = ledger.reserve("host", "staging", 300)
    assert store.held_bytes == 700
    ledger.reserve("device", "resident", 500)
    assert store.held_bytes == 200
    first.release()
    assert store.held_bytes == 200
    with pytest.raises(po.BudgetError):
        ledger.reserve("host", "private", 501)
    assert store.held_bytes == 200  # a refusal takes nothing


def test_copies_never_pass_the_budget_and_those_of_other_models_go_first() -> None:
    store = WarmStore()
    fill(store, range(8), room=800)
    fill(store, range(8, 12), room=800)
    assert store.held_bytes == 800
    use = store.use(lambda: 800)
    assert [number for number in range(12) if use.find(key(number)) is not None] == list(range(4, 12))
    use.keep(key(20), torch.zeros(100, dtype=torch.uint8))  # its own are used again: the first ones stay
    assert use.find(key(20)) is None
    assert store.held_bytes == 800


def test_in_a_tight_budget_a_phase_streams_no_more_than_without_warm_copies(embeds: po.Embeds) -> None:
    figures = []
    for warm in (False, True):
        settings = OffloadSettings(
            warm=warm, device_memory=700 << 10, host_memory=14 << 20, resident_below=4096, activation_memory=0
        )
        session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu", settings=settings)
        if warm:
            fill(session.warm, range(100, 110), room=1 << 30)
            session.warm.use(lambda: 1 << 30).keep(key(1, 20 << 20), torch.zeros(20 << 20, dtype=torch.uint8))
        for _ in range(2):
            latents = po.denoise(handle, embeds, seed=1, session=session, **CALL)
        report = session.report.phases[-1]
        figures.append((report.streamed_bytes, report.reserved_peak_bytes, latents.samples.sum().item()))
        assert session.warm.held_bytes <= 14 << 20
    assert figures[0] == figures[1]
    assert figures[0][0] > 0


# --- release, whenever ------------------------------------------------------------------------------------------------


class At(po.SilentObserver):
    """Does something at the k-th poll of a phase."""

    def __init__(self, k: int) -> None:
        self.k, self.polls = k, 0
        self.do: Any = lambda: None

    def check_interrupt(self) -> None:
        self.polls += 1
        if self.polls == self.k:
            self.do()


def test_what_a_running_phase_uses_is_dropped_at_its_end_if_all_was_asked_back(embeds: po.Embeds) -> None:
    observer = At(20)
    session, handle = po.Session(observer), po.load(tiny_model("sd15"), device="cpu", settings=WARM)
    expected = po.denoise(handle, embeds, seed=3, session=session, **CALL)
    held = session.warm.held_bytes
    assert held > 0
    observer.polls, observer.do = 0, session.warm.release
    latents = po.denoise(handle, embeds, seed=3, session=session, **CALL)
    assert observer.polls > 20
    assert session.warm.held_bytes == 0
    assert torch.equal(latents.samples, expected.samples)
    po.denoise(handle, embeds, seed=3, session=session, **CALL)
    assert session.warm.held_bytes == held


def test_copies_can_be_asked_back_by_any_thread_while_a_phase_runs(embeds: po.Embeds) -> None:
    session, handle = po.Session(), po.load(tiny_model("sd15"), device="cpu", settings=STREAMED)
    expected = po.denoise(handle, embeds, seed=3, session=session, **CALL)
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.001):
            session.warm.release(10_000)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        latents = po.denoise(handle, embeds, seed=3, session=session, **CALL)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert torch.equal(latents.samples, expected.samples)
    assert session.report.phases[-1].leaked_bytes == 0


def test_release_frees_as_much_as_is_asked_the_longest_unused_first() -> None:
    store = WarmStore()
    fill(store, range(4))
    assert store.use(lambda: 1000).find(key(0)) is not None
    assert store.release(150) == 200
    assert [number for number in range(4) if store.use(lambda: 1000).find(key(number)) is not None] == [0, 3]
    assert store.release() == 200
    assert store.release() == 0
