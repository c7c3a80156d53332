"""Runs one way of `bench seeds` in this process and measures it."""

from __future__ import annotations

import hashlib
from typing import Any

from .job import Job
from .measure import device_peak
from .process import OtherLoad, PrivatePeak, private_bytes, resident_bytes, resident_peak_bytes
from .seed_ways import SEED_WAYS, Watch


def measure_seed(job: Job) -> dict[str, Any]:
    """The measured fields of a SeedRow. Raises CannotRunError, or whatever the way itself raises."""
    import diffusers
    import torch

    way, watch = SEED_WAYS[job.way], Watch()
    diffusers.FluxPipeline  # noqa: B018 - the libraries' imports are nobody's set-up
    way.check(job)
    resident, private, others = resident_bytes(), private_bytes(), OtherLoad()
    with PrivatePeak() as peak:
        picture = way.run(job, watch)
        if job.device != "cpu":
            torch.accelerator.synchronize()
    values = picture.detach().cpu().float().contiguous().numpy()
    return {
        **{f"{stage}_s": seconds for stage, seconds in watch.seconds.items()},
        "total_s": sum(watch.seconds.values()),
        "baseline_resident_bytes": resident,
        "resident_peak_bytes": max(peak.highest_resident, resident_peak_bytes() or 0),
        "baseline_private_bytes": private,
        "private_peak_bytes": peak.highest,
        "device_peak_bytes": device_peak(job.device),
        "others_cpus": others.cpus(),
        "picture_digest": hashlib.sha256(values.tobytes()).hexdigest(),
    }
