"""A streamed weight is what an operator takes it for; what dispatch doesn't see works like the real thing or raises."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from offload_core.errors import BudgetError, ColdWeightError, ManagedModuleError
from offload_core.streaming import Offload, StreamedWeight, is_cold
from streaming_models import (
    BY_NAME,
    Stack,
    assert_equal,
    flux_call,
    from_files,
    noise,
    offload,
    one_compute_thread,
    seeded_module,
    smallest_budget,
    twin_of,
    weight_bytes,
)

__all__ = ["one_compute_thread"]

Change = Callable[[Any], Any]
X = noise(3, 64)


def stack() -> Any:
    return seeded_module(Stack)()


def flux() -> Any:
    return BY_NAME["flux"].build()


@contextlib.contextmanager
def streamed(module: nn.Module, budget: float = 0.5, **arguments: Any) -> Iterator[Offload]:
    """`module` under offload, without gradients; bytes must have been streamed when this ends well."""
    with torch.no_grad(), offload(module, budget, **arguments) as offloaded:
        assert offloaded.plan.streamed_bytes > 0
        yield offloaded
        assert offloaded.report().streamed_bytes > 0


def streamed_weight(module: nn.Module) -> StreamedWeight:
    """A weight that isn't resident."""
    for weight in module.parameters():
        if isinstance(weight, StreamedWeight) and not weight._entry.resident and weight.ndim > 1:
            return weight
    raise AssertionError("nothing is streamed")


# --- lookups in tables ---------------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, rows: int = 20_000, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.out = nn.Linear(width, width)
        self.back = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.out(self.table(ids))))


TABLE_BUDGET = 2048  # of 1,282,176 bytes


@pytest.mark.parametrize("in_files", [False, True])
def test_a_lookup_never_brings_the_table(in_files: bool, tmp_path: Path) -> None:
    module: Any = seeded_module(Table)()
    files: list[Path] = []
    if in_files:
        module, files = from_files(module, tmp_path)
    twin = twin_of(module)
    ids = torch.tensor([[0, 5, 19_999, 5, 77]])
    with torch.no_grad(), offload(module, TABLE_BUDGET, files=files, direct_io="off") as offloaded:
        assert offloaded.plan.lookup_bytes == module.table.weight.nbytes
        for _ in range(3):
            assert torch.equal(module(ids), twin(ids))
        report = offloaded.report()
    assert report.peak_bytes <= TABLE_BUDGET
    assert report.ring_bytes < 2 * TABLE_BUDGET
    assert 0 < report.streamed_bytes < 16 << 10
    if in_files:
        assert 0 < report.read_bytes < 200_000


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (1, 2, 2), (0,), ()])
def test_a_lookup_has_the_bits_and_the_form_of_a_resident_one(mode: Any, shape: tuple[int, ...]) -> None:
    module: Any = seeded_module(Table)()
    twin = twin_of(module)
    ids = torch.arange(torch.Size(shape).numel()).view(shape) * 31
    with offload(module, TABLE_BUDGET) as offloaded, mode():
        for kind in (ids, ids.int()):
            assert_equal([module.table(kind)], [twin.table(kind)])
        assert_equal([module(ids)], [twin(ids)])
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.lookup_bytes > 0


def test_index_select_gathers_rows_too() -> None:
    module: Any = seeded_module(Table)()
    twin, ids = twin_of(module), torch.tensor([3, 3, 19_999, 0])
    with torch.no_grad(), offload(module, TABLE_BUDGET) as offloaded:
        assert torch.equal(torch.index_select(module.table.weight, 0, ids), twin.table.weight.index_select(0, ids))
        assert torch.equal(module.table.weight.index_select(-2, ids), twin.table.weight.index_select(0, ids))
        assert offloaded.report().streamed_bytes < TABLE_BUDGET


@pytest.mark.parametrize("look", [lambda w, ids: F.embedding(ids, w), lambda w, ids: w.index_select(0, ids)])
@pytest.mark.parametrize("row", [-1, 20_000, 1 << 40])
def test_a_row_out_of_range_is_an_index_error_as_in_torch(look: Any, row: int) -> None:
    module: Any = seeded_module(Table)()
    ids = torch.tensor([1, row])
    with pytest.raises(IndexError):
        look(twin_of(module).table.weight, ids)
    with torch.no_grad(), offload(module, TABLE_BUDGET):
        with pytest.raises(IndexError, match="out of range"):
            look(module.table.weight, ids)
        assert module(torch.tensor([1])).shape == (1, 16)


