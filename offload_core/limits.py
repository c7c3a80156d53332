"""What memory the machine really has, and turning a user's budget ("6GiB", "60%", "leave 2GiB") into bytes.

The operating system's own figures are not enough: a container has a cgroup limit that `free` doesn't show, Windows
refuses memory above its commit limit, and other processes use the same device. All sizes are bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ._report_table import human_bytes
from .errors import InputError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# As in IEC 80000-13: kB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024. A letter alone is the binary unit, which is
# what docker, Java and Kubernetes ("Gi") mean by it. Upper and lower case are the same, so "gb" is GB.
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("ib", 1024), ("b", 1000))
}
_NUMBER_AND_UNIT = re.compile(r"(\d{1,19}(?:\.\d{1,19})?) ?([a-z%]*)", re.ASCII)


def parse_budget(value: int | str, *, free: int, total: int, auto: int, name: str) -> int:
    """The bytes that a budget stands for on a machine with `free` of `total` bytes (`total` 0: unknown).

    - a whole number, or a string of one: bytes
    - "6GiB", "512 MiB", "1.5GB": a size. GB is 10^9 and GiB 2^30; "6g" and "6Gi" are GiB, "6gb" is GB
    - "60%": a share of `total`
    - "leave 2GiB", "leave 2 GiB free": what is free, less that
    - "auto": `auto`, as given

    Case doesn't matter. Raises InputError, which names the setting `name`, for anything else, for a budget that is not
    above zero, and for one that is more than `total`.
    """
    budget = _read(value, name)
    setting = _setting(name, value)
    if budget.kind == "auto":
        return auto
    if budget.kind == "share":
        if total <= 0:
            raise InputError(f"{setting} is a share of memory whose size isn't known here: give a size such as 6GiB.")
        size = int(total * budget.amount)
    elif budget.kind == "leave":
        size = free - int(budget.amount)
        if size <= 0:
            raise InputError(
                f"{setting} leaves nothing to work with, as only {human_bytes(max(free, 0))} is free: leave less, "
                "or use auto."
            )
    else:
        size = int(budget.amount)
    if size < 1:
        raise _unusable(value, name)
    if size > total > 0:
        raise InputError(f"{setting} is more than the {human_bytes(total)} there is: give less, such as 60%, or auto.")
    return size


def parse_limit(value: int | str, memory: Memory, name: str) -> int | None:
    """The bytes of an upper limit, in the words of `parse_budget`; None for "auto", which is none. It may be 0, and
    more than there is. Raises InputError like `parse_budget`."""
    if value in (0, "0"):
        return 0
    budget = _read(value, name)
    if budget.kind == "auto":
        return None
    if budget.kind == "share":
        return int(memory.total * budget.amount)
    return max(int(memory.free - budget.amount if budget.kind == "leave" else budget.amount), 0)


def check_budget(value: int | str, name: str) -> None:
    """Raises InputError if `value` can't be a budget on any machine: the check before a machine is known."""
    _read(value, name)


class _Budget(NamedTuple):
    kind: Literal["auto", "size", "share", "leave"]
    amount: Fraction  # bytes, or the share of the total


def _read(value: int | str, name: str) -> _Budget:
    if isinstance(value, int) and not isinstance(value, bool):
        budget = _Budget("size", Fraction(value))
    elif isinstance(value, str):
        budget = _read_text(" ".join(value.lower().split()))
    else:
        raise _unusable(value, name)
    if budget.kind != "auto" and (budget.amount <= 0 or (budget.kind == "share" and budget.amount > 1)):
        raise _unusable(value, name)
    return budget


def _read_text(text: str) -> _Budget:
    """The budget that a text says. An amount of zero if it says none."""
    if text == "auto":
        return _Budget("auto", Fraction(0))
    kind: Literal["size", "leave"] = "size"
    if text.startswith("leave "):
        kind, text = "leave", text.removeprefix("leave ").removesuffix(" free")
    match = _NUMBER_AND_UNIT.fullmatch(text)
    number, unit = match.groups() if match else ("0", "")
    if unit == "%" and kind == "size":
        return _Budget("share", Fraction(number) / 100)
    if not unit and "." in number:
        return _Budget(kind, Fraction(0))  # a fraction of a byte: "1.5" is a size whose unit was forgotten
    amount = Fraction(number) * _UNITS.get(unit, 0)
    return _Budget(kind, amount if amount >= 1 else Fraction(0))


def _setting(name: str, value: object) -> str:
    return f"{name}={reprlib.repr(value)}"


