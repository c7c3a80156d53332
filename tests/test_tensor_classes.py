"""Each class of weight has a stated rule, loses nothing when it is taken apart, and computes the same bits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload_core.errors import ManagedModuleError
from offload_core.streaming._tensor_classes import DelegatesToHot, Shell, classify, shell_of


class Scaled(torch.Tensor):
    """A made quantised weight: bytes and a scale, its own `F.linear`, an attribute and a method."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, kind: str) -> Any:
        self: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        self.codes, self.scale, self.kind = codes, scale, kind
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"kind": self.kind}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"], context["kind"])

    def as_plain(self):
        codes = self.codes.as_plain() if isinstance(self.codes, Scaled) else self.codes
        return codes.to(self.scale.dtype) * self.scale

    def dequantize(self):  # torch.Tensor has a method of this name that means something else
        return self.as_plain()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            inputs, weight, bias = args
            return F.linear(inputs * 3, weight.as_plain(), bias) / 3
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            names, context = args[0].__tensor_flatten__()
            parts = {name: getattr(args[0], name) for name in names}
            return cls.__tensor_unflatten__(parts, context, None, None)
        if func is torch.ops.aten.addmm.default:
            return func(*(arg.as_plain() if isinstance(arg, Scaled) else arg for arg in args))
        raise NotImplementedError(f"{func} of a Scaled weight")


class NotesItsDevice(Scaled):
    """As some classes of torchao do: the context holds the device, also inside a dataclass."""

    @dataclass(frozen=True)
    class Meta:
        device: torch.device

    def __tensor_flatten__(self):
        device = self.codes.device
        return ["codes", "scale"], {"kind": self.kind, "device": device, "meta": self.Meta(device)}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        assert context["device"] == context["meta"].device == parts["codes"].device
        return cls(parts["codes"], parts["scale"], context["kind"])


class Unknown(nn.Parameter):
    pass


def scaled(cls: type[Scaled] = Scaled) -> Any:
    codes = torch.arange(-24, 24, dtype=torch.int8).view(6, 8)
    return cls(codes, torch.linspace(0.1, 0.7, 6).view(6, 1), "rows")


def nested() -> Any:
    return Scaled(scaled(), torch.linspace(1.0, 2.0, 6).view(6, 1), "twice")


def foreign(module: str, name: str) -> Any:
    """A class as another package would define it."""
    return type(name, (nn.Parameter,), {"__module__": module})


