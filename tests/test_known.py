"""The descriptions of models and machines are whole, and each model can be built from its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload_core.errors import InputError
from offload_core.known import described_source, known_machine, known_machines, known_model, known_models
from offload_core.model_source import pipeline_class
from offload_core.phases._components import _skeleton
from offload_core.phases._pipeline import call_parameters

MODELS = known_models()


def test_the_models_that_everybody_asks_for_are_there_under_names_of_their_own() -> None:
    asked = "flux.1-dev flux.2-klein-4b flux.2-klein-9b z-image-turbo qwen-image wan2.2-t2v-a14b wan2.2-ti2v-5b ltx-2 "
    asked += "sdxl sd1.5 sd3.5-large hunyuanvideo-1.5 chroma"
    assert set(asked.split()) <= set(MODELS)
    for things in (MODELS, known_machines()):
        names = [name.lower() for thing in things.values() for name in (thing.name, *thing.aliases)]
        assert len(names) == len(set(names))
        assert all(thing.sources for thing in things.values())
    assert known_model("Black-Forest-Labs/FLUX.1-dev") is MODELS["flux.1-dev"]
    assert known_model("no such model") is None


def test_a_machine_that_is_not_known_is_answered_with_those_that_are_near() -> None:
    assert known_machine("RTX4060-8GB").device_bytes == 8 << 30
    with pytest.raises(InputError, match=r"No machine 'rtx4060-9gb' is known. Choose one of: .*rtx4060-8gb"):
        known_machine("rtx4060-9gb")


@pytest.mark.parametrize("name", known_machines())
def test_figures_of_a_machine_are_of_the_right_size(name: str) -> None:
    machine = known_machines()[name]
    assert 4 << 30 <= machine.device_bytes <= 256 << 30
    assert 1e11 < machine.memory_bytes_per_s < 1e13
    assert 1e9 < machine.link_bytes_per_s < 1e12
    assert all(1e12 < rate < 1e16 for rate in machine.flops.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_names_what_its_pipeline_takes(name: str) -> None:
    model = MODELS[name]
    with _opened(name) as source:
        cls: Any = pipeline_class(source)
    assert set(model.defaults) <= set(call_parameters(cls))
    assert set(model.components) <= set(cls._get_signature_keys(cls)[0])


@contextlib.contextmanager
def _opened(name: str) -> Iterator[Any]:
    with contextlib.ExitStack() as opened:
        try:
            source = opened.enter_context(described_source(MODELS[name]))
        except InputError as error:
            pytest.skip(str(error))
        yield source


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_component_is_built_from_its_description_and_has_that_many_parameters(name: str) -> None:
    with _opened(name) as source:
        for component in source.components.values():
            part = MODELS[name].components[component.name]
            if "parameters" not in part:
                continue
            dtype = getattr(torch, component.dtype or "")
            module = _skeleton(component, dtype, torch.device("cpu"))
            assert sum(p.numel() for p in module.parameters()) == part["parameters"], component.name
            assert component.weight_bytes >= part["parameters"] * dtype.itemsize
