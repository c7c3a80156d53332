"""Changes of weights: an operator that writes, a view that was written to, `.data = ...`. The master gets them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ledger import Ledger
from ._masters import HostMaster
from ._shape import Layout, as_bytes, flat, is_dense
from ._weight import Entry

if TYPE_CHECKING:
    from ._cache import WeightCache


class PrivateMaker:
    """Makes masters in RAM that no file backs, and books them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def master(self, layout: Layout, name: str) -> HostMaster:
        """RAM for a weight of `layout`, with undefined values. Raises BudgetError if the host budget is full."""
        reservation = self.ledger.reserve("host", "private", layout.nbytes, name)
        try:
            with torch.inference_mode(False):
                tensor = layout.over(torch.empty(layout.nbytes, dtype=torch.uint8).untyped_storage())
        except BaseException:
            reservation.release()
            raise
        return HostMaster(tensor, reservation)

    def entry(self, old: Entry, value: torch.Tensor, cache: WeightCache) -> Entry:
        """A weight with the values of `value` in the place of `old`."""
        with torch.inference_mode(False), torch.no_grad():
            value = value.detach()
            if not is_dense(value):
                value = value.contiguous()
            layout = Layout(value.dtype, value.shape, value.stride())
            master = self.master(layout, old.name)
            flat(master.tensor).copy_(flat(value))
        entry = Entry(old.names, layout, master, cache, owner=old.owner)
        entry.group = old.group
        return entry

    def adopt(self, entry: Entry) -> None:
        """The values of the hot copy become the master's."""
        assert entry.hot is not None
        become(entry, writable_master(entry) or self.master(entry.layout, entry.name), entry.hot)


def writable_master(entry: Entry) -> HostMaster | None:
    """The master, if it is in RAM and holds exactly what the hot copy does."""
    master = entry.master
    return master if isinstance(master, HostMaster) and not entry.casts else None


def become(entry: Entry, master: HostMaster, hot: torch.Tensor) -> None:
    """The values of `hot` are the weight's from now on, and `master` holds them."""
    with torch.inference_mode(False), torch.no_grad():
        as_bytes(master.tensor).copy_(as_bytes(hot))
    old, entry.master, entry.casts = entry.master, master, ()
    cache = entry.cache
    if cache is not None:
        cache.engine.forget(entry)
    entry.keep_on_host = False
    if old is not None and old is not master:
        old.close()
    entry.seen = {id(w): w._version for ref in entry.wrappers if (w := ref()) is not None}
    entry.seen[0] = hot._version


class Edits:
    """The scope of an operator that writes to hot copies. Without `keep` their copies are dropped: nothing changed."""

    def __init__(
        self, cache: WeightCache, private: PrivateMaker, targets: Sequence[Entry], hot: dict[Entry, torch.Tensor]
    ) -> None:
        self._cache, self._private, self._targets, self._hot = cache, private, targets, hot
        self._masters: list[HostMaster] = []
        self._kept = False

    def __enter__(self) -> Edits:
        try:
            for entry in self._targets:
                self._masters.append(writable_master(entry) or self._private.master(entry.layout, entry.name))
        except BaseException:
            self._undo()
            raise
        return self

    def keep(self) -> None:
        """Writes the hot values to the masters."""
        for entry, master in zip(self._targets, self._masters, strict=True):
            become(entry, master, self._hot[entry])
            if entry.hot is not self._hot[entry]:
                self._cache.spoil(entry)
            # the operator's own write is counted after this, once, on the weight it was called on
            entry.seen = {key: version + (key != 0) for key, version in entry.seen.items()}
        self._kept = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._kept:
            for entry in self._targets:
                self._cache.spoil(entry)
            self._undo()

    def _undo(self) -> None:
        for entry, master in zip(self._targets, self._masters, strict=False):
            if master is not entry.master:
                master.close()


def was_edited(entry: Entry) -> bool:
    """Whether a hot copy was written to since it was made. torch counts the writes: those through a view of a wrapper
    on the wrapper, with which the view shares its counter."""
    seen, hot = entry.seen, entry.hot
    assert hot is not None
    if hot._version != seen.get(0, 0):
        return True
    known = set(seen.values())
    for ref in entry.wrappers:
        wrapper = ref()
        if wrapper is None:
            continue
        expected = seen.get(id(wrapper))
        if wrapper._version != expected and (expected is not None or wrapper._version not in known):
            return True
    return False
