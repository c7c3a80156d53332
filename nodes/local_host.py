"""The host of nodes that run without ComfyUI: this machine, a few model folders, and an interrupt flag."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_core.memory_host import MemoryHost, NoMemoryHost
from offload_core.session import Observer, Progress, SilentObserver

from .patcher import WarmCopies
from .progress import NodeObserver


class GraphInterrupted(BaseException):
    """The run of a graph was stopped. Not an Exception, so that nothing swallows it by mistake."""


@dataclass(frozen=True)
class Video:
    """A VIDEO without a host: IMAGE [N, H, W, C], frames per second, and an AUDIO or None."""

    image: Any
    frame_rate: float
    audio: Any = None


class LocalHost:
    """Runs nodes in this process.

    model_roots: where models are. listener: who follows all nodes of a run. budgets: what a graph's "auto" stands for,
    by the name of the setting (device_memory, host_memory). folders: those of a kind ("loras"); the runner adds its own
    ("input", "output"). tokenizers: folders to look for tokenizers in.
    """

    def __init__(
        self,
        model_roots: Sequence[Path] = (),
        *,
        listener: Observer | None = None,
        say: Callable[[str | None, str], None] | None = None,
        budgets: Mapping[str, str] | None = None,
        folders: Mapping[str, Sequence[Path]] | None = None,
        tokenizers: Sequence[Path] = (),
    ) -> None:
        self._model_roots = tuple(model_roots)
        self._listener = listener or SilentObserver()
        self._say = say
        self._budgets = dict(budgets or {})
        self._folders = {kind: tuple(found) for kind, found in (folders or {}).items()}
        self._tokenizers = tuple(tokenizers)
        self._runs = 0
        self._interrupt = threading.Event()
        self.memory: MemoryHost = NoMemoryHost()

    def model_roots(self) -> Sequence[Path]:
        return self._model_roots

    def folders(self, kind: str) -> Sequence[Path]:
        return self._folders.get(kind, ())

    def tokenizer_folders(self) -> Sequence[Path]:
        return self._tokenizers

    def use_folder(self, kind: str, folder: Path) -> None:
        """Makes `folder` the one of a kind."""
        self._folders[kind] = (folder,)

    def run_id(self) -> str:
        return str(self._runs)

    def begin_run(self) -> None:
        """A run of a graph begins: what interrupted the one before is forgotten."""
        self._runs += 1
        self._interrupt.clear()

    def devices(self) -> Sequence[str]:
        import torch

        if not torch.accelerator.is_available():
            return ("cpu",)
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return (*(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())), "cpu")

    def auto_device(self) -> str:
        return "auto"

    def auto_budgets(self) -> Mapping[str, str]:
        return self._budgets

    def image_placement(self) -> dict[str, Any]:
        import torch

        return {"device": torch.device("cpu"), "dtype": torch.float32}

    def video(self, image: Any, frame_rate: float, audio: Any) -> Video:
        return Video(image, frame_rate, audio)

    def nothing(self, why: str) -> None:
        """None: no node of the graph runner takes what could be missing."""

    def observer(self, node_id: str | None) -> NodeObserver:
        return _LocalObserver(self, node_id)

    def offer(self, warm: WarmCopies) -> None:
        pass

    def release_cache(self) -> None:
        pass

    def make_room(self) -> None:
        pass

    def is_interrupt(self, error: BaseException) -> bool:
        return isinstance(error, GraphInterrupted | KeyboardInterrupt)

    def send(self, event: str, data: dict[str, Any]) -> None:
        pass

    def free_between_prompts(self) -> None:
        pass

    def interrupt(self) -> None:
        """Stops the running graph at its next check. Safe from any thread."""
        self._interrupt.set()

    def check_interrupt(self) -> None:
        if self._interrupt.is_set():
            self._interrupt.clear()
            raise GraphInterrupted("The run was interrupted.")
        self._listener.check_interrupt()


class _LocalObserver(NodeObserver):
    def __init__(self, host: LocalHost, node_id: str | None) -> None:
        self._host = host
        self.node_id = node_id
        self.wants_preview = host._listener.wants_preview

    def progress(self, event: Progress) -> None:
        self._host._listener.progress(event)

    def check_interrupt(self) -> None:
        self._host.check_interrupt()

    def status(self, text: str) -> None:
        if self._host._say is not None:
            self._host._say(self.node_id, text)
