"""The one object that carries state from call to call: who listens, who may interrupt, and what was measured.

A `Session` is made at a door (the command line, a node, a script) and passed down. Nothing in the library is global.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .errors import PhaseBusyError
from .memory_host import MemoryHost, NoMemoryHost
from .prompt_cache import PromptCache
from .report import RunReport
from .warm import WarmStore

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Held:
    """What a phase has reserved at one moment, in bytes: of the execution device `device`, and of RAM."""

    device: str
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Progress:
    """One step forward in a phase.

    phase: "encode", "denoise" or "decode". stage and unit: "load" in "bytes", "step" in "steps". done/total: in that
    unit. preview: a small picture of the current latents, if the observer wants one. held: the memory it has reserved.
    """

    phase: str
    stage: str
    done: int
    total: int
    unit: str
    preview: Image | None = None
    held: Held | None = None


class Observer(Protocol):
    """Listens to a run. Its methods are called on the thread that runs the phase."""

    wants_preview: bool

    def progress(self, event: Progress) -> None: ...

    def check_interrupt(self) -> None:
        """Raise to stop the run here. Called at least once per weight loaded and per transformer block."""

    def make_room(self) -> bool:
        """Called when the device ran out of memory: gives back what others hold there (a host unloads its own models).
        Returns whether anything was."""


class SilentObserver:
    """Listens to nothing, never interrupts and holds no memory."""

    wants_preview = False

    def progress(self, event: Progress) -> None:
        pass

    def check_interrupt(self) -> None:
        pass

    def make_room(self) -> bool:
        return False


@dataclass
class Session:
    """State of one user of the library. Phases of one session run one at a time.

    prompt_cache: what encoders answered before. warm: weights that stay in RAM (`settings.warm`). Sessions may share
    these two, also at the same time. memory_host: the program that the machine is shared with, if it is one that makes
    room for phases.
    """

    observer: Observer = field(default_factory=SilentObserver)
    report: RunReport = field(default_factory=RunReport)
    prompt_cache: PromptCache = field(default_factory=PromptCache, repr=False)
    warm: WarmStore = field(default_factory=WarmStore, repr=False)
    memory_host: MemoryHost = field(default_factory=NoMemoryHost, repr=False)
    _running: Any = field(default_factory=threading.Lock, repr=False)

    def enter(self, phase: str) -> None:
        """Claims the session for a phase. Raises PhaseBusyError if another phase is running on it."""
        if not self._running.acquire(blocking=False):
            raise PhaseBusyError(
                f"The {phase} phase can't start while another phase of this session is running. "
                "Wait for it to finish, or use a session of your own for each thread."
            )

    def leave(self) -> None:
        self._running.release()
