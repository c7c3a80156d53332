"""Folders with a quantization_config: each format loads and keeps its bits in a budget, or is refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload_core as po
from offload_core import quantised
from offload_core.model_source import ComponentSource
from offload_core.quantised import check_device, check_quantised, import_format, method_of, packed_sizes
from offload_core.streaming._tensor_classes import bytes_beside
from quantised_models import CONFIGS, save_quantised
from staging import job, staged, words

KIB = 1024
CODES, SCALE = torch.zeros(4, 4, dtype=torch.int8), torch.ones(4, 1)
NIBBLES = torch.zeros(8, 1, dtype=torch.uint8)
TORCHAO = {"a.weight": '{"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}'}
# By method: the tensors of a file, what it says of them, and those that a weight can't do without.
FILES: dict[str, tuple[str, dict[str, torch.Tensor], dict[str, str], list[str]]] = {
    "torchao": ("torchao", {"a._weight_qdata": CODES, "a._weight_scale": SCALE}, TORCHAO, ["a._weight_scale"]),
    "bnb-int8": ("bitsandbytes", {"a.weight": CODES, "a.SCB": SCALE}, {}, ["a.SCB"]),
    "bnb-nf4": (
        "bitsandbytes",
        {
            "a.weight": NIBBLES,
            "a.weight.absmax": SCALE,
            "a.weight.quant_map": SCALE,
            "a.weight.nested_absmax": SCALE,
            "a.weight.nested_quant_map": SCALE,
            "a.weight.quant_state.bitsandbytes__nf4": NIBBLES,
        },
        {},
        ["a.weight.absmax", "a.weight.quant_map", "a.weight.nested_quant_map"],
    ),
    "sdnq": (
        "sdnq",
        {"a.weight": CODES, "a.scale": SCALE, "a.svd_up": SCALE, "a.svd_down": SCALE},
        {},
        ["a.scale", "a.svd_up", "a.svd_down"],
    ),
}


def component(
    folder: Path, method: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> ComponentSource:
    file = folder / "weights.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata)
    config = {"quantization_config": {"quant_method": method}}
    return ComponentSource("transformer", "diffusers", "X", folder, config, (file,), file.stat().st_size, "int8")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_is_installed", lambda package: True)


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lacks_a_scale_is_refused_by_its_name(case: str, tmp_path: Path, installed: None) -> None:
    method, tensors, metadata, companions = FILES[case]
    check_quantised(component(tmp_path, method, tensors, metadata))
    for lost in companions:
        fewer = {name: tensor for name, tensor in tensors.items() if name != lost}
        with pytest.raises(po.ModelError, match=f"lack '?\"?{lost}"):
            check_quantised(component(tmp_path, method, fewer, metadata))


def test_packed_tensors_without_what_torchao_notes_of_them_are_refused(tmp_path: Path, installed: None) -> None:
    _, tensors, _, _ = FILES["torchao"]
    with pytest.raises(po.ModelError, match="a.weight in its metadata"):
        check_quantised(component(tmp_path, "torchao", tensors))


def test_a_missing_package_is_a_sentence_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_is_installed", lambda package: False)
    for method in ("torchao", "bitsandbytes", "sdnq"):
        with pytest.raises(po.ModelError, match=f"`pip install {method}`"):
            check_quantised(component(tmp_path, method, {"a.weight": CODES}))


@pytest.mark.parametrize(("method", "why"), [("quanto", "can't read back"), ("hqq", "no rule")])
def test_a_format_without_a_way_in_is_refused_by_name(method: str, why: str, tmp_path: Path, installed: None) -> None:
    with pytest.raises(po.ModelError, match=f"{method}.*{why}.*torchao, bitsandbytes, sdnq"):
        check_quantised(component(tmp_path, method, {"a.weight": CODES}))


def test_bitsandbytes_denoisers_are_refused_on_a_cpu_only(tmp_path: Path) -> None:
    made = component(tmp_path, "bitsandbytes", {"a.weight": CODES, "a.SCB": SCALE})
    with pytest.raises(po.DeviceError, match="accelerator"):
        check_device(made, torch.device("cpu"))
    check_device(made, torch.device("cuda"))


@pytest.mark.parametrize("case", FILES)
def test_packed_sizes_count_every_tensor_of_a_weight(case: str, tmp_path: Path) -> None:
    method, tensors, metadata, _ = FILES[case]
    plain = {"a.bias": torch.ones(4), "b.weight": torch.ones(4, 4)}
    found = packed_sizes(component(tmp_path, method, tensors | plain, metadata), ["a.weight", "a.bias", "b.weight"])
    assert found == {"a.weight": {name: tensor.nbytes for name, tensor in tensors.items()}}


def test_sdnq_that_compiles_its_unpacking_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = component(tmp_path, "sdnq", {"a.weight": CODES, "a.scale": SCALE})
    common = SimpleNamespace(use_torch_compile=True)
    monkeypatch.setitem(sys.modules, "sdnq", ModuleType("sdnq"))
    monkeypatch.setitem(sys.modules, "sdnq.common", common)
    with pytest.raises(po.ModelError, match="SDNQ_USE_TORCH_COMPILE=0"):
        import_format(made)
    common.use_torch_compile = False
    import_format(made)


def test_what_sdnq_loads_in_float32_counts_so(tmp_path: Path) -> None:
    tensors = {"a.weight": CODES, "a.scale": SCALE.bfloat16(), "a.bias": SCALE.bfloat16()}
    found = packed_sizes(component(tmp_path, "sdnq", tensors), ["a.weight", "a.bias"])
    assert found == {"a.weight": {"a.weight": 16, "a.scale": 16}}


def test_tensors_that_a_weight_keeps_beside_its_bytes_are_counted_once() -> None:
    weight: Any = nn.Parameter(CODES.clone(), requires_grad=False)
    nested = SimpleNamespace(absmax=torch.ones(2), code=torch.ones(4))
    weight.quant_state = SimpleNamespace(absmax=torch.ones(8), state2=nested, again=nested.code)
    weight.CB = weight.data
    assert bytes_beside(weight) == 4 * (8 + 2 + 4)


def test_old_configs_of_bitsandbytes_are_known(tmp_path: Path) -> None:
    old = ComponentSource("a", "diffusers", "X", tmp_path, {"quantization_config": {"load_in_4bit": True}})
    assert method_of(old) == "bitsandbytes"


# --- with the packages ----------------------------------------------------------------------------------------------

WHOLE = [
    *[(kind, "transformer") for kind in ("torchao-int8", "torchao-float8", "sdnq-int8", "sdnq-uint4")],
    *[(kind, "text_encoder_2") for kind in CONFIGS if not kind.startswith("quanto")],
]


def made(kind: str, name: str, folder: Path) -> Path:
    pytest.importorskip(CONFIGS[kind][0])
    return save_quantised(kind, folder, (name,))


def resident_twin(folder: Path) -> torch.Tensor:
    """The library's own pipeline over the same folder, whole."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {**words("flux"), **job("flux", guided=False)}
    result = pipeline(**call, output_type="pt", generator=torch.Generator("cpu").manual_seed(7))[0]
    return torch.as_tensor(result).float()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), WHOLE)
