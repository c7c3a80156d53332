"""Asks before loading: a plan for a job, from its model's configs and headers, budgets, and the rates of a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .devices import resolve_device
from .known import KnownMachine, KnownModel, described_source, known_machine, known_model
from .limits import Memory, auto_device_budget, auto_host_budget, parse_budget
from .plan import Limits, PhaseJob, Plan, plan_job
from .rates import measured_rates, rates_of
from .settings import OffloadSettings

if TYPE_CHECKING:
    from .model_source import ModelSource
    from .phases import Handle, PhaseTrace
    from .plan import Rates
    from .session import Session

# Of a machine that isn't this one: what its desktop and driver keep of the card, and the RAM that is assumed.
DESKTOP_BYTES = 600 << 20
ASSUMED_RAM = Memory(total=32 << 30, free=24 << 30, source="assumed")
# A prompt of common length for a plan that is asked for without one.
USUAL_PROMPT = "a lighthouse on a cliff at dusk, waves below it, warm light in its windows, oil on canvas"


@dataclass(frozen=True)
class Foresight:
    """A plan and what it stands on. traces: of each phase as it is planned."""

    plan: Plan
    traces: tuple[PhaseTrace, ...]
    limits: Limits
    rates: Rates
    model: str


def foresee_job(
    model: str | os.PathLike[str],
    prompt: Any = None,
    negative_prompt: Any = None,
    *,
    settings: OffloadSettings | None = None,
    dtype: str = "auto",
    hardware: str | None = None,
    rates: Rates | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> Foresight:
    """What `encode`, `denoise` and `decode` with these arguments will take. Nothing is loaded.

    model: a folder as `load` takes it, or the name of a known model. settings: its budgets are planned for. hardware: a
    known machine that is asked about in place of this one; budgets are then of its memory. rates: in place of those of
    the machine. session: whose observer may interrupt. pipeline_kwargs: of the pipeline's call, e.g. height, width,
    num_inference_steps.

    Raises ModelError and InputError as `load`, `encode` and `denoise` do, InputError for a machine that isn't known,
    TraceError for a model whose code can't be traced.
    """
    settings = settings or OffloadSettings()
    machine = known_machine(hardware) if hardware else None
    device = torch.device("cpu") if machine else resolve_device(settings.execution_device)
    limits = _limits_of(machine, settings) if machine else _limits_here(settings, device)
    rates = rates or (rates_of(machine) if machine else measured_rates(device))
    with _opened(model, dtype) as (handle, source, defaults, title):
        from .phases import foresee

        call = {**defaults, **pipeline_kwargs}
        prompt = USUAL_PROMPT if prompt is None else prompt
        ways = foresee(handle, prompt, negative_prompt, source=source, session=session, **call)
        asked: list[list[PhaseTrace]] = [[] for _ in ways]
        plan = plan_job([_noted(phase, into) for phase, into in zip(ways, asked, strict=True)], limits, rates)
    return Foresight(plan, tuple(traced[-1] for traced in asked), limits, rates, title)


def _noted(ways: Iterable[PhaseTrace], into: list[PhaseTrace]) -> Iterator[PhaseJob]:
    """Ways to do a phase as far as they are asked for."""
    for way in ways:
        into.append(way)
        yield way.job


@contextlib.contextmanager
def _opened(
    model: str | os.PathLike[str], dtype: str
) -> Iterator[tuple[Handle, ModelSource | None, dict[str, Any], str]]:
    """A handle for tracing on the CPU. A folder goes before a known model of the same name."""
    from .phases import Handle, load

    known = known_model(str(model)) if not os.path.isdir(model) else None
    if known is None:
        handle = load(model, device="cpu", dtype=dtype)
        yield handle, None, {}, os.path.basename(handle.model)
        return
    with described_source(known) as source:
        yield Handle(str(source.root), source.fingerprint, known.pipeline, "cpu", dtype), source, *_defaults(known)


def _defaults(known: KnownModel) -> tuple[dict[str, Any], str]:
    return dict(known.defaults), known.title


def _limits_here(settings: OffloadSettings, device: torch.device) -> Limits:
    """The budgets that the engine would make of these settings on this machine, now."""
    from .streaming import OffloadScope

    scope = OffloadScope(replace(settings, activation_memory=0), device)
    try:
        return Limits(
            device_bytes=scope.ledger.limits["device"],
            host_bytes=scope.ledger.limits["host"],
            on_cpu=device.type == "cpu",
            resident_below=settings.resident_below,
            read_threads=settings.read_threads,
            staging_bytes=scope.staging_bytes,
            align=scope.engine.align,
        )
    finally:
        scope.close()


def _limits_of(machine: KnownMachine, settings: OffloadSettings) -> Limits:
    memory = Memory(machine.device_bytes, machine.device_bytes - DESKTOP_BYTES, machine.title)
    device = parse_budget(
        settings.device_memory,
        free=memory.free,
        total=memory.total,
        auto=auto_device_budget(memory),
        name="device_memory",
    )
    host = parse_budget(
        settings.host_memory,
        free=ASSUMED_RAM.free,
        total=0,
        auto=auto_host_budget(ASSUMED_RAM),
        name="host_memory",
    )
    return Limits(device, host, resident_below=settings.resident_below, read_threads=settings.read_threads, align=512)
