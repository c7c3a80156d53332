"""Threads that fill hot copies ahead of use. Owned and joined by the cache that made them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from ..file_reader import ReadBuffer

log = logging.getLogger(__name__)

Job = Callable[[ReadBuffer], None]


class Readers:
    """A few threads, each with a read buffer of its own. They start with the first job.

    Where a thread can't be started there are fewer, or none: `submit` then returns False and the caller reads itself.
    """

    def __init__(self, buffers: list[ReadBuffer]) -> None:
        self._buffers = buffers
        self._jobs: deque[Job] = deque()
        self._running: list[Job] = []
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._started = self._stopping = False

    def stopping(self) -> bool:
        return self._stopping

    @property
    def alive(self) -> bool:
        return bool(self._threads)

    def ready(self) -> bool:
        """Whether there is a thread to read ahead. Starts them if need be."""
        if not self._started and self._buffers:
            self._start()
        return bool(self._threads) and not self._stopping

    def submit(self, job: Job, *, urgent: bool = False) -> bool:
        """Queues a job, before all others if it is urgent. False if there is no thread to run it."""
        if not self.ready():
            return False
        with self._wake:
            (self._jobs.appendleft if urgent else self._jobs.append)(job)
            self._wake.notify()
        return True

    def hurry(self, job: Job) -> None:
        """Puts a queued job first."""
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)
                self._jobs.appendleft(job)

    def holds(self, job: Job) -> bool:
        """Whether a job is queued or running."""
        with self._wake:
            return job in self._jobs or job in self._running

    def cancel(self, job: Job) -> bool:
        """Takes a queued job back. False if it has begun."""
        with self._wake:
            if job in self._jobs:
                self._jobs.remove(job)
                return True
            return False

    def close(self) -> None:
        """Stops reading at the next chunk and joins the threads. Queued jobs never run."""
        with self._wake:
            self._stopping = True
            self._jobs.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a reader may hold the last reference to what owns it
                thread.join()
        self._threads.clear()

    def _start(self) -> None:
        self._started = True
        for number, buffer in enumerate(self._buffers):
            thread = threading.Thread(target=self._work, args=(buffer,), name=f"offload-reader-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("A reading thread can't be started (%s); weights are read by %d.", str(error), number)
                return
            self._threads.append(thread)

    def _work(self, buffer: ReadBuffer) -> None:
        with torch.no_grad():
            while True:
                with self._wake:
                    while not self._jobs and not self._stopping:
                        self._wake.wait()
                    if self._stopping:
                        return
                    job = self._jobs.popleft()
                    self._running.append(job)
                try:
                    job(buffer)
                finally:
                    with self._wake:
                        self._running.remove(job)
                del job  # it holds a hot tensor
