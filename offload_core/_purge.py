"""Give memory back that libraries and the system keep for reuse, and say how much each of them gave.

None of this frees anything that is in use: phases give their weights back by themselves.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ._page_cache import drop_pages, why_not
from ._report_table import human_bytes
from ._standby_list import Windows, purge_standby_list
from .devices import empty_cache, empty_pinned_cache, reserved_bytes, resident_bytes, resolve_device, trim_heap
from .errors import InputError, OffloadError

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True)
class GivenBack:
    """One keeper of memory and the bytes it gave back. reason: why it was not asked, or couldn't be."""

    what: str
    nbytes: int
    reason: str = ""


@dataclass(frozen=True)
class PurgeReport:
    """What a purge gave back, one row for each keeper of memory, in the order they were asked.

    device_bytes: to the driver of `device`. host_bytes: of this process's resident set. cache_bytes: of files in the
    system's own caches, which it would have given up when somebody needed the memory.
    """

    device: str
    rows: tuple[GivenBack, ...]

    @property
    def device_bytes(self) -> int:
        return self._sum("device cache")

    @property
    def host_bytes(self) -> int:
        return self._sum("warm copies", "prompt cache", "garbage", "pinned cache", "heap")

    @property
    def cache_bytes(self) -> int:
        return self._sum("page cache", "standby list")

    def _sum(self, *names: str) -> int:
        return sum(row.nbytes for row in self.rows if row.what in names)

    def sentence(self) -> str:
        freed = [f"{self.host_bytes / 2**20:.0f} MiB of RAM"]
        if self.device != "cpu":
            freed.insert(0, f"{self.device_bytes / 2**20:.0f} MiB on {self.device}")
        if self.cache_bytes:
            freed.append(f"{self.cache_bytes / 2**20:.0f} MiB of file caches")
        *first, last = freed
        return f"Freed {', '.join(first)} and {last}." if first else f"Freed {last}."

    def table(self) -> str:
        """One line for each row: the bytes, or why there are none."""
        width = max(len(row.what) for row in self.rows)
        return "\n".join(f"{row.what:<{width}}  {row.reason or human_bytes(row.nbytes)}" for row in self.rows)


def purge(
    device: str | torch.device = "auto",
    *,
    files: Iterable[str | os.PathLike[str]] = (),
    standby: bool = False,
    session: Session | None = None,
    windows: Callable[[], Windows | None] = Windows.here,
) -> PurgeReport:
    """Collects garbage, empties torch's caches for `device` and pinned memory, and trims the heap.

    files: weight files, or folders of them, whose pages leave the page cache (Linux); the next load reads from the
    disk. standby: also empty the Windows standby list, which needs an elevated process and takes the cached files of
    every program on the machine. session: whose warm copies of weights and cached prompts go, too; those on disk stay.
    windows: where Windows is reached, for tests.

    What can't be done is a reason in the report, not an error. Raises DeviceError or InputError for `device`,
    InputError for a file that isn't there.
    """
    where = resolve_device(device)
    weights = [found for path in files for found in _weight_files(Path(path))]
    own = (
        [
            _in_process("warm copies", session.warm.release),
            _in_process("prompt cache", session.prompt_cache.release),
        ]
        if session is not None
        else []
    )
    rows = [
        *own,
        _in_process("garbage", gc.collect),
        _on_device(where),
        _in_process("pinned cache", empty_pinned_cache),
        _in_process("heap", trim_heap),
        _page_cache(weights),
        _standby(windows) if standby else GivenBack("standby list", 0, "not asked to"),
    ]
    return PurgeReport(str(where), tuple(rows))


def _in_process(what: str, give_back: Callable[[], object]) -> GivenBack:
    before = resident_bytes()
    give_back()
    return GivenBack(what, max(0, before - resident_bytes()))


def _on_device(device: torch.device) -> GivenBack:
    if device.type == "cpu":
        return GivenBack("device cache", 0, "the CPU has none")
    before = reserved_bytes(device)
    empty_cache(device)
    return GivenBack("device cache", max(0, before - reserved_bytes(device)))


def _page_cache(files: list[Path]) -> GivenBack:
    reason = why_not() or ("" if files else "no files named")
    return GivenBack("page cache", 0 if reason else sum(map(drop_pages, files)), reason)


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.safetensors"))
    if path.is_file():
        return [path]
    raise InputError(f"There is no file or folder {path}; name a model folder or its weight files.")


def _standby(windows: Callable[[], Windows | None]) -> GivenBack:
    try:
        return GivenBack("standby list", purge_standby_list(windows()))
    except OffloadError as error:
        return GivenBack("standby list", 0, str(error))
