"""What a run asks of the program it shares a machine with: how much memory it may count on, room for a phase, and pins.

A program that keeps models of its own on the device (ComfyUI) gives a `MemoryHost` to the `Session`. Phases count what
it would give back as free, ask it for what they need before they take it, and pin memory only through it. Everybody
else has `NoMemoryHost`: then a phase takes what is free, and torch pins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .limits import Machine

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Claim:
    """What a phase will take of the execution device, in bytes. weight_bytes: of weights and their ring.
    activation_bytes: beside them. spare_bytes: what the phase's budget leaves free for others."""

    device: torch.device
    weight_bytes: int
    activation_bytes: int
    spare_bytes: int = 0


class Pins(Protocol):
    """Pins memory that the engine allocated, and keeps count of it."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Pins a CPU tensor (uint8, 1-D). False if it won't; then the phase does without pinned memory."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Takes back what `pin` did. The tensor is still alive, and no copy from it is under way."""


class MemoryHost(Protocol):
    """The program that a run shares its machine with."""

    def machine(self) -> Machine:
        """What answers about memory. What the host would give back to a claim counts as free, until one was made."""

    def claim(self, claim: Claim) -> AbstractContextManager[None]:
        """Makes room before a phase takes anything; the phase holds it until the end of the block.

        Entered on the thread that runs the phase, before its first weight, and left when all memory was given back.
        Room that can't be made is no error: the phase measures what is free afterwards.
        """

    def pins(self) -> Pins | None:
        """Who pins memory, None for torch."""


class NoMemoryHost:
    """Nobody to share with: the machine as it is."""

    def machine(self) -> Machine:
        return Machine()

    @contextlib.contextmanager
    def claim(self, claim: Claim) -> Iterator[None]:
        yield

    def pins(self) -> Pins | None:
        return None
