"""Runs one way in this process and measures it."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

from .job import Job
from .memory_limit import usage_bytes
from .model import model_class, step_inputs
from .process import OtherLoad, PrivatePeak, disk_read_bytes, private_bytes, resident_peak_bytes
from .ways import WAYS, Counts, Ready, load

#: Of a memory limit, what is left for activations and what the operators pack for themselves.
ACTIVATION_RESERVE = 0.10


def measure_way(job: Job) -> dict[str, Any]:
    """The measured fields of a Row. Raises CannotRunError, or whatever the way itself raises."""
    import torch

    model_class(job.family)  # diffusers' own import isn't part of anybody's set-up
    prepare = WAYS[job.way].prepare(job)
    baseline = private_bytes()
    baseline_group = usage_bytes(job.group) if job.group else None
    job = _with_budget(job, baseline)
    if job.budget_bytes is not None:
        prepare = WAYS[job.way].prepare(job)

    with PrivatePeak() as peak, torch.no_grad():
        started = time.perf_counter()
        module = load(job)
        load_s = time.perf_counter() - started
        ready = prepare(module)
        del module
        setup_s = time.perf_counter() - started
        inputs = step_inputs(job.family, ready.module.config, job.device, job.image_tokens, job.text_tokens)
        steps = Steps(ready, inputs)
        steps.run(1)
        first_counts, first_read = _counts(ready), disk_read_bytes()
        others = OtherLoad()
        steps.run(job.steps)
        others_cpus = others.cpus()
        last_counts, last_read = _counts(ready), disk_read_bytes()
    row = {
        "load_s": load_s,
        "setup_s": setup_s,
        "first_step_s": steps.seconds[0],
        "steps_s": steps.seconds[1:],
        "step_s": statistics.median(steps.seconds[1:]),
        "others_cpus": others_cpus,
        "budget_bytes": job.budget_bytes,
        "baseline_private_bytes": baseline,
        "baseline_group_bytes": baseline_group,
        "private_peak_bytes": peak.highest,
        "resident_peak_bytes": resident_peak_bytes(),
        "device_peak_bytes": device_peak(job.device),
        "extra_disk_bytes": _folder_bytes(Path(job.scratch)) if job.scratch else 0,
        "output_sum": steps.total,
        "output_digest": steps.digest.hexdigest(),
    }
    if first_read is not None and last_read is not None:
        row["read_bytes_per_step"] = (last_read - first_read) // job.steps
    if first_counts is not None and last_counts is not None:
        row["streamed_bytes_per_step"] = (last_counts.streamed_bytes - first_counts.streamed_bytes) // job.steps
        row["stall_s_per_step"] = (last_counts.stall_s - first_counts.stall_s) / job.steps
        row["ledger_peak_bytes"] = last_counts.peak_bytes
    if ready.release is not None:
        ready.release()
    return row


class Steps:
    """Runs steps of one module: seconds of each, and what came out."""

    def __init__(self, ready: Ready, inputs: dict[str, Any]) -> None:
        self._module, self._inputs = ready.module, inputs
        self.seconds: list[float] = []
        self.digest = hashlib.sha256()
        self.total = 0.0

    def run(self, count: int) -> None:
        import torch

        for _ in range(count):
            started = time.perf_counter()
            output = self._module(**self._inputs)[0]
            if output.device.type != "cpu":
                torch.accelerator.synchronize()
            self.seconds.append(time.perf_counter() - started)
            values = output.detach().cpu().float().numpy()
            self.digest.update(values.tobytes())
            self.total = float(values.astype("float64").sum())


def _with_budget(job: Job, baseline: int) -> Job:
    """Under a memory limit the budget for weights is what the limit leaves beside the interpreter and activations."""
    if job.limit_bytes is None or job.budget_bytes is not None:
        return job
    from dataclasses import replace

    return replace(job, budget_bytes=int(job.limit_bytes * (1 - ACTIVATION_RESERVE)) - baseline)


def _counts(ready: Ready) -> Counts | None:
    return ready.counts() if ready.counts is not None else None


def device_peak(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    from ..devices import peak_bytes

    return peak_bytes(torch.device(device))


def _folder_bytes(folder: Path) -> int:
    return sum(os.stat(file).st_size for file in folder.rglob("*") if file.is_file())