def test_a_quantised_folder_gives_the_bits_of_its_resident_twin_in_a_budget(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder = made(kind, name, tmp_path / "model")
    expected, texts, call = resident_twin(folder), words("flux"), job("flux", guided=False)
    pictures, _ = staged(folder, texts, call, dtype=torch.bfloat16, seed=7)
    assert torch.equal(pictures, expected)
    phase = 1 if name == "transformer" else 0
    smallest = 0
    for kib in (40, 60, 80, 100, 120, 160, 200, 300):
        settings = po.OffloadSettings(device_memory=kib * KIB, resident_below=256, activation_memory=0)
        try:
            pictures, session = staged(folder, texts, call, dtype=torch.bfloat16, seed=7, settings=settings)
        except po.InsufficientMemoryError:
            continue
        smallest = smallest or kib
        assert torch.equal(pictures, expected)
        report = session.report.phases
        assert all(0 < phase.reserved_peak_bytes <= kib * KIB and phase.leaked_bytes == 0 for phase in report)
        if kib == smallest and not kind.startswith("bnb"):
            assert report[phase].streamed_bytes > 0
        break
    assert smallest


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), WHOLE)
def test_a_plan_counts_the_packed_bytes(kind: str, name: str, tmp_path: Path) -> None:
    folder = made(kind, name, tmp_path / "model")
    texts, call = words("flux"), job("flux", guided=False)
    found = po.foresee_job(folder, settings=po.OffloadSettings(), dtype="bfloat16", seed=7, **texts, **call)
    _, session = staged(folder, texts, call, dtype=torch.bfloat16, seed=7, settings=po.OffloadSettings())
    for planned, ran in zip(found.plan.phases, session.report.phases, strict=True):
        assert planned.weight_bytes >= ran.weight_bytes
    place = 1 if name == "transformer" else 0
    held = found.plan.phases[place].weight_bytes
    assert held <= session.report.phases[place].weight_bytes * 1.1
