"""A phase is a scope that owns its weights: however it is left, they are gone, even if somebody keeps the module."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offload_core as po
from offload_core.phases._roles import Role, role_of
from offload_core.streaming import is_cold
from staging import job, one_shot, staged, tiny_model, words


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Release has to work by reference counting alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Interrupt(BaseException):
    """Like the host's own interrupt: not an Exception."""


class StopAt(po.SilentObserver):
    """Raises at the k-th poll."""

    def __init__(self, k: int, error: type[BaseException] = Interrupt) -> None:
        self.k, self.error, self.polls = k, error, 0

    def check_interrupt(self) -> None:
        self.polls += 1
        if self.polls == self.k:
            raise self.error("stop")


def handle_of(name: str, **options: Any) -> po.Handle:
    return po.load(tiny_model(name), device="cpu", **options)


def storages_of(module: torch.nn.Module) -> list[weakref.ref[Any]]:
    return [weakref.ref(p.untyped_storage()) for p in module.parameters()]


@pytest.mark.parametrize("exit_by", ["return", "exception", "keyboard", "host"])
def test_every_exit_takes_the_weights_from_whoever_keeps_the_module(exit_by: str, no_collector: None) -> None:
    session, kept, watched, errors = po.Session(), [], [], []
    raised = {"exception": ValueError, "keyboard": KeyboardInterrupt, "host": Interrupt}.get(exit_by)
    try:
        with po.open_phase(handle_of("flux"), "transformer", session=session) as phase:
            transformer = phase.modules["transformer"]
            phase.components["transformer"].load()
            kept += [transformer, transformer.transformer_blocks[0], dict(transformer.named_modules())]
            watched += storages_of(transformer)
            assert all(storage() is not None for storage in watched)
            if raised:
                raise raised("out")
    except BaseException as error:
        errors.append(error)
    assert [type(error) for error in errors] == ([raised] if raised else [])
    assert all(storage() is None for storage in watched)
    report = session.report.phases[0]
    assert report.weight_bytes > 0
    assert report.leaked_bytes == 0
    assert all(is_cold(p.data) for p in kept[1].parameters())


def test_a_kept_raw_tensor_is_reported_as_leaked() -> None:
    session = po.Session()
    with po.open_phase(handle_of("flux"), "transformer", session=session, name="mine") as phase:
        phase.components["transformer"].load()
        kept = phase.modules["transformer"].proj_out.weight.detach()
    assert session.report.phases[0].leaked_bytes >= kept.nbytes


def test_a_kept_exception_keeps_no_activation_and_no_weight_alive(no_collector: None) -> None:
    watched: list[weakref.ref[Any]] = []

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        watched.extend(storages_of(module))
        watched.append(weakref.ref(kwargs["hidden_states"].untyped_storage()))
        raise RuntimeError("block 0 fails")

    handle = handle_of("flux")
    with pytest.raises(RuntimeError, match="block 0 fails") as kept, po.open_phase(handle, "transformer") as phase:
        component = phase.components["transformer"]
        component.load()
        component.module.transformer_blocks[0].register_forward_pre_hook(fail, with_kwargs=True)
        inputs = {"hidden_states": (1, 12, 16), "encoder_hidden_states": (1, 4, 32), "pooled_projections": (1, 32)}
        config = component.module.config
        inputs["hidden_states"] = (1, 12, config.in_channels)
        inputs["encoder_hidden_states"] = (1, 4, config.joint_attention_dim)
        inputs["pooled_projections"] = (1, config.pooled_projection_dim)
        tensors = {name: torch.ones(shape) for name, shape in inputs.items()}
        ids = {"img_ids": torch.zeros(12, 3), "txt_ids": torch.zeros(4, 3), "timestep": torch.ones(1)}
        component.module(**tensors, **ids, guidance=torch.ones(1))
    del component, phase, tensors
    assert kept.value is not None
    assert len(watched) > 1
    assert [storage() for storage in watched] == [None] * len(watched)


