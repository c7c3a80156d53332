"""Asks before loading: a plan for a job, from its model's configs and headers, budgets, and the rates of a machine."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import demo
from .devices import device_title, resolve_device
from .errors import InputError
from .known import KnownMachine, KnownModel, described_source, known_machine, known_model
from .learnt import Learnt, corrected, dtype_of
from .limits import Memory, auto_device_budget, auto_host_budget, parse_budget, parse_limit
from .plan import Limits, PhaseJob, Plan, plan_job
from .rates import measured_rates, rates_of
from .settings import OffloadSettings
from .single_files.split_files import SplitFiles
from .small_files import cache_folder
from .trace_store import TraceStore, asked_embeds, asked_images, asked_of, asked_plain, asked_values

if TYPE_CHECKING:
    from .model_source import ModelSource
    from .phases import Embeds, Handle, Images, IPAdapter, Latents, PhaseTrace
    from .plan import Rates
    from .report import RunReport
    from .session import Session

# Of a machine that isn't this one: what its desktop and driver keep of the card, and the RAM that is assumed.
DESKTOP_BYTES = 600 << 20
ASSUMED_RAM = Memory(total=32 << 30, free=24 << 30, source="assumed")
# A prompt of common length for a plan that is asked for without one.
USUAL_PROMPT = "a lighthouse on a cliff at dusk, waves below it, warm light in its windows, oil on canvas"


@dataclass(frozen=True)
class Foresight:
    """A plan and what it stands on. traces: of each phase as it is planned. model, machine: their names, for people.
    family: the pipeline's class, under which `learn` keeps what runs teach."""

    plan: Plan
    traces: tuple[PhaseTrace, ...]
    limits: Limits
    rates: Rates
    model: str
    machine: str
    family: str = ""
    learnt: Learnt | None = field(default=None, repr=False, compare=False)

    def learn(self, report: RunReport) -> None:
        """Compares the plan with a run that followed it, so that the next plan of such a job is nearer. Nothing if the
        plan was made for another machine."""
        for trace, planned in zip(self.traces, self.plan.phases, strict=True):
            ran = next((phase for phase in reversed(report.phases) if phase.name == planned.name), None)
            if self.learnt is not None and ran is not None and ran.predicted:
                self.learnt.add(self.family, dtype_of(trace.job), planned, trace.job.correction, ran)


def foresee_job(
    model: str | os.PathLike[str] | SplitFiles,
    prompt: Any = None,
    negative_prompt: Any = None,
    *,
    settings: OffloadSettings | None = None,
    dtype: str = "auto",
    images: Any = None,
    mask: Any = None,
    loras: Sequence[Any] = (),
    hardware: str | None = None,
    rates: Rates | None = None,
    session: Session | None = None,
    scheduler: str | None = None,
    weight_storage: str = "as stored",
    controlnet: Any = None,
    ip_adapter: IPAdapter | None = None,
    **pipeline_kwargs: Any,
) -> Foresight:
    """What `encode`, `denoise` and `decode` with these arguments will take. No weight of the model is loaded.

    model: a folder as `load` takes it, or the name of a known model. loras: as `load` takes them, too. images, mask:
    pictures as `encode_images` takes them, of which only the sizes matter; encoding them is then a phase of the plan,
    and height and width are those of the result. settings: its budgets are planned for. hardware: a known machine that
    is asked about in place of this one; budgets are then of its memory. rates: in place of those of the machine.
    session: whose observer may interrupt, and whose memory host's memory is counted on. scheduler: as `denoise` takes
    it. weight_storage, controlnet, ip_adapter: as `load` takes them; the latter two need a model that is here.
    pipeline_kwargs: of the pipeline's call, e.g. height, width, num_inference_steps, or the picture of a ControlNet.

    Raises ModelError and InputError as `load`, `encode_images`, `encode` and `denoise` do, InputError for a machine
    that isn't known, TraceError for a model whose code can't be traced.
    """
    settings = settings or OffloadSettings()
    machine = known_machine(hardware) if hardware else None
    device = torch.device("cpu") if machine else resolve_device(settings.execution_device)
    limits = _limits_of(machine, settings) if machine else limits_here(settings, device, session)
    rates = rates or (rates_of(machine) if machine else measured_rates(device))
    learnt = None if machine else Learnt(device, rates)
    how: dict[str, Any] = {"dtype": dtype, "settings": settings, "weight_storage": weight_storage}
    beside = {"controlnet": controlnet, "ip_adapter": ip_adapter}
    with _opened(model, loras, how, beside) as (handle, source, defaults, title):
        from .phases import foresee, trace_cached_encode

        call = {**defaults, **pipeline_kwargs}
        prompt = USUAL_PROMPT if prompt is None else prompt
        usual = call.pop("negative_prompt", None)
        negative_prompt = usual if negative_prompt is None else negative_prompt

        @functools.cache
        def traced() -> tuple[Iterable[PhaseTrace], ...]:
            chosen: dict[str, Any] = {"source": source, "session": session, "scheduler": scheduler}
            return foresee(handle, prompt, negative_prompt, images=images, mask=mask, **chosen, **call)

        given = {name: value for name, value in (("images", images), ("mask", mask)) if value is not None}
        names = [*(("images",) if images is not None else ()), "encode", "denoise", "decode"]
        asked = [*asked_of(handle), prompt, negative_prompt, asked_values(call | given | _named(scheduler))]
        store = TraceStore(cache_folder() / "traces")
        ways = [
            store.ways([name, *asked], lambda place=place: traced()[place])  # type: ignore[misc]
            for place, name in enumerate(names)
        ]
        if session is not None and machine is None and source is None and images is None:
            here, asked_of_encode = replace(handle, device=str(device)), {k: v for k, v in call.items() if k != "seed"}
            answered = trace_cached_encode(here, prompt, negative_prompt, session=session, **asked_of_encode)
            ways[0] = iter([answered]) if answered is not None else ways[0]
        there = machine.title if machine else device_title(device)
        return _planned(ways, limits, rates, (title, there), handle.controlled().pipeline, learnt)