def test_half_of_the_rows_are_gathered_and_more_bring_the_table_where_it_fits() -> None:
    module: Any = seeded_module(lambda: Table(40))()
    twin = twin_of(module)
    with torch.no_grad(), offload(module, 1.5) as offloaded:
        assert torch.equal(module.table(torch.arange(20)), twin.table(torch.arange(20)))
        assert torch.equal(module.table(torch.arange(40)), twin.table(torch.arange(40)))
        assert torch.equal(module.table(torch.arange(20)), twin.table(torch.arange(20)))
        assert offloaded.report().streamed_bytes >= module.table.weight.nbytes


def test_all_rows_can_be_looked_up_where_the_table_does_not_fit() -> None:
    module: Any = seeded_module(lambda: Table(400))()
    twin, ids = twin_of(module), torch.arange(400).flip(0)
    with torch.no_grad(), offload(module, TABLE_BUDGET) as offloaded:
        assert torch.equal(module(ids), twin(ids))
        assert offloaded.report().peak_bytes <= TABLE_BUDGET


def test_a_table_that_shortens_its_rows_as_it_is_used_is_right_or_refused() -> None:
    module: Any = seeded_module(lambda: nn.ModuleList([nn.Embedding(50, 16, max_norm=1.0), nn.Linear(16, 90)]))()
    twin, ids = twin_of(module), torch.tensor([1, 4, 4])
    with torch.no_grad(), offload(module, 0.8) as offloaded:
        for _ in range(2):
            with contextlib.suppress(BudgetError):
                assert torch.equal(module[0](ids), twin[0](ids))
            assert torch.equal(module[1](noise(2, 16)), twin[1](noise(2, 16)))
        assert offloaded.report().streamed_bytes > 0


# --- what dispatch doesn't see: works as on a resident module -------------------------------------------------------


def _swap_data(m: Any) -> None:
    m.blocks[0].weight.data, m.blocks[1].weight.data = m.blocks[1].weight.data, m.blocks[0].weight.data


def _fp8_and_back(m: Any) -> None:
    for block in m.blocks:
        block.weight.data = block.weight.data.to(torch.float8_e4m3fn)
        block.weight.data = block.weight.data.to(torch.float32)


def _set_to_another(m: Any) -> None:
    m.blocks[2].weight.set_(m.blocks[1].weight)


def _load(m: Any) -> None:
    m.load_state_dict({key: value * 2 for key, value in m.state_dict().items()})


def _load_fresh(m: Any) -> None:
    m.load_state_dict({key: value * 2 for key, value in stack().state_dict().items()}, strict=True, assign=True)


def _load_own(m: Any) -> None:
    m.load_state_dict(m.state_dict(), assign=True)


def _out(m: Any) -> None:
    torch.add(m.blocks[1].weight, 1, out=m.blocks[2].weight)


def _late_view(m: Any) -> None:
    view = m.blocks[2].weight[0]
    m(X)
    m(X)
    view.zero_()


def _add(m: Any) -> None:
    m.blocks[2].weight += 1


def _set_item(m: Any) -> None:
    m.blocks[2].weight[1:3] = 7.0


def _new_parameter(m: Any) -> None:
    m.blocks[2].weight = nn.Parameter(m.blocks[2].weight, requires_grad=False)


def _other_parameter(m: Any) -> None:
    m.blocks[2].weight = nn.Parameter(m.blocks[2].weight * 3, requires_grad=False)


def _assign_data(m: Any) -> None:
    m.blocks[2].weight.data = m.blocks[2].weight.data * 2


def _assign_transposed(m: Any) -> None:
    m.blocks[2].weight.data = m.blocks[2].weight.data.t()


