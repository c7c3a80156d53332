"""The cases of a machine with an accelerator: big models with a tenth, a quarter and half of their weights on it.

Written, not yet measured: the project has had no machine with an accelerator to run it on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .job import Job
from .model import FLUX_12B, WAN_14B, ModelSpec
from .ways import CannotRunError

SHARES = (0.10, 0.25, 0.50)
WAYS = ("resident", "group_leaf_stream", "group_block_stream", "ours")
MODELS = {"flux12b": FLUX_12B, "wan14b": WAN_14B}
#: FLUX at 1024 x 1024; Wan at 480p-class latents of four frames.
TOKENS = {"flux12b": (4096, 512), "wan14b": (6240, 512)}


@dataclass(frozen=True)
class DeviceCase:
    """A model with `share` of its weights allowed on the device; the group-offload peers take no budget."""

    name: str
    model: str
    share: float

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]


CASES = {
    case.name: case
    for model in MODELS
    for share in SHARES
    for case in (DeviceCase(f"{model}-{round(share * 100)}", model, share),)
}


def measure_link(job: Job) -> dict[str, Any]:
    """Bytes per second from pinned host memory to the device, and seconds of a resident step if the model fits.

    The floor of a step is then max(compute, streamed bytes / link rate).
    """
    import torch

    if not torch.accelerator.is_available():
        raise CannotRunError("torch finds no accelerator on this machine")
    size = 256 << 20
    source = torch.empty(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=job.device)
    best = 0.0
    for _ in range(5):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        best = max(best, size / (time.perf_counter() - started))
    return {"link_rate": best}
