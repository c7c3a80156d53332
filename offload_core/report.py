"""What a run cost, phase by phase: plain values, their JSON, and one readable table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PhaseReport:
    """What one phase cost.

    wall_s: seconds from opening the phase to everything given back; load_s: seconds of it spent loading weights.
    weight_bytes: bytes of all weights that ran, summed over components; bytes_read: bytes taken from weight files,
    again in every pass where weights are streamed. device_peak_bytes: peak allocated on the execution device (0 on CPU,
    where host_peak_bytes has it all). host_peak_bytes: peak resident set of this process during the phase.
    leaked_bytes: bytes of storages owned by the phase that something outside still holds after it was closed (0 is
    right).
    forwards: calls of each component that ran, by name. notes: sentences worth knowing (a fallback, a retry).
    device_budget_bytes: what the phase could take of the execution device for weights and activations;
    reserved_peak_bytes: what it reserved of that at most. streamed_bytes: bytes of weights that were brought for one
    use and let go. stall_s: seconds that compute waited for weights. forward_s: seconds in calls of each component,
    loading left out (on an accelerator as far as the host waited for it). step_s: seconds of the median step of the
    denoiser but the first, 0 where there is none. predicted: what a plan said before, if there was one:
    device_peak_bytes (beside reserved_peak_bytes), streamed_bytes, seconds (beside wall_s) and step_s. warm_bytes:
    bytes of weights that were in RAM from a phase before (`settings.warm`) and so weren't read from files.
    """

    name: str
    wall_s: float
    load_s: float
    weight_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    bytes_read: int
    leaked_bytes: int
    device: str = "cpu"
    forwards: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    device_budget_bytes: int = 0
    reserved_peak_bytes: int = 0
    streamed_bytes: int = 0
    stall_s: float = 0.0
    forward_s: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    predicted: dict[str, float] = field(default_factory=dict)
    warm_bytes: int = 0


@dataclass
class RunReport:
    """The phases of a run, in the order they ran."""

    phases: list[PhaseReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"phases": [asdict(phase) for phase in self.phases]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> str:
        """One row per phase and a total, as plain text for a terminal or a log."""
        from ._report_table import render

        return render(self.phases)
