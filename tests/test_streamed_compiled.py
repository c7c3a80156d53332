"""torch.compile and offload together: a compiled block runs on plain hot tensors, and never on none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from offload_core import ManagedModuleError, OffloadSettings
from offload_core.errors import BudgetError
from offload_core.streaming import StreamedWeight, enable_offload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(torch.relu(self.inner(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def offload(module: nn.Module, kib: int) -> Any:
    settings = OffloadSettings(execution_device="cpu", device_memory=kib * 1024, resident_below=0, activation_memory=0)
    return enable_offload(module, settings=settings)


@pytest.fixture
def stack() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield Stack().eval().requires_grad_(False)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_compiled_blocks_are_streamed_with_equal_bits_and_compiled_once(stack: Stack, how: str, backend: str) -> None:
    x = torch.randn(4, 64)
    expected = stack(x)
    counter = CompileCounterWithBackend(backend)
    for index, block in enumerate(stack.blocks):
        if how == "torch.compile":
            stack.blocks[index] = torch.compile(block, backend=counter)
        else:
            block.compile(backend=counter)
    result = offload(stack, 60)
    assert result.plan.streamed_bytes > 0
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(stack(x), expected)
    assert (
        counter.frame_count == 1
    )  # one graph for all blocks and passes: the compiled code really ran, on plain weights
    assert result.report().streamed_bytes > 3 * result.plan.streamed_bytes
    assert any(isinstance(p, StreamedWeight) for p in stack.parameters())
    assert result.release() == 0
    assert torch.equal(stack(x), expected)


def test_a_module_compiled_as_a_whole_needs_room_for_all_of_its_weights(stack: Stack) -> None:
    x = torch.randn(4, 64)
    expected = stack(x)
    whole = torch.compile(stack, backend="eager")
    with pytest.raises(BudgetError, match="at least 195"):
        offload(whole, 60)
    with offload(whole, 300), torch.no_grad():
        assert torch.equal(whole(x), expected)


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}], ids=str
)
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_modes_that_keep_addresses_are_refused_by_name(stack: Stack, how: str, options: dict[str, Any]) -> None:
    if how == "torch.compile":
        stack.blocks[2] = torch.compile(stack.blocks[2], **options)
    else:
        stack.blocks[2].compile(**options)
    with pytest.raises(ManagedModuleError, match=r"model\.blocks\.2 was compiled in a mode that records CUDA graphs"):
        offload(stack, 60)
    assert not any(isinstance(p, StreamedWeight) for p in stack.parameters())


def test_compiling_after_attach_is_an_error_and_never_a_silent_wrong_result(stack: Stack) -> None:
    with offload(stack, 60), pytest.raises(Exception, match="streamed and has none of its own"), torch.no_grad():
        torch.compile(stack, backend="eager")(torch.randn(4, 64))


def test_a_failing_block_gets_its_streamed_weights_back(stack: Stack) -> None:
    stack.blocks[1] = torch.compile(stack.blocks[1], backend="eager")
    with offload(stack, 60), torch.no_grad():
        with pytest.raises(Exception, match="mat1 and mat2|shape|size"):
            stack.blocks[1](torch.randn(4, 63))
        assert all(isinstance(p, StreamedWeight) for p in stack.blocks[1].parameters())
        stack(torch.randn(4, 64))
