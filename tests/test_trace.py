"""What a trace foretells is what a real run does: weights in that order, and activation memory to the byte."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from torch import nn

import offload_core as po
from offload_core.bench.live_bytes import LiveBytes
from offload_core.errors import TraceError
from offload_core.memory_count import MemoryCount
from offload_core.phases import TracedCall, _foresee, foresee
from offload_core.phases._cold import make_cold
from offload_core.phases._ports import ENTRY_POINTS
from offload_core.phases._tiling import tile
from offload_core.tiny_models import FAMILIES
from offload_core.trace import Trace, Tracer
from offload_core.trace_blocks import repeated_blocks
from staging import OTHERS, PROMISED, tiny_model

CPU = torch.device("cpu")


def cold(module: nn.Module) -> Any:
    """The module with its weights taken away."""
    make_cold(module.eval(), "module", CPU, None, buffers=False)
    return module


def traced(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    tracer = Tracer()
    with tracer, torch.no_grad():
        return tracer.trace("module", run, args, kwargs)


# Parts of components that a family's pipeline calls by themselves.
PARTS_CALLED = {"ace_step": (("text_encoder", "embed_tokens"),)}


def measured(name: str) -> dict[tuple[str, str], set[int]]:
    """Peaks of activations of a family's plain pipeline, by component and entry point, counted on real tensors."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    count, inside = MemoryCount(), [False]
    peaks: dict[tuple[str, str], set[int]] = {}

    def watched(component: str, entry: str, method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return method(*args, **kwargs)
            inside[0], before = True, count.live_bytes
            count.high_bytes()
            try:
                return method(*args, **kwargs)
            finally:
                inside[0] = False
                peaks.setdefault((component, entry), set()).add(count.high_bytes() - before)

        return run

    for component, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            cls: Any = type(module)
            entries = {entry: getattr(cls, entry) for entry in ENTRY_POINTS if hasattr(cls, entry)}
            entries[""] = cls.__call__
            methods = {entry or "__call__": watched(component, entry, method) for entry, method in entries.items()}
            module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})
    for component, path in PARTS_CALLED.get(name, ()):
        part = getattr(pipeline, component).get_submodule(path)
        cls = type(part)
        method = {"__call__": watched(component, path, cls.__call__)}
        part.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **method})
    with count, torch.no_grad():
        pipeline(**FAMILIES[name].guided_call, output_type="pt", generator=torch.Generator("cpu").manual_seed(5))
    count.forget()
    return peaks


def foretold_phases(name: str) -> Any:
    call = dict(FAMILIES[name].guided_call)
    handle = po.load(tiny_model(name), device="cpu", dtype="float32")
    return foresee(handle, call.pop("prompt"), call.pop("negative_prompt", None), **call)


def foretold(name: str) -> list[TracedCall]:
    return [call for phase in foretold_phases(name) for call in next(iter(phase)).calls]


OFTEN = ("flux", "sdxl", "qwen_image", "wan22_a14b")
NOT_IN_PHASES = {"safety_checker", "audio_vae", "vocoder"}  # after the picture's VAE; sound isn't decoded
FAMILIES_IN_TURN = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in (*PROMISED, *OTHERS)
]


@pytest.mark.parametrize("name", FAMILIES_IN_TURN)
def test_the_activations_of_every_component_are_foretold_to_the_byte(name: str) -> None:
    real = measured(name)
    calls = foretold(name)
    for call in calls:
        assert call.trace.peak_bytes in real[call.component, call.name], f"{call.component}.{call.name}"
    assert {call.component for call in calls} == {component for component, _ in real} - NOT_IN_PHASES


def test_the_weights_of_a_trace_have_the_names_that_a_plan_gives_them() -> None:
    """Also those of a VAE, which the pipeline casts while it is cold."""
    for phase in foretold_phases("sd15"):
        for component in next(iter(phase)).job.components:
            names = {f"{component.name}.{size.name}" for part in component.parts for size in part.sizes}
            assert {weight.name for trace, _ in component.calls for weight in trace.weights} <= names


