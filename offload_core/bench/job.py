"""What one fresh process is asked to do, and the row it answers with. Both travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Job:
    """One way in one case.

    family, folder: the model. scratch: an empty folder on the same disk, for ways that write.
    budget_bytes: memory for weights, for the ways that take a budget; None if `limit_bytes` has to do.
    limit_bytes, group: the memory limit this process is under, and the control group's folder.
    steps: steady steps to time, after the first one.
    """

    way: str
    family: str
    folder: str
    scratch: str = ""
    device: str = "cpu"
    budget_bytes: int | None = None
    limit_bytes: int | None = None
    group: str | None = None
    steps: int = 5
    image_tokens: int = 64
    text_tokens: int = 64

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


@dataclass
class Row:
    """One way in one case, as measured. None: not measured here.

    status: "ok", "skipped" (can't run here) or "failed" (it tried); `reason` says why.
    load_s: from_pretrained. setup_s: from the model's folder to ready to run, load_s in it.
    step_s: median of `steps_s`, the steps after the first.
    baseline_private_bytes: private (not file-backed) memory after the imports. private_peak_bytes: the highest seen.
    resident_peak_bytes: the peak resident set, file pages included. group_peak_bytes: peak charge of the control group.
    read_bytes_per_step: bytes that came from the disk. streamed_bytes_per_step: by the engine's own count.
    others_cpus: CPUs that other processes kept busy during the timed steps.
    output_digest: of the bytes of every step's output.
    """

    case: str
    way: str
    status: str = "ok"
    reason: str = ""
    load_s: float | None = None
    setup_s: float | None = None
    first_step_s: float | None = None
    step_s: float | None = None
    steps_s: list[float] = field(default_factory=list)
    budget_bytes: int | None = None
    limit_bytes: int | None = None
    baseline_private_bytes: int | None = None
    baseline_group_bytes: int | None = None
    private_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    group_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    ledger_peak_bytes: int | None = None
    extra_disk_bytes: int | None = None
    read_bytes_per_step: int | None = None
    streamed_bytes_per_step: int | None = None
    stall_s_per_step: float | None = None
    others_cpus: float | None = None
    output_sum: float | None = None
    output_digest: str | None = None
    same_sum: bool | None = None
    same_bits: bool | None = None
    floor_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fill(self, values: dict[str, Any]) -> None:
        """Takes over what a process measured. A name that isn't a field is a fault of this package."""
        known = {entry.name for entry in fields(self)}
        for name, value in values.items():
            if name not in known:
                raise KeyError(name)
            setattr(self, name, value)
