"""Purge: what each keeper of memory gave back, and why one gave nothing."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload_core
from offload_core._standby_list import StandbyListError, Windows, purge_standby_list
from offload_core.cli import main
from offload_core.errors import InputError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's page cache")

PAGE, LISTS = 4096, 80
NOT_ALL_ASSIGNED = 1300


class FakeWindows:
    """Windows as the standby list needs it: each call is noted, and `refuse` names the one that fails."""

    def __init__(self, *, refuse: str = "", elevated: bool = True, status: int = 0, silent: bool = False) -> None:
        self.refuse, self.elevated, self.status, self.silent = refuse, elevated, status, silent
        self.calls: list[str] = []
        self.standby_pages = 1000
        self.privileged = False
        self.open_tokens = 0

    def libraries(self) -> Windows:
        return Windows(
            kernel32=self._library("GetCurrentProcess", "CloseHandle"),
            advapi32=self._library("OpenProcessToken", "LookupPrivilegeValueW", "AdjustTokenPrivileges"),
            ntdll=self._library("NtSetSystemInformation", "NtQuerySystemInformation"),
            last_error=lambda: 5 if self.refuse else 0 if self.elevated else NOT_ALL_ASSIGNED,
            page_bytes=PAGE,
        )

    def _library(self, *names: str) -> Any:
        class Library:
            pass

        for name in names:
            setattr(Library, name, staticmethod(self._call(name)))
        return Library

    def _call(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 0 if name == self.refuse else int(getattr(self, f"on_{name}")(*arguments))

        return call

    def on_GetCurrentProcess(self) -> int:
        return -1

    def on_CloseHandle(self, token: Any) -> int:
        self.open_tokens -= 1
        return 1

    def on_OpenProcessToken(self, process: int, access: int, token: Any) -> int:
        assert (process, access) == (-1, 0x28)
        self.open_tokens += 1
        return 1

    def on_LookupPrivilegeValueW(self, system: None, name: str, luid: Any) -> int:
        assert name == "SeProfileSingleProcessPrivilege"
        luid._obj.low = 13
        return 1

    def on_AdjustTokenPrivileges(self, token: Any, off: bool, new: Any, size: int, old: Any, length: Any) -> int:
        assert (off, new._obj.count, new._obj.luid.low) == (False, 1, 13)
        if old is not None:
            old._obj.count, old._obj.luid.low, old._obj.attributes = int(self.elevated), 13, 0
        self.privileged = new._obj.attributes == 2 and self.elevated
        return 1

    def on_NtQuerySystemInformation(self, kind: int, lists: Any, size: int, length: None) -> int:
        assert (kind, size) == (LISTS, ctypes.sizeof(lists._obj))
        lists._obj.standby[5] = self.standby_pages
        return 1 if self.silent else 0

    def on_NtSetSystemInformation(self, kind: int, command: Any, size: int) -> int:
        assert (kind, command._obj.value, size) == (LISTS, 4, 4)
        assert self.privileged
        if not self.status:
            self.standby_pages = 10
        return self.status


def test_standby_list_is_emptied_with_the_privilege_held_for_just_that_time():
    fake = FakeWindows()
    assert purge_standby_list(fake.libraries()) == 990 * PAGE
    assert not fake.privileged and fake.open_tokens == 0


def test_bytes_are_unknown_where_windows_does_not_tell_its_lists():
    fake = FakeWindows(silent=True)
    assert purge_standby_list(fake.libraries()) == 0
    assert fake.standby_pages == 10


@pytest.mark.parametrize("function", ["OpenProcessToken", "LookupPrivilegeValueW", "AdjustTokenPrivileges"])
def test_a_call_that_windows_refuses_is_named_with_its_error_and_the_token_is_closed(function: str):
    fake = FakeWindows(refuse=function)
    with pytest.raises(StandbyListError, match=rf"{function.removesuffix('W')}: error 5"):
        purge_standby_list(fake.libraries())
    assert fake.open_tokens == 0
    assert "NtSetSystemInformation" not in fake.calls


@pytest.mark.parametrize("fake", [FakeWindows(elevated=False), FakeWindows(status=0xC0000061 - 2**32)])
def test_a_process_that_is_not_elevated_is_told_so(fake: FakeWindows):
    with pytest.raises(StandbyListError, match="elevated process"):
        purge_standby_list(fake.libraries())
    assert fake.open_tokens == 0 and not fake.privileged


def test_another_status_of_windows_is_shown_as_it_is():
    fake = FakeWindows(status=0xC0000004 - 2**32)
    with pytest.raises(StandbyListError, match="status 0xC0000004"):
        purge_standby_list(fake.libraries())
    assert not fake.privileged and fake.open_tokens == 0


def rows(report: offload_core.PurgeReport) -> dict[str, tuple[int, str]]:
    return {row.what: (row.nbytes, row.reason) for row in report.rows}


def test_purge_empties_the_standby_list_only_when_asked_to():
    fake = FakeWindows()
    assert rows(offload_core.purge("cpu", windows=fake.libraries))["standby list"] == (0, "not asked to")
    assert fake.calls == []
    report = offload_core.purge("cpu", standby=True, windows=fake.libraries)
    assert rows(report)["standby list"] == (990 * PAGE, "")
    assert report.cache_bytes == 990 * PAGE
    assert report.sentence().endswith("and 4 MiB of file caches.")


def test_where_there_is_no_standby_list_the_reason_is_given():
    report = offload_core.purge("cpu", standby=True, windows=lambda: None)
    assert "only Windows has one" in report.table()


def weight_file(folder: Path, nbytes: int) -> Path:
    """A file whose pages are clean and cached. Not in RAM's own file system, which has nothing to let go."""
    path = folder / "part.safetensors"
    path.write_bytes(bytes(nbytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
    return path


@linux_only
def test_files_of_a_model_folder_leave_the_page_cache(tmp_path: Path):
    nbytes = 3 * 2**20 + 5
    weight_file(tmp_path, nbytes)
    (tmp_path / "config.json").write_text("{}")
    found, reason = rows(offload_core.purge("cpu", files=[tmp_path]))["page cache"]
    if not found:
        pytest.skip("the temporary folder's file system keeps its pages")
    assert not reason and found >= nbytes


def test_without_files_the_page_cache_is_left_alone():
    nbytes, reason = rows(offload_core.purge("cpu"))["page cache"]
    assert not nbytes and reason


def test_a_file_that_is_not_there_is_an_error():
    with pytest.raises(InputError, match="There is no file or folder /nowhere"):
        offload_core.purge("cpu", files=["/nowhere"])


def test_purge_command_says_what_each_gave_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    weight_file(tmp_path, 2**20)
    assert main(["purge", "--device", "cpu", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for what in ("garbage", "device cache", "pinned cache", "heap", "page cache", "standby list", "Freed "):
        assert what in out
    assert main(["purge", "--device", "cpu", "--model", str(tmp_path / "no")]) == 2
