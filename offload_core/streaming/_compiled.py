"""Compiled blocks (torch.compile): they get plain hot tensors for the time they run, all of a block together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..errors import ManagedModuleError
from ._weight import Entry, StreamedWeight, hot_tensors

_BAKES_ADDRESSES = (
    "was compiled in a mode that records CUDA graphs, which keep the addresses of weights, and streamed weights change "
    "theirs. Compile it with mode='default' or 'max-autotune-no-cudagraphs', or keep the whole module in memory."
)


def compiled_blocks(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The outermost compiled parts of a module, by path.

    Raises ManagedModuleError for one that keeps the addresses of its weights.
    """
    found: list[tuple[str, nn.Module]] = []
    for path, part in module.named_modules():
        inside = any(path == outer or path.startswith(f"{outer}.") or not outer for outer, _ in found)
        compiled = _compiled_call(part)
        if compiled is None or inside:
            continue
        if _records_graphs(compiled):
            raise ManagedModuleError(f"{name}.{path} {_BAKES_ADDRESSES}" if path else f"{name} {_BAKES_ADDRESSES}")
        found.append((path, part))
    return found


def _compiled_call(part: nn.Module) -> Any:
    """What runs when a compiled module is called, None if it isn't compiled: by `torch.compile(m)` or `m.compile()`."""
    if type(part).__name__ == "OptimizedModule" and "_orig_mod" in part._modules:
        return vars(part).get("forward")
    return vars(part).get("_compiled_call_impl")


def _key(part: nn.Module) -> str:
    return "forward" if "_orig_mod" in part._modules else "_compiled_call_impl"


def _records_graphs(compiled: Any) -> bool:
    config = getattr(compiled, "get_compiler_config", None)
    options = (config() if callable(config) else None) or {}
    if options.get("triton.cudagraphs"):
        return True
    return any(getattr(backend, "__name__", "") == "cudagraphs" for backend in _backends(compiled))


def _backends(compiled: Any) -> Iterator[Any]:
    """The chain of wrappers down to the backend, as far as dynamo shows it."""
    cells = getattr(compiled, "__closure__", None) or ()
    pending = [cell.cell_contents for cell in cells if hasattr(cell, "cell_contents")]
    pending += [getattr(item, "callback", None) for item in pending]
    for backend in pending:
        while backend is not None and hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
            yield backend


class PlainWeights:
    """Stands before a compiled call: swaps the block's streamed weights for hot tensors, and back, however it ends.

    Calls from several threads share one swap.
    """

    def __init__(self, run: Callable[..., Any], weights: Sequence[tuple[weakref.ref[nn.Module], str]]) -> None:
        self.run, self.weights = run, weights
        self._lock = threading.Lock()
        self._inside = 0
        self._away: list[tuple[nn.Module, str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._enter()
        try:
            return self.run(*args, **kwargs)
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._swap()
            self._inside += 1

    def _swap(self) -> None:
        owners = [(owner, key) for ref, key in self.weights if (owner := ref()) is not None]
        places: list[tuple[nn.Module, str, Any]] = [(owner, key, owner._parameters.get(key)) for owner, key in owners]
        streamed = [place for place in places if isinstance(place[2], StreamedWeight)]
        entries: list[Entry] = list(dict.fromkeys(weight._entry for _, _, weight in streamed))
        hot = hot_tensors(entries)
        values = {weight._entry: weight for _, _, weight in streamed}
        plain = {
            entry: nn.Parameter(weight._value(hot[entry]), requires_grad=False) for entry, weight in values.items()
        }
        self._away = streamed
        for owner, key, weight in streamed:
            owner._parameters[key] = plain[weight._entry]

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for owner, key, weight in self._away:
                    owner._parameters[key] = weight
                self._away = []


def install(part: nn.Module) -> None:
    weights = [(weakref.ref(owner), key) for owner in part.modules() for key in owner._parameters]
    key = _key(part)
    object.__setattr__(part, key, PlainWeights(vars(part)[key], weights))


def uninstall(part: nn.Module) -> None:
    key = _key(part)
    held = vars(part).get(key)
    if isinstance(held, PlainWeights):
        object.__setattr__(part, key, held.run)
