"""What tests of streamed weights share: modules of every kind with calls to make on them, twins, budgets, files."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from offload_core.errors import BudgetError
from offload_core.settings import OffloadSettings
from offload_core.streaming import Offload, enable_offload
from offload_core.tiny_models import FAMILIES
from offload_core.tiny_models.running import align
from offload_core.tiny_models.weights import seeded

Call = Callable[[Any], Any]
Build = Callable[[], nn.Module]

_BIAS = 512  # bytes
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Case:
    """A module and calls on it, each of which makes tensors. in_files: a file can hold it as it lies in memory.

    streams: whether a budget below 100 % leaves anything to stream.
    """

    name: str
    build: Build
    calls: tuple[Call, ...]
    in_files: bool = True
    streams: bool = True

    def __str__(self) -> str:
        return self.name


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Tiny products on many threads take longer than on one, and much longer beside reader threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- budgets, twins and files ------------------------------------------------------------------------------------


def settings(device_memory: int | str, **changes: Any) -> OffloadSettings:
    """Settings for the CPU that stream whatever doesn't fit `device_memory`, however small it is."""
    plain: dict[str, Any] = {
        "execution_device": "cpu",
        "device_memory": device_memory,
        "host_memory": "2GiB",
        "activation_memory": 0,
        "resident_below": 0,
        "read_threads": 2,
    }
    return OffloadSettings(**(plain | changes))


def weight_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def offload(
    module: nn.Module,
    budget: float | int = 0.5,
    *,
    files: Sequence[Path] = (),
    by_readers: bool = True,
    **changes: Any,
) -> Offload:
    """`module` under offload with a budget in bytes (int) or as a share of its weights (float).

    by_readers: matrices are read ahead by reader threads, and only biases where they are needed, as in a real model.
    """
    nbytes = budget if isinstance(budget, int) else int(budget * weight_bytes(module))
    result = enable_offload(module, settings=settings(nbytes, **changes), component="transformer", files=files)
    if by_readers:
        cache = result._managed.scope.cache
        cache._inline_bytes, cache._fetches_ahead = _BIAS, True
        for entry in cache._room:
            entry.small = entry.nbytes <= _BIAS
    return result


def asked_for(error: BudgetError, given: int) -> int:
    """The budget in bytes that a message asks for."""
    number = r"([\d.]+) (B|KiB|MiB|GiB)"
    more = re.search(rf"Raise device_memory by {number}", str(error))
    whole = re.search(rf"Set device_memory to at least {number}", str(error))
    found = more or whole
    assert found is not None, f"no budget is named in: {error}"
    nbytes = float(found[1]) * _UNITS[found[2]]
    return int(nbytes + (given if more else 0)) + 1


def smallest_budget(module: nn.Module, **arguments: Any) -> int:
    """The least bytes that `enable_offload` accepts, found by doing what its messages say."""
    budget = 1
    for _ in range(6):
        try:
            offload(module, budget, **arguments).release()
        except BudgetError as error:
            budget = max(asked_for(error, budget), budget + 64)
        else:
            return budget
    raise AssertionError(f"{budget} bytes were asked for and are still not enough")


def twin_of(module: nn.Module) -> nn.Module:
    """A resident copy: no gradients, aligned weights."""
    twin = copy.deepcopy(module).requires_grad_(False)
    align(twin)
    return twin


def from_files(module: nn.Module, folder: Path) -> tuple[nn.Module, list[Path]]:
    """The same module loaded from safetensors files, by its library's own loader if it has one; and the files."""
    if hasattr(module, "save_pretrained"):
        module.save_pretrained(folder)
        dtype = next(module.parameters()).dtype
        loaded = type(module).from_pretrained(folder, dtype=dtype)
    else:
        loaded = copy.deepcopy(module)
        save_file({key: value.contiguous() for key, value in module.state_dict().items()}, folder / "model.safetensors")
        loaded.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    return loaded.eval(), sorted(folder.glob("*.safetensors"))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in tensors_of(item)]
    return []


def passes(module: nn.Module, calls: Sequence[Call]) -> list[torch.Tensor]:
    """Five passes over the calls: in order, reversed, each twice, only the first, in order again."""
    orders = (calls, calls[::-1], [call for call in calls for _ in range(2)], calls[:1], calls)
    return [tensor.clone() for order in orders for call in order for tensor in tensors_of(call(module))]


def assert_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str = "") -> None:
    assert len(got) == len(expected) > 0
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, f"{what}: result {index} has another form"
        assert torch.equal(one, other), f"{what}: result {index} has other bits"


