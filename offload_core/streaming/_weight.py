"""`StreamedWeight`: a weight with shape, dtype and execution device that brings its bytes when an operator needs them.

It is a wrapper tensor without storage. Every operator on it arrives in `__torch_dispatch__`, which hands the operator
the hot tensor from the weight cache. So every entry point works, not only `forward`: methods, borrowed children, tied
weights, projections. Whatever dispatch doesn't see (`.data`, `data_ptr`, pickling, ...) works or raises by name here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import ColdWeightError, ManagedModuleError
from ._shape import Layout, normal_mode

if TYPE_CHECKING:
    from ._cache import WeightCache
    from ._masters import Master

aten = torch.ops.aten


class Entry:
    """One weight under management: its master, its layout on the device, and the hot copy while there is one.

    names: dotted paths in the component, the first of ties first. cache: None once the component is released; then the
    weight is cold for good. casts: dtypes the stored values go through, the last is the layout's. fast: the hot copy of
    a resident weight, for which nothing needs to be waited for. pinned: it must not be dropped (a compiled block runs).
    mark: content sum of a hot copy that may stay in RAM as a warm one (`warm.py`).
    """

    __slots__ = (
        "_cache",
        "_layout",
        "casts",
        "fast",
        "fetch",
        "group",
        "host",
        "hot",
        "keep_on_host",
        "lookup_only",
        "mark",
        "master",
        "names",
        "nbytes",
        "owner",
        "pinned",
        "planned",
        "ready",
        "region",
        "reservation",
        "resident",
        "seen",
        "small",
        "wrappers",
    )

    def __init__(
        self,
        names: tuple[str, ...],
        layout: Layout,
        master: Master | None,
        cache: WeightCache | None,
        *,
        casts: tuple[torch.dtype, ...] = (),
        owner: str = "",
    ) -> None:
        self.names, self.layout, self.master, self.casts, self.owner = names, layout, master, casts, owner
        self.cache = cache
        self.resident = self.lookup_only = self.planned = self.keep_on_host = self.small = False
        self.pinned = 0
        self.hot: torch.Tensor | None = None
        self.fast: torch.Tensor | None = None
        self.fetch: Any = None
        self.host: Any = None
        self.ready: Any = None
        self.region: Any = None
        self.reservation: Any = None
        self.group: str = ""
        self.mark: int | None = None
        self.wrappers: list[weakref.ref[StreamedWeight]] = []
        self.seen: dict[int, int] = {}

    @property
    def cache(self) -> WeightCache | None:
        """Held weakly: the module's guard keeps it, and it keeps the entries, so that nothing is a cycle."""
        return self._cache() if self._cache is not None else None

    @cache.setter
    def cache(self, cache: WeightCache | None) -> None:
        self._cache = weakref.ref(cache) if cache is not None else None

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.names[0]}" if self.owner else self.names[0]

    @property
    def layout(self) -> Layout:
        """Of the hot copy."""
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._layout, self.nbytes = layout, layout.nbytes

    def cold_error(self) -> ColdWeightError:
        return ColdWeightError(
            f"The weight {self.name} was used while its component isn't loaded. "
            "Use the component inside the phase that owns it (open_phase), or before `release`."
        )

    def hot_tensor(self) -> torch.Tensor:
        """The weight's bytes on the execution device, for one operator. Raises ColdWeightError outside its phase."""
        if self.fast is not None:
            return self.fast
        cache = self.cache
        if cache is None:
            raise self.cold_error()
        return cache.acquire_one(self)


