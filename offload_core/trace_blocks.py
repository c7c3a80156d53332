"""Blocks that are alike are traced once: what one did is told again for the others.

Large models are a few kinds of blocks, each many times. What a block does depends on its class, its settings and the
layout of its weights and arguments, and on nothing else as long as it keeps nothing and changes none of its arguments.
Where that can't be seen, a block is traced like any other code.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .streaming import StreamedWeight
from .trace import Stretch, Tracer, Use

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, type(None))
_OF_MODULES = {"_parameters", "_buffers", "_modules", "_gate", "_path", "_component", "training", "_is_hf_initialized"}


@contextlib.contextmanager
def repeated_blocks(modules: Iterable[nn.Module], tracer: Tracer) -> Iterator[None]:
    """While it is open, `tracer` traces blocks of `modules` (members of their lists) that are alike once."""
    blocks, changed = _Blocks(tracer), []
    try:
        for part in (part for module in modules for part in module.modules()):
            members = list(part.children()) if isinstance(part, nn.ModuleList) else []  # a list may hold None
            kinds = [_kind(block) for block in members]
            often = Counter(kinds)
            for block, kind in zip(members, kinds, strict=True):
                if kind is not None and often[kind] > 1 and "forward" not in vars(block):
                    vars(block)["forward"] = functools.partial(blocks.run, block, kind, block.forward)
                    changed.append(block)
        yield
    finally:
        for block in changed:
            del vars(block)["forward"]


@dataclass(frozen=True)
class _Output:
    """A tensor of a result. storage: which of the new ones it lies in."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Done:
    """What a block did. part: its stretches, and what began each; weights of the block are named by their path in it,
    and bytes are above those at its start. storages: bytes, dtype and device of what it returned. outputs: the leaves
    of its result, which `spec` arranges."""

    part: tuple[tuple[Use | None, Stretch], ...]
    storages: tuple[tuple[int, torch.dtype, torch.device], ...]
    outputs: tuple[Any, ...]
    spec: Any


