"""What DDO offers to watch a run: steps, one file of metrics for each, and a census of host memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..devices import resident_bytes
from ..errors import InputError
from ..report import RunReport
from ..streaming import is_streamed
from ._metrics import DynamicOffloadMetrics

if TYPE_CHECKING:
    from ._results import DynamicOffloadApplyResult


class DynamicOffloadExecutionTimer:
    """Seconds and traffic of each step, told apart by `mark_step`. Does nothing unless `enabled`.

    A step's seconds are the host's, with the device waited for at each mark; `stall_s` is what compute waited for
    weights of it.
    """

    def __init__(self, result: DynamicOffloadApplyResult, *, enabled: bool = False) -> None:
        self._result, self.enabled = result, enabled
        self.steps: list[dict[str, float]] = []

    def __enter__(self) -> DynamicOffloadExecutionTimer:
        self._last = self._now()
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def mark_step(self) -> None:
        """Ends a step here."""
        if self.enabled:
            now = self._now()
            self.steps.append({name: now[name] - self._last[name] for name in now})
            self._last = now

    def snapshot(self, *, wait: bool = False) -> dict[str, Any]:
        """The steps so far, and their sums. wait: every figure is complete at any time."""
        return {"steps": list(self.steps), **{f"total_{name}": sum(s[name] for s in self.steps) for name in self._last}}

    def _now(self) -> dict[str, float]:
        report = self._result.report()
        if self.enabled and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        figures = {"seconds": time.perf_counter()}
        if report is not None:
            figures |= {"streamed_bytes": report.streamed_bytes, "stall_s": report.stall_s}
        return figures


class DynamicOffloadMetricsJournal:
    """One JSON file for each `record`, `step-0000.json` and so on, never written again. Nothing unless `enabled`."""

    def __init__(
        self, result: DynamicOffloadApplyResult, directory: str | os.PathLike[str], *, enabled: bool = False
    ) -> None:
        self._result, self.directory, self.enabled = result, Path(directory), enabled
        self._next = 0

    def __enter__(self) -> DynamicOffloadMetricsJournal:
        if self.enabled:
            self.directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record(self, step_index: int | None = None) -> Path | None:
        """Writes the metrics of now; returns the file. Raises InputError if that step was recorded before."""
        if not self.enabled:
            return None
        step = self._next if step_index is None else step_index
        self._next = step + 1
        path = self.directory / f"step-{step:04d}.json"
        text = json.dumps(self._result.metrics_snapshot().as_dict(), indent=2)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise InputError(f"Step {step} is in {path} already; use another folder for each run.") from None
        return path


def metrics_of_run(report: RunReport) -> DynamicOffloadMetrics:
    """What this project's phase report says of a run, under DDO's names: each phase's peaks, bytes and seconds."""
    return DynamicOffloadMetrics("phases", runtime={phase.name: asdict(phase) for phase in report.phases})


def inspect_host_memory(
    module: nn.Module | None = None, *, phase: str = "", max_storage_samples: int = 16
) -> DynamicOffloadMetrics:
    """The process's resident set, and the storages in RAM of a module's parameters and buffers, each counted once.

    Streamed weights have no memory of their own and aren't among them. Samples are the largest, in bytes.
    """
    found: dict[str, Any] = {"phase": phase, "host": {"process_rss_bytes": resident_bytes()}}
    if module is not None:
        storages: dict[int, tuple[int, str]] = {}
        for name, tensor in _tensors(module):
            if tensor.device.type == "cpu" and not is_streamed(tensor):
                storage = tensor.untyped_storage()
                storages.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        largest = sorted(storages.values(), reverse=True)[:max_storage_samples]
        found["cpu_storages"] = {
            "unique_storage_count": len(storages),
            "unique_storage_bytes": sum(nbytes for nbytes, _ in storages.values()),
            "storage_samples": [{"storage_bytes": nbytes, "name": name} for nbytes, name in largest],
            "omitted_storage_count": max(len(storages) - max_storage_samples, 0),
        }
    return DynamicOffloadMetrics("host_memory_observation", setup={"host_memory": found})


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
