"""Pages of a file in Linux's page cache: how many there are, and letting them go."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np


def why_not() -> str:
    """Why the page cache can't be told anything here; nothing where it can."""
    if sys.platform == "linux" and hasattr(os, "posix_fadvise"):
        return ""
    return f"only Linux lets go of single files, this is {sys.platform}"


def drop_pages(path: Path) -> int:
    """Lets go of a file's clean pages (posix_fadvise(2), POSIX_FADV_DONTNEED). Returns the bytes that left.

    Pages that a process has mapped and touched, or that aren't written yet, stay.
    """
    with path.open("rb") as file:
        before = _cached_bytes(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return max(0, before - _cached_bytes(file.fileno()))


def _cached_bytes(descriptor: int) -> int:
    """Bytes of a file that are in the page cache, by mincore(2); 0 where the system doesn't say."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        failed = libc.mincore(view.ctypes.data, size, pages.ctypes.data)
        del view  # else the mapping can't be closed
    return 0 if failed else int((pages & 1).sum()) * mmap.PAGESIZE
