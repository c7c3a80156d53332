"""A weight cast on its way in has the dtype that the library's own loader would have given it."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import T5Config, T5EncoderModel

from offload_core.library_dtypes import parameter_dtypes, request_dtype
from offload_core.tiny_models import load_tiny, save_tiny

# AutoencoderKL, CLIP, T5, umT5, Qwen2.5-VL, Qwen3-VL, Gemma 2 and 3, and denoisers with and without exceptions
FAMILIES = ("flux", "sd3", "sd15", "wan22_a14b", "qwen_image", "krea2", "lumina2", "ltx2")
OFTEN = ("flux", "sd15", "wan22_a14b", "krea2")
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    root = tmp_path_factory.mktemp("dtypes")
    number = itertools.count()
    return functools.cache(lambda name, dtype: save_tiny(name, root / str(next(number)), dtype))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def skeleton(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module's class made anew from its config, without weights, as a loader makes it."""
    cls: Any = type(module)
    config = copy.deepcopy(module.config)
    if library_of(module) == "transformers":
        request_dtype(config, dtype)
    with default_dtype(dtype), init_empty_weights():
        return cls(config) if library_of(module) == "transformers" else cls.from_config(config)


def library_of(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@every_dtype
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *((name, torch.float32) for name in OFTEN),
        ("wan22_a14b", torch.bfloat16),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in FAMILIES if name not in OFTEN),
        pytest.param("qwen_image", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_parameters_and_buffers_of_a_family_get_the_dtype_that_from_pretrained_gives(
    name: str, stored: torch.dtype, dtype: torch.dtype, folder: Callable[[str, torch.dtype], Path]
) -> None:
    pipeline = load_tiny(folder(name, stored), dtype=dtype)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            loaded = {key: tensor.dtype for key, tensor in tensors_of(component).items()}
            bare = skeleton(component, dtype)
            assert parameter_dtypes(bare, library_of(component), loaded, dtype) == loaded, type(component).__name__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_cases_that_differ_from_the_asked_dtype_are_among_those_compared(
    dtype: torch.dtype, folder: Callable[[str, torch.dtype], Path]
) -> None:
    wan, flux = (load_tiny(folder(name, torch.float32), dtype=dtype) for name in ("wan22_a14b", "flux"))
    qwen = load_tiny(folder("qwen_image", torch.float32), dtype=dtype)
    kept = {key for key, tensor in tensors_of(wan.transformer).items() if tensor.dtype != dtype}
    assert {"scale_shift_table", "blocks.0.norm2.weight", "rope.freqs_cos"} <= kept
    t5 = {key for key, tensor in tensors_of(flux.text_encoder_2).items() if tensor.dtype != dtype}
    assert bool(t5) == (dtype == torch.float16)
    assert qwen.text_encoder.model.language_model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["wan22_a14b", "flux", "krea2"])
def test_a_value_cast_from_the_stored_dtype_equals_the_one_that_was_loaded_in_the_asked_dtype(
    name: str, dtype: torch.dtype, folder: Callable[[str, torch.dtype], Path]
) -> None:
    path = folder(name, torch.float32)
    stored, asked = load_tiny(path, dtype=torch.float32), load_tiny(path, dtype=dtype)
    for key, component in stored.components.items():
        if isinstance(component, nn.Module):
            loaded = tensors_of(asked.components[key])
            bare = skeleton(component, dtype)
            dtypes = parameter_dtypes(bare, library_of(component), loaded, dtype)
            saved = component.state_dict().keys()
            for path_of, tensor in tensors_of(component).items():
                assert path_of not in saved or torch.equal(tensor.to(dtypes[path_of]), loaded[path_of]), path_of


def test_a_class_alone_tells_what_is_kept_by_its_own_list() -> None:
    names = ["encoder.block.0.layer.1.DenseReluDense.wo.weight", "shared.weight"]
    assert parameter_dtypes(T5EncoderModel, "transformers", names, torch.float16) == {
        names[0]: torch.float32,
        names[1]: torch.float16,
    }


class Part(nn.Module):
    _keep_in_fp32_modules = ("norm",)
    _keep_in_fp32_modules_strict = ("gate.*scale",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.norm_out = nn.LayerNorm(2)
        self.gate = nn.ParameterDict({"my_scale": torch.zeros(2)})
        self.exact = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros(2, dtype=torch.int64))
        self.norm_cache = nn.Buffer(torch.zeros(2), persistent=False)


def dtypes_of_part(library: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    with default_dtype(dtype):
        part = Part()
    return parameter_dtypes(part, library, tensors_of(part), dtype)


def test_diffusers_keeps_whole_path_components_for_every_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        found = dtypes_of_part("diffusers", dtype)
        assert found["norm.weight"] == torch.float32
        assert found["norm_out.weight"] == found["gate.my_scale"] == found["exact"] == dtype


def test_transformers_keeps_what_a_pattern_finds_and_respects_a_declared_dtype() -> None:
    half, brain = (dtypes_of_part("transformers", dtype) for dtype in (torch.float16, torch.bfloat16))
    assert half["norm.weight"] == half["norm_out.weight"] == torch.float32
    assert brain["norm.weight"] == brain["norm_out.weight"] == torch.bfloat16
    assert half["gate.my_scale"] == brain["gate.my_scale"] == torch.float32
    assert half["exact"] == brain["exact"] == torch.float64


@pytest.mark.parametrize("library", ["diffusers", "transformers", "another"])
def test_integers_and_buffers_that_are_never_saved_stay_as_they_were_made(library: str) -> None:
    found = dtypes_of_part(library, torch.float16)
    assert found["count"] == torch.int64
    assert found["norm_cache"] == torch.float16


def test_a_tie_is_found_under_both_names() -> None:
    with default_dtype(torch.float16):
        model = T5EncoderModel(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    names = ["shared.weight", "encoder.embed_tokens.weight"]
    assert parameter_dtypes(model, "transformers", names, torch.float16) == dict.fromkeys(names, torch.float16)