def noise(*shape: int, seed: str = "noise", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def seeded_module(build: Build) -> Build:
    """The module that `build` makes, with the same random weights each time, in eval mode and without gradients."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().eval().requires_grad_(False)

    return made


# --- modules of our own ------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks that are called in the order asked for, some not at all and some twice."""

    def __init__(self, count: int = 6, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.width = width

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        for index in order if order is not None else range(len(self.blocks)):
            x = torch.tanh(self.blocks[index](x))
        return x


class Experts(nn.Module):
    """Two denoisers in one budget, as a mixture by noise level has them."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high, self.low = high, low


class Roots(nn.Module):
    """Parameters at the root, in a list, in a dictionary, and one used as a bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32))
        self.listed = nn.ParameterList(torch.randn(32, 32) for _ in range(4))
        self.named = nn.ParameterDict({"a": torch.randn(32, 32), "b": torch.randn(32)})
        self.register_buffer("mean", torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.table + self.mean
        for weight in self.listed:
            x = torch.sin(x @ weight)
        return torch.einsum("bi,ij->bj", x, self.named["a"]) + self.named["b"]


class Fp8Linear(nn.Linear):
    """Stored in eight bits, computed in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Encoder(nn.Module):
    """Attention as torch itself has it, used by several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(32, 4, batch_first=True)
        self.second = nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, vdim=16, add_bias_kv=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = self.first(x, x, x, attn_mask=mask, need_weights=False)
        other, weights = self.second(x, x[..., :16], x[..., :16])
        return other, weights


def _transposed() -> nn.Module:
    module = Stack(4)
    for block in module.blocks:
        block.weight = nn.Parameter(torch.randn(64, 64).t(), requires_grad=False)
    return module


def _with_offset() -> nn.Module:
    module = Stack(4)
    for block in module.blocks:
        block.weight = nn.Parameter(torch.randn(100 + 64 * 64)[100:].view(64, 64), requires_grad=False)
    return module


def _channels_last() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3), nn.ConvTranspose2d(16, 8, 3))
    return module.to(memory_format=torch.channels_last)


def _old_weight_norm() -> nn.Module:
    with_norm = torch.nn.utils.weight_norm
    return nn.Sequential(
        *(with_norm(nn.Linear(32, 32)) for _ in range(3)), nn.Unflatten(1, (8, 4)), with_norm(nn.Conv1d(8, 8, 3))
    )


def _new_weight_norm() -> nn.Module:
    return nn.Sequential(*(torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)) for _ in range(4)))


def _tables() -> nn.Module:
    return nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(40, 16, mode="mean"),
            "padded": nn.Embedding(50, 16, padding_idx=3),
            "plain": nn.Embedding(60, 16),
            "head": nn.Linear(16, 60, bias=False),
        }
    )


def _tied_tables() -> nn.Module:
    tables = _tables()
    tables["head"].weight = tables["plain"].weight
    return tables


def _use_tables(ids: torch.Tensor) -> Call:
    def call(tables: Any) -> Any:
        hidden = tables["plain"](ids) + tables["padded"](ids)
        return tables["bag"](ids), tables["padded"](ids), tables["head"](hidden)

    return call


def _recurrent() -> nn.Module:
    return nn.ModuleDict(
        {"lstm": nn.LSTM(16, 16, 2, batch_first=True), "head": nn.Linear(16, 128), "out": nn.Linear(128, 16)}
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(8, 16, 3),
        nn.ConvTranspose1d(16, 8, 3),
        nn.Unflatten(2, (4, 8)),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ConvTranspose2d(16, 8, 3),
        nn.Unflatten(3, (2, 5)),
        nn.Conv3d(8, 8, (3, 1, 3)),
        nn.ConvTranspose3d(8, 8, 2),
        nn.BatchNorm3d(8),
    )


# --- models of the libraries -------------------------------------------------------------------------------------


def component(family: str, name: str) -> Build:
    return lambda: FAMILIES[family].build().components[name]


def _experts() -> nn.Module:
    pipeline = FAMILIES["wan22_a14b"].build()
    return Experts(pipeline.transformer, pipeline.transformer_2)


