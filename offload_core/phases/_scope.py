"""`open_phase`: a scope that owns its weights. However it is left, everything it took is given back."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._report_table import human_bytes
from ..devices import HostPeak, empty_cache, is_out_of_memory, peak_bytes, reset_peak, trim_heap
from ..errors import InputError, InsufficientMemoryError
from ..limits import activation_reserve, auto_device_budget, parse_budget
from ..memory_host import Claim
from ..model_source import ModelSource
from ..plan import Plan, predicted_figures
from ..report import PhaseReport
from ..session import Held, Progress, Session
from ..settings import OffloadSettings
from ..streaming import OffloadScope, StreamPlan
from ._components import Component, Usage
from ._handle import Handle
from ._ip_adapter import wear_ip_adapter
from ._pipeline import build_pipeline
from ._ports import CapturePort, EncodeOnlyPort, Port, RunPort


class Phase:
    """An open phase: `pipeline` with `modules` of which the owned ones load on first use, the others stay cold."""

    def __init__(
        self, name: str, handle: Handle, source: ModelSource, session: Session, plan: Plan | None = None
    ) -> None:
        self.name, self.handle, self.source, self.session = name, handle, source, session
        self.plan = plan.phase(name) if plan is not None else None
        self.device = handle.device_here()
        self.usage = Usage()
        self.notes: list[str] = []
        self.components: dict[str, Component] = {}
        self.pipeline: Any = None
        self.on_step: Callable[[int, int], None] | None = None  # told of each step, in place of the observer
        self.job, self.jobs = 0, 1  # the number of the job that runs, and how many there are
        self._to_load = 0
        self._arrived = 0
        self._steps: list[float] = []  # when each began or ended
        self._given_back: list[tuple[weakref.ref[Any], int]] = []
        self._scope: OffloadScope | None = None
        self._claim = contextlib.ExitStack()
        self.traffic = StreamTraffic()

    def scope(self) -> OffloadScope:
        """The budget that all components of the phase share, from the first one that is loaded on. Before it is
        measured, the session's memory host makes room."""
        if self._scope is None:
            settings = self.handle.settings
            if self.plan is not None and settings.activation_memory == "auto":
                settings = replace(settings, activation_memory=self.plan.activation_peak_bytes)
            host = self.session.memory_host
            self._claim.enter_context(host.claim(self._needs(settings)))
            self._scope = OffloadScope(
                settings,
                self.device,
                poll=self.poll,
                machine=host.machine(),
                pins=host.pins(),
                warm=self.session.warm,
            )
        return self._scope

    def _needs(self, settings: OffloadSettings) -> Claim:
        """What the plan says; without one, all weights of the phase as far as the budget goes."""
        machine = self.session.memory_host.machine()
        memory = machine.device(self.device) or machine.host()
        auto = auto_device_budget(memory)
        spare = memory.free - auto if settings.device_memory == "auto" else 0
        if self.plan is not None:
            activations = self.plan.activation_peak_bytes
            return Claim(self.device, self.plan.device_peak_bytes - activations, activations, spare)
        budget = parse_budget(
            settings.device_memory, free=memory.free, total=memory.total, auto=auto, name="device_memory"
        )
        activations = activation_reserve(settings.activation_memory, budget)
        return Claim(self.device, min(self._to_load, budget - activations), activations, spare)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return {name: component.module for name, component in self.components.items()}

    def build(self, ports: dict[str, Port], owned: set[str]) -> None:
        for name, part in self.source.components.items():
            if part.has_weights:
                component = Component(part, self.handle.dtype_of(part), self, self.handle.weight_storage)
                component.use(ports.get(name, RunPort()), owned=name in owned)
                self.components[name] = component
                if name in owned and not isinstance(component.gate.port, EncodeOnlyPort | CapturePort):
                    self._to_load += component.run_bytes
        self.pipeline = build_pipeline(self.source, self.modules, self.device, self._step)
        wear_ip_adapter(self, self.handle.ip_adapter)

    def poll(self, arrived: int) -> None:
        self.session.observer.check_interrupt()
        if arrived:
            self._arrived += arrived
            self._to_load = max(self._to_load, self._arrived)
            self._say("load", self._arrived, self._to_load, "bytes")

    def planned(self, name: str) -> StreamPlan | None:
        components = self.plan.components if self.plan is not None else ()
        return next((component.weights for component in components if component.name == name), None)

    def won_t_arrive(self, nbytes: int) -> None:
        self._to_load = max(self._to_load - max(nbytes, 0), self._arrived)

    def make_room(self, component: Component, share: float = 0.5) -> bool:
        """After the device ran out of memory: whoever else holds some is asked for it, and a share of the weights that
        were resident is streamed. False if that gave nothing."""
        asked = getattr(self.session.observer, "make_room", None)
        others = bool(asked is not None and asked())
        cooled = self.session.warm.release() if self.device.type == "cpu" else 0
        resident = component.managed.resident_bytes if component.managed is not None else 0
        gone = component.managed.stream_more(int(resident * share)) if component.managed is not None else 0
        empty_cache(self.device)
        given = [f"{human_bytes(gone)} of its weights were streamed from then on"] if gone else []
        given += [f"{human_bytes(cooled)} of warm copies were given back"] if cooled else []
        given += ["others gave back theirs"] if others else []
        if given:
            name = component.source.name
            self.notes.append(f"{name} ran out of memory on {self.device}; {' and '.join(given)}, and it ran again.")
        return bool(given)

    def _step(self, done: int, total: int) -> None:
        self._steps.append(time.perf_counter())
        done, total = self.job * total + done, self.jobs * total
        if self.on_step is not None:
            self.on_step(done, total)
        else:
            self._say("step", done, total, "steps")
        self.session.observer.check_interrupt()

    def _say(self, stage: str, done: int, total: int, unit: str) -> None:
        self.session.observer.progress(Progress(self.name, stage, done, total, unit, held=self.held()))

    def held(self) -> Held | None:
        """What the phase has reserved now; None before its first component is loaded."""
        if self._scope is None:
            return None
        ledger = self._scope.ledger
        return Held(str(self.device), ledger.used("device"), ledger.used("host"))

    def forwards(self) -> dict[str, int]:
        return {name: c.gate.forwards for name, c in self.components.items() if c.gate.forwards}

    def forward_s(self) -> dict[str, float]:
        return {name: c.gate.seconds for name, c in self.components.items() if c.gate.forwards}

    def step_s(self) -> float:
        """Seconds of the median step but the first, which brings what stays; 0 where there are no such steps."""
        seconds = [end - start for start, end in itertools.pairwise(self._steps)]
        return statistics.median(seconds) if seconds else 0.0

    def close(self) -> int:
        """Gives everything back. Returns the bytes of storages that something outside still holds."""
        with contextlib.ExitStack() as every:  # an interrupt in one release doesn't keep the others from it
            every.callback(self._claim.close)
            every.callback(self._close_scope)
            for component in self.components.values():
                every.callback(component.empty)
                every.callback(self.give_back, [component])
        for component in self.components.values():
            component.gate.after_oom = None
        self.components.clear()
        if self.pipeline is not None:
            self.pipeline.__dict__.clear()
        self.pipeline = self.on_step = None
        held = self.traffic.held_bytes
        empty_cache(self.device)
        trim_heap()
        held += sum(nbytes for ref, nbytes in self._given_back if self._is_held(ref()))
        return held

    def _is_held(self, storage: torch.UntypedStorage | None) -> bool:
        """Whether somebody outside holds a storage; that of a warm copy is held by the session."""
        return storage is not None and not self.session.warm.owns(storage)

    def _close_scope(self) -> None:
        if self._scope is not None:
            self.traffic = StreamTraffic.of(self._scope)
            self._scope = None

    def give_back(self, components: Iterable[Component]) -> None:
        """Releases components in the middle of a phase or at its end; they load again if they are used again."""
        for component in components:
            self._given_back += component.release()


