"""Weights that load themselves: any component runs in a byte budget, streaming from its original files or from RAM."""

from __future__ import annotations

from ._enable import Offload, StreamReport, enable_offload, offload_of
from ._homes import Homes, take_to_host
from ._managed import Managed
from ._parts import operator_groups, part_sizes, unpacking_bytes
from ._plan import PartSize, StreamPlan, WeightSize, largest_group, make_plan, plan_parts, spread
from ._scope import OffloadScope
from ._shape import Layout
from ._streamed_class import StreamedClass
from ._turns import for_a_while, hot_bytes, keep_on_host, rest, wake
from ._weight import StreamedWeight, cold_weight, is_cold


def is_streamed(tensor: object) -> bool:
    """Whether a tensor is a wrapper that has no memory of its own (whatever class it stands for)."""
    return issubclass(type(tensor), StreamedWeight | StreamedClass)


__all__ = [
    "Homes",
    "Layout",
    "Managed",
    "Offload",
    "OffloadScope",
    "PartSize",
    "StreamPlan",
    "StreamReport",
    "StreamedWeight",
    "WeightSize",
    "cold_weight",
    "enable_offload",
    "for_a_while",
    "hot_bytes",
    "is_cold",
    "is_streamed",
    "keep_on_host",
    "largest_group",
    "make_plan",
    "offload_of",
    "operator_groups",
    "part_sizes",
    "plan_parts",
    "rest",
    "spread",
    "take_to_host",
    "unpacking_bytes",
    "wake",
]
