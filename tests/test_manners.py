"""Memory shared with ComfyUI, against a stand-in of its model list: who makes room for whom, and what is left over."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_engine
import offload_core
from comfy_manager import CPU, GPU, LEAST_FREE_BYTES, Manager, OwnModel, VRAMState, install
from offload_core import demo
from offload_core.errors import OffloadError
from offload_core.ledger import Ledger
from offload_core.limits import Machine
from offload_core.memory_host import Claim, NoMemoryHost
from offload_core.plan import Rates
from offload_core.session import Progress, Session
from offload_core.streaming._accelerator import PinnedMemory
from phase_offload_nodes.calls import run_node
from phase_offload_nodes.comfy_memory import ComfyMemory
from phase_offload_nodes.host import ComfyHost
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.progress import NodeObserver
from phase_offload_nodes.schema import RECORD_KEY
from phase_offload_nodes.state import PackState

RATES = Rates({"float32": 1e11}, 1e10, 1e-6, 1e9, 5e9)


class Copies:
    """Warm host copies."""

    def __init__(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes

    def release(self, nbytes: int | None = None) -> int:
        freed = self.held_bytes if nbytes is None else min(nbytes, self.held_bytes)
        self.held_bytes -= freed
        return freed


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    return install(monkeypatch, Manager())


def memory_of(manager: Manager) -> ComfyMemory:
    """Our side of it, on a machine where the driver sees what ComfyUI sees."""
    driver = Machine(device_info=lambda device: (manager.free(device), manager.total), nvml_info=lambda index: None)
    return ComfyMemory(driver)


def load(manager: Manager, *sizes: int) -> list[OwnModel]:
    """Models of ComfyUI on the device, the first of them the one used last."""
    models = [OwnModel(size) for size in sizes]
    for model in reversed(models):
        manager.load_models_gpu([model], -LEAST_FREE_BYTES)
    manager.asked.clear()
    return models


# Room for a phase


def test_models_of_comfyui_make_as_much_room_as_a_phase_asks_for(manager: Manager) -> None:
    memory, (model,) = memory_of(manager), load(manager, 80)
    with memory.claim(Claim(GPU, 30, 10, spare_bytes=5)):
        assert model.loaded == 55  # 20 were free
    assert manager.asked[0] == 45


def test_a_phase_that_fits_beside_them_takes_nothing_from_them(manager: Manager) -> None:
    memory, (model,) = memory_of(manager), load(manager, 60)
    with memory.claim(Claim(GPU, 30, 10)):
        assert model.loaded == 60


def test_what_is_to_be_left_free_is_the_persons_reserve_where_that_is_more(manager: Manager) -> None:
    memory, (model,) = memory_of(manager), load(manager, 80)
    manager.reserve = 8
    with memory.claim(Claim(GPU, 30, 10, spare_bytes=5)):
        assert model.loaded == 52


def test_nothing_is_asked_for_on_the_cpu(manager: Manager) -> None:
    memory, (model,) = memory_of(manager), load(manager, 80)
    with memory.claim(Claim(CPU, 10**9, 10**9)):
        assert manager.asked == []
        assert model.loaded == 80


def test_models_of_comfyui_are_moved_in_inference_mode_like_everything_there(manager: Manager) -> None:
    """Phases run outside of it, and torch refuses to change a weight in place that was made in it."""
    memory, models = memory_of(manager), load(manager, 40, 40)
    with torch.inference_mode(False), memory.claim(Claim(GPU, 60, 0)):
        memory.unload_others()
    modes = [mode for model in models for mode in model.in_inference_mode]
    assert modes
    assert all(modes)


def test_what_comfyui_would_give_back_counts_as_free_until_it_was_asked(manager: Manager) -> None:
    memory, _ = memory_of(manager), load(manager, 80)

    def free() -> int:
        found = memory.machine().device(GPU)
        assert found is not None
        assert found.total == 100
        return found.free

    assert free() == 100
    manager.others_bytes = 15  # of other programs
    assert free() == 85
    with memory.claim(Claim(GPU, 20, 0)):
        assert free() == 20
    manager.reserve = 60
    assert free() == 75  # the engine's own headroom, half of so small a device, is part of the 60


# In ComfyUI's list


def test_a_running_phase_is_listed_and_nothing_afterwards(manager: Manager) -> None:
    memory = memory_of(manager)
    with memory.claim(Claim(GPU, 30, 10)):
        (ours,) = manager.loaded_models()
        assert (ours.model_size(), ours.loaded_size(), ours.load_device) == (30, 30, GPU)
        assert type(ours.model).__name__ == "PhaseOffload"
    del ours
    assert manager.loaded_models() == []


@pytest.mark.parametrize("error", [OffloadError("x"), KeyboardInterrupt()])
def test_nothing_is_listed_after_a_failed_phase(manager: Manager, error: BaseException) -> None:
    memory = memory_of(manager)
    with pytest.raises(type(error)), memory.claim(Claim(GPU, 30, 10)):
        raise error
    assert manager.loaded_models() == []


def test_a_running_phase_gives_nothing_and_comfyui_copes(manager: Manager) -> None:
    memory = memory_of(manager)
    with memory.claim(Claim(GPU, 60, 0)):
        manager.others_bytes = 60
        (ours,) = manager.loaded_models()
        manager.free_memory(70, GPU)
        assert ours.loaded_size() == 60
        assert manager.loaded_models() == []  # ComfyUI took it for unloaded
        (other,) = load(manager, 30)
        assert other.loaded == 30
        assert ours.loaded_size() == 60
    del ours
    manager.others_bytes = 0
    assert manager.loaded_models() == [other]
    with memory.claim(Claim(GPU, 60, 0)):
        assert len(manager.loaded_models()) == 2


def test_two_phases_one_after_the_other_don_t_make_room_for_each_other(manager: Manager) -> None:
    memory = memory_of(manager)
    for _ in range(3):
        with memory.claim(Claim(GPU, 90, 5)):
            pass
    assert manager.loaded_models() == []


def test_a_later_comfyui_that_asks_more_of_its_patchers_is_no_reason_to_fail(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import comfy.model_management as mm  # type: ignore[import-not-found]

    monkeypatch.setattr(mm, "load_models_gpu", lambda models: models[0].not_there())
    with caplog.at_level(logging.WARNING), memory_of(manager).claim(Claim(GPU, 30, 10)):
        pass
    assert "not_there" in caplog.text


# Warm host copies


def with_copies(manager: Manager, held: int = 40) -> tuple[ComfyMemory, Copies]:
    memory, copies = memory_of(manager), Copies(held)
    memory.offer(copies)
    with memory.claim(Claim(GPU, 20, 0)):
        pass
    return memory, copies


def test_copies_that_wait_are_listed_as_what_is_not_on_the_device(manager: Manager) -> None:
    _, copies = with_copies(manager)
    (ours,) = manager.loaded_models()
    assert (ours.model_size(), ours.loaded_size(), ours.current_loaded_device()) == (40, 0, CPU)
    assert copies.held_bytes == 40


def test_copies_go_when_everything_is_unloaded(manager: Manager) -> None:
    _, copies = with_copies(manager)
    manager.unload_all_models()
    assert copies.held_bytes == 0
    assert manager.loaded_models() == []


def test_copies_go_first_when_comfyui_needs_the_device(manager: Manager) -> None:
    _, copies = with_copies(manager)
    manager.others_bytes = 60
    (model,) = load(manager, 50)
    assert copies.held_bytes == 0
    assert model.loaded == 50


def test_copies_stay_for_the_next_phase_that_they_are_kept_for(manager: Manager) -> None:
    memory, copies = with_copies(manager)
    load(manager, 80)
    for _ in range(2):
        with memory.claim(Claim(GPU, 60, 10)):
            assert copies.held_bytes == 40
    assert copies.held_bytes == 40


def test_copies_made_after_a_phase_was_asked_for_memory_go_when_it_ends(manager: Manager) -> None:
    """ComfyUI has forgotten the patcher then, so nobody could ask for them later."""
    memory, copies = with_copies(manager)
    with memory.claim(Claim(GPU, 20, 0)):
        manager.unload_all_models()
        assert copies.held_bytes == 0
        copies.held_bytes = 7
    assert copies.held_bytes == 0
    assert manager.loaded_models() == []


def test_copies_on_a_host_without_a_device_go_in_parts(manager: Manager) -> None:
    memory, copies = memory_of(manager), Copies(40)
    memory.offer(copies)
    with memory.claim(Claim(CPU, 20, 0)):
        pass
    manager.others_bytes = 100
    manager.free_memory(10.5, CPU)
    assert copies.held_bytes == 29
    assert len(manager.loaded_models()) == 1


def test_loading_again_in_the_same_breath_keeps_copies(manager: Manager) -> None:
    _, copies = with_copies(manager)
    (ours,) = manager.loaded_models()
    ours.detach(unpatch_all=False)
    assert copies.held_bytes == 40


# Out of memory


def test_only_comfyuis_models_count_as_others_that_gave_way(manager: Manager) -> None:
    memory = memory_of(manager)
    with memory.claim(Claim(GPU, 20, 0)):
        assert memory.unload_others() is False
    (model,) = load(manager, 50)
    with memory.claim(Claim(GPU, 20, 0)):
        assert memory.unload_others() is True
        assert model.loaded == 0


# Pinned memory


def test_memory_is_pinned_by_comfyui_and_given_back_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = install(monkeypatch, Manager(can_pin=True))
    ledger = Ledger(device=0, host=1 << 20)
    pinned = PinnedMemory(ledger, 1 << 20, ComfyMemory().pins())
    taken = pinned.take(1000)
    assert taken is not None
    assert manager.pinned == {taken.data_ptr(): 1024}
    pinned.give(taken)
    pinned.trim()
    assert manager.pinned == {}
    pinned.take(5000)
    assert sum(manager.pinned.values()) == ledger.used("host") == 8192
    pinned.close()
    assert manager.pinned == {}
    assert ledger.used("host") == 0


def test_where_comfyui_refuses_to_pin_nothing_is_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, Manager(can_pin=False))
    ledger = Ledger(device=0, host=1 << 20)
    pinned = PinnedMemory(ledger, 1 << 20, ComfyMemory().pins())
    assert pinned.take(1000) is None
    assert pinned.free == 0
    assert ledger.used("host") == 0
    assert "refuses to pin" in caplog.text


def test_an_older_comfyui_leaves_pinning_to_torch(manager: Manager) -> None:
    assert ComfyMemory().pins() is None


# The engine's side


class Neighbour(NoMemoryHost):
    """Notes what it is asked for, and whether the phase had anything when it was."""

    def __init__(self, free: int | None = None) -> None:
        self.claims: list[Claim] = []
        self.events: list[str] = []
        self.free = free

    @contextlib.contextmanager
    def claim(self, claim: Claim) -> Iterator[None]:
        self.claims.append(claim)
        self.events.append("claim")
        try:
            yield
        finally:
            self.events.append("end")

    def machine(self) -> Machine:
        self.events.append("machine")
        return super().machine()


class Loads:
    """An observer that notes when weights arrive, and may stop a run then."""

    wants_preview = False

    def __init__(self, events: list[str], stop: bool = False) -> None:
        self.events, self.stop = events, stop

    def progress(self, event: Progress) -> None:
        if event.unit == "bytes":
            self.events.append("bytes")
            if self.stop:
                raise KeyboardInterrupt

    def check_interrupt(self) -> None:
        pass

    def make_room(self) -> bool:
        return False


def session_with(neighbour: Neighbour, stop: bool = False) -> Session:
    return Session(observer=Loads(neighbour.events, stop), memory_host=neighbour)


def test_a_phase_asks_for_what_its_plan_says_before_it_takes_anything() -> None:
    neighbour = Neighbour()
    session = session_with(neighbour)
    handle = offload_core.load(demo.MODEL, device="cpu")
    plan = offload_core.foresee_encode(handle, "a red circle", session=session, rates=RATES).plan
    planned = plan.phase("encode")
    assert planned is not None
    assert neighbour.claims == []  # looking ahead takes nothing
    neighbour.events.clear()
    embeds = offload_core.encode(handle, "a red circle", session=session, plan=plan)
    (claim,) = neighbour.claims
    assert claim.weight_bytes + claim.activation_bytes == planned.device_peak_bytes
    assert claim.activation_bytes == planned.activation_peak_bytes
    events = neighbour.events
    assert events.index("claim") < events.index("bytes")
    assert "machine" in events[events.index("claim") : events.index("bytes")]  # the budget is measured after it
    assert events[-1] == "end"
    assert torch.equal(*(_answers(made) for made in (embeds, offload_core.encode(handle, "a red circle"))))


def _answers(embeds: Any) -> torch.Tensor:
    return torch.cat([t.flatten().float() for plain in embeds.records.values() for t in plain.tensors])


def test_a_phase_without_a_plan_asks_for_its_weights_as_far_as_its_budget_goes() -> None:
    handle = offload_core.load(demo.MODEL, device="cpu")
    weights = sum(
        handle.source().components[name].weight_bytes
        for name in handle.source().components
        if name.startswith("text_encoder")
    )
    asked = []
    for budget in ("1GiB", weights // 2):
        neighbour = Neighbour()
        settings = replace(handle.settings, device_memory=budget, activation_memory=0)
        offload_core.encode(replace(handle, settings=settings), "a red circle", session=session_with(neighbour))
        asked.append(sum(claim.weight_bytes for claim in neighbour.claims))
    assert asked[0] == pytest.approx(weights, rel=0.1)
    assert asked[1] == weights // 2


def test_a_claim_ends_with_an_interrupted_phase() -> None:
    neighbour = Neighbour()
    with pytest.raises(KeyboardInterrupt):
        offload_core.encode(
            offload_core.load(demo.MODEL, device="cpu"), "a red circle", session=session_with(neighbour, stop=True)
        )
    assert neighbour.events.count("claim") == neighbour.events.count("end") == 1


# Flags and values of the host


def test_with_novram_nothing_stays_on_the_device_beyond_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    install(monkeypatch, manager)
    assert PackState(ComfyHost()).settings(device_memory="auto").resident_memory == "auto"
    install(monkeypatch, replace(manager, vram_state=VRAMState.NO_VRAM))
    settings = PackState(ComfyHost()).settings(device_memory="auto", host_memory="1GiB")
    assert (settings.resident_memory, settings.device_memory, settings.host_memory) == ("0", "auto", "1GiB")


def test_latents_go_where_the_host_keeps_what_lies_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --gpu-only. The record for VAE Decode Phase stays in RAM."""

    class Elsewhere(LocalHost):
        def image_placement(self) -> dict[str, Any]:
            return {"device": torch.device("meta"), "dtype": torch.float32}

    fake_engine.install(monkeypatch)
    state = PackState(Elsewhere())
    model, embeds = fake_engine.Handle("m", "cpu", "auto"), fake_engine.Embeds("x", None)
    job = {"steps": 0, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    result = run_node(
        "PhaseOffloadDenoise", state, NodeObserver(), {"model": model, "embeds": embeds, "seed": 1, **job}
    )
    (latent,) = result.values
    assert latent["samples"].device.type == "meta"
    assert latent[RECORD_KEY].exact.device.type == "cpu"


def test_values_on_wires_say_which_tensors_they_hold() -> None:
    handle = offload_core.load(demo.MODEL, device="cpu")
    assert handle._comfy_cache_tensors() == []
    embeds = offload_core.encode(handle, "a red circle")
    assert sum(tensor.nbytes for tensor in embeds._comfy_cache_tensors()) == embeds.nbytes > 0
    channels = handle.source().components["vae"].config["latent_channels"]
    latents = offload_core.latents_from_samples(handle, torch.zeros(1, channels, 8, 8))
    held = latents._comfy_cache_tensors()
    assert any(tensor is latents.decode.tensors[0] for tensor in held)


def test_a_pack_that_is_dropped_leaves_nothing_in_comfyuis_list(manager: Manager) -> None:
    memory, _ = with_copies(manager)
    assert len(manager.loaded_models()) == 1
    del memory
    gc.collect()
    assert manager.loaded_models() == []


def test_a_host_of_its_own_has_nobody_to_ask() -> None:
    assert isinstance(LocalHost().memory, NoMemoryHost)
