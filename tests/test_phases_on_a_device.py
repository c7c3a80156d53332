"""Phases on an accelerator (a pretend one): the CPU's bits, and every byte back after success, error and cancel."""

from __future__ import annotations

from typing import Any

import pytest

from vgpu.runner import run_on_vgpu


def _setup(name: str) -> tuple[Any, ...]:
    import torch

    import offload_core as po
    import vgpu
    from staging import job, tiny_model, words

    device = vgpu.install()
    path = tiny_model(name)
    return torch, device, po, path, words(name), job(name, guided=True, images=2)


def same_bits_and_nothing_left(names: list[str]) -> dict[str, Any]:
    return {name: _same_bits_and_nothing_left(name) for name in names}


def _same_bits_and_nothing_left(name: str) -> dict[str, Any]:
    torch, device, po, path, texts, call = _setup(name)

    def run(where: str) -> tuple[Any, Any]:
        session = po.Session()
        # bfloat16, cast from float32 files: the CPU's weights are then aligned copies, as the device's are. Mapped
        # float32 weights may give other last bits at batch 1, by their address.
        handle = po.load(path, device=where, dtype="bfloat16")
        embeds = po.encode(handle, **texts, session=session)
        held = [device.current()]
        latents = po.denoise(handle, embeds, seed=1, session=session, **call)
        held.append(device.current())
        if latents.only_sound:
            pictures, _ = po.decode_sound(handle, latents, session=session)
        else:
            pictures = torch.as_tensor(po.decode(handle, latents, "pt", session=session))
        held.append(device.current())
        assert pictures.device.type == "cpu"
        return pictures, (held, session.report)

    expected, _ = run("cpu")
    pictures, (held, report) = run("auto")
    return {
        "equal": torch.equal(pictures, expected),
        "held": held,
        "pinned": device.pinned_bytes(),
        "peaks": [phase.device_peak_bytes for phase in report.phases],
        "weights": [phase.weight_bytes for phase in report.phases],
        "leaked": [phase.leaked_bytes for phase in report.phases],
        "device": {phase.device for phase in report.phases} == {"vgpu:0"},
    }


@pytest.mark.slow
def test_an_accelerator_gives_the_cpus_bits_and_gets_every_byte_back() -> None:
    names = ["sd15", "sdxl", "flux", "flux2_klein", "z_image", "qwen_image", "wan22_a14b", "stable_audio", "ace_step"]
    for name, result in run_on_vgpu(same_bits_and_nothing_left, names).items():
        assert result["equal"], name
        assert result["held"] == [0, 0, 0], name
        assert result["pinned"] == 0, name
        assert result["leaked"] == [0, 0, 0], name
        assert result["device"], name
        assert all(peak > 0 for peak in result["peaks"]), name
        if name != "wan22_a14b":  # its two experts are both loaded, one after the other
            assert all(p >= weights for p, weights in zip(result["peaks"], result["weights"], strict=True)), name