class _Blocks:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._done: dict[Any, _Done | None] = {}  # None: not to be told again
        self._real: dict[int, weakref.ref[torch.Tensor]] = {}  # those that keys name, by id

    def run(self, block: nn.Module, kind: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = self._key(kind, args, kwargs) if self.tracer.is_tracing else None
        if key is not None and key not in self._done:
            result, self._done[key] = self._traced(block, forward, args, kwargs)
            return result
        done = self._done[key] if key is not None else None
        return self._told_again(done, block) if done is not None else forward(*args, **kwargs)

    def _key(self, kind: Any, args: Any, kwargs: Any) -> Any:
        """What decides the trace of a call; None if that can't be told."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        storages: dict[int, int] = {}
        parts: list[Any] = [self.tracer.real_bytes, self.tracer.crowded, kind, str(spec)]
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                storage = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))
                parts.append((storage, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()))
            elif isinstance(leaf, torch.Tensor):
                parts.append(self._same(leaf))
            elif isinstance(leaf, _PLAIN):
                parts.append(leaf)
            else:
                return None
        return tuple(parts)

    def _same(self, real: torch.Tensor) -> Any:
        """A key of a tensor with values: the object itself, while it lives."""
        known = self._real.get(id(real))
        if known is None or known() is not real:
            self._real[id(real)] = known = weakref.ref(real)
        return known

    def _traced(
        self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, _Done | None]:
        before = _state(args, kwargs)
        start, live = len(self.tracer.recorded()), self.tracer.live_bytes
        result = forward(*args, **kwargs)
        part, grown = self.tracer.recorded()[start:], self.tracer.live_bytes - live
        if _state(args, kwargs) != before:
            return result, None
        paths = {entry: path for path, entry in _entries(block).items()}
        above = live - self.tracer.call_began_with
        named = tuple((_renamed(use, paths), replace(s, peak_bytes=s.peak_bytes - above)) for use, s in part)
        done = _done(named, result, before)
        whole = done is not None and sum(nbytes for nbytes, *_ in done.storages) == grown
        return result, done if whole else None  # else it kept something, or returned what was there

    def _told_again(self, done: _Done, block: nn.Module) -> Any:
        entries = _entries(block)
        self.tracer.tell((_renamed(use, entries), stretch) for use, stretch in done.part)
        flat = [self.tracer.fake(*storage) for storage in done.storages]
        leaves = [
            self.tracer.fake_view(flat[leaf.storage], leaf.shape, leaf.stride, leaf.offset)
            if isinstance(leaf, _Output)
            else leaf
            for leaf in done.outputs
        ]
        return pytree.tree_unflatten(leaves, done.spec)


def _state(args: Any, kwargs: Any) -> list[Any]:
    """What a call's arguments hold, without keeping it alive: tensors with version and storage."""
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return [_seen(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = None if isinstance(tensor, StreamedWeight) else tensor.untyped_storage()._cdata
    return id(tensor), weakref.ref(tensor), tensor._version, storage


def _done(part: Any, result: Any, given: list[Any]) -> _Done | None:
    """None if the result can't be made again: it is of values, or a view of an argument. given: their `_state`."""
    there = {leaf[-1] for leaf in given if isinstance(leaf, tuple)}
    storages: dict[int, tuple[int, int, torch.dtype, torch.device]] = {}
    leaves, spec = pytree.tree_flatten(result)
    outputs: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            storage = leaf.untyped_storage()
            if storage._cdata in there:
                return None
            number, _, dtype, _ = storages.setdefault(
                storage._cdata, (len(storages), storage.nbytes(), leaf.dtype, leaf.device)
            )
            if dtype != leaf.dtype:
                return None
            outputs.append(_Output(number, tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())))
        elif isinstance(leaf, _PLAIN):
            outputs.append(leaf)
        else:
            return None
    return _Done(part, tuple(storage[1:] for storage in storages.values()), tuple(outputs), spec)


def _entries(block: nn.Module) -> dict[str, Any]:
    weights = (*block.named_parameters(), *block.named_buffers())
    return {path: weight._entry for path, weight in weights if isinstance(weight, StreamedWeight)}


def _renamed(use: Use | None, names: dict[Any, Any]) -> Use | None:
    """Entries of a block as paths in it, or the other way round; those of others stay."""
    return use and replace(use, entries=tuple(names.get(entry, entry) for entry in use.entries))


def _kind(block: nn.Module) -> Any:
    """What two blocks that do the same have in common; None if that can't be told."""
    try:
        parts = tuple((path, _settings(part), _layouts(part)) for path, part in block.named_modules())
        hash(parts)
    except (_OddError, TypeError):
        return None
    return parts


class _OddError(Exception):
    """Something that can't be compared."""


def _settings(part: Any, depth: int = 0) -> Any:
    found = []
    for name, value in vars(part).items():
        if name in _OF_MODULES or (name.endswith("hooks") and not value) or name.startswith("_forward_hooks_with"):
            continue
        found.append((name, _plain(value, depth)))
    return type(part), tuple(sorted(found, key=lambda item: item[0]))


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return tuple(_plain(item, depth) for item in value)
    if isinstance(value, dict | set | frozenset):
        return tuple(sorted((repr(key), _plain(value[key], depth) if isinstance(value, dict) else 0) for key in value))
    if isinstance(value, torch.Tensor | nn.Module) or depth > 2:
        raise _OddError
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__module__, value.__qualname__
    if hasattr(value, "__dict__"):
        return _settings(value, depth + 1)
    raise _OddError


def _layouts(part: nn.Module) -> Any:
    found: list[Any] = []
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None:
            found.append((name, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        if tensor is not None and not isinstance(tensor, StreamedWeight):  # a buffer with values, which may steer
            found.append(tensor.reshape(-1).view(torch.uint8).numpy(force=True).tobytes())
    return tuple(found)
