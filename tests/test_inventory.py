"""Every storage of a component is listed once, with all its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_core.errors import ManagedModuleError
from offload_core.inventory import Inventory, Item, check_ownership, take_inventory
from offload_core.tiny_models import FAMILIES


def by_name(inventory: Inventory) -> dict[str, Item]:
    return {name: item for item in inventory.items for name in item.names}


def linear() -> nn.Linear:
    return nn.Linear(4, 3)


# Ties and overlaps


def test_a_linear_in_two_places_is_listed_once_under_both_names() -> None:
    shared = linear()
    inventory = take_inventory(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert [item.names for item in inventory.items] == [("a.weight", "b.0.weight"), ("a.bias", "b.0.bias")]
    assert inventory.items[0].places == ((shared, "weight"), (shared, "weight"))


def test_two_parameters_over_the_same_memory_are_one_item() -> None:
    model = nn.ModuleList([linear(), linear()])
    model[1].weight = nn.Parameter(model[0].weight.detach())
    inventory = take_inventory(model)
    assert inventory.items[0].names == ("0.weight", "1.weight")
    assert inventory.items[0].tensor is model[0].weight
    assert not inventory.overlapping


def test_a_tied_transposed_view_makes_a_group_that_shares_storage() -> None:
    model = nn.ModuleList([linear(), nn.Linear(3, 4, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    inventory = take_inventory(model)
    (group,) = inventory.overlapping
    assert [item.names for item in group] == [("0.weight",), ("1.weight",)]
    assert [item.names[0] for item in inventory.items if item.shares_storage] == ["0.weight", "1.weight"]


def test_a_fused_buffer_and_its_slices_are_one_group() -> None:
    model = nn.Module()
    model.fused = nn.Buffer(torch.arange(12.0))
    model.first, model.second = (nn.Parameter(half) for half in model.fused.chunk(2))
    (group,) = take_inventory(model).overlapping
    assert {item.names[0] for item in group} == {"fused", "first", "second"}


def test_slices_of_one_storage_that_do_not_overlap_are_independent() -> None:
    fused = torch.arange(12.0)
    inventory = take_inventory(nn.ParameterList(fused.chunk(3)))
    assert not inventory.overlapping
    assert not any(item.shares_storage for item in inventory.items)
    assert [item.nbytes for item in inventory.items] == [16, 16, 16]


# Where tensors are registered


def test_every_kind_of_place_is_found_in_the_order_of_registration() -> None:
    model = nn.Module()
    model.register_parameter("absent", None)
    model.root = nn.Parameter(torch.zeros(2))
    model.statistics = nn.Buffer(torch.zeros(2))
    model.cache = nn.Buffer(torch.zeros(3), persistent=False)
    model.attention = nn.MultiheadAttention(4, 2)
    model.table = nn.ParameterDict({"x": torch.zeros(1)})
    model.rows = nn.ParameterList([torch.zeros(1), torch.zeros(2)])
    model.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 1))
    inventory = take_inventory(model)
    names = [item.names[0] for item in inventory.items]
    assert names[:4] == ["root", "statistics", "cache", "attention.in_proj_weight"]
    assert {"table.x", "rows.0", "rows.1", "normed.parametrizations.weight.original0"} <= set(names)
    every = [*model.named_parameters(), *model.named_buffers()]
    assert sorted(names) == sorted(name for name, _ in every)
    assert {item.names[0] for item in inventory.items if item.kind == "buffer"} == {"statistics", "cache"}


def test_a_module_that_contains_itself_is_walked_once() -> None:
    model = nn.Sequential(linear())
    model[0].add_module("parent", model)
    assert [item.names for item in take_inventory(model).items] == [("0.weight",), ("0.bias",)]


@pytest.mark.parametrize("name", ["flux", "sdxl", "qwen_image"])
def test_the_items_of_a_real_family_hold_all_its_tensors(name: str) -> None:
    for component in FAMILIES[name].build().components.values():
        if isinstance(component, nn.Module):
            items = by_name(take_inventory(component))
            tensors = {**dict(component.named_parameters()), **dict(component.named_buffers())}
            assert {key: id(items[key].tensor) for key in tensors} == {key: id(t) for key, t in tensors.items()}
            for item in {id(item): item for item in items.values()}.values():
                assert all(
                    module._parameters.get(key) is item.tensor or key in module._buffers for module, key in item.places
                )


def test_tensors_in_plain_attributes_are_listed_by_module() -> None:
    model = nn.Sequential(nn.Identity())
    model.loose = torch.zeros(2)
    model[0].held = {"a": [torch.zeros(1)], "b": (torch.zeros(1), 3), "deep": [[[torch.zeros(1)]]]}
    inventory = take_inventory(model)
    assert inventory.items == []
    assert inventory.attributes == {"": ("loose",), "0": ("held['a'][0]", "held['b'][0]")}


def test_a_parameter_that_a_plain_attribute_holds_too_shares_its_storage() -> None:
    inventory = take_inventory(nn.LSTM(2, 3))
    assert inventory.attributes[""][0] == "_flat_weights[0]"
    assert all(item.shares_storage for item in inventory.items)
    model = linear()
    model.corner = model.weight.detach()[1:]
    assert [item.shares_storage for item in take_inventory(model).items] == [True, False]


# Shapes, and tensors that are not plain


@pytest.mark.parametrize(
    ("tensor", "nbytes", "dense"),
    [
        (torch.zeros(3, 4), 48, True),
        (torch.zeros(3, 4).t(), 48, True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), 480, True),
        (torch.zeros(3, 4, dtype=torch.bfloat16)[:, :2], 20, False),
        (torch.zeros(1).expand(5), 4, False),
        (torch.zeros(6)[::2], 20, False),
        (torch.zeros(3, 0), 0, True),
        (torch.tensor(1.0), 4, True),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), 4, True),
    ],
)
def test_bytes_are_counted_from_the_first_to_the_last_element(tensor: torch.Tensor, nbytes: int, dense: bool) -> None:
    model = nn.Module()
    model.tensor = nn.Buffer(tensor)
    (item,) = take_inventory(model).items
    assert (item.nbytes, item.dense, item.opaque) == (nbytes, dense, False)
    assert (item.shape, item.stride, item.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


class Quantised(torch.Tensor):
    """A wrapper without a storage of its own around two inner tensors."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_part, self.scale_part = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_part", "scale_part"], None

    def untyped_storage(self) -> Any:
        pytest.fail("looked for a storage")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_part, args[0].scale_part)
        raise NotImplementedError(func)


