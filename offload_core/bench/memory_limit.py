"""A memory control group (cgroup v2 or v1) around one process, where this process may make one.

A process that joins before it starts its program is under the limit from its first page: imports count.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import OffloadError


class NoMemoryLimit(OffloadError):  # noqa: N818
    """No memory control group can be made here. The message says why."""


@dataclass(frozen=True)
class _Files:
    """What the two versions call the same things."""

    limits: tuple[str, ...]  # all are set to the limit; those after the first may be absent
    usage: str
    peak: str
    kills: str  # file with an `oom_kill N` line


V1 = _Files(
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
V2 = _Files(("memory.max",), "memory.current", "memory.peak", "memory.events")


class MemoryGroup:
    """A group for one process; `limit_bytes` None only counts. A context manager: the folder goes when it ends.

    Raises NoMemoryLimit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.folder, self._files = _make_folder()
        try:
            if limit_bytes is not None:
                self._set_limit(limit_bytes)
        except OSError as error:
            self.remove()
            raise NoMemoryLimit(f"The memory limit can't be set in {self.folder} ({error.strerror}).") from None

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *unused: object) -> None:
        self.remove()

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command line that joins the group and then becomes `command`."""
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self.folder), *command]

    def peak_bytes(self) -> int | None:
        """The highest charge so far; None if the kernel doesn't say."""
        return _number(self.folder / self._files.peak)

    def kills(self) -> int:
        """Processes of the group that were killed for memory."""
        try:
            lines = (self.folder / self._files.kills).read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # the last process is still on its way out
                time.sleep(0.1)

    def _set_limit(self, limit_bytes: int) -> None:
        for number, name in enumerate(self._files.limits):
            file = self.folder / name
            if number == 0 or file.exists():
                file.write_text(str(limit_bytes))
        swap = self.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")


def usage_bytes(folder: str | Path) -> int | None:
    """What a group is charged now."""
    return next((n for n in (_number(Path(folder) / files.usage) for files in (V1, V2)) if n is not None), None)


_serial = itertools.count()


def _make_folder() -> tuple[Path, _Files]:
    tried = []
    for parent, files in _own_groups():
        folder = parent / f"phase-offload-bench-{os.getpid()}-{next(_serial)}"
        try:
            folder.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if (folder / files.limits[0]).exists():
            return folder, files
        folder.rmdir()
        tried.append(f"{parent}: the memory controller isn't handed down")
    why = "; ".join(tried) or "this system has none"
    raise NoMemoryLimit(f"No memory control group can be made here ({why}); run as root or in a delegated group.")


def _own_groups() -> Iterator[tuple[Path, _Files]]:
    """This process's own memory groups and, for v2 (where a group with processes can't have children), the parent."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in own:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            files, kind = V1, "cgroup"
        elif not controllers:
            files, kind = V2, "cgroup2"
        else:
            continue
        for mount in mounts:
            left, _, right = mount.partition(" - ")
            root, point = left.split()[3:5]
            if right.split()[0] != kind or (files is V1 and "memory" not in right.split()[-1].split(",")):
                continue
            inside = path.removeprefix(root) if root != "/" else path
            group = Path(point) / inside.strip("/")
            yield group, files
            if files is V2 and group != Path(point):
                yield group.parent, files


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
