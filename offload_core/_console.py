"""What the command line shows: progress bars on stderr, results on stdout, and how Ctrl-C gets into a running phase."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from ._report_table import human_bytes
from .session import Progress, Session

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

#: What a stage is called on its bar.
STAGE_TITLES = {"load": "loading", "step": "steps", "decode": "decoding"}


class InterruptFlag:
    """Remembers that Ctrl-C was pressed.

    Python raises KeyboardInterrupt wherever the program happens to be. In a finalizer or a callback that swallows
    exceptions it is lost; the flag isn't, and the next `check_interrupt` stops the run all the same.
    """

    def __init__(self) -> None:
        self.pressed = False

    def check(self) -> None:
        if self.pressed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens while the block runs. Does nothing off the main thread or where the caller ignores Ctrl-C."""
        previous = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or previous is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt


class ProgressBars:
    """An `Observer` that draws one bar for each phase and stage on stderr, and stops the run after Ctrl-C."""

    wants_preview = False

    def __init__(self, console: Console, interrupt: InterruptFlag) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._interrupt = interrupt
        self._bars: Bars = Bars(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[amount]:<22}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._starting: TaskID | None = None

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        self._starting = self._bars.add_task("starting", total=None, amount="")
        return self

    def __exit__(self, error_type: object, *unused: object) -> None:
        self._remove_starting()
        if error_type is None:
            self._fill_load_bars()
        self._bars.stop()

    def progress(self, event: Progress) -> None:
        self._remove_starting()
        key = (event.phase, event.stage)
        total = event.total or None
        if key not in self._tasks:
            title = f"{event.phase}: {STAGE_TITLES.get(event.stage, event.stage)}"
            self._tasks[key] = self._bars.add_task(title, total=total, amount="")
        self._bars.update(self._tasks[key], completed=event.done, total=total, amount=amount(event))

    def check_interrupt(self) -> None:
        self._interrupt.check()

    def make_room(self) -> bool:
        return False

    def _fill_load_bars(self) -> None:
        """A phase announces all weights it might need; what it didn't need isn't missing."""
        loads = {task_id for (_, stage), task_id in self._tasks.items() if stage == "load"}
        for task in self._bars.tasks:
            if task.id in loads:
                self._bars.update(task.id, total=task.completed, amount=human_bytes(int(task.completed)))

    def _remove_starting(self) -> None:
        if self._starting is not None:
            self._bars.remove_task(self._starting)
            self._starting = None


def amount(event: Progress) -> str:
    """How far a stage is, in its own unit: ``1.2 MiB / 7.8 MiB``, ``4 / 20 steps``."""
    if event.unit == "bytes":
        return f"{human_bytes(event.done)} / {human_bytes(event.total)}"
    return f"{event.done} / {event.total} {event.unit}"


class Terminal:
    """The two streams of a command, and the sessions it runs."""

    def __init__(self, interrupt: InterruptFlag) -> None:
        from rich.console import Console

        self._interrupt = interrupt
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """A session whose progress is drawn on stderr while the block runs."""
        with ProgressBars(self.err, self._interrupt) as bars:
            yield Session(observer=bars)

    def check_interrupt(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed, even if a library swallowed it."""
        self._interrupt.check()

    def say(self, text: str) -> None:
        """One line (or a table) on stdout, never folded or coloured."""
        self.out.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """A remark on stderr."""
        self.err.print(text, markup=False, soft_wrap=True)


def quiet_libraries(debug: bool) -> None:
    """Keeps the libraries' own bars and warnings off the terminal. Has to run before they are imported."""
    logging.captureWarnings(True)
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("offload_core").setLevel(logging.DEBUG)
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("py.warnings", "diffusers", "transformers", "torch", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