def foresee_encode(
    handle: Handle,
    prompt: Any,
    negative_prompt: Any = None,
    *,
    images: Images | None = None,
    rates: Rates | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> Foresight:
    """What `encode` with these arguments will take, beside what the session's prompt cache answers. See `foresee_job`;
    raises what `encode` does."""
    from .phases import trace_cached_encode, trace_encode

    if session is not None:
        known = trace_cached_encode(handle, prompt, negative_prompt, images=images, session=session, **pipeline_kwargs)
        if known is not None:
            return _way_of(handle, [known], rates, session)

    def trace(here: Handle) -> Iterable[PhaseTrace]:
        yield trace_encode(here, prompt, negative_prompt, images=images, session=session, **pipeline_kwargs)

    asked = [prompt, negative_prompt, asked_images(images), asked_values(pipeline_kwargs)]
    return _phase(handle, "encode", asked, trace, rates, session)


def foresee_images(
    handle: Handle,
    images: Any,
    *,
    rates: Rates | None = None,
    session: Session | None = None,
    **kwargs: Any,
) -> Foresight:
    """What `encode_images` with these arguments will take. See `foresee_job`; raises what `encode_images` does."""
    from .phases import trace_images

    def trace(here: Handle) -> Iterable[PhaseTrace]:
        yield trace_images(here, images, session=session, **kwargs)

    return _phase(handle, "images", [asked_values({"images": images, **kwargs})], trace, rates, session)


def foresee_denoise(
    handle: Handle,
    embeds: Embeds,
    *,
    images: Images | None = None,
    seed: int = 0,
    scheduler: str | None = None,
    rates: Rates | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> Foresight:
    """What `denoise` with these arguments will take. See `foresee_job`; raises what `denoise` does for its call."""
    from .phases import check_embeds, trace_denoise

    check_embeds(handle, handle.source(), embeds)

    def trace(here: Handle) -> Iterable[PhaseTrace]:
        yield trace_denoise(
            here, embeds, images=images, seed=seed, scheduler=scheduler, session=session, **pipeline_kwargs
        )

    asked = [asked_embeds(embeds), asked_images(images), asked_values(pipeline_kwargs | _named(scheduler))]
    return _phase(handle, "denoise", asked, trace, rates, session, handle.controlled().pipeline)


def _named(scheduler: str | None) -> dict[str, Any]:
    """What a scheduler adds to what is asked: it may call the denoiser twice a step."""
    return {} if scheduler is None else {"scheduler": scheduler}


def foresee_decode(
    handle: Handle,
    latents: Latents,
    *,
    tiling: str | None = None,
    rates: Rates | None = None,
    session: Session | None = None,
) -> Foresight:
    """What `decode` of these latents will take, whole or in the first tiles that fit. See `foresee_job`."""
    from .phases import check_latents, trace_decode

    check_latents(handle, handle.source(), latents)
    asked = [latents.component, latents.dtype, asked_plain(latents.decode), tiling or handle.settings.vae_tiling]

    def trace(here: Handle) -> Iterable[PhaseTrace]:
        return trace_decode(here, latents, tiling=tiling, session=session)

    return _phase(handle, "decode", asked, trace, rates, session)


def _phase(
    handle: Handle,
    name: str,
    asked: list[Any],
    trace: Callable[[Handle], Iterable[PhaseTrace]],
    rates: Rates | None,
    session: Session | None,
    family: str | None = None,
) -> Foresight:
    here = replace(handle, device="cpu")
    ways = TraceStore(cache_folder() / "traces").ways([name, *asked_of(handle), *asked], lambda: trace(here))
    return _way_of(handle, ways, rates, session, family)


def _way_of(
    handle: Handle,
    ways: Iterable[PhaseTrace],
    rates: Rates | None,
    session: Session | None,
    family: str | None = None,
) -> Foresight:
    """family: the pipeline's class, if it isn't the handle's."""
    device = handle.device_here()
    limits = limits_here(replace(handle.settings, execution_device=str(device)), device, session)
    rates = rates or measured_rates(device)
    titles = (_name_of(handle.model), device_title(device))
    return _planned([ways], limits, rates, titles, family or handle.pipeline, Learnt(device, rates))


def _planned(
    phases: Sequence[Iterable[PhaseTrace]],
    limits: Limits,
    rates: Rates,
    titles: tuple[str, str],
    family: str,
    learnt: Learnt | None,
) -> Foresight:
    seen: list[list[PhaseTrace]] = [[] for _ in phases]
    jobs = [_noted(ways, into, learnt, family) for ways, into in zip(phases, seen, strict=True)]
    plan = plan_job(jobs, limits, rates)
    return Foresight(plan, tuple(traced[-1] for traced in seen), limits, rates, *titles, family, learnt)


def _noted(
    ways: Iterable[PhaseTrace], into: list[PhaseTrace], learnt: Learnt | None, family: str
) -> Iterator[PhaseJob]:
    """Ways to do a phase as far as they are asked for, with what is known of such ones."""
    for way in ways:
        way = replace(way, job=corrected(way.job, learnt, family))
        into.append(way)
        yield way.job


@contextlib.contextmanager
def _opened(
    model: str | os.PathLike[str] | SplitFiles,
    loras: Sequence[Any],
    how: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> Iterator[tuple[Handle, ModelSource | None, dict[str, Any], str]]:
    """A handle for tracing on the CPU. A folder goes before a known model of the same name. how: the other arguments of
    `load`; beside: those that name parts of other folders, which a known model isn't planned with."""
    from .phases import Handle, as_loras, load

    named = isinstance(model, str | os.PathLike) and not os.path.isdir(model)
    known = known_model(str(model)) if named else None
    if known is None:
        handle = load(model, device="cpu", loras=loras, **how, **beside)
        yield handle, None, {}, _name_of(handle.model)
        return
    if any(part is not None for part in beside.values()):
        raise InputError(
            f"{known.title} is planned by its name without a ControlNet or an IP-Adapter: give its folder."
        )
    with described_source(known) as source:
        yield (
            Handle(str(source.root), source.fingerprint, known.pipeline, "cpu", loras=as_loras(loras), **how),
            source,
            *_defaults(known),
        )


def _name_of(folder: str) -> str:
    return "the demo model" if os.path.realpath(folder) == os.path.realpath(demo.MODEL) else os.path.basename(folder)


def _defaults(known: KnownModel) -> tuple[dict[str, Any], str]:
    return dict(known.defaults), known.title


def limits_here(settings: OffloadSettings, device: torch.device, session: Session | None = None) -> Limits:
    """The budgets that the engine would make of these settings on this machine, now. What the session's memory host
    would give back counts as free, and so do its warm copies: they would give way."""
    from .streaming import OffloadScope

    machine = session.memory_host.machine() if session is not None else None
    warm = session.warm if session is not None else None
    scope = OffloadScope(replace(settings, activation_memory=0), device, machine=machine, warm=warm)
    try:
        return Limits(
            device_bytes=scope.ledger.limits["device"],
            host_bytes=scope.ledger.limits["host"],
            on_cpu=device.type == "cpu",
            resident_below=settings.resident_below,
            read_threads=settings.read_threads,
            staging_bytes=scope.staging_bytes,
            align=scope.engine.align,
            resident_limit=scope.resident_limit,
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
    return Limits(
        device,
        host,
        resident_below=settings.resident_below,
        read_threads=settings.read_threads,
        align=512,
        resident_limit=parse_limit(settings.resident_memory, memory, "resident_memory"),
    )