def test_a_transformer_of_twelve_billion_weights_is_traced_without_one() -> None:
    """FLUX.1-dev at 1024 x 1024: the figures are counted from its layers, see docs/foresight.md."""
    with init_empty_weights():
        module = cold(FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16))
    inputs = {
        "hidden_states": torch.zeros(1, 4096, 64, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.zeros(1, 512, 4096, dtype=torch.bfloat16),
        "pooled_projections": torch.zeros(1, 768, dtype=torch.bfloat16),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(4096, 3),
        "txt_ids": torch.zeros(512, 3),
    }
    trace = traced(module, **inputs)
    assert sum(weight.nbytes for weight in trace.weights) == 2 * 11_901_408_320
    uses = [stretch for stretch in trace.stretches if stretch.weights]
    assert len(uses) == 1160
    assert trace.flops == pytest.approx(59.5e12, rel=0.001)
    assert 400 << 20 < trace.peak_bytes < 500 << 20  # with unfused attention it would be 1.9 GiB


class Steered(nn.Module):
    """Code that asks for values: of a mask, and of a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = int(mask.sum())
        return x[:, :length] @ self.weight

    def kept(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight)[mask.bool()]

    def is_zero(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool((x == 0).all()) else torch.cat([x, x])

    def by_result(self, x: torch.Tensor) -> torch.Tensor:
        return x if float((x @ self.weight).sum()) > 0 else -x


@pytest.mark.parametrize("length", [3, 8])
def test_masks_and_lengths_steer_a_trace(length: int) -> None:
    x, mask = torch.zeros(1, 8, 64), torch.tensor([[1] * length + [0] * (8 - length)])
    module = Steered()
    for name in ("forward", "kept"):
        expected = getattr(module, name)(x, mask)
        trace = traced(getattr(cold(Steered()), name), x, mask)
        assert trace.output_bytes == expected.nbytes


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_large_arguments_are_real_where_code_asks_for_their_values(value: float) -> None:
    x = torch.full((300, 64), value)
    expected = Steered().is_zero(x)
    assert traced(cold(Steered()).is_zero, x).output_bytes == expected.nbytes


def test_code_that_is_steered_by_what_it_computed_is_said_to_be_untraceable() -> None:
    with pytest.raises(TraceError, match=r"^module needs values that aren't known before it runs"):
        traced(cold(Steered()).by_result, torch.zeros(8, 64))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor, *, head: bool) -> torch.Tensor:
        x = self.second(self.first(self.table(ids)))
        return x @ self.table.weight.t() if head else x


def test_a_trace_tells_the_order_of_weights_and_which_are_only_looked_up() -> None:
    ids = torch.tensor([[1, 2, 3]])
    trace = traced(cold(Tied()), ids, head=False)
    names = [trace.weights[index].name for stretch in trace.stretches for index in stretch.weights]
    assert names == ["module.first.weight", "module.first.bias", "module.second.weight"]
    assert {weight.name: weight.lookup_only for weight in trace.weights}["module.table.weight"]
    again = traced(cold(Tied()), ids, head=True)
    assert not {weight.name: weight.lookup_only for weight in again.weights}["module.table.weight"]
    assert trace.flops == 3 * 2 * 2 * 64 * 32


def test_a_call_like_one_before_is_not_traced_again_and_counts_its_memory_again() -> None:
    module, tracer = cold(Tied()), Tracer()
    ids = torch.tensor([[1, 2, 3]])
    with tracer, torch.no_grad():
        result, first = tracer.call("module", module, (ids,), {"head": False})
        _, second = tracer.call("module", module, (ids + 1,), {"head": False})
        _, other = tracer.call("module", module, (ids.repeat(2, 1),), {"head": False})
    assert result.shape == (1, 3, 64) and result.std() > 0
    assert first is second and other is not first
    assert tracer.peak_bytes >= result.nbytes + other.peak_bytes


class Repeating(nn.Module):
    """Returns its last hidden state twice, as text encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first = x * self.weight
        last = first * self.weight
        return {"last": last, "all": (first, last)}


def test_a_tensor_that_is_in_a_result_twice_is_kept_once() -> None:
    tracer, x = Tracer(), torch.zeros(1000)
    with tracer, torch.no_grad():
        result, _ = tracer.call("module", cold(Repeating()), (x,), {})
        assert tracer.live_bytes == 2 * x.nbytes
    assert result["last"] is result["all"][1] and result["last"] is not result["all"][0]


class Remembering(nn.Module):
    """Makes a table in its first call and keeps it, as Z-Image does with its rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.zeros(1000)
        return x * self.weight + self.table


def test_a_table_that_the_first_call_leaves_behind_is_counted_once() -> None:
    module, tracer, x = cold(Remembering()), Tracer(), torch.zeros(1000)
    with tracer, torch.no_grad():
        for _ in range(2):
            tracer.call("module", module, (x,), {})
    assert tracer.peak_bytes == 3 * x.nbytes  # the table, a product and a sum


def test_nothing_counted_is_left_when_everything_is_dropped() -> None:
    with MemoryCount() as count:
        x = torch.zeros(1000)
        y = x[10:] + 1
        view = y[::2]
        del x, y
        assert count.live_bytes == 990 * 4
        del view
        assert count.live_bytes == 0
        assert count.peak_bytes == (1000 + 990) * 4


def test_memory_that_was_there_before_is_not_counted() -> None:
    there = torch.zeros(1000)
    with MemoryCount() as count:
        view = there.t() if there.ndim == 2 else there.view(10, 100)
        assert count.peak_bytes == 0
        other = view + 1
        assert count.peak_bytes == other.nbytes


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_a_tensor_made_from_numbers_is_counted() -> None:
    """Its storage is there before any operator. The Gemma encoders of Sana, Lumina 2 and LTX-2 make some."""
    x = torch.zeros(4)
    with MemoryCount() as count:
        made = torch.tensor([1.0, 2.0])
        assert count.live_bytes == made.nbytes == 8
    assert traced(cold(Constant()), x).peak_bytes == 3 * x.nbytes  # a product, the constant, and their product


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "wan22_a14b"])
def test_decoding_in_tiles_is_foretold_to_the_byte_without_blending_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = dict(FAMILIES[name].guided_call) | {"height": 640, "width": 640, "num_inference_steps": 1}
    handle = po.load(tiny_model(name), device="cpu", dtype="float32")
    asked: list[Any] = []
    monkeypatch.setattr(_foresee._Watch, "trace", _noting(asked, _foresee._Watch.trace))
    *_, decode = foresee(handle, call.pop("prompt"), call.pop("negative_prompt", None), **call)
    whole, *tiled = decode
    assert [way.job.tile for way in tiled] == [512, 256, 128]
    vae: Any = DiffusionPipeline.from_pretrained(tiny_model(name)).vae.requires_grad_(False)
    for way in tiled:
        assert tile(vae, way.job.tile or 0)
        args, kwargs = asked[0]
        with MemoryCount() as count, torch.no_grad():
            vae.decode(*args, **kwargs)
        count.forget()
        assert way.calls[0].trace.peak_bytes == count.peak_bytes < whole.job.activation_bytes


def _noting(asked: list[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, component: str, name: str, run: Any, args: Any, kwargs: Any) -> None:
        asked.append((args, kwargs))
        method(self, component, name, run, args, kwargs)

    return noted


class Block(nn.Module):
    times = 0

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(16, 64), nn.Linear(64, 16), scale

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        Block.times += 1
        y = self.second(torch.relu(self.first(x))) * self.scale
        if kept is not None:
            kept.append(y + 1)
        if self.scale == 2.0:
            x += 1
        return x.view(-1) if self.scale == 3.0 else x + y


class Stack(nn.Module):
    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(scale) for scale in scales)

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, kept).view(8, 16)
        return x


@pytest.mark.parametrize(
    ("scales", "kept", "times"),
    [
        ((1.0, 1.0, 1.0), None, 1),
        ((1.0, 0.5, 1.0), None, 2),  # settings differ
        ((2.0, 2.0), None, 2),  # an argument is changed
        ((3.0, 3.0), None, 2),  # the result is a view of one
        ((1.0, 1.0), [], 2),  # something is kept
    ],
)
def test_blocks_that_are_alike_are_traced_once_where_that_is_the_same(
    scales: tuple[float, ...], kept: list[torch.Tensor] | None, times: int
) -> None:
    module = cold(Stack(*scales))

    def trace(watched: list[nn.Module]) -> Trace:
        tracer, here = Tracer(), None if kept is None else []
        with repeated_blocks(watched, tracer), tracer, torch.no_grad():
            Block.times = 0
            return tracer.trace("module", module, (torch.zeros(8, 16), here), {})

    expected = trace([])
    assert Block.times == len(scales)
    assert trace([module]) == expected
    assert Block.times == times
    assert all("forward" not in vars(block) for block in module.blocks)


@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "flux")]
)
def test_telling_blocks_again_gives_the_trace_of_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = foretold(name)
    monkeypatch.setattr(_foresee, "repeated_blocks", lambda *_: contextlib.nullcontext())
    assert told == foretold(name)


class Experts(nn.Module):
    """A mixture of experts: which one gets a token is chosen by what was computed from the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = torch.topk(self.gate(x).softmax(-1), k=2, dim=-1)
        order, ends = chosen.view(-1).argsort(), chosen.view(-1).bincount(minlength=4).cumsum(0).tolist()
        y, start = torch.zeros_like(x), 0
        for expert, end in zip(self.experts, ends, strict=True):
            tokens = order[start:end] // 2
            y.index_add_(0, tokens, expert(x[tokens]) * weight.view(-1, 1)[order[start:end]])
            start = end
        return y


def test_the_memory_of_experts_is_that_of_the_most_uneven_choice() -> None:
    tokens, real = torch.randn(4096, 16), Experts()
    with torch.no_grad():
        real.gate.weight.zero_()
        real.gate.bias.copy_(torch.tensor([2.0, 1.0, 0.0, 0.0]))  # the first two get every token
        with LiveBytes() as count:
            real(tokens)
    trace = traced(cold(Experts()), tokens)
    assert trace.peak_bytes == count.peak_bytes
    assert trace.flops == 2 * 4096 * 16 * 4 + 2 * 2 * 4096 * 16 * 16  # the work is still that of all experts


def test_experts_that_are_chosen_by_what_was_computed_are_taken_to_be_used_evenly() -> None:
    trace = traced(cold(Experts()), torch.randn(32, 16))
    assert "evenly" in trace.assumed
    assert {weight.name for weight in trace.weights} >= {f"module.experts.{i}.weight" for i in range(4)}
    assert trace.flops == 2 * 32 * 16 * 4 + 2 * 64 * 16 * 16  # every token twice
    assert traced(cold(Tied()), torch.tensor([[1]]), head=False).assumed == ""


@pytest.mark.parametrize(
    ("name", "alone"), [("wan22_a14b", True), pytest.param("ideogram4", False, marks=pytest.mark.slow)]
)
def test_denoisers_that_take_turns_make_room_and_those_that_alternate_both_stay(name: str, alone: bool) -> None:
    _, denoise, _ = (next(iter(phase)) for phase in foretold_phases(name))
    assert [component.alone for component in denoise.job.components] == [alone, alone]


def test_a_denoiser_that_cannot_be_traced_is_estimated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is rough, and it stands in for the same weights and about as much work."""
    (_, known, _) = (next(iter(phase)) for phase in foretold_phases("flux"))
    forward = FluxTransformer2DModel.forward

    def by_result(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        assert float(result[0].sum()) < float("inf")
        return result

    monkeypatch.setattr(FluxTransformer2DModel, "forward", by_result)
    _, rough, decode = (next(iter(phase)) for phase in foretold_phases("flux"))
    assert decode.job.activation_bytes > 0
    (sentence,) = rough.job.assumed
    assert sentence.startswith("transformer: its figures are a rough estimate") and "values" in sentence
    (call,), (expected, *_) = rough.calls, known.calls
    assert {weight.name for weight in call.trace.weights} == {weight.name for weight in expected.trace.weights}
    assert call.times == sum(each.times for each in known.calls)
    assert 0.25 < call.trace.flops / expected.trace.flops < 4
    assert 0.25 < rough.job.activation_bytes / known.job.activation_bytes < 4


def test_a_list_of_blocks_may_hold_none() -> None:
    # Mochi's VAE has a list of norms in which some places are empty.
    blocks = nn.ModuleList([nn.Linear(4, 4), None, nn.Linear(4, 4)])  # type: ignore[list-item]
    tracer = Tracer()
    with repeated_blocks([blocks], tracer), tracer:
        assert not tracer.live_bytes
