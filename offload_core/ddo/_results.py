"""What the functions that attach give back. Nothing here keeps weights alive beyond the module they belong to."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..streaming import Offload, StreamPlan, StreamReport
from ._group import remove_group_offload
from ._guests import PipelineHost
from ._metrics import DynamicOffloadMetrics, DynamicOffloadState, metrics_of, state_of
from ._observe import DynamicOffloadExecutionTimer, DynamicOffloadMetricsJournal
from ._options import no_effect
from ._settings import DynamicOffloadSettings
from ._whereabouts import Whereabouts

if TYPE_CHECKING:
    from ..phases import Visit
    from ._profiles import ProfileRun


RecordEvent = Callable[..., Any]


class DynamicOffloadHook:
    """DDO's handle of a module under offload. No forward is hooked; this only reaches the engine."""

    def __init__(self, offload: Offload) -> None:
        self._module, self._offload = weakref.ref(offload.module), weakref.ref(offload._managed)

    @property
    def state(self) -> DynamicOffloadState | None:
        """None once the offload has ended."""
        offload = self._now()
        return state_of(offload) if offload is not None else None

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Gives `module` its own weights back."""
        offload = self._now()
        if offload is not None:
            offload.release()
        return module

    deinitalize_hook = detach_hook

    def _now(self) -> Offload | None:
        module, managed = self._module(), self._offload()
        return Offload(module, managed) if module is not None and managed is not None and not managed.released else None


class DynamicOffloadApplyResult:
    """A module that went its way. `route` says which; `hook`, `plan` and `report` are there for this engine's.

    Deleting the result gives back the memory that weights take beside their masters, without a collection of garbage,
    and leaves the module usable. `release` (or the end of a `with` block) gives the module back as it was.
    """

    def __init__(
        self,
        module: nn.Module,
        route: str,
        settings: DynamicOffloadSettings,
        offload: Offload | None = None,
        *,
        should_move_to_execution_device: bool = False,
        event_payload: Mapping[str, Any] | None = None,
        host: PipelineHost | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self.module, self.route, self.settings = module, route, settings
        self.hook = DynamicOffloadHook(offload) if offload is not None else None
        self.should_move_to_execution_device = should_move_to_execution_device
        self.event_payload: dict[str, Any] = dict(event_payload or {})
        self._offload, self._host, self._whereabouts = offload, host, whereabouts
        self._end: weakref.finalize[Any, Any] | None = None
        if offload is not None:
            self._end = weakref.finalize(self, _cool, weakref.ref(offload._managed))
            self._end.atexit = False

    @property
    def plan(self) -> StreamPlan | None:
        """Where the weights lie, None on the routes that have no plan."""
        return self._offload.plan if self._offload is not None else None

    @property
    def visits(self) -> tuple[Visit, ...]:
        """Calls of components that the module's pipeline was built without (VAE, image encoder), and what they took."""
        return tuple(self._host.visits) if self._host is not None else ()

    def report(self) -> StreamReport | None:
        """What the component took and did so far, None on the routes that don't count."""
        return self._offload.report() if self._offload is not None else None

    def release(self) -> int:
        """Gives the module its own weights back, with the edits made to them: where they were and in the memory they
        had. On every route. Returns the bytes of copies that somebody outside still holds.

        Raises InsufficientMemoryError if the device that it was on has no room for it now; it is usable in RAM then.
        """
        if self._end is not None:
            self._end.detach()
        if self._offload is not None:
            return self._offload.release()
        whereabouts, self._whereabouts = self._whereabouts, None
        if whereabouts is not None:
            remove_group_offload(self.module)
            whereabouts.restore()
        return 0

    def __enter__(self) -> DynamicOffloadApplyResult:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def metrics_snapshot(
        self, *, collect_completed: bool = False, execution_timing: Any = None
    ) -> DynamicOffloadMetrics:
        """What was planned and what came of it so far. Both parameters have no effect: nothing is left uncollected."""
        if collect_completed:
            no_effect("collect_completed", "every figure is complete at any time")
        if execution_timing is not None:
            no_effect("execution_timing", "a phase report has the seconds of a run")
        return metrics_of(self.route, self.settings, self._offload, self.visits)

    def profile_run(self) -> ProfileRun:
        """A `with` block whose peak is kept as a capacity profile of this module on this device."""
        from ._profiles import ProfileRun

        return ProfileRun(self.module, self.settings, self._offload)

    def execution_timer(
        self,
        *,
        enabled: bool = False,
        native_units: bool = False,
        native_capacity: int = 4096,
        diagnostic_step_wait: bool = False,
    ) -> DynamicOffloadExecutionTimer:
        """A `with` block in which `mark_step()` ends a step. The last three have no effect: nothing native is timed."""
        if native_units or diagnostic_step_wait or native_capacity != 4096:
            no_effect("native_units, native_capacity and diagnostic_step_wait", "nothing is native")
        return DynamicOffloadExecutionTimer(self, enabled=enabled)

    def metrics_journal(
        self, directory: str | os.PathLike[str], *, enabled: bool = False
    ) -> DynamicOffloadMetricsJournal:
        """A `with` block in which `record()` writes the metrics of now to a file of their own."""
        return DynamicOffloadMetricsJournal(self, directory, enabled=enabled)

    @contextlib.contextmanager
    def cleanup_on_error(self) -> Iterator[DynamicOffloadApplyResult]:
        """If the block raises, the offload ends first; the error goes on with a note that says so."""
        try:
            yield self
        except BaseException as error:
            self.release()
            error.add_note("The offload of the module was ended because of this error.")
            raise

    def detach_auxiliary_cpu_sources(
        self, *, enabled: bool = False, max_copy_bytes: int = 16 << 20
    ) -> DynamicOffloadMetrics:
        if enabled:
            no_effect("detach_auxiliary_cpu_sources", "weights are read from their files, nothing is to detach")
        return self.metrics_snapshot()

    def allocation_diagnostics(self, *, enabled: bool = False) -> contextlib.AbstractContextManager[None]:
        if enabled:
            no_effect("allocation_diagnostics", "report().by_kind says who holds how much")
        return contextlib.nullcontext()

    def operator_diagnostics(
        self,
        *,
        enabled: bool = False,
        module_path: str | None = None,
        invocations: tuple[int, ...] = (0, 2),
        output_dir: Any = None,
        use_cuda: bool = True,
    ) -> contextlib.AbstractContextManager[None]:
        if enabled:
            no_effect("operator_diagnostics", "torch.profiler sees every operator as it is")
        return contextlib.nullcontext()


@dataclass(frozen=True)
class DiffusersGroupOffloadResult:
    """A module under diffusers' group offload. visits: as `DynamicOffloadApplyResult.visits`."""

    module: nn.Module
    event_payload: dict[str, Any] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)
    whereabouts: Whereabouts | None = field(default=None, repr=False)

    def release(self) -> None:
        """Takes diffusers' hooks off and puts the weights back where they were, in the memory they had, with edits.

        Raises InsufficientMemoryError if the device that they were on has no room for them now.
        """
        if self.whereabouts is not None:
            remove_group_offload(self.module)
            self.whereabouts.restore()


def _cool(managed: weakref.ref[Any]) -> None:
    alive = managed()
    if alive is not None:
        alive.cool()