def _unusable(value: object, name: str) -> InputError:
    return InputError(
        f"{_setting(name, value)} isn't a usable memory budget: give auto, a size above zero such as 6GiB or 512MiB, "
        "a share up to 100% such as 60%, or what to keep free such as 'leave 2GiB'."
    )


@dataclass(frozen=True)
class Memory:
    """Memory of one place: `free` of `total` bytes may be used, and `source` names what set the bound on `free`."""

    total: int
    free: int
    source: str


def auto_device_budget(memory: Memory) -> int:
    """What "auto" means on a device: free less max(5 % of total, 400 MiB) for desktop, driver and fragmentation.

    Never under half of free.
    """
    return max(memory.free - max(memory.total // 20, 400 * 2**20), memory.free // 2)


def auto_host_budget(memory: Memory) -> int:
    """What "auto" means in RAM: free less max(10 % of total, 1 GiB), but never under half of free (small cgroups)."""
    return max(memory.free - max(memory.total // 10, 2**30), memory.free // 2)


def activation_reserve(value: int | str, budget: int) -> int:
    """Bytes of a device budget that are kept for activations. "auto": a tenth of it, at most 4 GiB.

    A stated share until a trace of the model's own forward says what it needs.
    """
    if value == 0 or value == "0":
        return 0
    auto = min(budget // 10, 4 << 30)
    return parse_budget(value, free=budget, total=budget, auto=auto, name="activation_memory")


def _virtual_memory() -> Any:
    import psutil

    return psutil.virtual_memory()


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h."""

    _fields_ = [
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    ]


def _windows_commit_limit() -> tuple[int, int] | None:
    """Free and total bytes that Windows still commits to (RAM and page file together)."""
    if sys.platform != "win32":
        return None
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return status.ullAvailPageFile, status.ullTotalPageFile


def _driver_memory(device: torch.device) -> tuple[int, int] | None:
    """Free and total bytes by torch. `torch.accelerator.get_memory_info` is newer than the oldest torch we run on."""
    import torch

    generic = getattr(torch.accelerator, "get_memory_info", None)
    of_backend = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return _ask(generic, device) or _ask(of_backend, device)


def _nvml_memory(index: int) -> tuple[int, int] | None:
    """Free and total bytes of the CUDA device `index` by NVML, None without pynvml.

    NVML counts devices in bus order and ignores CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, so the device is found by
    its UUID.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    nvml.nvmlInit()
    try:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.free), int(memory.total)
    finally:
        nvml.nvmlShutdown()


def _ask(probe: Callable[..., tuple[int, int] | None] | None, *arguments: object) -> tuple[int, int] | None:
    """A probe's answer, None where it has none or fails: a missing library or driver must not stop a run."""
    try:
        return probe(*arguments) if probe else None
    except Exception as error:  # each backend has error classes of its own
        logger.debug("No answer about memory from %s: %s", probe, str(error))
        return None


@dataclass(frozen=True)
class Machine:
    """The machine's memory, asked anew at every call. The parameters are the places it is asked at.

    `root` holds `proc` and `sys/fs/cgroup`; `virtual_memory` answers like psutil's; the other probes answer
    (free, total) in bytes, or None where they don't know.
    """

    root: Path = Path("/")
    platform: str = sys.platform
    virtual_memory: Callable[[], Any] = _virtual_memory
    commit_limit: Callable[[], tuple[int, int] | None] = _windows_commit_limit
    device_info: Callable[[torch.device], tuple[int, int] | None] = _driver_memory
    nvml_info: Callable[[int], tuple[int, int] | None] = _nvml_memory

    def host(self) -> Memory:
        """RAM that this process may use: the least that physical memory, cgroups and Windows' commit limit allow.

        Clean page cache that is charged to a cgroup counts as free, because the kernel drops it before it refuses.
        """
        physical = self.virtual_memory()
        bounds = [Memory(physical.total, physical.available, "WSL" if self.is_wsl() else "physical memory")]
        if self.platform.startswith("linux"):
            bounds += _cgroup_bounds(self.root)
        commit = _ask(self.commit_limit) if self.platform == "win32" else None
        if commit:
            bounds.append(Memory(commit[1], commit[0], "Windows commit limit"))
        total = min(bound.total for bound in bounds)
        tightest = min(bounds, key=lambda bound: (bound.free, bound.total))
        return Memory(total, min(max(tightest.free, 0), total), tightest.source)

    def device(self, device: torch.device) -> Memory | None:
        """Memory of an accelerator, None for the CPU and where the driver doesn't say.

        Memory that torch's allocator keeps for reuse counts as used. Free is what the driver says, or NVML where that
        is less: it sees all processes, while the Windows driver model (WDDM) answers with what it would grant to this
        one by moving others out.
        """
        driver = None if device.type == "cpu" else _ask(self.device_info, device)
        if driver is None or driver[1] <= 0:
            return None
        free, total = driver
        source = "driver"
        nvml = _ask(self.nvml_info, device.index or 0) if device.type == "cuda" else None
        if nvml and nvml[0] < free:
            free, source = nvml[0], "NVML"
        return Memory(total, min(max(free, 0), total), source)

    def is_wsl(self) -> bool:
        """Whether this is Linux inside Windows (WSL): its kernel says so."""
        releases = ("proc/sys/kernel/osrelease", "proc/version")
        return any("microsoft" in _text(self.root / release).lower() for release in releases)

    def pinned_limit(self) -> int:
        """The most bytes of pinned host memory to take: a share of the host's total, and never more than is free.

        50 %. On Windows 40 %, as WDDM maps no more than half of RAM. Under WSL 25 %, as a large pin that fails there
        can leave the CUDA context broken.
        """
        host = self.host()
        percent = 40 if self.platform == "win32" else 25 if self.is_wsl() else 50
        return min(host.total * percent // 100, host.free)


@dataclass(frozen=True)
class _CgroupFiles:
    """Names that a version of the kernel's memory controller gives to limits, usage and lines of memory.stat."""

    version: str
    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    limit_in_stat: str | None
    usage: str
    file_pages: tuple[str, ...]
    busy_pages: tuple[str, ...]  # file pages that must be written first


# v2: docs.kernel.org/admin-guide/cgroup-v2.html, v1: docs.kernel.org/admin-guide/cgroup-v1/memory.html
_V2 = _CgroupFiles(
    version="cgroup v2",
    mounts=("sys/fs/cgroup", "sys/fs/cgroup/unified"),
    limits=("memory.max", "memory.high"),
    limit_in_stat=None,
    usage="memory.current",
    file_pages=("inactive_file", "active_file"),
    busy_pages=("file_dirty", "file_writeback"),
)
_V1 = _CgroupFiles(
    version="cgroup v1",
    mounts=("sys/fs/cgroup/memory",),
    limits=("memory.limit_in_bytes",),
    limit_in_stat="hierarchical_memory_limit",
    usage="memory.usage_in_bytes",
    file_pages=("total_inactive_file", "total_active_file"),
    busy_pages=("total_dirty", "total_writeback"),
)


def _cgroup_bounds(root: Path) -> Iterator[Memory]:
    """The limits of the process's cgroups and of all that contain them; "no limit" comes as none or a huge number."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        for mount in files.mounts:
            for folder in _folders_up(root / mount, path):
                yield from _bounds_in(folder, files)


def _folders_up(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder and its parents up to the mount.

    In a container the mount may be the cgroup itself while the path is the host's; then only the mount exists. A path
    that leads out of the cgroup namespace ("/../other") isn't visible under the mount either.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _bounds_in(folder: Path, files: _CgroupFiles) -> Iterator[Memory]:
    limits = {name: _whole(_text(folder / name)) for name in files.limits}
    if not any(limits.values()) and files.limit_in_stat is None:
        return
    stat = _stat(folder / "memory.stat")
    if files.limit_in_stat:
        limits[files.limit_in_stat] = stat.get(files.limit_in_stat)
    clean = sum(stat.get(name, 0) for name in files.file_pages) - sum(stat.get(name, 0) for name in files.busy_pages)
    used = max((_whole(_text(folder / files.usage)) or 0) - max(clean, 0), 0)
    for name, limit in limits.items():
        if limit:
            yield Memory(limit, limit - used, f"{files.version} {name}")


def _stat(path: Path) -> dict[str, int]:
    """The lines "name number" of a memory.stat; others are left out."""
    rows = (line.split() for line in _text(path).splitlines())
    numbers = {row[0]: _whole(row[1]) for row in rows if len(row) == 2}
    return {name: number for name, number in numbers.items() if number is not None}


def _whole(text: str) -> int | None:
    """A whole number that isn't negative, None for anything else ("max", garbage, nothing)."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _text(path: Path) -> str:
    """What a file of the kernel says, nothing where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a path with a null byte
        return ""
