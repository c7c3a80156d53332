"""vLLM-Omni's offloader under its own names: signatures, mutual exclusion, exact restoring, and its faults kept out."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers.hooks
import pytest
import torch
from torch import nn

import offload_core.sequential as sequential
from offload_core import OffloadSettings
from offload_core.errors import BudgetError, InputError, ManagedModuleError
from offload_core.limits import Machine, Memory
from offload_core.sequential import (
    HookRegistry,
    LayerWiseOffloadBackend,
    ModelLevelOffloadBackend,
    ModuleDiscovery,
    OffloadConfig,
    OffloadStrategy,
    SequentialOffloadHook,
    apply_sequential_offload,
    get_offload_backend,
    remove_sequential_offload,
)
from offload_core.sequential._exclusion import member_of
from offload_core.tiny_models import FAMILIES, load_tiny, run_whole, save_tiny
from sequential_models import Denoiser, Encoder, Pipeline, Vae, traces

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_device(*modules: nn.Module) -> list[int]:
    """Bytes of weights that can leave the device and are there."""
    found = []
    for module in modules:
        member = member_of(module)
        assert member is not None
        found.append(member.component.device_bytes - sum(buffer.nbytes for buffer in module.buffers()))
    return found


def there(*modules: nn.Module) -> list[bool]:
    return [nbytes > 0 for nbytes in on_device(*modules)]


# --- names and signatures --------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> str:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{star}{parameter.name}{default}")
    return ", ".join(shown)


SIGNATURES: dict[str, str] = {
    "apply_sequential_offload": "dit_modules, encoder_modules, device, pin_memory=True, use_hsdp=False",
    "remove_sequential_offload": "modules",
    "SequentialOffloadHook": "offload_targets, device, pin_memory=True, use_hsdp=False",
    "SequentialOffloadHook.pre_forward": "self, module, *args, **kwargs",
    "OffloadBackend": "config, device",
    "OffloadBackend.enable": "self, pipeline",
    "OffloadBackend.disable": "self",
    "ModelLevelOffloadBackend": "config, device",
    "ModelLevelOffloadBackend.enable": "self, pipeline",
    "ModelLevelOffloadBackend.disable": "self",
    "LayerWiseOffloadBackend": "config, device",
    "LayerWiseOffloadBackend.enable": "self, pipeline",
    "LayerWiseOffloadBackend.disable": "self",
    "LayerWiseOffloadBackend.get_blocks_attr_names": "model",
    "LayerWiseOffloadBackend.set_blocks_attr_names": "model, names",
    "LayerWiseOffloadBackend.get_blocks_from_dit": "model",
    "ModuleDiscovery.discover": "pipeline",
    "OffloadConfig.from_od_config": "od_config",
    "get_offload_backend": "config, device=None",
    "enable_offload_backend": "config, pipeline, device=None",
    "sequential_offload_component": "module",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_those_of_the_original(name: str) -> None:
    found: Any = sequential
    for part in name.split("."):
        found = getattr(found, part)
    assert parameters(found) == SIGNATURES[name]


def test_hooks_are_diffusers_own_and_the_rest_are_kinds_of_what_they_were() -> None:
    assert sequential.ModelHook is diffusers.hooks.ModelHook
    assert sequential.HookRegistry is diffusers.hooks.HookRegistry
    assert issubclass(SequentialOffloadHook, sequential.ModelHook)
    assert issubclass(ModelLevelOffloadBackend, sequential.OffloadBackend)
    assert issubclass(LayerWiseOffloadBackend, sequential.OffloadBackend)
    assert issubclass(OffloadStrategy, Enum)
    assert [each.value for each in OffloadStrategy] == ["none", "model_level", "layer_wise", "distributed_layer_wise"]
    config = OffloadConfig(OffloadStrategy.MODEL_LEVEL)
    assert (config.pin_cpu_memory, config.use_hsdp, config.strict) == (True, False, False)
    hook = SequentialOffloadHook([], CPU)
    assert (hook.offload_targets, hook.device, hook.pin_memory, hook.use_hsdp) == ([], CPU, True, False)


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ({}, OffloadStrategy.NONE),
        ({"enable_cpu_offload": True}, OffloadStrategy.MODEL_LEVEL),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, OffloadStrategy.LAYER_WISE),
        ({"enable_distributed_layerwise_offload": True}, OffloadStrategy.DISTRIBUTED_LAYER_WISE),
    ],
)
def test_their_flags_choose_the_backend(flags: dict[str, bool], strategy: OffloadStrategy) -> None:
    config = OffloadConfig.from_od_config(SimpleNamespace(**flags, pin_cpu_memory=False))
    assert config == OffloadConfig(strategy, pin_cpu_memory=False)
    backend = get_offload_backend(config, CPU)
    expected = {OffloadStrategy.NONE: type(None), OffloadStrategy.MODEL_LEVEL: ModelLevelOffloadBackend}
    assert type(backend) is expected.get(strategy, LayerWiseOffloadBackend)


def test_an_argument_without_effect_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload_core.sequential")
    pipeline = Pipeline()
    apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], CPU, pin_memory=True, use_hsdp=True)
    remove_sequential_offload([pipeline.transformer, pipeline.text_encoder])
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == ["pin_memory=True", "use_hsdp=True"]
    assert all("accepted, no effect because" in text for text in said)
    caplog.clear()
    apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], CPU, pin_memory=False)
    remove_sequential_offload([pipeline.transformer, pipeline.text_encoder])
    assert not [record for record in caplog.records if "no effect" in record.getMessage()]


def test_a_hook_that_joins_others_keeps_to_what_they_were_given(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline()
    dit, encoder = pipeline.transformer, pipeline.text_encoder
    SequentialOffloadHook([dit], CPU, pin_memory=False).pre_forward(encoder)
    with caplog.at_level(logging.INFO, "offload_core.sequential"):
        SequentialOffloadHook([encoder], CPU, pin_memory=True).pre_forward(dit)
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("pin_memory=True: accepted, no effect because") for text in said)
    elsewhere = SequentialOffloadHook([encoder], CPU)
    elsewhere.device = torch.device("cuda", 0)
    with pytest.raises(InputError, match="Use one device"):
        elsewhere.pre_forward(pipeline.transformer_2)
    assert member_of(pipeline.transformer_2) is None
    remove_sequential_offload([dit, encoder])


# --- who is on the device --------------------------------------------------------------------------------------------


def test_dits_and_encoders_are_never_on_the_device_together_and_encoders_may_be() -> None:
    pipeline, twin = Pipeline(), Pipeline()
    dits, encoders = [pipeline.transformer, pipeline.transformer_2], [pipeline.text_encoder, pipeline.image_encoder]
    apply_sequential_offload(dits, encoders, CPU)
    assert there(*dits, *encoders) == [False] * 4  # nothing is loaded before it is used
    ids, time = torch.arange(6)[None], torch.tensor(0.5)
    with torch.no_grad():
        first, second = pipeline.text_encoder(ids), pipeline.image_encoder(ids)
        assert there(*dits, *encoders) == [False, False, True, True]
        x = pipeline.transformer(first + second, time)
        assert there(*dits, *encoders) == [True, False, False, False]
        x = pipeline.transformer_2(x, time)
        assert there(*dits, *encoders) == [False, True, False, False]
        pipeline.image_encoder(ids)
        assert there(*dits, *encoders) == [False, False, False, True]
        expected = twin.transformer_2(twin.transformer(twin.text_encoder(ids) + twin.image_encoder(ids), time), time)
    assert torch.equal(x, expected)
    remove_sequential_offload([*dits, *encoders])


def enabled(pipeline: Pipeline, **options: Any) -> ModelLevelOffloadBackend:
    backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL, **options), CPU)
    backend.enable(pipeline)
    return backend


@pytest.mark.parametrize("strict", [False, True])
def test_the_vae_comes_when_it_decodes_and_has_the_others_leave_only_if_that_is_strict(strict: bool) -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    backend = enabled(pipeline, strict=strict)
    assert torch.equal(pipeline(), expected)  # decode is no forward, and no hook is on it
    alone = there(pipeline.transformer_2, pipeline.text_encoder, pipeline.vae)
    assert alone == [not strict, False, True]
    if strict:
        pipeline.text_encoder(torch.arange(6)[None])
        pipeline.image_encoder(torch.arange(6)[None])
        assert there(pipeline.vae, pipeline.text_encoder, pipeline.image_encoder) == [False, False, True]
    assert backend.device_bytes().keys() == pipeline.modules().keys()
    backend.disable()
    assert torch.equal(pipeline(), expected)


def test_a_component_leaves_after_its_block_also_if_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    pipeline, twin, x = Pipeline(), Pipeline(), torch.rand(1, 6, 32)
    enabled(pipeline)
    with sequential.sequential_offload_component(pipeline.vae) as vae:
        assert torch.equal(vae.decode(x), twin.vae.decode(x)) and there(pipeline.vae) == [True]
    assert there(pipeline.vae) == [False]
    with pytest.raises(KeyError), sequential.sequential_offload_component(pipeline.vae):
        pipeline.vae.decode(x)
        raise KeyError("x")
    assert there(pipeline.vae) == [False]
    caplog.set_level(logging.INFO, logger="offload_core")
    with sequential.sequential_offload_component(twin.vae):
        twin.vae.decode(x)
    assert "takes no turns" in caplog.text


def test_a_backend_is_had_from_their_flags_alone() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    flags = SimpleNamespace(enable_cpu_offload=True, pin_cpu_memory=False)
    same, backend = sequential.enable_offload_backend(flags, pipeline, CPU)
    assert same is pipeline and isinstance(backend, ModelLevelOffloadBackend) and backend.is_enabled()
    assert torch.equal(pipeline(), expected)
    backend.disable()
    assert sequential.enable_offload_backend(SimpleNamespace(), pipeline) == (pipeline, None)


def test_a_part_that_is_called_by_itself_takes_the_turn_of_its_component() -> None:
    pipeline, twin = Pipeline(), Pipeline()
    enabled(pipeline)
    x = torch.rand(1, 6, 32)
    pipeline.text_encoder(torch.arange(6)[None])
    assert torch.equal(pipeline.transformer.single_blocks[1](x), twin.transformer.single_blocks[1](x))
    assert there(pipeline.transformer, pipeline.text_encoder) == [True, False]
    assert torch.equal(
        torch.nn.functional.linear(x, pipeline.transformer_2.first.weight), x @ twin.transformer_2.first.weight.T
    )
    assert there(pipeline.transformer, pipeline.transformer_2) == [False, True]


def test_it_works_in_inference_mode_and_out_of_it() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    with torch.inference_mode():  # as ComfyUI runs nodes
        backend = enabled(pipeline, strict=True)
        assert torch.equal(pipeline(), expected)
    assert torch.equal(pipeline(), expected)
    with torch.inference_mode():
        assert torch.equal(pipeline(), expected)
        backend.disable()
    assert torch.equal(pipeline(), expected)


def test_a_dit_larger_than_the_device_runs_in_what_there_is() -> None:
    pipeline, expected = Pipeline(blocks=6), Pipeline(blocks=6)()
    budget = 60_000
    assert sum(p.nbytes for p in pipeline.transformer.parameters()) > 2 * budget
    settings = OffloadSettings(device_memory=budget, host_memory="1GiB", activation_memory=0, resident_below=0)
    backend = enabled(pipeline, settings=settings)
    for _ in range(2):
        assert torch.equal(pipeline(), expected)
        assert sum(backend.device_bytes().values()) <= budget
    backend.disable()
    assert torch.equal(pipeline(), expected)


def test_a_turn_keeps_no_more_resident_than_the_settings_allow() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    settings = OffloadSettings(
        device_memory="1MiB", resident_memory="20KiB", host_memory="1GiB", activation_memory=0, resident_below=0
    )
    backend = enabled(pipeline, settings=settings)
    assert torch.equal(pipeline(), expected)
    for module in pipeline.modules().values():
        member = member_of(module)
        assert member is not None
        plan = member.component._managed.plan  # type: ignore[attr-defined]
        assert plan.resident_bytes <= 20 << 10
    backend.disable()


def test_components_that_are_no_rivals_rest_as_well_where_both_do_not_fit() -> None:
    torch.manual_seed(0)
    parts = {"transformer": Denoiser(), "text_encoder": Encoder(), "mixer": nn.Linear(150, 150)}
    pipeline = SimpleNamespace(**{name: part.requires_grad_(False) for name, part in parts.items()})
    x, time, y = torch.rand(1, 6, 32), torch.tensor(0.5), torch.rand(2, 150)
    expected = parts["transformer"](x, time), parts["mixer"](y)
    settings = OffloadSettings(device_memory=100_000, host_memory="1GiB", activation_memory=0, resident_below=0)
    backend = enabled(pipeline, settings=settings)
    for _ in range(2):
        assert torch.equal(pipeline.transformer(x, time), expected[0])
        assert torch.equal(pipeline.mixer(y), expected[1])
        assert there(pipeline.transformer, pipeline.mixer) == [False, True]
    backend.disable()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_weights_take_turns_too(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    torch.manual_seed(0)
    quant_type = getattr(gguf.GGMLQuantizationType, kind)
    dit = GGUFLinear(64, 64, bias=True, compute_dtype=torch.float32)
    packed = gguf.quants.quantize(torch.rand(64, 64).numpy(), quant_type)
    dit.weight = GGUFParameter(torch.from_numpy(packed.copy()), quant_type=quant_type)
    dit.requires_grad_(False)
    encoder, x = nn.Linear(64, 64).requires_grad_(False), torch.rand(2, 64)
    expected, weight = dit(x), dit.weight
    apply_sequential_offload([dit], [encoder], CPU)
    for _ in range(2):
        assert torch.equal(dit(x), expected)
        assert there(dit, encoder) == [True, False]
        encoder(x)
        assert there(dit, encoder) == [False, True]
    remove_sequential_offload([dit, encoder])
    assert dit.weight is weight
    assert torch.equal(dit(x), expected)


def test_weights_that_are_in_ram_already_need_no_free_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    dit, encoder = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]).requires_grad_(False), nn.Linear(256, 256)
    assert sum(p.nbytes for p in dit.parameters()) > 4 << 20
    monkeypatch.setattr(Machine, "host", lambda self: Memory(16 << 30, 4 << 20, "a test"))
    x = torch.rand(2, 256)
    expected = dit(x)
    apply_sequential_offload([dit], [encoder], CPU)
    for _ in range(2):
        assert torch.equal(dit(x), expected)
    remove_sequential_offload([dit, encoder])


# --- restoring -------------------------------------------------------------------------------------------------------


def test_remove_restores_objects_storages_devices_forwards_and_attributes() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    before = {name: traces(module) for name, module in pipeline.modules().items()}
    backend = enabled(pipeline, strict=True)
    pipeline()
    backend.disable()
    assert {name: traces(module) for name, module in pipeline.modules().items()} == before
    backend.disable()  # may be called twice
    assert torch.equal(pipeline(), expected)
    copy.deepcopy(pipeline.transformer)


def test_a_forward_of_the_modules_own_and_hooks_of_others_stay() -> None:
    pipeline = Pipeline()
    dit = pipeline.transformer
    calls: list[str] = []

    class Counts(sequential.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("hook")
            return args, kwargs

    encoder = pipeline.text_encoder
    HookRegistry.check_if_exists_or_initialize(dit).register_hook(Counts(), "before")
    apply_sequential_offload([dit], [encoder], CPU)
    HookRegistry.check_if_exists_or_initialize(encoder).register_hook(Counts(), "after")
    pipeline()  # one call of the encoder, two of the DiT
    remove_sequential_offload([dit, encoder])
    pipeline()
    assert calls == ["hook"] * 6
    assert [list(HookRegistry.check_if_exists_or_initialize(each).hooks) for each in (dit, encoder)] == [
        ["before"],
        ["after"],
    ]


def test_nothing_changes_if_one_of_the_modules_can_not_be_managed() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    before = {name: traces(module) for name, module in pipeline.modules().items()}
    odd = nn.Linear(4, 4, device="meta")
    with pytest.raises(ManagedModuleError, match="meta device"):
        apply_sequential_offload([pipeline.transformer, pipeline.transformer_2], [pipeline.text_encoder, odd], CPU)
    assert {name: traces(module) for name, module in pipeline.modules().items()} == before
    with pytest.raises(InputError, match="listed twice"):
        apply_sequential_offload([pipeline.transformer], [pipeline.transformer], CPU)
    assert {name: traces(module) for name, module in pipeline.modules().items()} == before
    assert torch.equal(pipeline(), expected)


def test_a_registration_that_fails_takes_back_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    modules = [pipeline.transformer, pipeline.transformer_2, pipeline.text_encoder]
    before = [traces(module) for module in modules]
    register = HookRegistry.register_hook
    for k in range(1, 4):
        count = 0

        def fails(self: Any, hook: Any, name: str, k: int = k) -> None:
            nonlocal count
            count += 1
            if count == k:
                raise KeyboardInterrupt
            register(self, hook, name)

        monkeypatch.setattr(HookRegistry, "register_hook", fails)
        with pytest.raises(KeyboardInterrupt):
            apply_sequential_offload(modules[:2], modules[2:], CPU)
        monkeypatch.setattr(HookRegistry, "register_hook", register)
        for module, was in zip(modules, before, strict=True):
            assert traces(module) == was, k


def test_a_module_that_is_managed_already_is_refused_and_stays_managed() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    backend = enabled(pipeline)
    with pytest.raises(ManagedModuleError, match="already"):
        apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], CPU)
    with pytest.raises(ManagedModuleError, match="already"):
        ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL), CPU).enable(pipeline)
    assert torch.equal(pipeline(), expected)
    backend.disable()
    assert torch.equal(pipeline(), expected)


def test_a_module_that_is_not_managed_is_left_alone() -> None:
    pipeline = Pipeline()
    other = nn.Linear(4, 4)
    before = traces(other)
    apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], CPU)
    assert other.to(torch.float64).weight.dtype == torch.float64
    assert other.to("meta").weight.is_meta
    other = nn.Linear(4, 4)
    before = traces(other)
    remove_sequential_offload([other])
    assert traces(other) == before


def test_removing_one_module_leaves_the_others_offloaded() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    backend = enabled(pipeline)
    before = traces(Pipeline().transformer).keys()
    remove_sequential_offload([pipeline.transformer])
    assert member_of(pipeline.transformer) is None
    assert traces(pipeline.transformer).keys() == before
    assert torch.equal(pipeline(), expected)
    assert there(pipeline.transformer_2, pipeline.text_encoder) == [True, False]
    backend.disable()


def test_a_forward_that_raises_gives_the_device_back_and_the_next_one_runs() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    backend = enabled(pipeline)
    pipeline.transformer.fail = True
    with pytest.raises(RuntimeError, match="interrupted"):
        pipeline()
    assert there(pipeline.transformer) == [False]
    pipeline.transformer.fail = False
    assert torch.equal(pipeline(), expected)
    backend.disable()
    assert torch.equal(pipeline(), expected)


def test_a_budget_that_can_not_work_is_refused_with_the_smallest_that_can() -> None:
    pipeline = Pipeline()
    before = {name: traces(module) for name, module in pipeline.modules().items()}
    settings = OffloadSettings(device_memory=4096, host_memory="1GiB", activation_memory=0, resident_below=0)
    with pytest.raises(BudgetError, match="Raise device_memory by"):
        enabled(pipeline, settings=settings)
    assert {name: traces(module) for name, module in pipeline.modules().items()} == before


def test_a_dropped_pipeline_is_collected_without_disable() -> None:
    import weakref

    pipeline = Pipeline()
    apply_sequential_offload([pipeline.transformer], [pipeline.text_encoder], CPU)
    pipeline()
    gone = weakref.ref(pipeline.transformer)
    del pipeline
    gc.collect()
    assert gone() is None


# --- weights -------------------------------------------------------------------------------------------------------


def test_two_models_of_one_class_and_shape_keep_their_own_weights() -> None:
    pipelines, twins = [Pipeline(seed=seed) for seed in (1, 2)], [Pipeline(seed=seed) for seed in (1, 2)]
    backends = [enabled(pipeline) for pipeline in pipelines]
    for _ in range(2):
        for pipeline, twin in zip(pipelines, twins, strict=True):
            assert torch.equal(pipeline(), twin())
    for backend in backends:
        backend.disable()


def edit_in_place(dit: Denoiser) -> None:
    with torch.no_grad():
        dit.first.weight.add_(1)


def edit_through_data(dit: Denoiser) -> None:
    dit.conv.weight.data += 0.5


def edit_through_a_view(dit: Denoiser) -> None:
    with torch.no_grad():
        dit.position[0, 1].mul_(3)


def replace_data(dit: Denoiser) -> None:
    dit.single_blocks[0].up.weight.data = dit.single_blocks[0].up.weight.data * 2


@pytest.mark.parametrize("awake", [True, False], ids=["awake", "at rest"])
def test_a_changed_weight_outlives_swaps_and_removal(awake: bool) -> None:
    pipeline, twin = Pipeline(), Pipeline()
    backend = enabled(pipeline)
    pipeline()
    if awake:
        pipeline.transformer(torch.rand(1, 6, 32), torch.tensor(0.5))
    for edit in (edit_in_place, edit_through_data, edit_through_a_view, replace_data):
        assert there(pipeline.transformer) == [True] or not awake
        edit(pipeline.transformer)
        edit(twin.transformer)
    expected = twin()
    assert torch.equal(pipeline(), expected)
    backend.disable()
    changed = [
        name
        for name, w in twin.transformer.state_dict().items()
        if not torch.equal(w, pipeline.transformer.state_dict()[name])
    ]
    assert changed == []
    assert torch.equal(pipeline(), expected)


# --- hooks by hand ---------------------------------------------------------------------------------------------------


def test_a_hook_that_is_called_by_hand_makes_room_and_gives_the_arguments_back() -> None:
    pipeline = Pipeline()
    dit, encoder = pipeline.transformer, pipeline.text_encoder
    before = [traces(dit), traces(encoder)]
    for_dit = SequentialOffloadHook(offload_targets=[encoder], device=CPU)
    for_encoder = SequentialOffloadHook([dit], CPU, pin_memory=False)
    x = torch.rand(1)
    assert for_encoder.pre_forward(encoder, x, key=1) == ((x,), {"key": 1})
    encoder(torch.arange(6)[None])
    assert there(dit, encoder) == [False, True]
    assert for_dit.pre_forward(dit) == ((), {})
    assert there(dit, encoder) == [False, False]
    dit(torch.rand(1, 6, 32), torch.tensor(0.5))
    for_encoder.pre_forward(encoder)
    assert there(dit, encoder) == [False, False]
    remove_sequential_offload([dit, encoder])
    assert [traces(dit), traces(encoder)] == before


def test_hooks_that_are_registered_by_hand_take_turns_and_give_back_when_they_are_removed() -> None:
    pipeline, expected = Pipeline(), Pipeline()()
    dit, encoder = pipeline.transformer, pipeline.text_encoder
    registries = [HookRegistry.check_if_exists_or_initialize(module) for module in (dit, encoder)]
    before = [traces(dit), traces(encoder)]
    registries[0].register_hook(SequentialOffloadHook([encoder], CPU), "mine")
    registries[1].register_hook(SequentialOffloadHook([dit], CPU), "mine")
    pipeline.transformer_2 = dit
    pipeline()
    assert there(dit, encoder) == [True, False]
    registries[0].remove_hook("mine")
    assert traces(dit) == before[0]
    remove_sequential_offload([encoder])  # whatever the hook's name
    assert traces(encoder) == before[1]
    pipeline.transformer_2 = Pipeline().transformer_2
    assert torch.equal(pipeline(), expected)


# --- discovery -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dits", "encoders", "vaes", "auxiliaries"),
    [
        ("sd15", ["unet"], ["text_encoder"], ["vae"], []),
        ("sd15_safety", ["unet"], ["text_encoder"], ["vae"], ["safety_checker"]),
        ("flux", ["transformer"], ["text_encoder", "text_encoder_2"], ["vae"], []),
        ("wan22_a14b", ["transformer", "transformer_2"], ["text_encoder"], ["vae"], []),
        ("ltx2", ["transformer"], ["text_encoder", "connectors"], ["vae", "audio_vae", "vocoder"], []),
    ],
)
def test_components_of_a_pipeline_are_told_by_what_they_can_do(
    family: str, dits: list[str], encoders: list[str], vaes: list[str], auxiliaries: list[str]
) -> None:
    found = ModuleDiscovery.discover(FAMILIES[family].build())
    assert found.dit_names == dits
    assert found.encoder_names == encoders
    assert sorted(found.vae_names) == sorted(vaes)
    assert found.auxiliary_names == auxiliaries
    assert found.unrecognised_names == []


def test_unusual_names_are_recognised_and_what_is_not_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = SimpleNamespace(mllm=Encoder(), velocity=Denoiser(), codec=Vae(), mixer=nn.Linear(4, 4), scheduler=None)
    with caplog.at_level(logging.WARNING):
        found = ModuleDiscovery.discover(pipeline)
    assert (found.dit_names, found.encoder_names, found.vae_names) == (["velocity"], ["mllm"], ["codec"])
    assert found.unrecognised_names == ["mixer (Linear)"]
    (record,) = caplog.records
    assert "mixer (Linear)" in record.getMessage()
    backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL), CPU)
    backend.enable(pipeline)
    assert "mixer" in backend.device_bytes()  # it isn't left behind on another device
    backend.disable()


def test_a_pipeline_may_say_what_its_components_are(caplog: pytest.LogCaptureFixture) -> None:
    class Declares(nn.Module):
        _dit_modules = ("pipe.inner", "gone")
        _encoder_modules = ("pipe.reader",)

        def __init__(self) -> None:
            super().__init__()
            self.pipe = nn.ModuleDict({"inner": nn.Linear(4, 4), "reader": nn.Linear(4, 4)})

    found = ModuleDiscovery.discover(Declares())
    assert (found.dit_names, found.encoder_names) == (["pipe.inner"], ["pipe.reader"])
    assert "'gone'" in caplog.text


def test_a_pipeline_without_a_dit_is_an_error_that_names_what_there_is() -> None:
    backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL), CPU)
    with pytest.raises(InputError, match=r"text_encoder \(Encoder\)"):
        backend.enable(SimpleNamespace(text_encoder=Encoder()))
    assert not backend.is_enabled()


def test_a_pipeline_with_an_offload_of_its_own_is_asked_for_it() -> None:
    calls: list[Any] = []

    class Own:
        def enable_omni_model_cpu_offload(self, **options: Any) -> None:
            calls.append(options)
            if len(calls) == 1:
                raise RuntimeError("not yet")

        def disable_omni_model_cpu_offload(self) -> None:
            calls.append("disable")

    backend = ModelLevelOffloadBackend(OffloadConfig(OffloadStrategy.MODEL_LEVEL, pin_cpu_memory=False), CPU)
    with pytest.raises(RuntimeError, match="not yet"):
        backend.enable(Own())
    assert not backend.enabled
    backend.enable(Own())
    assert backend.enabled
    backend.disable()
    options = {"device": CPU, "pin_memory": False, "use_hsdp": False}
    assert calls == [options, "disable", options, "disable"]


# --- layer-wise ------------------------------------------------------------------------------------------------------


def layerwise(pipeline: Any, **options: Any) -> LayerWiseOffloadBackend:
    backend = LayerWiseOffloadBackend(OffloadConfig(OffloadStrategy.LAYER_WISE, **options), CPU)
    backend.enable(pipeline)
    return backend


WIDTH = 160  # so that a block's matrices are above what always stays


def test_a_dit_is_streamed_in_the_room_of_two_blocks_whatever_its_lists_are_called() -> None:
    pipeline, expected = Pipeline(blocks=4), Pipeline(blocks=4)()
    pipeline.transformer, pipeline.transformer_2 = Denoiser(WIDTH, 4), Denoiser(WIDTH, 4)
    del expected
    twin = copy.deepcopy(pipeline.transformer)
    before = traces(pipeline.transformer)
    x, time = torch.rand(1, 6, WIDTH), torch.tensor(0.5)
    with torch.no_grad():
        expected = twin(x, time)
        backend = layerwise(pipeline)
        block = sum(p.nbytes for p in twin.double_blocks[0].parameters())
        rest = sum(t.nbytes for t in (*twin.parameters(), *twin.buffers())) - 8 * block
        assert backend.device_budget_bytes < 2 * block + rest + 9 * 8 * 1024  # small weights of eight blocks, twice
        for _ in range(3):  # the last block is followed by the first
            assert torch.equal(pipeline.transformer(x, time), expected)
            assert backend.device_bytes()["transformer"] <= backend.device_budget_bytes
        for skip in ({1, 2}, {0}, {7}, {0, 1, 2, 3, 4, 5, 6, 7}, set()):  # as a step cache does
            pipeline.transformer.skip = twin.skip = skip
            assert torch.equal(pipeline.transformer(x, time), twin(x, time))
        backend.disable()
        assert torch.equal(pipeline.transformer(x, time), expected)
    assert traces(pipeline.transformer) == before


def test_resident_bytes_stay_on_the_device() -> None:
    def after_a_step(resident_bytes: int) -> tuple[int, int, int]:
        pipeline = SimpleNamespace(transformer=Denoiser(WIDTH, 4).requires_grad_(False), vae=Vae())
        backend = layerwise(pipeline, resident_bytes=resident_bytes)
        pipeline.transformer(torch.rand(1, 6, WIDTH), torch.tensor(0.5))
        member = member_of(pipeline.transformer)
        assert member is not None
        plan = member.component._managed.plan  # type: ignore[attr-defined]
        budget = backend.device_budget_bytes
        backend.disable()
        return budget, plan.resident_bytes, plan.streamed_bytes

    none, some = after_a_step(0), after_a_step(600_000)
    assert some[0] == none[0] + 600_000
    assert some[1] >= none[1] + 200_000  # the ring takes its part of the room, too
    assert some[2] < none[2]


def test_block_lists_are_found_or_said_by_the_model_and_never_by_its_class() -> None:
    one, other = Denoiser(), Denoiser()
    assert LayerWiseOffloadBackend.get_blocks_attr_names(one) == ["double_blocks", "single_blocks"]
    assert LayerWiseOffloadBackend.get_blocks_from_dit(one) == [*one.double_blocks, *one.single_blocks]
    LayerWiseOffloadBackend.set_blocks_attr_names(one, ["single_blocks"])
    assert LayerWiseOffloadBackend.get_blocks_from_dit(one) == [*one.single_blocks]
    assert LayerWiseOffloadBackend.get_blocks_attr_names(other) == ["double_blocks", "single_blocks"]
    LayerWiseOffloadBackend.set_blocks_attr_names(one, ["blocks"])
    with pytest.raises(InputError, match="'blocks'"):
        LayerWiseOffloadBackend.get_blocks_from_dit(one)


# --- whole pipelines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ModelLevelOffloadBackend, LayerWiseOffloadBackend])
def test_a_diffusers_pipeline_with_a_step_cache_gives_the_same_picture_bit_by_bit(kind: Any, tmp_path: Path) -> None:
    """The cache skips blocks. It is switched on before one kind of offload and after the other."""
    save_tiny("flux", tmp_path)
    call = {**FAMILIES["flux"].call, "num_inference_steps": 4}
    cache = diffusers.hooks.FirstBlockCacheConfig(threshold=0.9)
    twin, pipeline = (load_tiny(tmp_path, dtype=torch.float32) for _ in range(2))
    expected = run_whole(twin, seed=1, **call)
    twin.transformer.enable_cache(cache)
    cached = run_whole(twin, seed=1, **call)
    assert not torch.equal(cached, expected)

    settings = OffloadSettings(device_memory=350_000, host_memory="1GiB", activation_memory=0, resident_below=0)
    backend = kind(OffloadConfig(OffloadStrategy.MODEL_LEVEL, settings=settings), CPU)
    if kind is LayerWiseOffloadBackend:
        pipeline.transformer.enable_cache(cache)
    backend.enable(pipeline)
    if kind is ModelLevelOffloadBackend:
        pipeline.transformer.enable_cache(cache)
    assert torch.equal(run_whole(pipeline, seed=1, **call), cached)
    assert backend.device_bytes()["transformer"] < sum(p.nbytes for p in twin.transformer.parameters())
    backend.disable()
    assert torch.equal(run_whole(pipeline, seed=1, **call), cached)
    pipeline.transformer.disable_cache()
    assert torch.equal(run_whole(pipeline, seed=1, **call), expected)