def flux_inputs(batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 12, 16, dtype=dtype),
        "encoder_hidden_states": noise(batch, 7, 32, dtype=dtype),
        "pooled_projections": noise(batch, 32, dtype=dtype),
        "timestep": torch.full((batch,), 0.7, dtype=dtype),
        "guidance": torch.full((batch,), 3.5, dtype=dtype),
        "img_ids": torch.zeros(12, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def flux_call(batch: int) -> Call:
    return lambda model: model(**flux_inputs(batch, model.dtype), return_dict=False)


def flux_skipping(blocks: Sequence[int]) -> Call:
    """A forward in which only some of the single blocks run, in another order: what step caches do."""

    def call(model: Any) -> Any:
        every = model.single_transformer_blocks
        model.single_transformer_blocks = nn.ModuleList([every[index] for index in blocks])
        try:
            return flux_call(1)(model)
        finally:
            model.single_transformer_blocks = every

    return call


def _wan_call(*experts: str) -> Call:
    def call(module: Any) -> Any:
        x = noise(1, 4, 2, 8, 8)
        for expert in experts:
            model = getattr(module, expert)
            arguments = {"timestep": torch.tensor([500.0]), "encoder_hidden_states": noise(1, 6, 32)}
            x = model(hidden_states=x, **arguments, return_dict=False)[0]
        return x

    return call


def _unet_call(batch: int, text: int, added: int = 0) -> Call:
    def call(model: Any) -> Any:
        more = {"text_embeds": noise(batch, added).to(model.dtype), "time_ids": torch.ones(batch, 6, dtype=model.dtype)}
        extra = {"added_cond_kwargs": more} if added else {}
        x, states = noise(batch, 4, 8, 8).to(model.dtype), noise(batch, 5, text).to(model.dtype)
        return model(x, 500, states, **extra, return_dict=False)

    return call


def _encode_picture(batch: int) -> Call:
    return lambda vae: vae.encode(noise(batch, 3, 16, 24).to(vae.dtype)).latent_dist.mean


def _decode_picture(batch: int) -> Call:
    return lambda vae: vae.decode(noise(batch, 4, 4, 6).to(vae.dtype), return_dict=False)


def _text_call(batch: int) -> Call:
    ids = torch.arange(batch * 9).view(batch, 9) % 90
    return lambda model: model(input_ids=ids, return_dict=False)


def _projection_outside(model: Any) -> Any:
    hidden = model.text_model(input_ids=torch.arange(9)[None])[0]
    return F.linear(hidden[:, -1], model.text_projection.weight), model.text_projection(hidden)


_IDS = torch.tensor([[1, 3, 7, 3, 0, 9]])
_CAUSAL = torch.triu(torch.ones(10, 10, dtype=torch.bool), 1)

LIBRARY_CASES = (
    Case("flux", component("flux", "transformer"), (flux_call(1), flux_skipping((2, 0)), flux_call(2))),
    Case("wan", _experts, (_wan_call("high", "low"), _wan_call("high"), _wan_call("low", "low")), in_files=False),
    Case("sdxl_unet", component("sdxl", "unet"), (_unet_call(1, 40, 24), _unet_call(2, 40, 24))),
    Case("sd15_unet", component("sd15", "unet"), (_unet_call(2, 32), _unet_call(1, 32))),
    Case("vae", component("flux", "vae"), (_encode_picture(1), _decode_picture(1), _decode_picture(2))),
    Case("t5", component("flux", "text_encoder_2"), (_text_call(1), _text_call(2))),
    Case("clip", component("sdxl", "text_encoder_2"), (_text_call(1), _projection_outside)),
)

TORCH_CASES = (
    Case("linear", seeded_module(Stack), (lambda m: m(noise(3, 64)), lambda m: m(noise(1, 64), (4, 2, 2, 0)))),
    Case("attention", seeded_module(Encoder), (lambda m: m(noise(2, 10, 32)), lambda m: m(noise(1, 10, 32), _CAUSAL))),
    Case(
        "encoder_layer",
        seeded_module(
            lambda: nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)))
        ),
        (lambda m: m(noise(2, 10, 32)), lambda m: m[1](noise(1, 10, 32), src_mask=_CAUSAL)),
    ),
    Case("convolutions", seeded_module(_convolutions), (lambda m: m(noise(1, 8, 32)), lambda m: m(noise(2, 8, 32)))),
    Case("old_weight_norm", seeded_module(_old_weight_norm), (lambda m: m(noise(2, 32)), lambda m: m(noise(1, 32)))),
    Case("new_weight_norm", seeded_module(_new_weight_norm), (lambda m: m(noise(2, 32)), lambda m: m(noise(1, 32)))),
    Case("tables", seeded_module(_tables), (_use_tables(_IDS), _use_tables(_IDS[:, :2]))),
    Case("tied_tables", seeded_module(_tied_tables), (_use_tables(_IDS), _use_tables(_IDS[:, :2])), in_files=False),
    Case(
        "lstm",
        seeded_module(_recurrent),
        (lambda m: m["out"](m["head"](m["lstm"](noise(2, 5, 16))[0])),),
        in_files=False,
    ),
    Case("roots", seeded_module(Roots), (lambda m: m(noise(2, 32)), lambda m: m.table.t() @ noise(32, 3))),
    Case("channels_last", seeded_module(_channels_last), (lambda m: m(noise(1, 8, 12, 12)),), in_files=False),
    Case(
        "transposed", seeded_module(_transposed), (lambda m: m(noise(3, 64)), lambda m: m(noise(1, 64))), in_files=False
    ),
    Case("offset", seeded_module(_with_offset), (lambda m: m(noise(3, 64)), lambda m: m(noise(1, 64))), in_files=False),
)
CASES = (*LIBRARY_CASES, *TORCH_CASES)
BY_NAME = {case.name: case for case in CASES}
