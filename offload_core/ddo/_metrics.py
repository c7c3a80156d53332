"""What DDO reports about a module under offload, from this engine's own figures. Sizes are bytes, GB is GiB there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._report_table import human_bytes
from ..streaming import Offload, StreamedWeight, StreamReport, is_streamed
from ._settings import DynamicOffloadSettings

if TYPE_CHECKING:
    from ..phases import Visit

DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION = 1
RESIDENT, SMALL, STREAMED = "resident_module", "resident_small", "streamed_large"


@dataclass(frozen=True)
class DynamicOffloadMetrics:
    """route: which way the module went. configuration: the settings. setup: what was planned. runtime: what came."""

    route: str
    configuration: Mapping[str, Any] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schema_version(self) -> int:
        return DYNAMIC_OFFLOAD_METRICS_SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {
            "schema_version": self.schema_version,
            "route": self.route,
            "configuration": dict(self.configuration),
            "setup": dict(self.setup),
            "runtime": dict(self.runtime),
        }

    def format_profile(self) -> str:
        """The same in a few lines for a person."""
        preset = self.configuration.get("dynamic_offload_effective_preset", "?")
        lines = [f"Offload profile: route {self.route}, preset {preset}"]
        for name, value in (*self.setup.items(), *self.runtime.items()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                shown = human_bytes(int(value)) if name.endswith("_bytes") else f"{value:g}"
                lines.append(f"  {name}: {shown}")
        return "\n".join(lines)


@dataclass(frozen=True)
class DynamicOffloadPlanEntry:
    """One parameter or buffer and where it lies: resident_module (stays hot), resident_small or streamed_large."""

    module_name: str
    module_type: str
    tensor_name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    placement: str


@dataclass(frozen=True)
class DynamicOffloadState:
    """A module under offload, now. bytes_by_placement: sums of the entries; tied weights count once."""

    entries: tuple[DynamicOffloadPlanEntry, ...]
    report: StreamReport
    planner_decisions: Mapping[str, Any]

    @property
    def module_count(self) -> int:
        return len({entry.module_name for entry in self.entries})

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    @property
    def bytes_by_placement(self) -> dict[str, int]:
        sums = dict.fromkeys((entry.placement for entry in self.entries), 0)
        for entry in self.entries:
            sums[entry.placement] += entry.bytes
        return sums

    @property
    def copy_bytes_by_name(self) -> dict[str, int]:
        return {"hot": self.report.streamed_bytes, "file": self.report.read_bytes}

    @property
    def copy_calls_by_name(self) -> dict[str, int]:
        return {"hot": self.report.fetches}

    @property
    def selected_resident_modules(self) -> list[str]:
        return sorted({entry.module_name for entry in self.entries if entry.placement == RESIDENT})

    def as_dict(self) -> dict[str, Any]:
        return {
            "module_count": self.module_count,
            "total_bytes": self.total_bytes,
            "bytes_by_placement": self.bytes_by_placement,
            "copy_bytes_by_name": self.copy_bytes_by_name,
            "copy_calls_by_name": self.copy_calls_by_name,
            "stall_s": self.report.stall_s,
            "planner_decisions": dict(self.planner_decisions),
            "entries": [asdict(entry) for entry in self.entries],
        }


def state_of(offload: Offload) -> DynamicOffloadState:
    """The state of a module under offload."""
    decisions = {name: value for name, value in vars(offload.plan).items() if not isinstance(value, frozenset)}
    return DynamicOffloadState(tuple(_entries(offload.module)), offload.report(), decisions)


def _entries(module: nn.Module) -> Iterator[DynamicOffloadPlanEntry]:
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield DynamicOffloadPlanEntry(
                module_name=path,
                module_type=type(owner).__name__,
                tensor_name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype),
                device=str(tensor.device),
                bytes=tensor.numel() * tensor.dtype.itemsize,
                placement=_placement(tensor),
            )


def _placement(tensor: torch.Tensor) -> str:
    if not is_streamed(tensor):
        return SMALL
    stays = isinstance(tensor, StreamedWeight) and tensor._entry.resident
    return RESIDENT if stays else STREAMED


def setup_of(offload: Offload) -> dict[str, Any]:
    """What was planned for a module, as an event tells it."""
    plan = offload.plan
    return {
        "module_count": sum(1 for _ in offload.module.modules()),
        "total_bytes": plan.small_bytes + plan.resident_bytes + plan.streamed_bytes + plan.lookup_bytes,
        "bytes_by_placement": {
            SMALL: plan.small_bytes,
            RESIDENT: plan.resident_bytes,
            STREAMED: plan.streamed_bytes + plan.lookup_bytes,
        },
        "ring_bytes": plan.ring_bytes,
        "device_budget_bytes": offload.report().device_budget_bytes,
    }


def metrics_of(
    route: str, settings: DynamicOffloadSettings, offload: Offload | None, visits: Sequence[Visit] = ()
) -> DynamicOffloadMetrics:
    """Metrics of a module that went some way; what only this engine counts is left out on the others."""
    guests = {"visits": [asdict(visit) for visit in visits]} if visits else {}
    if offload is None:
        return DynamicOffloadMetrics(route, settings.as_metrics(), runtime=guests)
    runtime = asdict(offload.report()) | guests
    return DynamicOffloadMetrics(route, settings.as_metrics(), setup_of(offload), runtime)