CHANGES: dict[str, Change] = {
    "data assigned": _assign_data,
    "data assigned transposed": _assign_transposed,
    "data written": lambda m: m.blocks[2].weight.data.mul_(2),
    "data exchanged": _swap_data,
    "data of another": lambda m: setattr(m.blocks[2].weight, "data", m.blocks[1].weight),
    "set_ to another": _set_to_another,
    "set_ to a tensor": lambda m: m.blocks[2].weight.set_(noise(64, 64)),
    "copy_": lambda m: m.blocks[2].weight.copy_(m.blocks[1].weight),
    "copy_ into data": lambda m: m.blocks[2].weight.data.copy_(noise(64, 64, dtype=torch.float64)),
    "load_state_dict": _load,
    "load_state_dict, assigned": _load_fresh,
    "load_state_dict of its own, assigned": _load_own,
    "fill_": lambda m: nn.init.ones_(m.blocks[2].weight),
    "out=": _out,
    "+=": _add,
    "item set": _set_item,
    "row zeroed": lambda m: m.blocks[2].weight[0].zero_(),
    "transposed view": lambda m: m.blocks[2].weight.t().mul_(2),
    "chunk": lambda m: m.blocks[2].weight.chunk(2)[1].add_(1),
    "flat view": lambda m: m.blocks[2].weight.detach().view(-1)[5:9].fill_(3),
    "view of a view": lambda m: m.blocks[2].weight.unflatten(0, (8, 8))[3].t().sub_(1),
    "view written late": _late_view,
    "foreach": lambda m: torch._foreach_mul_([m.blocks[2].weight, m.blocks[2].bias], 2.0),
    "same parameter anew": _new_parameter,
    "another parameter": _other_parameter,
    "tied": lambda m: setattr(m.blocks[2], "weight", m.blocks[1].weight),
    "fp8 and back by data": _fp8_and_back,
}


def compare(change: Change, *, budget: float = 0.7, mode: Any = torch.no_grad) -> None:
    """The change on a streamed module and on a resident twin: equal at once, after three passes, and after release.

    The budget has room for two weights in the ring: some operators take two, some changes hold one.
    """
    module = stack()
    twin = twin_of(module)
    with torch.no_grad(), offload(module, budget) as offloaded:
        assert torch.equal(module(X), twin(X))
        with mode():
            change(module)
            change(twin)
        for _ in range(3):
            assert torch.equal(module(X), twin(X))
        assert_equal(list(module.state_dict().values()), list(twin.state_dict().values()))
        assert offloaded.report().streamed_bytes > 0 and offloaded.plan.streamed_bytes > 0
    assert not any(isinstance(weight, StreamedWeight) for weight in module.parameters())
    assert_equal(list(module.state_dict().values()), list(twin.state_dict().values()))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_weight_is_that_of_a_resident_one(name: str) -> None:
    compare(CHANGES[name])


@pytest.mark.parametrize("budget", [0.25, 0.7])
@pytest.mark.parametrize("name", ["row zeroed", "transposed view", "chunk", "data written"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_write_through_a_view_is_kept_in_every_grad_mode(name: str, mode: Any, budget: float) -> None:
    compare(CHANGES[name], budget=budget, mode=mode)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "detach", [lambda w: w, lambda w: w.detach(), lambda w: w.data, lambda w: nn.Parameter(w, False)]
)
def test_an_alias_of_a_weight_stays_the_weight(mode: Any, detach: Change) -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module), mode():
        alias = detach(module.blocks[2].weight)
        assert isinstance(alias, StreamedWeight) and not alias.requires_grad
        detach(twin.blocks[2].weight).mul_(2)
        alias.mul_(2)
        assert torch.equal(alias, twin.blocks[2].weight)
        assert torch.equal(module(X), twin(X))


