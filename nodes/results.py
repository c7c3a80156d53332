"""What a node gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NodeResult:
    """values: one per output, in order. ui: what the host shows on the node, by kind; every value is a list. shown: an
    IMAGE that the host shows there, too: it makes a file of it, in its own folder, and adds that to `ui`."""

    values: tuple[Any, ...]
    ui: dict[str, list[Any]] = field(default_factory=dict)
    shown: torch.Tensor | None = None