class StreamedWeight(torch.Tensor):
    """A weight whose bytes are fetched when they are needed. Made by `enable_offload` and by phases, not by hand."""

    _entry: Entry
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, entry: Entry, device: torch.device, layout: Layout | None = None) -> StreamedWeight:
        layout = layout or entry.layout
        with normal_mode():
            weight: StreamedWeight = torch.Tensor._make_wrapper_subclass(
                cls,
                layout.shape,
                strides=layout.stride,
                storage_offset=layout.offset,
                dtype=layout.dtype,
                device=device,
            )
        torch._C._set_throw_on_mutable_data_ptr(weight)
        weight._entry = entry
        entry.wrappers = list({id(ref): ref for ref in entry.wrappers if ref() is not None}.values())
        entry.wrappers.append(weakref.ref(weight))
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if kwargs or func._schema.is_mutable:
            return run(func, args, kwargs or {})
        call, missing = list(args), -1
        for index, value in enumerate(args):
            if isinstance(value, StreamedWeight):
                call[index] = value._entry.fast
                if call[index] is None:
                    if missing >= 0:
                        return run(func, args, {})
                    missing = index
            elif type(value) is list:
                return run(func, args, {})
        if missing >= 0:  # one weight that isn't resident: no others have to be acquired with it
            call[missing] = args[missing]._entry.hot_tensor()
        return func(*call)

    def _value(self, hot: torch.Tensor) -> torch.Tensor:
        """What an operator gets, made of the hot copy."""
        return hot

    # --- what dispatch doesn't see -------------------------------------------------------------------------------

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign(self, value)

    def set_(self, source: Any = None, *_: Any, **__: Any) -> Any:
        if not isinstance(source, torch.Tensor) or _:
            self._refuse("set_ with a storage")
        assign(self, source)
        return self

    def _refuse(self, what: str) -> NoReturn:
        entry = self._entry
        if entry.cache is None:
            raise entry.cold_error()
        raise ManagedModuleError(
            f"{what} needs the memory of the weight {entry.name}, which is streamed and has none of its own. "
            "Use weight.clone() for a copy, or release the offload first."
        )

    def data_ptr(self) -> int:
        self._refuse("data_ptr")

    def untyped_storage(self) -> Any:
        self._refuse("untyped_storage")

    def storage(self) -> Any:
        self._refuse("storage")

    def numpy(self, **_: Any) -> Any:
        self._refuse("numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse("numpy")

    def tolist(self) -> Any:
        self._refuse("tolist")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        self._refuse("dlpack")

    def share_memory_(self) -> Any:
        self._refuse("share_memory_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("Pickling")

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("deepcopy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        entry = self._entry
        state = "cold" if entry.cache is None else "resident" if entry.resident else "streamed"
        what = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"StreamedWeight({entry.name}, {state}, {what})"


def cold_weight(layout: Layout, name: str, device: torch.device) -> StreamedWeight:
    """A weight whose bytes aren't here and never come."""
    return StreamedWeight(Entry((name,), layout, None, None), device)


def is_cold(tensor: object) -> bool:
    """Whether this is a weight whose bytes aren't to be had any more, or not yet."""
    return isinstance(tensor, StreamedWeight) and tensor._entry.cache is None


# --- operators ---------------------------------------------------------------------------------------------------


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the hot tensors of its weights, all of them acquired together."""
    written = _written(func, args, kwargs) if func._schema.is_mutable else []
    if written:
        return _run_write(func, args, kwargs, written)
    entries = list(dict.fromkeys(_entries((*args, *kwargs.values()))))
    hot = hot_tensors(entries)
    _refuse_meta(func, kwargs, entries)
    return func(*_swap(args, hot), **{name: _swap_one(value, hot) for name, value in kwargs.items()})


def hot_tensors(entries: Sequence[Entry]) -> dict[Entry, torch.Tensor]:
    """Hot copies of all `entries`, acquired together per cache."""
    hot: dict[Entry, torch.Tensor] = {}
    rest: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.fast is not None:
            hot[entry] = entry.fast
        else:
            cache = entry.cache
            if cache is None:
                raise entry.cold_error()
            rest.setdefault(cache, []).append(entry)
    for cache, group in rest.items():
        hot.update(zip(group, cache.acquire(group), strict=True))
    return hot


def _entries(values: Sequence[Any]) -> list[Entry]:
    found = []
    for value in values:
        if isinstance(value, StreamedWeight):
            found.append(value._entry)
        elif isinstance(value, list | tuple):
            found += _entries(value)
    return found


def _swap_one(value: Any, hot: dict[Entry, torch.Tensor]) -> Any:
    if isinstance(value, StreamedWeight):
        return value._value(hot[value._entry])
    if isinstance(value, list | tuple):
        return type(value)(_swap(value, hot))
    return value


def _swap(values: Sequence[Any], hot: dict[Entry, torch.Tensor]) -> list[Any]:
    return [_swap_one(value, hot) for value in values]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[StreamedWeight]:
    """The weights that an operator writes to, by its schema."""
    found: list[StreamedWeight] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        found += [item for item in values if isinstance(item, StreamedWeight)]
    return found


def _run_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: list[StreamedWeight]) -> Any:
    """An operator that writes to weights: their masters become private and get the new values, or nothing changes."""
    if torch.Tag.inplace_view in func.tags or func in _RESIZING:
        written[0]._refuse(func._schema.name.removeprefix("aten::"))
    entries = list(dict.fromkeys(_entries((*args, *kwargs.values()))))
    targets = list(dict.fromkeys(weight._entry for weight in written))
    hot = hot_tensors(entries)
    cache = targets[0].cache
    if cache is None:
        raise targets[0].cold_error()
    with cache.edit(targets, hot) as edits:
        result = func(*_swap(args, hot), **{name: _swap_one(value, hot) for name, value in kwargs.items()})
        edits.keep()
    back = {id(hot[weight._entry]): weight for weight in written}
    if isinstance(result, list | tuple):
        return type(result)(back.get(id(item), item) for item in result)
    return back.get(id(result), result)


def _refuse_meta(func: Any, kwargs: dict[str, Any], entries: list[Entry]) -> None:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        raise ManagedModuleError(
            f"Something (a hook of accelerate or diffusers?) tried to take the weight {entries[0].name} to the meta "
            "device, while it is under offload already. Use one kind of offload for a module; release this one first."
        )


def assign(weight: StreamedWeight, value: torch.Tensor) -> None:
    """What `weight.data = value` does: the weight gets a new private master. Its old one is let go with its last alias
    that is here now; one that lies in a file or in the module's own tensor is left as it is."""
    old = weight._entry
    if isinstance(value, StreamedWeight):
        if value._entry is old:
            return
        entry = value._entry
    else:
        cache = old.cache
        if cache is None:
            raise old.cold_error()
        entry = cache.new_private(old, value)
    shell = StreamedWeight(entry, weight.device)
    torch.Tensor.data.__set__(weight, shell)  # type: ignore[attr-defined]
    weight._entry = entry
    entry.wrappers.append(weakref.ref(weight))
    old.wrappers = [ref for ref in old.wrappers if ref() is not None and ref() is not weight]
    if not old.wrappers:
        _let_go(old)


def _let_go(entry: Entry) -> None:
    """Forgets what no weight has any more, and frees its master if that is private."""
    cache, reservation = entry.cache, getattr(entry.master, "reservation", None)
    if cache is not None:
        cache.replaced(entry)
    if cache is not None and reservation is not None and reservation.kind == "private":
        cache.release([entry])
        reservation.release()
        entry.master = None


def _alias(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    return StreamedWeight(weight._entry, weight.device)


def _as_strided(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An absolute storage offset counts from the original's storage, a hot copy starts at its own first element."""
    weight = args[0]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if offset is not None and isinstance(weight, StreamedWeight):
        args = (weight, args[1], args[2], offset - weight._entry.layout.offset)
    return run(func, args, {})


def _embedding(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A lookup gathers its rows from the master; the table is never brought."""
    weight, indices = args[0], args[1]
    if isinstance(weight, StreamedWeight) and isinstance(indices, torch.Tensor):
        rows = _gather(weight._entry, indices)
        if rows is not None:
            return rows
    return run(func, args, kwargs)


def _index_select(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    weight, dim, indices = args
    if isinstance(weight, StreamedWeight) and dim in (0, -weight.ndim) and indices.ndim == 1:
        rows = _gather(weight._entry, indices)
        if rows is not None:
            return rows
    return run(func, args, kwargs)


def _gather(entry: Entry, indices: torch.Tensor) -> torch.Tensor | None:
    if entry.hot is not None or not entry.layout.rows_lie_together:
        return None
    cache = entry.cache
    if cache is None:
        raise entry.cold_error()
    return cache.gather(entry, indices)


def _set_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if isinstance(target, StreamedWeight):
        target.set_(*args[1:])
        return target
    args[1]._refuse("set_")
    return None


# They change the form of the tensor they are called on. A hot copy's form would change, and the weight's would not.
_RESIZING = {aten.resize_.default, aten.resize_as_.default}
_Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
_SPECIAL: dict[Any, _Handler] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.as_strided.default: _as_strided,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.set_.source_Tensor: _set_operator,
    aten.set_.source_Storage: _set_operator,
    aten.set_.source_Storage_storage_offset: _set_operator,
    aten.set_.default: _set_operator,
}