_CASTS: dict[str, tuple[Change, ...]] = {
    "half": (lambda m: m.half(),),
    "half twice": (lambda m: m.half(), lambda m: m.half()),
    "bfloat16": (lambda m: m.bfloat16(),),
    "half and float": (lambda m: m.half(), lambda m: m.float()),
    "to bfloat16 and back": (lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float32)),
    "double and back": (lambda m: m.double(), lambda m: m.float()),
    "half, bfloat16, float": (lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.float()),
    "double, half, float": (lambda m: m.double(), lambda m: m.half(), lambda m: m.float()),
    "fp8 and float": (lambda m: m.to(torch.float8_e4m3fn), lambda m: m.to(torch.float32)),
    "fp8 thrice": (
        lambda m: m.to(torch.float8_e5m2),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float8_e4m3fn),
        lambda m: m.float(),
    ),
    "half, written, float": (lambda m: m.half(), lambda m: m.blocks[2].weight.mul_(1.1), lambda m: m.float()),
    "type": (lambda m: m.type(torch.float16),),
    "device and dtype": (lambda m: m.to("cpu", torch.float16), lambda m: m.to(device="cpu", dtype=torch.float32)),
    "like a tensor": (lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),),
}


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", _CASTS)
def test_a_change_of_dtype_gives_the_values_of_a_resident_module(name: str, in_files: bool, tmp_path: Path) -> None:
    module, files = from_files(stack(), tmp_path) if in_files else (stack(), [])
    twin = twin_of(module)
    with streamed(module, 0.9, files=files):
        for change in _CASTS[name]:
            change(module)
            change(twin)
            assert_equal(list(module.parameters()), list(twin.parameters()))
            dtype = twin.blocks[0].weight.dtype
            if dtype.itemsize > 1:
                assert torch.equal(module(X.to(dtype)), twin(X.to(dtype)))


def test_double_gives_the_values_of_a_resident_module_where_it_fits() -> None:
    module = stack()
    twin = twin_of(module).double()
    with streamed(module, 0.9):
        module.double()
        assert torch.equal(module(X.double()), twin(X.double()))


def test_a_cast_that_does_not_fit_is_refused_before_anything_changes() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module, smallest_budget(module)):
        module(X)
        with pytest.raises(BudgetError, match="device_memory"):
            module.double()
        assert torch.equal(module(X), twin(X))


@pytest.mark.parametrize("name", ["data assigned", "set_ to a tensor", "another parameter"])
def test_a_cast_after_an_assignment_casts_what_is_there_now(name: str) -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module, 0.7):
        for each in (module, twin):
            CHANGES[name](each)
            each.half()
        assert_equal(list(module.parameters()), list(twin.parameters()))
        assert torch.equal(module(X.half()), twin(X.half()))


def test_after_a_cast_and_an_edit_release_gives_one_dtype_back() -> None:
    module = stack()
    with streamed(module):
        module.half()
        module.blocks[2].weight.mul_(2)
        module(X.half())
    assert len({weight.dtype for weight in module.parameters()}) == 1


def test_a_cast_changes_the_part_that_it_was_asked_of_and_nothing_else() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module):
        for each in (module, twin):
            each.blocks[2].half()
            each.blocks[4].bfloat16().float()
        assert [w.dtype for w in module.parameters()] == [w.dtype for w in twin.parameters()]
        assert_equal(list(module.parameters()), list(twin.parameters()))
        module(X, (0, 1, 3))


def test_to_and_its_kind_return_the_module() -> None:
    module = stack()
    with streamed(module):
        module(X)
        assert module.to("cpu") is module
        assert module.cpu() is module
        assert module.float() is module
        assert module.blocks[1].to(torch.float32) is module.blocks[1]


def test_to_the_same_device_and_dtype_loads_nothing() -> None:
    module = stack()
    with streamed(module) as offloaded:
        module(X)
        before = offloaded.report().streamed_bytes
        module.cpu()
        module.to("cpu", torch.float32)
        module.float()
        assert offloaded.report().streamed_bytes == before
        assert all(isinstance(weight, StreamedWeight) for weight in module.parameters())


# --- what dispatch doesn't see: refused by name ---------------------------------------------------------------------


