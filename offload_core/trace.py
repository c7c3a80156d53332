"""What a call of a module would do: which weights it uses in what order, how much it computes, and how much memory its
activations take. Found out by running the module's own code on fake tensors, so no weight is read and nothing large
is computed.

Tensors whose values may steer the code (masks, lengths, timesteps: small ones) are real, and so is what is computed
from them alone, as long as it is small. All else has shape, dtype and strides but no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .errors import TraceError
from .memory_count import NEW_TENSOR, MemoryCount
from .streaming import StreamedWeight
from .traced_values import STEERING_BYTES, Shape, mapped, shapes_of, signature, tensors_in

_REAL_BYTES = 1 << 20
_REAL_BYTES_IN_NEED = 256 << 20  # and arguments, too, where code was found to ask for the values of larger ones
_STEERING_FLOATS = 64  # ... so many floating values, keep their values

aten = torch.ops.aten


@dataclass(frozen=True)
class TracedWeight:
    """A weight that a call used. nbytes: in the dtype it runs in. lookup_only: its rows were looked up, never all."""

    name: str
    nbytes: int
    lookup_only: bool = False


@dataclass(frozen=True)
class Stretch:
    """Compute between one use of weights and the next.

    weights: indices in `Trace.weights` of those that its first operator uses together. flops: of products, as
    `torch.utils.flop_counter` counts them. moved_bytes: of what its operators read and write, weights included.
    operators: how many there are. peak_bytes: the most that activations take meanwhile, above what was there when the
    call began.
    """

    weights: tuple[int, ...]
    flops: int
    moved_bytes: int
    operators: int
    peak_bytes: int


@dataclass(frozen=True)
class Trace:
    """One call. output_bytes: of what it returned. assumed: what was taken for granted, as a sentence, if anything."""

    weights: tuple[TracedWeight, ...]
    stretches: tuple[Stretch, ...] = field(repr=False)
    output_bytes: int
    assumed: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most that activations take, above what was there before; the arguments aren't counted."""
        return max((stretch.peak_bytes for stretch in self.stretches), default=0)

    @property
    def flops(self) -> int:
        return sum(stretch.flops for stretch in self.stretches)


@dataclass(frozen=True)
class Use:
    """What begins a stretch: the weights that an operator uses together (`StreamedWeight._entry`)."""

    entries: tuple[Any, ...]
    looked_up: bool


