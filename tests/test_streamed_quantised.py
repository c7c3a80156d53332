"""Quantised weights in a budget: streamed by their inner tensors, or resident by a stated rule, with equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload_core import BudgetError, OffloadSettings
from offload_core.streaming import enable_offload, is_streamed

X = torch.arange(3 * 256, dtype=torch.float32).view(3, 256).sin()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).eval().requires_grad_(False)


def torchao(config: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = plain().to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def quanto(weights: str) -> nn.Module:
    library = pytest.importorskip("optimum.quanto")
    model = plain()
    library.quantize(model, weights=getattr(library, weights))
    library.freeze(model)
    return model


def gguf(kind: str) -> nn.Module:
    library = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    model, quant_type = plain(), getattr(library.GGMLQuantizationType, kind)
    for index, layer in enumerate(list(model)):
        packed = library.quants.quantize(layer.weight.numpy(), quant_type)
        linear = GGUFLinear(256, 256, bias=True, compute_dtype=torch.float32)
        linear.weight = GGUFParameter(torch.from_numpy(packed.copy()), quant_type=quant_type)
        linear.bias = layer.bias
        model[index] = linear
    return model.requires_grad_(False)


class ScaledLinear(nn.Module):
    """fp8 weights with a scale beside them, as single-file checkpoints have them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.abs().amax() / 448
        self.weight = nn.Parameter((layer.weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def scaled_fp8(_: str) -> nn.Module:
    return nn.Sequential(*[ScaledLinear(layer) for layer in plain()])


CASES = [
    (torchao, "Int8WeightOnlyConfig"),
    (torchao, "Float8WeightOnlyConfig"),
    (quanto, "qint8"),
    (quanto, "qfloat8"),
    (gguf, "Q8_0"),
    (gguf, "Q4_0"),
    (scaled_fp8, "e4m3fn"),
]


def offload(model: nn.Module, kib: int) -> Any:
    settings = OffloadSettings(
        execution_device="cpu", device_memory=kib * 1024, resident_below=1024, activation_memory=0
    )
    return enable_offload(model, settings=settings)


@pytest.mark.parametrize(("make", "kind"), CASES, ids=[f"{make.__name__}-{kind}" for make, kind in CASES])
def test_quantised_weights_are_streamed_with_equal_bits(make: Any, kind: str) -> None:
    model = make(kind)
    x = X.to(torch.bfloat16) if make is torchao else X
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        in_inference = model(x)
    for kib in (2048, 250, 90):
        with offload(model, kib) as result, torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(x), expected)
            with torch.inference_mode():
                assert torch.equal(model(x), in_inference)
            assert any(is_streamed(p) for p in model.parameters())
            if kib < 300:
                assert result.plan.streamed_bytes > 0
                assert result.report().streamed_bytes >= 3 * result.plan.streamed_bytes
            assert result.report().peak_bytes <= kib * 1024
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert not any(is_streamed(p) for p in model.parameters())


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights_stay_resident_and_need_room(bits: int) -> None:
    library = pytest.importorskip("bitsandbytes")
    model = plain()
    for index, layer in enumerate(list(model)):
        if bits == 8:
            linear = library.nn.Linear8bitLt(256, 256, has_fp16_weights=False)
        else:
            linear = library.nn.Linear4bit(256, 256, compute_dtype=torch.float32)
        linear.load_state_dict(layer.state_dict())
        model[index] = linear.to("cpu")
    with torch.no_grad():
        expected = model(X)
        with offload(model, 1024):
            assert torch.equal(model(X), expected)
        with pytest.raises(BudgetError, match="of small ones that stay"):
            offload(model, 100)
        assert torch.equal(model(X), expected)
