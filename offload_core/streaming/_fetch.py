"""A hot copy on its way from its master."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..file_reader import ReadBuffer
from ..ledger import Reservation
from ._arena import Region
from ._weight import Entry

if TYPE_CHECKING:
    from ._cache import WeightCache


class Fetch:
    """What a reader fills. `done` is set under the cache's lock; until then `hot` is the copy. begun: a thread fills it
    that isn't a reader; without a job and not begun, it waits for whoever needs the weight. filled: there is nothing
    left to do."""

    __slots__ = ("begun", "done", "entry", "error", "filled", "hot", "job", "region", "reservation")

    def __init__(self, entry: Entry, hot: torch.Tensor, region: Region | None, reservation: Reservation | None) -> None:
        self.entry, self.region, self.reservation = entry, region, reservation
        self.hot: torch.Tensor | None = hot
        self.begun = self.done = self.filled = False
        self.error: BaseException | None = None
        self.job: Any = None


def job_for(cache: WeightCache, fetch: Fetch) -> Callable[[ReadBuffer], None]:
    def read(buffer: ReadBuffer) -> None:
        cache.read_ahead(fetch, buffer)

    return read


def forget_frames(error: BaseException | None) -> None:
    """Takes the tracebacks off an error and what it came from: their frames hold the hot copy."""
    while error is not None:
        error.__traceback__, error = None, error.__context__