def open_phase(
    handle: Handle,
    *components: str,
    name: str = "phase",
    session: Session | None = None,
) -> OpenPhase:
    """Makes `components` of the model usable by any of their methods; everything else of the pipeline is cold.

    A context manager; it gives a Phase with `.modules` and `.pipeline`. Owned components load on first use. Leaving
    the scope by any exit (return, exception, KeyboardInterrupt, the host's interrupt) releases all of it, even if
    somebody still holds the module, and adds a PhaseReport to the session.

    Raises InputError for a component that the model doesn't have, InsufficientMemoryError when memory ran out,
    ColdWeightError (from whoever does it) when a cold weight is touched.
    """
    source = handle.source()
    unknown = [part for part in components if part not in source.components]
    if unknown:
        raise InputError(f"The model has no component {unknown[0]!r}; it has {', '.join(source.components)}.")
    return OpenPhase(handle, source, name, session or Session(), owned=set(components))


@dataclass(frozen=True)
class StreamTraffic:
    """What went through a phase's scope, in bytes and seconds. held_bytes: of the ring, held by somebody outside."""

    device_budget_bytes: int = 0
    reserved_peak_bytes: int = 0
    streamed_bytes: int = 0
    read_bytes: int = 0
    held_bytes: int = 0
    stall_s: float = 0.0
    warm_bytes: int = 0

    @classmethod
    def of(cls, scope: OffloadScope) -> StreamTraffic:
        """Closes the scope and says what it did."""
        held = scope.close()
        counts = scope.cache.counts
        limit, peak = scope.ledger.limits["device"], scope.ledger.peak("device")
        return cls(limit, peak, counts.streamed_bytes, scope.bytes_read, held, counts.stall_s, scope.warm_bytes)