MOVES: dict[str, Change] = {
    "to meta": lambda m: m.to("meta"),
    "to another device": lambda m: m._apply(lambda tensor: tensor.to("meta")),
    "part to meta": lambda m: m.blocks[2].to("meta"),
    "share_memory": lambda m: m.share_memory(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_empty on meta": lambda m: m.to_empty(device="meta"),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "channels_last and half": lambda m: m.to(dtype=torch.float16, memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_of_a_module_is_refused_by_name_and_changes_nothing(name: str) -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module):
        before = [(id(weight), weight.dtype, weight.device, weight.stride()) for weight in module.parameters()]
        with pytest.raises(ManagedModuleError, match="transformer.*is under offload.*release"):
            MOVES[name](module)
        assert [(id(w), w.dtype, w.device, w.stride()) for w in module.parameters()] == before
        assert torch.equal(module(X), twin(X))
    assert torch.equal(module(X), twin(X))


MEMORY: dict[str, Change] = {
    "data_ptr": lambda w: w.data_ptr(),
    "ctypes": lambda w: ctypes.cast(w.data_ptr(), ctypes.POINTER(ctypes.c_float)),
    "untyped_storage": lambda w: w.untyped_storage(),
    "storage": lambda w: w.storage(),
    "numpy": lambda w: w.numpy(),
    "numpy, forced": lambda w: w.numpy(force=True),
    "np.asarray": lambda w: np.asarray(w),
    "tolist": lambda w: w.tolist(),
    "dlpack": lambda w: w.__dlpack__(),
    "torch.from_dlpack": lambda w: torch.from_dlpack(w),
    "np.from_dlpack": lambda w: np.from_dlpack(w),
    "share_memory_": lambda w: w.share_memory_(),
    "is_shared": lambda w: w.is_shared(),
    "pickle": lambda w: pickle.dumps(w),
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "deepcopy": lambda w: copy.deepcopy(w),
    "set_ to a storage": lambda w: w.set_(torch.zeros(64 * 64).untyped_storage()),
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_(0, 1),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "as_strided_": lambda w: w.as_strided_((2, 2), (1, 1)),
    "resize_": lambda w: w.resize_(2, 2),
}


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("name", MEMORY)
def test_what_needs_the_memory_of_a_weight_is_refused_by_name(name: str, resident: bool) -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module):
        weights = [w for w in module.parameters() if w.ndim > 1 and w._entry.resident == resident]
        module(X)
        with pytest.raises(ManagedModuleError, match=r"the weight transformer\.blocks\.\d\.weight"):
            MEMORY[name](weights[0])
        assert torch.equal(module(X), twin(X))


@pytest.mark.parametrize("reach", [torch.Tensor.data_ptr, torch.utils.dlpack.to_dlpack])
def test_the_memory_of_a_weight_is_not_reached_behind_its_back_either(reach: Change) -> None:
    module = stack()
    with streamed(module):
        module(X)
        with pytest.raises(RuntimeError, match="data pointer"):
            reach(streamed_weight(module))


def test_a_module_under_offload_is_neither_copied_nor_pickled() -> None:
    module = stack()
    with streamed(module):
        module(X)
        for attempt in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m.state_dict(), io.BytesIO())):
            with pytest.raises(ManagedModuleError, match="release"):
                attempt(module)


def test_a_state_dict_holds_real_values_and_can_be_cloned() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module):
        state = {key: value.clone() for key, value in module.state_dict().items()}
        assert not any(isinstance(value, StreamedWeight) for value in state.values())
        assert list(state) == list(twin.state_dict())
        assert_equal(list(state.values()), list(twin.state_dict().values()))
        assert_equal(list(module.state_dict().values()), list(twin.state_dict().values()))


@pytest.mark.parametrize("save", [safetensors.torch.save_file, torch.save])
def test_a_state_dict_is_saved_right_or_not_at_all(save: Any, tmp_path: Path) -> None:
    module = stack()
    twin, file = twin_of(module), tmp_path / "state"
    with streamed(module):
        module(X)
        with pytest.raises(ManagedModuleError, match=r"weight transformer\.blocks"):
            save(module.state_dict(), file)
        safetensors.torch.save_file({key: value.clone() for key, value in module.state_dict().items()}, file)
    assert_equal(
        list(safetensors.torch.load_file(file).values()), [twin.state_dict()[k] for k in sorted(twin.state_dict())]
    )


def test_an_alias_kept_over_release_raises_by_name() -> None:
    module = stack()
    with streamed(module) as offloaded:
        module(X)
        kept, data, state = streamed_weight(module), streamed_weight(module).data, module.state_dict()
        offloaded.release()
        for weight in (kept, data, state["blocks.0.weight"]):
            assert is_cold(weight)
            for use in (
                lambda w: w + 1,
                lambda w: w.clone(),
                lambda w: w.zero_(),
                lambda w: w.data_ptr(),
                lambda w: w[0],
                lambda w: F.linear(X, w),
                lambda w: F.embedding(torch.tensor([1]), w),
                lambda w: setattr(w, "data", torch.zeros(64, 64)),
                lambda w: w.set_(torch.zeros(64, 64)),
            ):
                with pytest.raises(ColdWeightError, match=r"transformer\.blocks\.\d\.weight"):
                    use(weight)
        assert "cold" in repr(kept)
    assert module.state_dict()["blocks.0.weight"].data_ptr() != 0


