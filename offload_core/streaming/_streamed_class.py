"""A streamed weight that has a class of its own (torchao, GGUF): rebuilt around hot inner tensors when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._shape import normal_mode
from ._tensor_classes import DelegatesToHot, Shell, TensorClass
from ._weight import Entry, hot_tensors


class StreamedClass(DelegatesToHot):
    """Stands for a quantised weight. Its inner tensors are entries of the cache, acquired together."""

    _entries: list[Entry]
    _rule: TensorClass
    _built: list[Any]

    @classmethod
    def make(
        cls, shell: Shell, rule: TensorClass, entries: list[Entry], name: str, device: torch.device
    ) -> StreamedClass:
        wrapper: StreamedClass = cls._make(shell, name, device)
        vars(wrapper).update(_entries=entries, _rule=rule, _built=[])
        return wrapper

    def _hot(self) -> torch.Tensor:
        return self._hot_together([self])[0]

    @classmethod
    def _hot_together(cls, wrappers: Sequence[Any]) -> list[torch.Tensor]:
        entries = list(dict.fromkeys(entry for wrapper in wrappers for entry in vars(wrapper)["_entries"]))
        hot = hot_tensors(entries)
        return [_rebuild(vars(wrapper), hot) for wrapper in wrappers]


def _rebuild(state: dict[str, Any], hot: dict[Entry, torch.Tensor]) -> torch.Tensor:
    """The weight around its hot inner tensors. It is kept while all of them are resident: building it takes longer than
    a small product."""
    entries: list[Entry] = state["_entries"]
    stays = all(entry.fast is not None and entry.fast is hot[entry] for entry in entries)
    built: list[Any] = state["_built"]
    if stays and built and all(old is entry.fast for old, entry in zip(built[0], entries, strict=True)):
        kept: torch.Tensor = built[1]
        return kept
    prefix = len(state["_weight_name"]) + 1
    inner = {entry.names[0][prefix:]: hot[entry] for entry in entries}
    with normal_mode():
        weight: torch.Tensor = state["_rule"].rebuild(state["_shell"], inner)
    built[:] = [[entry.fast for entry in entries], weight] if stays else []
    return weight
