"""What a node gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NodeResult:
    """values: one per output, in order. ui: what the host shows on the node, by kind; every value is a list."""

    values: tuple[Any, ...]
    ui: dict[str, list[Any]] = field(default_factory=dict)
