"""Weights that load themselves: any component runs in a byte budget, streaming from its original files or from RAM."""

from __future__ import annotations

from ._enable import Offload, StreamReport, enable_offload
from ._managed import Managed
from ._plan import StreamPlan, WeightSize, make_plan
from ._scope import OffloadScope
from ._shape import Layout
from ._weight import StreamedWeight, cold_weight, is_cold

__all__ = [
    "Layout",
    "Managed",
    "Offload",
    "OffloadScope",
    "StreamPlan",
    "StreamReport",
    "StreamedWeight",
    "WeightSize",
    "cold_weight",
    "enable_offload",
    "is_cold",
    "make_plan",
]
