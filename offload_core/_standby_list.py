"""The Windows standby list: clean pages of files that Windows keeps cached, of every program on the machine.

Windows has no documented call for it. The one that its own tools use is NtSetSystemInformation with the information
class SystemMemoryListInformation; numbers and structures as in the System Informer project's ntexapi.h. It needs the
privilege "profile single process", which only elevated processes hold.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .errors import OffloadError

_MEMORY_LISTS, _PURGE_STANDBY = 80, 4
_PRIVILEGE = "SeProfileSingleProcessPrivilege"
_ADJUST_AND_QUERY, _ENABLED = 0x20 | 0x8, 0x2
_NOT_ALL_ASSIGNED, _PRIVILEGE_NOT_HELD = 1300, 0xC0000061  # an error of Win32, a status of NT

_NEEDS_ELEVATION = (
    "The Windows standby list can only be purged by an elevated process; start it with 'Run as administrator'."
)


class StandbyListError(OffloadError):
    """The Windows standby list couldn't be purged, and why."""


@dataclass(frozen=True)
class Windows:
    """The three libraries of Windows, and how an error of the last call is asked for. page_bytes: of memory."""

    kernel32: Any
    advapi32: Any
    ntdll: Any
    last_error: Callable[[], int]
    page_bytes: int = 4096

    @classmethod
    def here(cls) -> Windows | None:
        """None on any other system. (WSL is Linux; the list is its host's.)"""
        if sys.platform != "win32":
            return None
        libraries = [ctypes.WinDLL(name, use_last_error=True) for name in ("kernel32", "advapi32", "ntdll")]
        return cls(*libraries, last_error=ctypes.get_last_error)


def purge_standby_list(windows: Windows | None) -> int:
    """Empties the standby list. Returns the bytes that left it.

    Raises StandbyListError on another system, without elevation, or if Windows refuses.
    """
    if windows is None:
        raise StandbyListError(f"There is no standby list here: only Windows has one, this is {sys.platform}.")
    with _privilege(windows):
        before = _standby_bytes(windows)
        command = ctypes.c_uint32(_PURGE_STANDBY)
        status = windows.ntdll.NtSetSystemInformation(_MEMORY_LISTS, ctypes.byref(command), ctypes.sizeof(command))
        if status & 0xFFFFFFFF == _PRIVILEGE_NOT_HELD:
            raise StandbyListError(_NEEDS_ELEVATION)
        if status:
            raise StandbyListError(
                f"Windows didn't purge its standby list (NtSetSystemInformation: status 0x{status & 0xFFFFFFFF:08X})."
            )
        return max(0, before - _standby_bytes(windows))


class _Luid(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint32), ("high", ctypes.c_int32)]


class _Privileges(ctypes.Structure):
    """TOKEN_PRIVILEGES with one entry."""

    _fields_ = [("count", ctypes.c_uint32), ("luid", _Luid), ("attributes", ctypes.c_uint32)]


class _MemoryLists(ctypes.Structure):
    """SYSTEM_MEMORY_LIST_INFORMATION: pages of each list; the standby list is kept by priority."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("zero", "free", "modified", "modified_no_write", "bad")),
        ("standby", ctypes.c_size_t * 8),
        ("repurposed", ctypes.c_size_t * 8),
        ("modified_page_file", ctypes.c_size_t),
    ]


def _standby_bytes(windows: Windows) -> int:
    """Bytes in the standby list now; 0 if Windows doesn't say."""
    lists = _MemoryLists()
    failed = windows.ntdll.NtQuerySystemInformation(_MEMORY_LISTS, ctypes.byref(lists), ctypes.sizeof(lists), None)
    return 0 if failed else sum(lists.standby) * windows.page_bytes


@contextmanager
def _privilege(windows: Windows) -> Iterator[None]:
    """Holds the privilege for the time of the block, and puts back what was before."""
    kernel32, advapi32 = windows.kernel32, windows.advapi32
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    kernel32.CloseHandle.argtypes = [ctypes.c_void_p]
    advapi32.OpenProcessToken.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    advapi32.AdjustTokenPrivileges.argtypes = [pointer, ctypes.c_int, pointer, number, pointer, pointer]
    token = ctypes.c_void_p()
    if not advapi32.OpenProcessToken(kernel32.GetCurrentProcess(), _ADJUST_AND_QUERY, ctypes.byref(token)):
        raise _refused(windows, "OpenProcessToken")
    try:
        wanted, before, length = _Privileges(1, _Luid(), _ENABLED), _Privileges(), ctypes.c_uint32()
        if not advapi32.LookupPrivilegeValueW(None, _PRIVILEGE, ctypes.byref(wanted.luid)):
            raise _refused(windows, "LookupPrivilegeValue")
        size = ctypes.sizeof(before)
        adjusted = advapi32.AdjustTokenPrivileges(
            token, False, ctypes.byref(wanted), size, ctypes.byref(before), ctypes.byref(length)
        )
        if not adjusted:
            raise _refused(windows, "AdjustTokenPrivileges")
        if windows.last_error() == _NOT_ALL_ASSIGNED:  # it "succeeds" without giving anything
            raise StandbyListError(_NEEDS_ELEVATION)
        try:
            yield
        finally:
            if before.count:
                advapi32.AdjustTokenPrivileges(token, False, ctypes.byref(before), 0, None, None)
    finally:
        kernel32.CloseHandle(token)


def _refused(windows: Windows, function: str) -> StandbyListError:
    return StandbyListError(f"Windows didn't purge its standby list ({function}: error {windows.last_error()}).")
