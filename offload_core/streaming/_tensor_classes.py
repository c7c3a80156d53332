"""How each class of weight is moved: as plain bytes, taken apart and rebuilt, whole and resident, or not at all.

A plain tensor is its bytes. A quantised weight is more: scales, a packing, methods and kernels of its own. Copying only
its storage would half-move it, so `classify` gives every class one stated rule and refuses the ones that have none.

| rule | what the engine does |
|---|---|
| plain | copies the bytes |
| inner | takes the weight apart into plain tensors, streams those, rebuilds the class around them (`Shell`) |
| resident | moves the whole weight with its own `.to(device)` and keeps it there for the phase |

Classes are recognised by the package they come from and their name, so no quantisation library has to be installed.
`DelegatesToHot` is what a wrapper tensor needs, beyond dispatch, to stand for a weight that has a class of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..errors import ManagedModuleError

_WHAT_TO_DO = "Leave this component out of the offload, or replace the weight by a plain torch.nn.Parameter first."


@dataclass(frozen=True)
class Shell:
    """All of a weight but its bytes: what is needed to make the same weight again around other inner tensors.

    `inner` names the inner tensors in order; one that has a class of its own has a shell too. `attributes` are the
    instance attributes that are no tensors. Nothing in here keeps a tensor alive.
    """

    cls: type[torch.Tensor]
    context: Any
    inner: tuple[tuple[str, Shell | None], ...]
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class TensorClass:
    """How one class of weights is handled, and why. `take_apart` and `rebuild` are there for the rule "inner" only.

    `take_apart(weight)` gives the plain inner tensors, which share the weight's memory, by dotted name.
    `rebuild(shell, tensors)` gives a weight of the shell's class around such tensors, which may lie on another device.
    """

    name: str
    rule: Literal["plain", "packed", "inner", "resident"]
    reason: str
    take_apart: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    rebuild: Callable[[Shell, Mapping[str, torch.Tensor]], torch.Tensor] | None = None


# By the package and the class's own name: the module in between changes from release to release (torchao's
# Int8Tensor calls itself torchao.quantization.Int8Tensor and is defined four packages deeper).
_RESIDENT = {
    ("bitsandbytes", "Params4bit"): "its scales lie in quant_state, which the layer shares, and its kernels read both",
    ("bitsandbytes", "Int8Params"): "its scales move to the layer's state at the first forward, and both must follow",
    ("optimum", "TinyGemmWeightQBitsTensor"): "its packing is made for one kind of device, and .to() packs it anew",
    ("optimum", "AWQWeightQBitsTensor"): "its packing is made for one kind of device, and .to() packs it anew",
    ("optimum", "MarlinF8QBytesTensor"): "its packing is made for one kind of device, and .to() packs it anew",
}
_REFUSED = {
    ("torch", "DTensor"): "it is one part of a weight that several processes share",
}


def classify(tensor: torch.Tensor, name: str) -> TensorClass:
    """The rule for a weight's class. `name` is the weight's full name, for the message.

    Raises `ManagedModuleError` for a class that has no rule: moving it would be a guess.
    """
    cls = type(tensor)
    full_name = f"{cls.__module__}.{cls.__qualname__}"
    if cls in (torch.Tensor, torch.nn.Parameter):
        odd = _not_just_bytes(tensor)
        return TensorClass(full_name, "resident", odd) if odd else TensorClass(full_name, "plain", "dense bytes")
    for base in cls.__mro__:
        key = (base.__module__.partition(".")[0], base.__name__)
        if key in _RESIDENT:
            return TensorClass(full_name, "resident", _RESIDENT[key])
        if key in _REFUSED:
            raise _refusal(tensor, name, _REFUSED[key])
    if _is_gguf(cls):
        reason = "raw bytes and a quant_type, which its layer reads"
        return TensorClass(full_name, "inner", reason, _take_apart, _rebuild)
    if _flattens(cls):
        reason = "it says itself which plain tensors it is made of (__tensor_flatten__)"
        return TensorClass(full_name, "inner", reason, _take_apart, _rebuild)
    raise _refusal(tensor, name, "this engine has no rule for it")


def bytes_beside(tensor: torch.Tensor) -> int:
    """Bytes of the tensors that a weight keeps in its attributes (the scales of bitsandbytes), which move with it."""
    if _flattens(type(tensor)):  # its parts are counted already
        return 0
    found: dict[int, int] = {}
    pending = [(value, 3) for value in vars(tensor).values()]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value.nbytes
        elif depth and not isinstance(value, type | torch.nn.Module):
            inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            pending += [(item, depth - 1) for item in inner.values()]
    found.pop(tensor.data_ptr(), None)
    return sum(found.values())


def shell_of(tensor: torch.Tensor, name: str) -> Shell:
    """The shell of a weight whose rule is "inner"; afterwards the weight itself may be dropped.

    The weight is rebuilt once around its own inner tensors (no bytes are copied), so that a class that can't be moved
    this way is found here and not in a forward. Raises `ManagedModuleError` if it loses state or changes.
    """
    try:
        shell = _make_shell(tensor)
        again = _rebuild(shell, _take_apart(tensor))
    except ManagedModuleError:
        raise
    except Exception as error:
        raise _refusal(tensor, name, f"taking it apart and rebuilding it failed ({error})") from error
    lost = _tensors_outside(tensor, shell)
    if lost:
        raise _refusal(tensor, name, f"it keeps tensors that it doesn't list as its parts ({', '.join(lost)})")
    for what in ("shape", "dtype", "device", "layout"):
        if getattr(again, what) != getattr(tensor, what):
            raise _refusal(tensor, name, f"rebuilt from its own parts it has another {what}")
    if type(again) is not type(tensor) or again.stride() != tensor.stride():
        raise _refusal(tensor, name, "rebuilt from its own parts it has another class or other strides")
    return shell


def _refusal(tensor: torch.Tensor, name: str, why: str) -> ManagedModuleError:
    cls = type(tensor)
    return ManagedModuleError(
        f"The weight '{name}' is of class {cls.__module__}.{cls.__qualname__} and can't be offloaded: {why}. "
        f"{_WHAT_TO_DO}"
    )


def _not_just_bytes(tensor: torch.Tensor) -> str:
    """Why a plain tensor's bytes alone don't say its values; empty if they do."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its layout {tensor.layout} is more than one block of bytes"
    if tensor.is_quantized:
        return "its scale lies in torch's own quantizer"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazily conjugated or negated view"
    return ""


