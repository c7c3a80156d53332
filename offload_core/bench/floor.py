"""How fast a step could be at best: the resident model's own compute, and how fast files can be read beside it.

    floor = max(resident compute, streamed bytes / best read rate beside that compute)

The readers here are plain loops over the weight files, direct (past the page cache) and buffered, with one to four
threads; the best of them counts. They share no code with the engine they are the yardstick for.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .job import Job
from .measure import Steps
from .model import drop_from_page_cache, step_inputs, weight_files
from .process import OtherLoad
from .ways import WAYS, load

THREADS = (1, 2, 4)
CHUNK_BYTES = 4 << 20
ALONE_S = 0.8


def measure_floor(job: Job) -> dict[str, Any]:
    """Seconds of a resident step, and read rates in bytes per second: alone and beside that step, cold and cached."""
    import torch

    ready = WAYS["resident"].prepare(job)(load(job))
    inputs = step_inputs(job.family, ready.module.config, job.device, job.image_tokens, job.text_tokens)
    folder = Path(job.folder)
    steps = Steps(ready, inputs)
    with torch.no_grad():
        steps.run(1)
        others = OtherLoad()
        steps.run(job.steps)
        others_cpus = others.cpus()
        compute_s = statistics.median(steps.seconds[1:])
        drop_from_page_cache(folder)
        direct = _rates(folder, _read_direct, steps)
        for file in weight_files(folder):
            file.read_bytes()  # into the page cache, whatever the readers' share of it would have been
        cached = _rates(folder, _read_buffered, steps)
    return {
        "compute_s": compute_s,
        "others_cpus": others_cpus,
        "read_alone": max(direct["alone"].values()),
        "read_beside": max(direct["beside"].values()),
        "cached_beside": max(cached["beside"].values()),
        "rates": {"direct": direct, "cached": cached},
    }


def floor_s(floor: dict[str, Any], streamed_bytes: int, *, cached: bool = False) -> float:
    """The floor of a step that streams `streamed_bytes`. `cached`: the files may stay in the page cache."""
    rate = max(floor["read_beside"], floor["cached_beside"]) if cached else floor["read_beside"]
    return max(floor["compute_s"], streamed_bytes / rate)


ReadLoop = Callable[[list[Path], int, threading.Event], int]


def _rates(folder: Path, read: ReadLoop, steps: Steps) -> dict[str, dict[int, float]]:
    files = weight_files(folder)
    rates: dict[str, dict[int, float]] = {"alone": {}, "beside": {}}
    for threads in THREADS:
        rates["alone"][threads] = _rate(files, read, threads, lambda: time.sleep(ALONE_S))
        rates["beside"][threads] = _rate(files, read, threads, lambda: steps.run(2))
    return rates


def _rate(files: list[Path], read: ReadLoop, threads: int, beside: Callable[[], None]) -> float:
    stop = threading.Event()
    done: list[int] = []
    workers = [
        # Each starts at another file, so that they don't wait for the same blocks.
        threading.Thread(target=lambda k=k: done.append(read(files[k:] + files[:k], CHUNK_BYTES, stop)))
        for k in (number * len(files) // threads for number in range(threads))
    ]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    try:
        beside()
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    return sum(done) / (time.perf_counter() - started)


def _read_direct(files: list[Path], chunk: int, stop: threading.Event) -> int:
    """Reads the files round and round until stopped; returns the bytes read. Buffered where direct reads can't be."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return _read_buffered(files, chunk, stop)
    buffer = mmap.mmap(-1, chunk)  # page-aligned, as direct reads want it
    total = 0
    while True:
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                return total + _read_buffered(files, chunk, stop)
            try:
                total += _read_through(descriptor, buffer, stop)
            finally:
                os.close(descriptor)
            if stop.is_set():
                return total


def _read_through(descriptor: int, buffer: mmap.mmap, stop: threading.Event) -> int:
    offset = 0
    while not stop.is_set():
        count = os.preadv(descriptor, [buffer], offset)
        offset += count
        if count < len(buffer):  # the end of the file
            break
    return offset


def _read_buffered(files: list[Path], chunk: int, stop: threading.Event) -> int:
    buffer = bytearray(chunk)
    total = 0
    while True:
        for file in files:
            with open(file, "rb", buffering=0) as stream:
                while not stop.is_set() and (count := stream.readinto(buffer)):
                    total += count
            if stop.is_set():
                return total