def test_a_weight_says_what_it_is() -> None:
    module = stack()
    with streamed(module):
        module(X)
        weight = streamed_weight(module)
        assert isinstance(weight, nn.Parameter) and not weight.requires_grad and weight.is_leaf
        assert (weight.numel(), weight.element_size(), weight.nbytes, weight.device.type) == (4096, 4, 16384, "cpu")
        assert f"{weight}" == repr(weight) and "streamed" in repr(weight) and "transformer.blocks" in repr(weight)


# --- LoRA -----------------------------------------------------------------------------------------------------------


def add_lora(model: Any) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.add_adapter(config)
    model.eval().requires_grad_(False)


_FUSIONS: dict[str, tuple[Change, ...]] = {
    "fused": (lambda m: m.fuse_lora(), lambda m: m.unfuse_lora()),
    "fused safely": (lambda m: m.fuse_lora(safe_fusing=True), lambda m: m.unfuse_lora()),
    "fused and unloaded": (lambda m: m.fuse_lora(lora_scale=0.5, safe_fusing=True), lambda m: m.unload_lora()),
    "switched": (lambda m: m.disable_adapters(), lambda m: m.enable_adapters()),
    "cast": (lambda m: m.bfloat16(), lambda m: m.fuse_lora(safe_fusing=True)),
}


_WITH_LORA = [
    (name, injected) for name in _FUSIONS for injected in ("before", "after") if (name, injected) != ("cast", "after")
]


@pytest.mark.parametrize(("name", "injected"), [*_WITH_LORA, ("cast", "after")])
def test_a_lora_gives_the_bits_of_the_resident_model(name: str, injected: str) -> None:
    pytest.importorskip("peft")
    module = flux()
    call = flux_call(1)
    plain = call(twin_of(module))[0]
    if injected == "before":
        add_lora(module)
    twin = twin_of(module)
    with streamed(module, 0.3):
        call(module)
        if injected == "after":
            add_lora(module)
            add_lora(twin)
        assert torch.equal(call(module)[0], call(twin)[0])
        assert not torch.equal(call(module)[0], plain)
        for change in _FUSIONS[name]:
            change(module)
            change(twin)
            assert_equal(call(module), call(twin), name)
    if name != "cast":
        assert_equal(call(module), call(twin), name)


@pytest.mark.parametrize("safe", [False, True])
def test_peft_merges_and_unmerges_with_the_bits_of_the_resident_model(safe: bool) -> None:
    peft = pytest.importorskip("peft")

    def wrap(module: nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=r"blocks\.[0-9]", init_lora_weights=False)
            return peft.LoraModel(module, config, "default").requires_grad_(False)

    module = stack()
    twin = twin_of(module)
    plain = twin(X)
    with streamed(module):
        ours, theirs = wrap(module), wrap(twin)
        assert torch.equal(ours(X), theirs(X)) and not torch.equal(ours(X), plain)
        for change in (
            lambda m: m.merge_adapter(safe_merge=safe),
            lambda m: m.unmerge_adapter(),
            lambda m: m.merge_adapter(safe_merge=safe),
        ):
            change(ours)
            change(theirs)
            for _ in range(2):
                assert torch.equal(ours(X), theirs(X))
        ours, theirs = ours.unload(), theirs.unload()
    assert torch.equal(ours(X), theirs(X))


# --- other kinds of offload -----------------------------------------------------------------------------------------


def _accelerate_cpu(module: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, "cpu")


def _accelerate_dispatch(module: Any) -> None:
    from accelerate import dispatch_model

    dispatch_model(module, {"": "cpu"}, force_hooks=True)


def _accelerate_disk(module: Any, folder: str) -> None:
    from accelerate import disk_offload

    disk_offload(module, folder, execution_device="cpu")


def _diffusers_groups(module: Any) -> None:
    module.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "block_level", num_blocks_per_group=1)


def _diffusers_leaves(module: Any) -> None:
    module.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


def _diffusers_casting(module: Any) -> None:
    module.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)