def test_a_wrapper_subclass_counts_its_inner_tensors_and_has_no_range(tmp_path: Path) -> None:
    model = nn.ModuleList([linear(), linear()])
    model[0].weight = nn.Parameter(Quantised(torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3)), requires_grad=False)
    model[1].weight = model[0].weight
    item = take_inventory(model, [tmp_path / "model.safetensors"]).items[0]
    assert item.names == ("0.weight", "1.weight")
    assert (item.nbytes, item.ranges, item.opaque) == (12 + 12, (), True)


def test_a_sparse_tensor_is_opaque() -> None:
    model = nn.Module()
    model.sparse = nn.Buffer(torch.eye(3).to_sparse())
    (item,) = take_inventory(model).items
    assert item.opaque
    assert item.ranges == ()


# What is refused


def test_tensors_without_a_value_are_named() -> None:
    model = nn.Sequential(linear())
    with torch.device("meta"):
        model.append(linear())
    with pytest.raises(ManagedModuleError, match=r"1\.weight \(and 1 more\) of Sequential has no value"):
        take_inventory(model)


def test_a_lazy_parameter_has_no_value() -> None:
    with pytest.raises(ManagedModuleError, match="weight .* has no value"):
        take_inventory(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 4))), "0.weight .* was exchanged"),
        (lambda model: model.append(linear()), "2.weight .* belongs to no items"),
        (lambda model: model[1].register_buffer("new", torch.ones(1)), "1.new .* belongs to no items"),
        (lambda model: model.pop(1), "1.weight .* no longer in the module"),
    ],
)
def test_a_change_after_the_inventory_is_found_by_name(change: Callable[[Any], Any], says: str) -> None:
    model = nn.Sequential(linear(), linear())
    inventory = take_inventory(model)
    check_ownership(inventory, model)
    change(model)
    with pytest.raises(ManagedModuleError, match=says):
        check_ownership(inventory, model)


def test_a_tensor_with_two_owners_is_found_by_name() -> None:
    model = nn.Sequential(linear())
    inventory = take_inventory(model)
    inventory.items.append(replace(inventory.items[0]))
    with pytest.raises(ManagedModuleError, match="0.weight .* belongs to 2 items"):
        check_ownership(inventory, model)
