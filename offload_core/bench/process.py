"""What the system says about this process: its memory, its reads, and how busy the rest of the machine is."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

SAMPLE_EVERY_S = 0.02


class OtherLoad:
    """How many CPUs other processes kept busy since this was made. Timings beside a busy neighbour mean little."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy, self._own = _busy_seconds(), time.process_time()

    def cpus(self) -> float | None:
        """None where the system doesn't tell. Time stolen by other machines on the same host counts."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = busy - self._busy - (time.process_time() - self._own)
        return max(0.0, others / (time.perf_counter() - self._started))


def _busy_seconds() -> float | None:
    try:
        with open("/proc/stat") as file:
            ticks = [int(number) for number in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class PrivatePeak:
    """The highest private memory of this process while the block runs, sampled by a thread. The same of its resident
    set, because phases start the system's own count of that peak anew."""

    def __init__(self) -> None:
        self.highest, self.highest_resident = private_bytes(), resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="private-peak", daemon=True)

    def __enter__(self) -> PrivatePeak:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._look()

    def _look(self) -> None:
        self.highest = max(self.highest, private_bytes())
        self.highest_resident = max(self.highest_resident, resident_bytes())


def private_bytes() -> int:
    """Memory of this process that no file backs: anonymous and shared pages. Off Linux, the nearest there is."""
    status = _status()
    if "RssAnon" in status:
        return status["RssAnon"] + status.get("RssShmem", 0)
    import psutil

    info = psutil.Process().memory_info()
    return getattr(info, "private", info.rss)


def resident_bytes() -> int:
    """Resident set of this process, file pages included."""
    status = _status()
    if "VmRSS" in status:
        return status["VmRSS"]
    import psutil

    return int(psutil.Process().memory_info().rss)


def resident_peak_bytes() -> int | None:
    """Peak resident set of this process, file pages included."""
    status = _status()
    if "VmHWM" in status:
        return status["VmHWM"]
    import psutil

    return getattr(psutil.Process().memory_info(), "peak_wset", None)


def disk_read_bytes() -> int | None:
    """Bytes this process caused to be read from a disk, so far."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _status() -> dict[str, int]:
    """The memory lines of /proc/self/status, in bytes; empty off Linux."""
    try:
        with open("/proc/self/status") as file:
            lines = file.readlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines)
    return {part[0][:-1]: int(part[1]) * 1024 for part in parts if len(part) == 3 and part[2] == "kB"}