def polls_of(name: str) -> int:
    observer = StopAt(-1)
    session = po.Session(observer)
    handle = handle_of(name)
    po.denoise(handle, po.encode(handle, **words(name)), session=session, **job(name, guided=False))
    return observer.polls


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (Interrupt, 10),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((Interrupt, 60), (KeyboardInterrupt, 8))),
    ],
)
def test_an_interrupt_anywhere_in_denoise_arrives_and_leaves_nothing(
    error: type[BaseException], times: int, no_collector: None
) -> None:
    name = "wan22_a14b"
    handle, call = handle_of(name), job(name, guided=False)
    embeds = po.encode(handle, **words(name))
    total = polls_of(name)
    assert total > 10  # at every weight, block and step, in both experts
    for k in {*range(1, total, total // times + 1), total}:
        session = po.Session(StopAt(k, error))
        with pytest.raises(error):
            po.denoise(handle, embeds, session=session, **call)
        assert session.report.phases[-1].leaked_bytes == 0
    expected, _ = one_shot(tiny_model(name), dtype=torch.float32, seed=0, **words(name), **call)
    again = torch.as_tensor(po.decode(handle, po.denoise(handle, embeds, **call), "pt"))
    assert torch.equal(again, expected)


def test_interrupts_are_polled_in_encode_and_decode_too() -> None:
    handle = handle_of("flux")
    with pytest.raises(Interrupt):
        po.encode(handle, **words("flux"), session=po.Session(StopAt(3)))
    latents = po.denoise(handle, po.encode(handle, **words("flux")), **job("flux", guided=False))
    with pytest.raises(Interrupt):
        po.decode(handle, latents, session=po.Session(StopAt(3)))


def test_a_part_that_was_taken_before_its_component_was_loaded_runs_as_the_loaded_one() -> None:
    # Ideogram 4 takes the layers of its text encoder first and then calls them one by one.
    ids = torch.arange(4)[None]
    with po.open_phase(handle_of("flux"), "text_encoder") as phase:
        encoder: Any = phase.modules["text_encoder"]
        taken = encoder.embeddings
        made = taken(input_ids=ids)
        assert encoder.embeddings is not taken
        assert torch.equal(made, encoder.embeddings(input_ids=ids))
    with pytest.raises(po.ColdWeightError, match=r"text_encoder\.embeddings"):
        taken(input_ids=ids)


def test_a_text_encoder_whose_code_is_in_diffusers_belongs_to_encode() -> None:
    assert role_of(handle_of("kolors").source().components["text_encoder"]) is Role.ENCODER


def test_two_experts_are_never_loaded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload_core.phases._components import Component

    handle, loaded, seen = handle_of("wan22_a14b"), set(), []
    embeds = po.encode(handle, **words("wan22_a14b"))
    load, release = Component.load, Component.release

    def watched_load(self: Component) -> None:
        load(self)
        loaded.add(self.source.name)
        seen.append(sorted(loaded))

    def watched_release(self: Component) -> Any:
        loaded.discard(self.source.name)
        return release(self)

    monkeypatch.setattr(Component, "load", watched_load)
    monkeypatch.setattr(Component, "release", watched_release)
    session = po.Session()
    po.denoise(handle, embeds, session=session, **job("wan22_a14b", guided=False))
    assert session.report.phases[-1].forwards.keys() == {"transformer", "transformer_2"}
    assert seen == [["transformer"], ["transformer_2"]]


def test_cold_weights_raise_by_name_and_never_compute() -> None:
    with po.open_phase(handle_of("sd15")) as phase:
        unet = phase.pipeline.unet
        with pytest.raises(po.ColdWeightError, match=r"unet\.conv_in\.weight"):
            torch.nn.functional.conv2d(torch.ones(1, 4, 8, 8), unet.conv_in.weight)
        with pytest.raises(po.ColdWeightError, match=r"unet\.conv_in\.bias"):
            unet.conv_in.bias + 1
        with pytest.raises(po.ColdWeightError):
            unet.state_dict()["conv_in.weight"].sum()
        with pytest.raises(po.ColdWeightError):
            pickle.dumps(unet.conv_in.weight)
        assert unet.conv_in.weight.shape[1] == 4
        assert unet.dtype == torch.float32


def test_a_second_phase_on_a_running_session_is_refused() -> None:
    session, handle = po.Session(), handle_of("sd15")
    with po.open_phase(handle, session=session), pytest.raises(po.PhaseBusyError, match="while another phase"):
        po.encode(handle, **words("sd15"), session=session)
    po.encode(handle, **words("sd15"), session=session)


def test_sessions_of_two_threads_run_side_by_side() -> None:
    path, call = tiny_model("sd15"), job("sd15", guided=False)
    expected, _ = one_shot(path, dtype=torch.float32, seed=1, **words("sd15"), **call)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(staged(path, words("sd15"), call, dtype="auto", seed=1)[0])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert all(torch.equal(result, expected) for result in results)


def test_phases_under_the_hosts_inference_mode_give_the_same_normal_tensors() -> None:
    path, call = tiny_model("wan22_5b"), job("wan22_5b", guided=False)
    expected, _ = one_shot(path, dtype=torch.float32, seed=1, **words("wan22_5b"), **call)
    with torch.inference_mode():
        pictures, _ = staged(path, words("wan22_5b"), call, dtype="auto", seed=1)
    assert torch.equal(pictures, expected)


def test_a_handle_is_small_plain_data() -> None:
    handle = handle_of("flux", dtype="bfloat16", settings=po.OffloadSettings(vae_tiling="off"))
    data = pickle.dumps(handle)
    assert len(data) < 10_000
    assert pickle.loads(data) == handle
    assert hash(pickle.loads(data)) == hash(handle)
    assert len(repr(handle)) < 120
    assert str(tiny_model("flux")) not in repr(handle)
    with pytest.raises(AttributeError):
        handle.dtype = "float16"  # type: ignore[misc]


def test_loading_a_handle_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("load read weights")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    handle = handle_of("flux")
    assert handle.defaults["num_inference_steps"] == 28


@pytest.mark.parametrize(
    ("name", "argument"),
    [("flux", "guidance_scale"), ("qwen_image", "true_cfg_scale"), ("sd15", "guidance_scale")],
)
def test_guidance_means_the_argument_that_the_model_listens_to(name: str, argument: str) -> None:
    # FLUX.1-dev was distilled to take its guidance as an input; true CFG would double the time and burn the picture.
    assert handle_of(name).guidance_name == argument


def test_a_model_changed_since_it_was_loaded_is_refused(tmp_path: Any) -> None:
    import os
    import shutil

    path = shutil.copytree(tiny_model("sd15"), tmp_path / "model")
    handle = po.load(path, device="cpu")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    os.utime(weights, ns=(1, 1))
    with pytest.raises(po.ModelError, match="changed"):
        po.encode(handle, "a star")
