"""Budgets in a person's words become bytes, and what the machine has is bounded by whatever bounds it."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.errors import InputError
from offload_core.limits import Machine, Memory, auto_device_budget, auto_host_budget, check_budget, parse_budget

MIB, GIB = 2**20, 2**30
CUDA = torch.device("cuda:0")
NO_LIMIT_V1 = 9223372036854771712


def parse(value: Any, free: int = 12 * GIB, total: int = 16 * GIB) -> int:
    return parse_budget(value, free=free, total=total, auto=7, name="device_budget")


# Budgets


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (6 * GIB, 6 * GIB),
        ("4096", 4096),
        ("4096b", 4096),
        ("6GiB", 6 * GIB),
        ("6 GiB", 6 * GIB),
        ("  6\tgib ", 6 * GIB),
        ("6g", 6 * GIB),
        ("6Gi", 6 * GIB),
        ("6GB", 6 * 10**9),
        ("6gb", 6 * 10**9),
        ("512MiB", 512 * MIB),
        ("512m", 512 * MIB),
        ("512 MB", 512 * 10**6),
        ("64k", 65536),
        ("0.01t", 2**40 // 100),
        ("1.5 GiB", 3 * GIB // 2),
        ("16GiB", 16 * GIB),
        ("100%", 16 * GIB),
        ("25 %", 4 * GIB),
        ("12.5%", 2 * GIB),
        ("auto", 7),
        (" AUTO ", 7),
        ("leave 2GiB", 10 * GIB),
        ("Leave 2 GiB free", 10 * GIB),
        ("leave 512m", 12 * GIB - 512 * MIB),
        ("leave  4096  FREE", 12 * GIB - 4096),
    ],
)
def test_budget_is_read_as_a_person_means_it(value: Any, size: int):
    check_budget(value, "device_budget")
    assert parse(value) == size


REFUSED: list[Any] = [
    *(True, False, None, 1.5, float("nan"), float("inf"), [], b"6GiB"),
    *(0, -1, "0", "-1", "-6GiB", "+6GiB", "0GiB", "0.0 GiB", "0%", "-5%", "0.1b"),
    *("", " ", "nan", "inf", "infGiB", "nan%", "1e9", "1.5", "1,5GiB", "1_000", "0x10", "\u0663GiB"),
    *("100.1%", "101%", "1000%", "60%%", "%", "60percent", "GiB", ".5GiB", "5.GiB", "6GiBs", "6 G iB", "6pb"),
    *("leave", "leave ", "leave free", "leave 0GiB", "leave -1GiB", "leave 10%", "leave auto", "leaves 2GiB"),
    *("2GiB free", "autos", "all", "6GiB 60%", "9" * 5000, "x" * 5000),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: repr(value)[:20])
def test_refused_budget_is_answered_with_the_settings_name_the_value_and_examples(value: Any):
    for call in (lambda: check_budget(value, "device_budget"), lambda: parse(value)):
        with pytest.raises(InputError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith("device_budget=")
        assert repr(value)[:8] in message
        assert "6GiB" in message and "60%" in message and "leave 2GiB" in message and "auto" in message
        assert len(message) < 300 and message.count(". ") == 0 and message.endswith(".")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("17GiB", "more than the 16.0 GiB"),
        (16 * GIB + 1, "more than the 16.0 GiB"),
        ("leave 12GiB", "only 12.0 GiB is free"),
        ("leave 900GiB free", "only 12.0 GiB is free"),
    ],
)
def test_budget_that_the_machine_cannot_give_is_refused_with_what_there_is(value: Any, says: str):
    check_budget(value, "device_budget")
    with pytest.raises(InputError, match=f"^device_budget={value!r} .*{says}"):
        parse(value)


def test_sizes_are_taken_as_given_where_the_total_is_unknown_and_shares_are_refused():
    assert parse("900GiB", free=0, total=0) == 900 * GIB
    assert parse(900 * GIB, free=0, total=0) == 900 * GIB
    assert parse("auto", free=0, total=0) == 7
    with pytest.raises(InputError, match="device_budget='60%' .*isn't known"):
        parse("60%", free=0, total=0)


def test_share_of_less_than_a_byte_is_refused():
    with pytest.raises(InputError, match="device_budget='0.1%' isn't a usable"):
        parse("0.1%", total=100)


UNITS = {"": 1, "b": 1, "k": 2**10, "KiB": 2**10, "kB": 10**3, "MiB": 2**20, "MB": 10**6, "GiB": 2**30, "GB": 10**9}
numbers = st.decimals(min_value="0.01", max_value=4096, places=2).map(str)


@given(number=numbers, unit=st.sampled_from([u for u in UNITS if u not in ("", "b")]), space=st.sampled_from(["", " "]))
def test_size_is_its_number_times_its_unit(number: str, unit: str, space: str):
    assert parse(f"{number}{space}{unit}", total=0) == int(Fraction(number) * UNITS[unit])


@given(size=st.integers(1, 2**50), unit=st.sampled_from(["", "b", " B"]))
def test_size_in_bytes_comes_back_as_it_is(size: int, unit: str):
    assert parse(size, total=2**50) == parse(f"{size}{unit}", total=2**50) == size


@given(percents=st.lists(st.integers(1, 10000), min_size=2, max_size=2), total=st.integers(10**4, 2**50))
def test_share_grows_with_its_percent_and_never_passes_the_total(percents: list[int], total: int):
    small, large = (parse(f"{percent / 100:.2f}%", total=total) for percent in sorted(percents))
    assert small <= large <= total
    assert small == total * min(percents) // 10000


@given(spared=st.lists(st.integers(1, 2**41), min_size=2, max_size=2), free=st.integers(1, 2**40))
def test_leaving_more_never_gives_more(spared: list[int], free: int):
    def left(spare: int) -> int:
        try:
            return parse(f"leave {spare}", free=free, total=2**40)
        except InputError:
            return 0

    assert [left(spare) for spare in spared] == [max(free - spare, 0) for spare in spared]


@given(
    value=st.integers() | st.text(max_size=12) | st.from_regex(r"(leave )?[0-9.]{1,4} ?[kmgt%]?i?b?( free)?"),
    total=st.integers(1, 2**44),
    used=st.integers(0, 2**44),
)
def test_whatever_is_asked_for_is_within_what_there_is_or_refused(value: int | str, total: int, used: int):
    try:
        size = parse_budget(value, free=max(total - used, 0), total=total, auto=1, name="ram")
    except InputError as error:
        assert str(error).startswith("ram=")
    else:
        assert 0 < size <= total


@pytest.mark.parametrize(
    ("auto", "total", "free", "budget"),
    [
        (auto_device_budget, 40 * GIB, 30 * GIB, 28 * GIB),
        (auto_device_budget, 4 * GIB, 3 * GIB, 3 * GIB - 400 * MIB),
        (auto_device_budget, 4 * GIB, 100 * MIB, 50 * MIB),
        (auto_host_budget, 64 * 10 * MIB, 640 * MIB, 320 * MIB),
        (auto_host_budget, 80 * GIB, 60 * GIB, 52 * GIB),
        (auto_host_budget, 8 * GIB, 6 * GIB, 5 * GIB),
        (auto_host_budget, 80 * GIB, 10 * GIB, 5 * GIB),
        (auto_host_budget, 8 * GIB, 0, 0),
    ],
)
def test_auto_leaves_headroom(auto: Any, total: int, free: int, budget: int):
    assert auto(Memory(total, free, "")) == budget


# The host


def machine(root: Path, total: int = 32 * GIB, free: int = 20 * GIB, **probes: Any) -> Machine:
    probes = {"platform": "linux"} | probes
    return Machine(root=root, virtual_memory=lambda: SimpleNamespace(total=total, available=free), **probes)


def write(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
IN_V2 = {"proc/self/cgroup": "0::/a/b"}
IN_V1 = {"proc/self/cgroup": "12:pids:/elsewhere\n4:cpu,memory:/a/b\n1:name=systemd:/c\n0::/"}
PHYSICAL = Memory(32 * GIB, 20 * GIB, "physical memory")


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        pytest.param({}, PHYSICAL, id="no cgroup at all"),
        pytest.param(
            IN_V2 | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.current": 3 * GIB},
            Memory(8 * GIB, 5 * GIB, "cgroup v2 memory.max"),
            id="v2, own limit",
        ),
        pytest.param(
            IN_V2 | {f"{V2}/a/b/memory.max": "max", f"{V2}/a/b/memory.high": "max", f"{V2}/a/b/memory.current": GIB},
            PHYSICAL,
            id="v2, no limit",
        ),
        pytest.param(
            IN_V2
            | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.high": 6 * GIB, f"{V2}/a/b/memory.current": GIB},
            Memory(6 * GIB, 5 * GIB, "cgroup v2 memory.high"),
            id="v2, throttled below its limit",
        ),
        pytest.param(
            IN_V2
            | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.current": GIB}
            | {f"{V2}/a/memory.max": 10 * GIB, f"{V2}/a/memory.current": 9 * GIB},
            Memory(8 * GIB, GIB, "cgroup v2 memory.max"),
            id="v2, a sibling fills the parent",
        ),
        pytest.param(
            IN_V2
            | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.current": 7 * GIB}
            | {f"{V2}/a/b/memory.stat": f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\nshmem 5\n"},
            Memory(8 * GIB, 7 * GIB, "cgroup v2 memory.max"),
            id="v2, page cache is free",
        ),
        pytest.param(
            IN_V2
            | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.current": 7 * GIB}
            | {f"{V2}/a/b/memory.stat": f"inactive_file {4 * GIB}\nfile_dirty {2 * GIB}\nfile_writeback {GIB}\n"},
            Memory(8 * GIB, 2 * GIB, "cgroup v2 memory.max"),
            id="v2, pages to be written are not",
        ),
        pytest.param(
            IN_V2 | {f"{V2}/a/b/memory.max": 8 * GIB, f"{V2}/a/b/memory.current": 9 * GIB},
            Memory(8 * GIB, 0, "cgroup v2 memory.max"),
            id="v2, over its limit",
        ),
        pytest.param(
            {"proc/self/cgroup": b"1:name=\xff:/\xff\n0::/a", f"{V2}/a/memory.max": 4 * GIB},
            Memory(4 * GIB, 4 * GIB, "cgroup v2 memory.max"),
            id="v2, a cgroup beside it is not named in UTF-8",
        ),
        pytest.param(
            IN_V2 | {f"{V2}/a/b/memory.max": 64 * GIB, f"{V2}/a/b/memory.current": GIB},
            PHYSICAL,
            id="v2, limit above the machine",
        ),
        pytest.param(
            IN_V2 | {f"{V2}/a/b/memory.max": 24 * GIB, f"{V2}/a/b/memory.current": GIB},
            Memory(24 * GIB, 20 * GIB, "physical memory"),
            id="v2, others fill the machine",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/docker/abc", f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": GIB},
            Memory(4 * GIB, 3 * GIB, "cgroup v2 memory.max"),
            id="v2, the mount is the container's cgroup",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../x", f"{V2}/memory.max": 4 * GIB, f"{V2}/x/memory.max": GIB}
            | {"sys/fs/x/memory.max": GIB},
            Memory(4 * GIB, 4 * GIB, "cgroup v2 memory.max"),
            id="v2, a path out of the namespace is not followed",
        ),
        pytest.param(
            IN_V2 | {f"{V2}/unified/a/memory.max": 4 * GIB, f"{V2}/unified/a/memory.current": GIB},
            Memory(4 * GIB, 3 * GIB, "cgroup v2 memory.max"),
            id="v2, mounted beside v1",
        ),
        pytest.param(
            IN_V1 | {f"{V1}/a/b/memory.limit_in_bytes": 8 * GIB, f"{V1}/a/b/memory.usage_in_bytes": 3 * GIB},
            Memory(8 * GIB, 5 * GIB, "cgroup v1 memory.limit_in_bytes"),
            id="v1, own limit",
        ),
        pytest.param(
            IN_V1
            | {f"{V1}/a/b/memory.limit_in_bytes": NO_LIMIT_V1, f"{V1}/a/b/memory.usage_in_bytes": 3 * GIB}
            | {f"{V1}/memory.limit_in_bytes": NO_LIMIT_V1, f"{V1}/memory.usage_in_bytes": 30 * GIB}
            | {f"{V1}/a/b/memory.stat": f"hierarchical_memory_limit {NO_LIMIT_V1}"},
            PHYSICAL,
            id="v1, no limit",
        ),
        pytest.param(
            IN_V1
            | {f"{V1}/a/b/memory.limit_in_bytes": NO_LIMIT_V1, f"{V1}/a/b/memory.usage_in_bytes": GIB}
            | {f"{V1}/a/memory.limit_in_bytes": 6 * GIB, f"{V1}/a/memory.usage_in_bytes": 4 * GIB},
            Memory(6 * GIB, 2 * GIB, "cgroup v1 memory.limit_in_bytes"),
            id="v1, limit of the parent",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/docker/abc"}
            | {f"{V1}/memory.limit_in_bytes": NO_LIMIT_V1, f"{V1}/memory.usage_in_bytes": 5 * GIB}
            | {
                f"{V1}/memory.stat": f"inactive_file 1\nhierarchical_memory_limit {6 * GIB}\n"
                f"total_inactive_file {GIB}\ntotal_active_file {2 * GIB}\ntotal_dirty {GIB}\ntotal_writeback 0\n"
            },
            Memory(6 * GIB, 3 * GIB, "cgroup v1 hierarchical_memory_limit"),
            id="v1, a parent's limit seen from within the container, page cache is free",
        ),
        pytest.param(
            IN_V1 | {f"{V1}/elsewhere/memory.limit_in_bytes": GIB, f"{V2}/elsewhere/memory.max": GIB},
            PHYSICAL,
            id="v1, other controllers' cgroups do not count",
        ),
    ],
)
def test_host_memory_is_the_least_that_all_limits_leave(tmp_path: Path, files: dict[str, Any], memory: Memory):
    write(tmp_path, files)
    assert machine(tmp_path).host() == memory


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe\x00", b"-1", b"1e9", b"9" * 5000, b"0", b"max max", b"\n:::\n"])
@pytest.mark.parametrize("base", [IN_V2, IN_V1], ids=["v2", "v1"])
def test_garbage_in_the_kernels_files_is_ignored(tmp_path: Path, garbage: bytes, base: dict[str, str]):
    folder = f"{V2 if base is IN_V2 else V1}/a/b"
    names = "memory.max memory.high memory.current memory.limit_in_bytes memory.usage_in_bytes".split()
    stat = b"inactive_file " + garbage + b"\nhierarchical_memory_limit " + garbage + b"\nlone\n" + garbage
    write(tmp_path, base | dict.fromkeys((f"{folder}/{name}" for name in names), garbage))
    write(tmp_path, {f"{folder}/memory.stat": stat})
    assert machine(tmp_path).host() == PHYSICAL
    write(
        tmp_path, {"proc/self/cgroup": garbage + b"\n0::/\x00\n0::" + b"/x" * 50 + b"/" + b"y" * 300 + b"\n4:memory\n0"}
    )
    assert machine(tmp_path).host() == PHYSICAL


def test_unreadable_usage_leaves_the_limit_in_force(tmp_path: Path):
    write(tmp_path, IN_V2 | {f"{V2}/a/memory.max": 4 * GIB})
    (tmp_path / V2 / "a/memory.current").mkdir()
    assert machine(tmp_path).host() == Memory(4 * GIB, 4 * GIB, "cgroup v2 memory.max")


def failing(*arguments: object) -> tuple[int, int]:
    raise OSError("driver not loaded")


@pytest.mark.parametrize(
    ("platform", "commit_limit", "memory"),
    [
        ("win32", lambda: (9 * GIB, 40 * GIB), Memory(32 * GIB, 9 * GIB, "Windows commit limit")),
        ("win32", lambda: (30 * GIB, 40 * GIB), PHYSICAL),
        ("win32", lambda: None, PHYSICAL),
        ("win32", failing, PHYSICAL),
        ("linux", lambda: (1, 2), PHYSICAL),
    ],
)
def test_windows_gives_no_more_than_its_commit_limit(tmp_path: Path, platform: str, commit_limit: Any, memory: Memory):
    assert machine(tmp_path, platform=platform, commit_limit=commit_limit).host() == memory


@pytest.mark.parametrize("file", ["proc/sys/kernel/osrelease", "proc/version"])
def test_wsl_is_known_by_its_kernel(tmp_path: Path, file: str):
    assert not machine(tmp_path).is_wsl()
    write(tmp_path, {file: "5.15.153.1-microsoft-standard-WSL2" if "osrelease" in file else "Linux (Microsoft@x)"})
    assert machine(tmp_path).is_wsl()
    assert machine(tmp_path).host().source == "WSL"


@pytest.mark.parametrize(
    ("release", "platform", "free", "limit"),
    [
        ("6.8.0-generic", "linux", 90 * GIB, 50 * GIB),
        ("6.8.0-generic", "linux", 30 * GIB, 30 * GIB),
        ("5.15-microsoft-standard-WSL2", "linux", 90 * GIB, 25 * GIB),
        ("5.15-microsoft-standard-WSL2", "linux", 10 * GIB, 10 * GIB),
        ("", "win32", 90 * GIB, 40 * GIB),
    ],
)
def test_pinned_memory_is_a_share_of_the_host(tmp_path: Path, release: str, platform: str, free: int, limit: int):
    write(tmp_path, {"proc/sys/kernel/osrelease": release})
    probes = {"platform": platform, "commit_limit": lambda: None}
    assert machine(tmp_path, total=100 * GIB, free=free, **probes).pinned_limit() == limit


def test_pinned_memory_keeps_to_the_cgroup(tmp_path: Path):
    write(tmp_path, IN_V2 | {f"{V2}/a/memory.max": 8 * GIB, f"{V2}/a/memory.current": GIB})
    assert machine(tmp_path).pinned_limit() == 4 * GIB


def test_this_machine_has_memory():
    memory = Machine().host()
    assert 0 < memory.free <= memory.total
    assert memory.source
    assert 0 < Machine().pinned_limit() <= memory.total // 2


# Devices


@pytest.mark.parametrize(
    ("device", "driver", "nvml", "memory"),
    [
        ("cuda:0", (10, 16), None, Memory(16, 10, "driver")),
        ("cuda:0", (10, 16), (6, 16), Memory(16, 6, "NVML")),
        ("cuda:0", (10, 16), (12, 16), Memory(16, 10, "driver")),
        ("cuda:0", (10, 16), failing, Memory(16, 10, "driver")),
        ("cuda:0", (20, 16), None, Memory(16, 16, "driver")),
        ("xpu:0", (10, 16), (6, 16), Memory(16, 10, "driver")),
        ("cuda:0", None, (6, 16), None),
        ("cuda:0", failing, (6, 16), None),
        ("cuda:0", (0, 0), None, None),
        ("cpu", (10, 16), (6, 16), None),
    ],
)
def test_device_memory_is_the_drivers_or_nvmls_where_that_is_less(device: str, driver: Any, nvml: Any, memory: Any):
    def answers(answer: Any) -> Any:
        return answer if callable(answer) else lambda argument: answer

    probed = Machine(device_info=answers(driver), nvml_info=answers(nvml))
    assert probed.device(torch.device(device)) == memory


def test_nvml_is_asked_about_the_device_of_that_index():
    asked: list[int] = []
    Machine(device_info=lambda device: (1, 2), nvml_info=asked.append).device(torch.device("cuda:3"))  # type: ignore[arg-type]
    assert asked == [3]


@pytest.mark.parametrize("generic", [True, False], ids=["torch.accelerator", "torch.cuda only"])
def test_torch_is_asked_by_its_generic_interface_where_it_has_one(monkeypatch: pytest.MonkeyPatch, generic: bool):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 9))
    if generic:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (4, 9), raising=False)
    else:
        monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    memory = Machine(nvml_info=lambda index: None).device(CUDA)
    assert memory == Memory(9, 4 if generic else 3, "driver")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_without_a_driver_has_no_memory_of_its_own(device: str):
    assert Machine().device(torch.device(device)) is None


class PretendNvml:
    """A driver library that knows one device, by its UUID."""

    NVMLError = RuntimeError

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.sessions = 0

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(free=5, total=16)


@pytest.mark.parametrize(
    ("nvml", "memory"),
    [
        (PretendNvml("GPU-u1"), Memory(16, 5, "NVML")),
        (PretendNvml("MIG-u1"), Memory(16, 5, "NVML")),
        (PretendNvml("GPU-u0"), Memory(16, 10, "driver")),
        (None, Memory(16, 10, "driver")),
    ],
    ids=["device", "MIG slice", "unknown to NVML", "no pynvml"],
)
def test_nvml_finds_the_device_by_its_uuid_and_is_closed_again(
    monkeypatch: pytest.MonkeyPatch, nvml: PretendNvml | None, memory: Memory
):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}"))
    assert Machine(device_info=lambda device: (10, 16)).device(torch.device("cuda:1")) == memory
    assert nvml is None or nvml.sessions == 0