def _refused_and_usable(module: Any, hook: Change) -> None:
    call = flux_call(1)
    expected = call(twin_of(module))
    with streamed(module, 0.3):
        call(module)
        with pytest.raises(ManagedModuleError, match="under offload|Use weight.clone"):
            hook(module)
        assert_equal(call(module), expected)
    assert_equal(call(module), expected)


@pytest.mark.parametrize("hook", [_accelerate_cpu, _accelerate_dispatch])
def test_hooks_of_accelerate_on_a_managed_module_are_refused(hook: Change) -> None:
    _refused_and_usable(flux(), hook)


def test_offload_to_disk_by_accelerate_on_a_managed_module_is_refused(tmp_path: Path) -> None:
    _refused_and_usable(flux(), lambda module: _accelerate_disk(module, str(tmp_path)))


@pytest.mark.parametrize("hook", [_diffusers_groups, _diffusers_leaves, _diffusers_casting])
def test_hooks_of_diffusers_on_a_managed_module_are_refused_or_right(hook: Change) -> None:
    """Where the device that they offload to is the execution device they move nothing, and casts are carried out."""
    module, call = flux(), flux_call(1)
    twin = twin_of(module)
    with streamed(module, 0.3):
        call(module)
        try:
            hook(module)
        except ManagedModuleError:
            pass
        else:
            hook(twin)
        for _ in range(2):
            assert_equal(call(module), call(twin))


@pytest.mark.parametrize("hook", [_accelerate_cpu, _diffusers_groups, _diffusers_leaves, _diffusers_casting])
def test_a_module_with_hooks_of_another_offload_is_refused_by_name(hook: Change) -> None:
    module = flux()
    hook(module)
    before = [id(weight) for weight in module.parameters()]
    with pytest.raises(ManagedModuleError, match=r"transformer.*(of accelerate|of diffusers).*one kind of offload"):
        offload(module, 0.3)
    assert [id(weight) for weight in module.parameters()] == before
    with torch.no_grad():
        assert flux_call(1)(module)[0].shape == (1, 12, 16)


def test_a_second_offload_of_a_module_or_a_part_of_it_is_refused() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module):
        for again in (module, module.blocks[1], nn.ModuleDict({"inner": module})):
            with pytest.raises(ManagedModuleError, match="under offload already"):
                offload(again, 0.9)
        assert torch.equal(module(X), twin(X))
    with streamed(module):
        assert torch.equal(module(X), twin(X))


# --- attach and release ---------------------------------------------------------------------------------------------


def traces(module: nn.Module) -> list[Any]:
    """All that could be left changed: attributes, hooks, and the identity and form of every tensor."""
    found: list[Any] = []
    for part in module.modules():
        tensors = {**part._parameters, **part._buffers}
        hooks = {key: len(value) for key, value in vars(part).items() if "hooks" in key and value is not None}
        found.append((type(part), sorted(vars(part)), hooks))
        found += [
            (key, id(t), type(t), t.requires_grad, t.dtype, t.device, t.stride(), t.data_ptr())
            for key, t in tensors.items()
            if t is not None
        ]
    return found


def test_an_attach_that_fails_leaves_the_module_as_it_was() -> None:
    for build in (stack, flux, BY_NAME["convolutions"].build, BY_NAME["tied_tables"].build):
        module = build()
        before = traces(module)
        with pytest.raises(BudgetError, match="transformer|budget"):
            offload(module, 100)
        with pytest.raises(BudgetError, match="host_memory"):
            offload(module, 0.5, host_memory=1000)
        assert traces(module) == before
        with streamed(module):
            next(module.parameters()).clone()