class OpenPhase(contextlib.AbstractContextManager[Phase]):
    """The scope of a phase, over files checked by the caller. `ports` decide what a call of each component does.

    Not a generator: contextlib puts a failed body's traceback back, with all its tensors.
    """

    def __init__(
        self,
        handle: Handle,
        source: ModelSource,
        name: str,
        session: Session,
        ports: dict[str, Port] | None = None,
        owned: set[str] | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.phase = Phase(name, handle, source, session, plan)
        self.ports, self.owned = ports or {}, owned or set()

    def __enter__(self) -> Phase:
        phase = self.phase
        phase.session.enter(phase.name)
        self._modes = contextlib.ExitStack()
        self._started, self._peak = time.perf_counter(), HostPeak()
        self._rng = torch.get_rng_state()
        try:
            reset_peak(phase.device)
            self._modes.enter_context(torch.inference_mode(False))
            self._modes.enter_context(torch.no_grad())
            self._modes.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)  # it would keep a second copy of every weight that requires grad
            phase.build(self.ports, self.owned)
        except BaseException as error:
            self._leave(error)
            raise
        return phase

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        del trace  # it would live on in the traceback of an error raised here
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        phase = self.phase
        _forget_frames(error)
        self._modes.close()
        torch.set_rng_state(self._rng)
        forwards, host, device = phase.forwards(), self._peak.sample(), peak_bytes(phase.device)
        forward_s, step_s = phase.forward_s(), phase.step_s()
        short = _out_of_memory(phase) if is_out_of_memory(error) else None
        try:
            leaked = phase.close()
        finally:
            phase.session.leave()
        if phase.traffic.warm_bytes:
            kept = human_bytes(phase.traffic.warm_bytes)
            phase.notes.append(f"Warm: {kept} of weights were in RAM and weren't read from files.")
        phase.session.report.phases.append(
            PhaseReport(
                name=phase.name,
                wall_s=time.perf_counter() - self._started,
                load_s=phase.usage.load_s,
                weight_bytes=phase.usage.weight_bytes,
                device_peak_bytes=device,
                host_peak_bytes=host,
                bytes_read=phase.traffic.read_bytes,
                leaked_bytes=leaked,
                device=str(phase.device),
                forwards=forwards,
                notes=tuple(phase.notes),
                device_budget_bytes=phase.traffic.device_budget_bytes,
                reserved_peak_bytes=phase.traffic.reserved_peak_bytes,
                streamed_bytes=phase.traffic.streamed_bytes,
                stall_s=phase.traffic.stall_s,
                forward_s=forward_s,
                step_s=step_s,
                # A plan is of one job; of several it only says what activations take.
                predicted=predicted_figures(phase.plan) if phase.plan is not None and phase.jobs == 1 else {},
                warm_bytes=phase.traffic.warm_bytes,
            )
        )
        if short is not None:
            raise short from None


def _forget_frames(error: BaseException | None) -> None:
    """Takes the traceback off an error that leaves a phase, and keeps its text as a note.

    Whoever keeps an exception (a host's error report, an interactive shell) keeps its frames, and they keep every
    activation and weight of the failed forward. Clearing the frames isn't enough: they hold their functions, and the
    closures of those hold the arguments.
    """
    seen: set[int] = set()
    text = "".join(traceback.format_exception(error)) if isinstance(error, Exception) else ""
    first = error
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    if first is not None and text:
        first.add_note(f"Inside the phase:\n{text}")


def _out_of_memory(phase: Phase) -> InsufficientMemoryError:
    largest = max((part.source.weight_bytes for part in phase.components.values()), default=0)
    weights = f" (its largest component has {human_bytes(largest)} of weights)"
    return InsufficientMemoryError(
        f"The {phase.name} phase ran out of memory on {phase.device}{weights}. "
        "Use a smaller picture, fewer images at once, VAE tiling, a smaller model, or device=cpu."
    )