class Streamed(DelegatesToHot):
    """The wrapper of these tests: it copies the inner tensors anew for every function and counts how often."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        rule = classify(weight, "layer.weight")
        assert rule.rule == "inner" and rule.take_apart
        master = {name: part.clone() for name, part in rule.take_apart(weight).items()}
        wrapper = cls._make(shell_of(weight, "layer.weight"), "layer.weight", weight.device)
        vars(wrapper).update(_master=master, _rebuild=rule.rebuild, _loads=[])
        return wrapper

    def _hot(self):
        self._loads.append(1)
        with torch.inference_mode(False):
            return self._rebuild(self._shell, {name: part.clone() for name, part in self._master.items()})


def loads(wrapper: Any) -> int:
    return len(vars(wrapper)["_loads"])


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_a_dense_tensor_or_parameter_is_plain_whatever_its_dtype(dtype):
    tensor = torch.zeros(4, 4, dtype=dtype)
    assert classify(tensor, "w").rule == "plain"
    assert classify(nn.Parameter(tensor, requires_grad=False), "w").rule == "plain"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_plain_tensor_whose_bytes_do_not_say_its_values_stays_resident_with_a_reason():
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ):
        rule = classify(tensor, "w")
        assert rule.rule == "resident" and rule.reason


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("bitsandbytes.nn.modules", "Params4bit"),
        ("bitsandbytes.nn.modules", "Int8Params"),
        ("optimum.quanto.tensor.weights.tinygemm.qbits", "TinyGemmWeightQBitsTensor"),
    ],
)
def test_a_class_that_only_its_own_package_can_move_is_kept_whole_and_resident(module, name):
    cls = foreign(module, name)
    rule = classify(cls(torch.zeros(2)), "w")
    assert (rule.rule, rule.name) == ("resident", f"{module}.{name}")
    assert rule.reason and rule.take_apart is None
    derived = type("Derived", (cls,), {"__module__": "somewhere"})
    assert classify(derived(torch.zeros(2)), "w").rule == "resident"


def test_the_same_class_name_from_another_package_is_not_taken_for_it():
    for name in ("Params4bit", "GGUFParameter"):
        with pytest.raises(ManagedModuleError):
            classify(foreign("elsewhere.modules", name)(torch.zeros(2)), "w")


@pytest.mark.parametrize("cls", [Unknown, foreign("torch.distributed.tensor", "DTensor")])
def test_a_class_without_a_rule_is_refused_with_its_name_the_weight_and_what_to_do(cls):
    with pytest.raises(ManagedModuleError, match=r"'blocks\.0\.weight'.*" + cls.__name__) as caught:
        classify(cls(torch.zeros(2)), "blocks.0.weight")
    assert "Leave this component out" in str(caught.value)


# --- taking apart and rebuilding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "names"), [(scaled, ["codes", "scale"]), (nested, ["codes.codes", "codes.scale", "scale"])]
)
def test_a_weight_is_rebuilt_from_copies_of_its_plain_inner_tensors(make, names):
    weight = make()
    rule = classify(weight, "w")
    assert rule.rule == "inner"
    parts = rule.take_apart(weight)
    assert list(parts) == names
    assert all(type(part) is torch.Tensor for part in parts.values())
    again = rule.rebuild(shell_of(weight, "w"), {name: part.clone() for name, part in parts.items()})
    assert type(again) is Scaled and again.kind == weight.kind
    assert torch.equal(again.as_plain(), weight.as_plain())


def test_taking_apart_copies_no_bytes():
    weight = scaled()
    assert classify(weight, "w").take_apart(weight)["codes"].data_ptr() == weight.codes.data_ptr()


@pytest.mark.parametrize("make", [scaled, nested])
def test_a_shell_keeps_no_tensor_of_the_weight_alive(make):
    weight = make()
    shell = shell_of(weight, "w")
    held = [weakref.ref(part) for part in (weight, weight.codes, weight.scale)]
    del weight
    gc.collect()
    assert isinstance(shell, Shell)
    assert [ref() for ref in held] == [None] * 3


def test_marks_on_a_parameter_and_its_gradient_flag_survive():
    weight = nn.Parameter(scaled(), requires_grad=True)
    weight.mark = "kept"
    rule = classify(weight, "w")
    again = rule.rebuild(shell_of(weight, "w"), rule.take_apart(weight))
    assert isinstance(again, nn.Parameter) and type(again) is Scaled
    assert again.mark == "kept" and again.requires_grad


def test_a_device_noted_in_the_context_follows_the_inner_tensors():
    weight = scaled(NotesItsDevice)
    rule = classify(weight, "w")
    moved = {name: part.to("meta") for name, part in rule.take_apart(weight).items()}
    assert rule.rebuild(shell_of(weight, "w"), moved).device.type == "meta"


def test_a_class_that_hides_a_tensor_from_its_parts_is_refused():
    weight = scaled()
    weight.lookup = {"table": [torch.ones(3)]}
    with pytest.raises(ManagedModuleError, match="'w'.*Scaled.*lookup"):
        shell_of(weight, "w")
    weight = scaled()
    weight.bias = torch.ones(3)
    with pytest.raises(ManagedModuleError, match="'w'.*Scaled.*bias"):
        shell_of(weight, "w")


def test_a_tensor_in_the_context_is_refused_too():
    class HasTable(Scaled):
        def __tensor_flatten__(self):
            return ["codes", "scale"], {"kind": self.kind, "tables": (torch.ones(3),)}

    with pytest.raises(ManagedModuleError, match="'w'.*HasTable.*context"):
        shell_of(scaled(HasTable), "w")


def test_a_class_that_comes_back_changed_or_not_at_all_is_refused():
    class Forgets(Scaled):
        @classmethod
        def __tensor_unflatten__(cls, parts, context, size, stride):
            return Scaled(parts["codes"], parts["scale"], "")

    class Breaks(Scaled):
        @classmethod
        def __tensor_unflatten__(cls, parts, context, size, stride):
            raise KeyError("group")

    with pytest.raises(ManagedModuleError, match="another class"):
        shell_of(scaled(Forgets), "w")
    with pytest.raises(ManagedModuleError, match="'w'.*group"):
        shell_of(scaled(Breaks), "w")
    with pytest.raises(ManagedModuleError, match="'scale'.*layout"):
        shell_of(Scaled(torch.eye(6, dtype=torch.int8), torch.eye(6).to_sparse(), ""), "w")


# --- the wrapper --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_function_that_the_class_overrides_is_the_one_that_runs(mode):
    weight = scaled()
    layer: Any = nn.Linear(8, 6).requires_grad_(False)
    layer._parameters["weight"] = weight
    inputs = torch.linspace(-1, 1, 24).view(3, 8)
    with mode():
        wanted = layer(inputs)
        layer._parameters["weight"] = Streamed.of(weight)
        got = layer(inputs)
    assert torch.equal(got, wanted) and type(got) is torch.Tensor
    assert not torch.equal(wanted, F.linear(inputs, weight.as_plain(), layer.bias)), "the class's own linear must show"
    assert loads(layer.weight) == 1


def test_an_operator_below_torch_functions_gets_the_hot_weight_too():
    weight, inputs = scaled(), torch.ones(3, 6)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        got = torch.addmm(torch.zeros(8), inputs, Streamed.of(weight))
    assert torch.equal(got, torch.addmm(torch.zeros(8), inputs, weight.as_plain()))


def test_questions_about_a_weight_bring_no_bytes_in():
    weight = nn.Parameter(scaled(), requires_grad=False)
    wrapper = Streamed.of(weight)
    assert (wrapper.shape, wrapper.dtype, wrapper.device) == (weight.shape, weight.dtype, weight.device)
    assert (wrapper.size(0), wrapper.stride(), wrapper.dim(), len(wrapper)) == (6, (8, 1), 2, 6)
    assert wrapper.is_contiguous() and wrapper.numel() == 48 and not wrapper.requires_grad
    assert isinstance(wrapper, nn.Parameter) and isinstance(wrapper, Scaled) and isinstance(wrapper, Streamed)
    assert wrapper.__class__.__name__ == "Scaled" and type(wrapper) is Streamed
    assert wrapper.kind == "rows"
    assert not hasattr(wrapper, "SCB") and getattr(wrapper, "_hf_hook", None) is None
    assert loads(wrapper) == 0


def test_methods_and_inner_tensors_come_from_the_hot_weight():
    weight = scaled()
    wrapper = Streamed.of(weight)
    assert torch.equal(wrapper.as_plain(), weight.as_plain())
    assert torch.equal(wrapper.dequantize(), weight.as_plain())
    assert torch.equal(wrapper.codes, weight.codes)
    assert loads(wrapper) == 3


def test_a_parameter_made_of_a_wrapper_and_its_data_are_wrappers_of_the_same_weight():
    weight = scaled()
    wrapper = Streamed.of(weight)
    for other in (nn.Parameter(wrapper, requires_grad=False), wrapper.detach(), wrapper.data):
        assert type(other) is Streamed and loads(wrapper) == 0
    assert torch.equal(nn.Parameter(wrapper, requires_grad=False).as_plain(), weight.as_plain())


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.add_(1),
        lambda w: w.copy_(torch.zeros(6, 8)),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__iadd__(1),
        lambda w: torch.add(torch.ones(6, 8), 1, out=w),
        lambda w: F.relu(w, inplace=True),
        lambda w: nn.init.normal_(w),
        lambda w: torch._foreach_add_([w], 1),
        lambda w: torch.ops.aten.mul_.Tensor(w, torch.ones(())),
        lambda w: setattr(w, "data", torch.ones(6, 8)),
        lambda w: w.set_(torch.ones(6, 8)),
        lambda w: w.data_ptr(),
        lambda w: w.untyped_storage(),
        lambda w: w.numpy(),
        lambda w: w.share_memory_(),
        lambda w: w.__deepcopy__({}),
        lambda w: w.__reduce_ex__(2),
    ],
)
def test_what_would_write_to_a_copy_or_hand_out_its_memory_is_refused_by_name(edit):
    wrapper = Streamed.of(scaled())
    with pytest.raises(ManagedModuleError, match=r"'layer\.weight' of class Scaled"):
        edit(wrapper)
    assert loads(wrapper) == 0


def test_writing_from_a_wrapper_into_another_tensor_is_no_edit_of_it():
    class Adds(Scaled):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.add_:
                return func(args[0], args[1].as_plain())
            return super().__torch_function__(func, types, args, kwargs)

    weight = scaled(Adds)
    target = torch.zeros(6, 8)
    target.add_(Streamed.of(weight))
    assert torch.equal(target, weight.as_plain())


def test_the_weights_of_one_function_are_acquired_together():
    class Counts(Streamed):
        @classmethod
        def _hot_together(cls, wrappers):
            groups.append(len(wrappers))
            return super()._hot_together(wrappers)

    class Joins(Scaled):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.cat:
                return torch.cat([item.as_plain() for item in args[0]])
            return super().__torch_function__(func, types, args, kwargs)

    groups: list[int] = []
    one, two = Counts.of(scaled(Joins)), Counts.of(scaled(Joins))
    assert torch.cat([one, two, one]).shape == (18, 8)
    assert groups == [2]


# --- real libraries -----------------------------------------------------------------------------------------------


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def check_same_bits_when_streamed(layer: Any, inputs: torch.Tensor, parts: set[str]) -> None:
    weight = layer.weight
    with torch.no_grad():
        wanted = layer(inputs)
        weight.requires_grad_(False)
        wrapper = layer._parameters["weight"] = Streamed.of(weight)
        got = layer(inputs)
    assert set(vars(wrapper)["_master"]) == parts
    assert loads(wrapper) == 1
    assert type(got) is type(wanted) is torch.Tensor and same_bits(got, wanted)


def made_linear() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128)).to(torch.bfloat16), torch.randn(4, 256, dtype=torch.bfloat16)


def test_a_scaled_fp8_layer_has_a_plain_weight_and_its_scale_beside_it():
    pytest.importorskip("diffusers.quantizers.bfl")
    from diffusers.quantizers.bfl.utils import BFLFP8RLinear

    layer = BFLFP8RLinear(16, 8, compute_dtype=torch.bfloat16)
    assert classify(layer.weight, "w").rule == classify(layer.weight_scale, "w").rule == "plain"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("Int8WeightOnlyConfig", {"qdata", "scale", "zero_point"}),
        ("Int8DynamicActivationInt8WeightConfig", {"qdata", "scale", "zero_point"}),
        ("IntxWeightOnlyConfig", {"qdata", "scale", "zero_point"}),
        ("Float8WeightOnlyConfig", {"qdata", "scale"}),
    ],
)
def test_torchao_weights_are_streamed_by_their_inner_tensors(config, parts):
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = made_linear()
    quantization.quantize_(model, getattr(quantization, config)())
    check_same_bits_when_streamed(model[0], inputs, parts)


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0", "Q4_K", "BF16"])
def test_gguf_weights_are_rebuilt_around_their_raw_bytes(quant_type):
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType[quant_type]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    torch.manual_seed(0)
    # Bytes below 64 make small finite float16 numbers, so that no scale is NaN.
    raw = torch.randint(0, 64, (128, 256 // block * block_bytes), dtype=torch.uint8)
    layer = GGUFLinear(256, 128, bias=True, compute_dtype=torch.bfloat16)
    layer.weight = GGUFParameter(raw, quant_type=kind)
    layer.requires_grad_(False)
    check_same_bits_when_streamed(layer, torch.randn(4, 256, dtype=torch.bfloat16), {"data"})
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, GGUFParameter)
    assert layer.weight.__class__.__name__ == "GGUFParameter" and layer.weight.quant_shape == (128, 256)


@pytest.mark.parametrize(
    ("qtype", "parts"),
    [
        ("qint8", {"_data", "_scale"}),
        ("qfloat8", {"_data", "_scale"}),
        ("qint2", {"_data._data", "_scale", "_shift"}),
    ],
)
def test_quanto_weights_are_streamed_by_their_inner_tensors(qtype, parts):
    quanto = pytest.importorskip("optimum.quanto")
    model, inputs = made_linear()
    quanto.quantize(model, weights=getattr(quanto, qtype))
    quanto.freeze(model)
    check_same_bits_when_streamed(model[0], inputs, parts)


def test_a_quanto_weight_packed_for_one_kind_of_device_stays_resident():
    quanto = pytest.importorskip("optimum.quanto")
    model, _ = made_linear()
    quanto.quantize(model, weights=quanto.qint4)
    quanto.freeze(model)
    assert classify(model[0].weight, "w").rule == "resident"


@pytest.mark.parametrize(("layer", "options"), [("Linear4bit", {}), ("Linear8bitLt", {"has_fp16_weights": False})])
def test_bitsandbytes_weights_stay_resident(layer, options):
    modules = pytest.importorskip("bitsandbytes").nn
    weight = getattr(modules, layer)(64, 64, **options).to("cpu").weight
    assert classify(weight, "w").rule == "resident"