def test_the_budget_that_a_message_names_is_enough() -> None:
    for name in ("linear", "attention", "flux", "convolutions", "tables", "sdxl_unet"):
        module = BY_NAME[name].build()
        budget = smallest_budget(module)
        with pytest.raises(BudgetError):
            offload(module, budget - budget // 4)
        with torch.no_grad(), offload(module, budget) as offloaded:
            BY_NAME[name].calls[0](module)
            assert offloaded.report().peak_bytes <= budget


def test_release_gives_back_the_very_objects_and_everything_they_had() -> None:
    module = flux()
    module.register_buffer("counter", torch.zeros(3))
    list(module.parameters())[3].requires_grad_(True)
    values = [weight.clone() for weight in module.parameters()]
    before = traces(module)
    with streamed(module, 0.3):
        assert not any(weight.requires_grad for weight in module.parameters())
        flux_call(1)(module)
        module.counter += 1
    assert traces(module) == before
    assert torch.equal(module.counter, torch.ones(3))
    assert_equal(list(module.parameters()), values)
    assert not any("_apply" in vars(part) for part in module.modules())


def test_release_may_be_called_twice_and_tells_what_is_still_held() -> None:
    module = stack()
    with torch.no_grad():
        offloaded = offload(module, 0.5)
        module(X)
        assert offloaded.release() == 0 == offloaded.release()
        offloaded = offload(module, 0.5)
        view = streamed_weight(module)[3]
        assert offloaded.release() == 16384
    assert torch.isfinite(view).all()


@pytest.mark.slow
def test_ten_rounds_of_attach_and_release_leave_nothing_behind() -> None:
    module = stack()
    before, threads = traces(module), threading.active_count()
    gc.collect()
    counts = []
    for _ in range(10):
        with streamed(module):
            module(X)
        gc.collect()
        alive = sum(type(thing) is StreamedWeight for thing in gc.get_objects())
        counts.append((alive, threading.active_count()))
        assert traces(module) == before
    assert set(counts) == {(0, threads)}


@pytest.mark.parametrize("in_files", [False, True])
def test_what_is_dropped_without_release_is_freed_by_reference_counts_alone(in_files: bool, tmp_path: Path) -> None:
    module, files = from_files(stack(), tmp_path) if in_files else (stack(), [])
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            offloaded = offload(module, 0.5, files=files)
            module(X)
            assert any(thread.name.startswith("offload-reader") for thread in threading.enumerate())
            cache = offloaded._managed.scope.cache
            readers = list(cache.readers._threads)
            storages = [weakref.ref(weight.view(-1).untyped_storage()) for weight in module.parameters()]
            things = (module, *module.parameters(), cache, cache.ledger, offloaded._managed, offloaded._managed.scope)
            watched = [weakref.ref(thing) for thing in things]
            del cache, things
            del offloaded
            assert torch.equal(module(X), module(X))
            del module
        for thread in readers:  # one may be in the middle of a copy, which it then owns
            thread.join(2)
            assert not thread.is_alive()
        assert [ref() for ref in watched if ref() is not None] == []
        assert [ref() for ref in storages if ref() is not None] == []
    finally:
        gc.enable()


def test_an_error_in_a_forward_leaves_nothing_held() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module) as offloaded:
        with pytest.raises(RuntimeError, match="shape"):
            module(noise(3, 65))
        assert torch.equal(module(X), twin(X))
        assert offloaded.release() == 0


def test_a_tensor_made_from_a_weight_outlives_its_eviction_and_the_offload() -> None:
    module = stack()
    twin = twin_of(module)
    with streamed(module, 0.7):
        view = streamed_weight(module).t()
        index = next(i for i, block in enumerate(module.blocks) if block.weight is streamed_weight(module))
        for _ in range(3):
            module(X)
        assert torch.equal(view, twin.blocks[index].weight.t())
    del module
    assert torch.equal(view, twin.blocks[index].weight.t())


def test_small_weights_stay_by_the_rule_and_are_charged() -> None:
    module = flux()
    twin = twin_of(module)
    with torch.no_grad(), offload(module, 0.9, resident_below=2048) as offloaded:
        small = [weight for weight in module.parameters() if weight.nbytes < 2048]
        assert small and not any(isinstance(weight, StreamedWeight) for weight in small)
        assert offloaded.plan.small_bytes >= sum(weight.nbytes for weight in small)
        assert offloaded.report().resident_bytes >= offloaded.plan.small_bytes
        assert_equal(flux_call(1)(module), flux_call(1)(twin))
        assert offloaded.report().streamed_bytes > 0


def test_weight_bytes_of_the_helper_are_the_plans() -> None:
    module = stack()
    with streamed(module) as offloaded:
        plan = offloaded.plan
        assert plan.resident_bytes + plan.streamed_bytes + plan.small_bytes == weight_bytes(module)
        module(X)