def _is_gguf(cls: type) -> bool:
    # Not by a base class: what a class derived from it adds would be lost.
    return cls.__module__.partition(".")[0] == "diffusers" and cls.__name__ == "GGUFParameter"


def _flattens(cls: type) -> bool:
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


# --- taking apart and rebuilding ------------------------------------------------------------------------------------


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The direct inner tensors by name, and what else the class needs to be made again."""
    if _is_gguf(type(tensor)):
        return {"data": tensor.as_tensor()}, {"quant_type": tensor.quant_type}  # type: ignore[attr-defined]
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}, context


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _take_apart(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = {}
    for name, part in _parts(tensor)[0].items():
        if _is_plain(part):
            plain[name] = part.detach()
        else:
            plain.update({f"{name}.{below}": leaf for below, leaf in _take_apart(part).items()})
    return plain


def _make_shell(tensor: torch.Tensor) -> Shell:
    parts, context = _parts(tensor)
    inner: list[tuple[str, Shell | None]] = []
    for name, part in parts.items():
        if not _is_plain(part):
            inner.append((name, shell_of(part, name)))
            continue
        odd = _not_just_bytes(part)
        if odd:
            raise TypeError(f"of its part '{name}', {odd}")
        inner.append((name, None))
    attributes = {
        name: value
        for name, value in vars(tensor).items()
        # A device is the old one; what the class rebuilds has the new one.
        if name not in parts and not isinstance(value, torch.Tensor | torch.device)
    }
    return Shell(
        cls=type(tensor),
        context=context,
        inner=tuple(inner),
        size=tensor.size(),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        attributes=MappingProxyType(attributes),
    )


def _rebuild(shell: Shell, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts: dict[str, torch.Tensor] = {}
    for name, below in shell.inner:
        if below is None:
            parts[name] = tensors[name]
        else:
            start = f"{name}."
            parts[name] = _rebuild(below, {k[len(start) :]: t for k, t in tensors.items() if k.startswith(start)})
    cls: Any = shell.cls
    if _is_gguf(cls):
        tensor = cls(parts["data"], requires_grad=shell.requires_grad, **shell.context)
    else:
        context = _on_device(shell.context, next(iter(parts.values())).device)
        tensor = cls.__tensor_unflatten__(parts, context, shell.size, shell.stride)
    missing = {name: value for name, value in shell.attributes.items() if name not in vars(tensor)}
    vars(tensor).update(missing)
    if tensor.requires_grad != shell.requires_grad:
        tensor.requires_grad_(shell.requires_grad)
    return tensor


def _on_device(context: Any, device: torch.device) -> Any:
    """The context with `device` in place of the device that some classes note there."""
    if isinstance(context, torch.device):
        return device
    if type(context) is dict:
        return {key: _on_device(value, device) for key, value in context.items()}
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        noted = [f.name for f in dataclasses.fields(context) if isinstance(getattr(context, f.name), torch.device)]
        return dataclasses.replace(context, **dict.fromkeys(noted, device)) if noted else context
    return context


def _tensors_outside(tensor: torch.Tensor, shell: Shell) -> list[str]:
    """The names under which a weight holds tensors besides its parts: they would stay behind on the old device."""
    listed = {name for name, _ in shell.inner}
    held = [name for name, value in vars(tensor).items() if name not in listed and _holds_tensor(value)]
    return held + (["its context"] if _holds_tensor(shell.context) else [])


def _holds_tensor(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type | torch.nn.Module):
        return False
    if isinstance(value, Mapping):
        within: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        within = value
    else:
        within = getattr(value, "__dict__", {}).values()
    return any(_holds_tensor(item, depth - 1) for item in within)


# --- the wrapper's side ---------------------------------------------------------------------------------------------

# Answered by the wrapper itself: to ask for a shape must not bring a weight in.
_METADATA = frozenset(
    """detach alias size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_conj is_neg
    is_floating_point is_complex is_signed is_inference get_device requires_grad_ retain_grad register_hook has_names
    __len__ __hash__ __repr__ __format__ __dir__""".split()
)
# Would hand out or give away the memory of a copy that is soon something else's.
_NEEDS_MEMORY = frozenset(
    """data_ptr const_data_ptr mutable_data_ptr untyped_storage storage numpy tolist share_memory_ __array__ __dlpack__
    __deepcopy__ __reduce_ex__""".split()
)
_VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__" for name in "setitem iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor".split()
) | {"__ilshift__", "__irshift__"}


class DelegatesToHot(torch.Tensor):
    """Lets a wrapper tensor stand for a weight that has a class of its own.

    Operators are not enough for such a weight. Its class may replace whole functions (`F.linear`) above dispatch, its
    layer may read attributes or call methods of it (`quant_type`, `as_tensor()`), and libraries ask for its class. So:

    - a torch function or operator is called again with the hot weights in place of the wrappers,
    - what only asks for metadata (shape, dtype, device) is answered by the wrapper and brings nothing in,
    - an attribute that the wrapper lacks is answered by the shell, or else by the hot weight if its class has it,
    - `isinstance` and `weight.__class__` give the weight's class; `type(weight)` is still the wrapper's,
    - a function that writes to the weight, or hands out its memory, is refused by name: it would get a copy's.

    The class that mixes this in makes its instances with `_make` and defines `_hot()`: the rebuilt weight, on the
    execution device, or the engine's error if it is cold. It may override `_hot_together`, to acquire the weights of
    one function at once, and `_another`, to be told of further wrappers of a weight (`detach`, `nn.Parameter(weight)`).
    """

    _shell: Shell
    _weight_name: str

    @classmethod
    def _make(cls, shell: Shell, weight_name: str, device: torch.device) -> Any:
        """A wrapper with the weight's metadata and no bytes. It never requires a gradient."""
        with torch.inference_mode(False):
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls,
                shell.size,
                strides=shell.stride,
                dtype=shell.dtype,
                device=device,
            )
        torch._C._set_throw_on_mutable_data_ptr(wrapper)
        vars(wrapper).update(_shell=shell, _weight_name=weight_name)
        return wrapper

    def _hot(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def _hot_together(cls, wrappers: Sequence[Any]) -> list[torch.Tensor]:
        return [wrapper._hot() for wrapper in wrappers]

    def _another(self) -> Any:
        wrapper = type(self)._make(self._shell, self._weight_name, self.device)
        vars(wrapper).update(vars(self))
        return wrapper

    def _edit_refused(self, what: str) -> ManagedModuleError:
        return ManagedModuleError(
            f"The weight '{self._weight_name}' of class {self._shell.cls.__name__} is under offload, where {what} "
            "would be lost or reach memory that isn't its own. Release the offload first, or work on a copy of it."
        )

    @property
    def data(self) -> Any:
        return self._another()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise self._edit_refused("assigning its data")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        shell = object.__getattribute__(self, "__dict__").get("_shell")
        return type(self) if shell is None else shell.cls

    def __getattr__(self, name: str) -> Any:
        shell = object.__getattribute__(self, "__dict__").get("_shell")
        if shell is None:
            raise AttributeError(name)
        if name in shell.attributes:
            return shell.attributes[name]
        # Libraries probe weights for marks of their own: such a question must not bring the weight in.
        if hasattr(shell.cls, name) or any(name == part for part, _ in shell.inner):
            return getattr(self._hot(), name)
        raise AttributeError(f"'{shell.cls.__name__}' object has no attribute '{name}'")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_no_bytes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = cls._with_hot(func, args, kwargs)
        return _own_method(func, args)(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]._another()
        args, kwargs = cls._with_hot(func, args, kwargs or {})
        return func(*args, **kwargs)

    @classmethod
    def _with_hot(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with every wrapper replaced by its hot weight, all of them acquired together."""
        _refuse_what_would_be_lost(func, args, kwargs)
        found: dict[int, DelegatesToHot] = {}
        _collect((*args, *kwargs.values()), found)
        hot = dict(zip(found, cls._hot_together(list(found.values())), strict=True))
        return _swapped(tuple(args), hot), {key: _swapped(value, hot) for key, value in kwargs.items()}


def _needs_no_bytes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEW_PROPERTIES
    return name in _METADATA


def _own_method(func: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The weight class's own version of a torch.Tensor method (`dequantize`): the wrapper's call named the base's."""
    name = getattr(func, "__name__", "")
    if args and not name.startswith("__") and func is getattr(torch.Tensor, name, None):
        return getattr(type(args[0]), name, func)
    return func


def _is_wrapper(value: Any) -> bool:
    return issubclass(type(value), DelegatesToHot)


def _collect(values: Iterable[Any], found: dict[int, DelegatesToHot]) -> None:
    for value in values:
        if _is_wrapper(value):
            found[id(value)] = value
        elif type(value) in (list, tuple):
            _collect(value, found)


def _swapped(value: Any, hot: Mapping[int, torch.Tensor]) -> Any:
    if _is_wrapper(value):
        return hot[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_swapped(item, hot) for item in value)
    return value


def _refuse_what_would_be_lost(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = getattr(func, "__name__", str(func))
    written = [kwargs.get("out")]
    if name in _NEEDS_MEMORY:
        written.append(args[0])
    schema = getattr(func, "_schema", None)
    if schema is not None:
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    elif (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS or kwargs.get("inplace"):
        # torch.nn.init passes its tensor by the name "tensor".
        written.append(args[0] if args else kwargs.get("tensor", kwargs.get("input")))
    found: dict[int, DelegatesToHot] = {}
    _collect(written, found)
    for weight in found.values():
        raise weight._edit_refused(name)