def cancel_and_fail() -> dict[str, Any]:
    torch, device, po, path, texts, call = _setup("flux")
    handle = po.load(path)
    embeds = po.encode(handle, **texts)
    latents = po.denoise(handle, embeds, **call)

    class Stop(BaseException):
        pass

    class At(po.SilentObserver):
        def __init__(self, k: int) -> None:
            self.k, self.n = k, 0

        def check_interrupt(self) -> None:
            self.n += 1
            if self.n == self.k:
                raise Stop

    held, kept = [], []
    phases = [
        lambda s: po.encode(handle, **texts, session=s),
        lambda s: po.denoise(handle, embeds, session=s, **call),
        lambda s: po.decode(handle, latents, session=s),
    ]
    for phase in phases:
        counter = At(-1)
        phase(po.Session(counter))
        for k in sorted({1, 2, counter.n // 2, counter.n}):
            try:
                phase(po.Session(At(k)))
            except Stop as error:
                kept.append(error)
            held.append(device.current())
    stopped = len(kept)
    for share in (0.2, 0.5, 0.9):
        device.reset_peak()
        phases[1](po.Session())
        device.set_cap(int(device.peak() * share))
        try:
            phases[1](po.Session())
        except po.InsufficientMemoryError as error:
            kept.append(error)
        device.set_cap(None)
        held.append(device.current())
    names = [type(error).__name__ for error in kept]
    again = po.denoise(handle, embeds, **call)
    equal = torch.equal(again.decode.tensors[0], latents.decode.tensors[0])
    sentences = [str(error) for error in kept[stopped:]]
    return {"held": held, "names": names, "stopped": stopped, "sentences": sentences, "equal": equal}


def test_cancel_and_out_of_memory_give_every_byte_back_while_the_error_is_kept() -> None:
    result = run_on_vgpu(cancel_and_fail)
    assert result["held"] == [0] * len(result["names"])
    assert result["stopped"] == 12
    assert len(result["sentences"]) == 3
    assert all("vgpu:0" in sentence and "memory" in sentence for sentence in result["sentences"])
    assert result["equal"]


def decode_that_only_fits_in_tiles() -> dict[str, Any]:
    torch, device, po, path, texts, call = _setup("sdxl")
    handle = po.load(path)
    latents = po.denoise(handle, po.encode(handle, **texts), **call)
    latents = latents.with_samples(torch.randn(1, latents.samples.shape[1], 144, 144))
    device.reset_peak()
    po.decode(handle, latents, tiling="off")
    whole = device.peak()
    device.set_cap(whole * 3 // 4)
    session = po.Session()
    pictures = po.decode(handle, latents, session=session)
    device.set_cap(None)
    return {"size": pictures[0].size, "notes": session.report.phases[-1].notes, "left": device.current()}


def test_a_decode_that_does_not_fit_whole_is_done_in_tiles_by_itself() -> None:
    result = run_on_vgpu(decode_that_only_fits_in_tiles)
    assert result["size"] == [576, 576]
    assert "Decoded in tiles" in result["notes"][-1]
    assert result["left"] == 0


def too_small_a_budget() -> str:
    _, device, po, path, _, _ = _setup("flux")
    handle = po.load(path, settings=po.OffloadSettings(device_memory="8KiB", resident_below=0))
    try:
        po.encode(handle, "a star")
    except po.InsufficientMemoryError as error:
        return f"{error} {device.current()}"
    return "ran"


def test_a_budget_that_cannot_work_is_refused_with_the_smallest_that_can_and_nothing_stays() -> None:
    sentence = run_on_vgpu(too_small_a_budget)
    assert "vgpu:0" in sentence
    assert "Raise device_memory by" in sentence
    assert sentence.endswith(" 0")


def purge_gives_back() -> dict[str, Any]:
    _, device, po, *_ = _setup("sd15")
    before = device.current()
    report = po.purge()
    return {"device": report.device, "sentence": report.sentence(), "same": device.current() == before}


def test_purge_says_what_it_freed() -> None:
    result = run_on_vgpu(purge_gives_back)
    assert result["device"] == "vgpu:0"
    assert "on vgpu:0 and" in result["sentence"]
    assert result["same"]


def warm_figures(settings: dict[str, Any]) -> dict[str, Any]:
    torch, device, po, path, texts, call = _setup("sd15")
    session = po.Session()
    handle = po.load(path, settings=po.OffloadSettings(warm=True, **settings))
    embeds = po.encode(handle, **texts, session=session)
    first, second = (po.denoise(handle, embeds, seed=1, session=session, **call).samples for _ in range(2))
    again = po.encode(handle, **texts, session=session)
    cold, warm = session.report.phases[1:3]
    held = session.warm.held_bytes
    return {
        "equal": torch.equal(first, second),
        "cold": [cold.bytes_read >= cold.weight_bytes, cold.streamed_bytes],
        "warm": [warm.bytes_read, warm.warm_bytes >= warm.weight_bytes, warm.streamed_bytes],
        "encode": session.report.phases[3].weight_bytes,
        "same_embeds": [record.key() == again.records[key].key() for key, record in embeds.records.items()],
        "held": held,
        "freed": session.warm.release(),
        "left": [device.current(), device.pinned_bytes()],
    }


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"device_memory": 500 << 10, "activation_memory": 0, "resident_below": 4096}])
def test_an_accelerator_sends_warm_copies_without_reading_files(settings: dict[str, Any]) -> None:
    found = run_on_vgpu(warm_figures, settings)
    assert found["equal"]
    assert all(found["same_embeds"])
    assert found["cold"][0]
    assert found["warm"] == [0, True, found["cold"][1]]
    assert bool(found["cold"][1]) == bool(settings)
    assert found["encode"] == 0
    assert found["held"] == found["freed"] > 0
    assert found["left"] == [0, 0]