class Tracer(MemoryCount):
    """Traces calls of modules whose parameters are cold `StreamedWeight`s; counts the memory of everything around
    them, too. Use it as a context manager, and `call` inside. poll: called again and again; may raise to stop."""

    def __init__(self, poll: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._poll = poll
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._weights: dict[Any, torch.Tensor] = {}  # by entry: its fake hot copy
        self._call: _Recorded | None = None
        self.real_bytes = _REAL_BYTES  # results of real tensors up to this size are real
        self.crowded = False  # experts that are chosen by what was computed: the first ones get every token
        self._blind = self._spread = self._has_spread = False
        self._stop: BaseException | None = None
        self._traced: dict[str, tuple[Trace, Any, int]] = {}  # trace, shapes of the result, bytes that it left behind

    def call(
        self, name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Trace]:
        """A result like that of `run(*args, **kwargs)`, with noise in it, and the call's trace. A call of that name
        with arguments like those before isn't traced again.

        Raises TraceError if the code asks for a value that only the real tensors have.
        """
        trace, result = self._known_call(name, run, args, kwargs)
        made: dict[int, torch.Tensor] = {}  # a tensor that is in the result twice is made once

        def noise(shape: Shape) -> torch.Tensor:
            if id(shape) not in made:
                made[id(shape)] = shape.noise()
            return made[id(shape)]

        return mapped(result, Shape, noise), trace

    def trace(self, name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
        """Like `call`, without a result."""
        return self._known_call(name, run, args, kwargs)[0]

    def _known_call(
        self, name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Trace, Any]:
        key = f"{name}:{signature(args, kwargs)}"
        if key not in self._traced:
            self._traced[key] = self._trace(name, run, args, kwargs)
            return self._traced[key][:2]
        trace, result, left = self._traced[key]
        # Tables that the first call made for all that follow are alive already: they aren't made again.
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + trace.peak_bytes - left)
        return trace, result

    def _trace(
        self, name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Trace, Any, int]:
        trace, shapes, left = self._traced_once(name, run, args, kwargs)
        if trace.assumed:  # the work is that of experts that are used evenly, the memory the most they could take
            self.crowded = True
            try:
                worst = self._traced_once(name, run, args, kwargs)[0].peak_bytes
            finally:
                self.crowded = False
            trace = _with_peak(trace, worst)
        return trace, shapes, left

    def _traced_once(
        self, name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Trace, Any, int]:
        for real_bytes, spread in ((_REAL_BYTES, False), (_REAL_BYTES_IN_NEED, False), (_REAL_BYTES_IN_NEED, True)):
            self.real_bytes, self._spread, self._has_spread = real_bytes, spread, False
            self._call = call = _Recorded(self)
            try:
                fake_args, fake_kwargs = mapped((list(args), kwargs), torch.Tensor, self._entering)
                result = run(*fake_args, **fake_kwargs)
                call.cut()
                storages = [tensor.untyped_storage() for tensor in tensors_in(result)]
                shapes = shapes_of(result)
                break
            except _VALUE_ERRORS as error:
                reason = str(error)
            except Exception as error:
                if error is self._stop:
                    raise
                raise TraceError(f"{name} can't be traced ({type(error).__name__}: {error}).") from error
            finally:
                self._call = fake_args = fake_kwargs = result = None
        else:
            raise TraceError(f"{name} needs values that aren't known before it runs ({reason}).")
        output = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        assumed = _EVENLY if self._has_spread else ""
        del storages
        left = max(self.live_bytes - call.before, 0)
        return Trace(tuple(call.weights.values()), _joined(call.stretches), output, assumed), shapes, left

    @property
    def is_tracing(self) -> bool:
        return self._call is not None

    @property
    def call_began_with(self) -> int:
        """Bytes that were alive when the call began; its peaks are above them."""
        assert self._call is not None
        return self._call.before

    def recorded(self) -> list[tuple[Use | None, Stretch]]:
        """What the call did so far: stretches, and what began each."""
        assert self._call is not None
        self._call.cut()
        return list(zip(self._call.uses, self._call.stretches, strict=True))

    def tell(self, part: Iterable[tuple[Use | None, Stretch]]) -> None:
        """Records stretches without running them. Their `peak_bytes` is above what is there now."""
        assert self._call is not None
        self._ask_to_go_on()
        for use, stretch in part:
            self._call.use(use)
            self.reach(self.live_bytes + stretch.peak_bytes)
            self._call.told(stretch)
        self._call.use(None)

    def fake(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new storage without memory, counted, as a flat tensor of `dtype`."""
        with self._unseen(), self._fake:
            flat = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
        self.made(flat)
        return flat

    def fake_view(self, flat: torch.Tensor, shape: Any, stride: Any, offset: int) -> torch.Tensor:
        """A view of a flat tensor, without an operator."""
        with self._unseen(), self._fake:
            return flat.as_strided(shape, stride, offset)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        self._blind = True
        try:
            yield
        finally:
            self._blind = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._blind or func.namespace == "prim":  # the latter only ask for a device or a layout
            return func(*args, **kwargs)
        if self._call is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        weights = [value for value in flat if isinstance(value, StreamedWeight)]
        if weights:
            if func in _ALIASES:
                return func(*args, **kwargs)
            self._use(func, weights, args)
            flat = [self._hot(value) if isinstance(value, StreamedWeight) else value for value in flat]
            args, kwargs = pytree.tree_unflatten(flat, spec)
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if func is not NEW_TENSOR:
            self.leave_out(tensors)
        result = self._run(func, args, kwargs, flat, spec, tensors)
        if self._spread and func.overloadpacket is aten.topk and isinstance(result[1], FakeTensor):
            result, self._has_spread = (result[0], _chosen(result[1], args, self.crowded)), True
        self.made(result)
        self._call.add(func, args, kwargs, result, tensors)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, flat: list[Any], spec: Any, tensors: list[torch.Tensor]) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func.overloadpacket in _INDEXING:
                flat, spec = pytree.tree_flatten(((args[0], _without_masks(args[1]), *args[2:]), kwargs))
            flat = [self._as_fake(value) if isinstance(value, torch.Tensor) else value for value in flat]
            args, kwargs = pytree.tree_unflatten(flat, spec)
            with self._fake:
                return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return func(*args, **kwargs)
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        with self._fake:
            fake = func(*args, **kwargs)
        if sum(tensor.nbytes for tensor in tensors_in(fake)) > self.real_bytes:
            return fake
        return func(*args, **kwargs)

    def _entering(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument as the traced code gets it."""
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        few = tensor.numel() <= _STEERING_FLOATS or (is_whole and tensor.nbytes <= STEERING_BYTES)
        needed = self.real_bytes > _REAL_BYTES and tensor.nbytes <= self.real_bytes
        return tensor if few or needed or isinstance(tensor, StreamedWeight) else self._as_fake(tensor)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._fake.from_tensor(tensor)
        self.leave_out([fake])  # the memory is the real one's
        return fake

    def _hot(self, weight: StreamedWeight) -> torch.Tensor:
        entry = weight._entry
        if entry not in self._weights:
            layout = entry.layout
            with self._fake:
                fake = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=weight.device)
            self.leave_out([fake])
            self._weights[entry] = fake
        return self._weights[entry]

    def _ask_to_go_on(self) -> None:
        try:
            if self._poll is not None:
                self._poll()
        except BaseException as error:
            self._stop = error  # a host's interrupt may be any kind of exception
            raise

    def _use(self, func: Any, weights: Sequence[StreamedWeight], args: Any) -> None:
        assert self._call is not None
        self._ask_to_go_on()
        looked_up = func in _LOOKUPS and args[0] is weights[0] and weights[0]._entry.layout.rows_lie_together
        self._call.use(Use(tuple(weight._entry for weight in weights), looked_up))


class _Recorded:
    """A trace that is being made. uses: what began each stretch."""

    def __init__(self, count: MemoryCount) -> None:
        self.weights: dict[Any, TracedWeight] = {}
        self.stretches: list[Stretch] = []
        self.uses: list[Use | None] = []
        self._count, self.before = count, count.live_bytes
        self._places: dict[Any, int] = {}
        self._begun_by: Use | None = None
        self._used: tuple[int, ...] = ()
        self._flops = self._moved = self._operators = 0
        count.high_bytes()

    def use(self, use: Use | None) -> None:
        """Begins a stretch."""
        self.cut()
        if use is None:
            return
        for entry in use.entries:
            known = self.weights.get(entry)
            self._places.setdefault(entry, len(self._places))
            rows = use.looked_up and (known is None or known.lookup_only)
            self.weights[entry] = TracedWeight(entry.name, entry.nbytes, rows)
        self._begun_by = use
        self._used = () if use.looked_up else tuple(dict.fromkeys(self._places[entry] for entry in use.entries))

    def add(self, func: Any, args: Any, kwargs: Any, result: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._operators += 1
        if func.is_view:
            return
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self._flops += int(formula(*args, **kwargs, out_val=result))
        read = 0 if func in _LOOKUPS else sum(tensor.nbytes for tensor in tensors)
        self._moved += read + sum(tensor.nbytes for tensor in tensors_in(result))

    def told(self, stretch: Stretch) -> None:
        """Adds what a stretch did."""
        self._flops, self._moved = self._flops + stretch.flops, self._moved + stretch.moved_bytes
        self._operators += stretch.operators

    def cut(self) -> None:
        """Ends a stretch."""
        high = self._count.high_bytes() - self.before
        if self._begun_by is not None or self._operators:
            self.stretches.append(Stretch(self._used, self._flops, self._moved, self._operators, high))
            self.uses.append(self._begun_by)
        self._begun_by, self._used = None, ()
        self._flops = self._moved = self._operators = 0


def _joined(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Those that begin without a weight belong to the one before."""
    joined: list[Stretch] = []
    for stretch in stretches:
        if stretch.weights or not joined:
            joined.append(stretch)
            continue
        last = joined[-1]
        joined[-1] = Stretch(
            last.weights,
            last.flops + stretch.flops,
            last.moved_bytes + stretch.moved_bytes,
            last.operators + stretch.operators,
            max(last.peak_bytes, stretch.peak_bytes),
        )
    return tuple(joined)


def _without_masks(indices: Sequence[Any]) -> list[Any]:
    """Indices with each mask whose values are known replaced by the places where it is true."""
    plain: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        plain += index.nonzero().unbind(1) if is_mask else [index]
    return plain


def _chosen(chosen: torch.Tensor, args: Sequence[Any], crowded: bool) -> torch.Tensor:
    """Real places in the stead of those that `topk` would choose: all as often, or the first ones each time."""
    values, count, dim = args[0], args[1], args[2] if len(args) > 2 else -1
    among = count if crowded else values.shape[dim]
    places = torch.arange(chosen.numel()).view(chosen.movedim(dim, -1).shape) % among
    return places.movedim(-1, dim).contiguous()


def _with_peak(trace: Trace, peak_bytes: int) -> Trace:
    """A trace whose peak is at least this high, where it is highest already."""
    highest = trace.peak_bytes
    if peak_bytes <= highest:
        return trace
    raised = (replace(s, peak_bytes=peak_bytes) if s.peak_bytes == highest else s for s in trace.stretches)
    return replace(trace, stretches=tuple(raised))


# Said of a model that picks experts by what it computed, and doesn't run on shapes alone.
_EVENLY = "its experts are taken to be used evenly, and in memory as unevenly as can be"
_INDEXING = {aten.index, aten.index_put, aten.index_put_}
_ALIASES = {aten.detach.default, aten.alias.default}
_LOOKUPS = {aten.embedding.default, aten.index_select.default}
_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
