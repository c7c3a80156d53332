"""What a job's phases would do, before a weight is read: the pipeline's own call with its components traced."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import TraceError
from ..estimate import estimated_trace, likely_result
from ..model_source import ModelSource
from ..plan import ComponentJob, PhaseJob
from ..session import Session
from ..streaming import PartSize
from ..trace import Trace, Tracer
from ..trace_blocks import repeated_blocks
from ._answers import Answers
from ._cold import forget_method_caches
from ._components import Component
from ._control import controlled, given_by
from ._decode import ENCODER_HALF, TILE_SIZES, decode_arguments
from ._denoise import check_size, collect_latents, denoise_ports, denoise_question, let_vaes_run, use_scheduler
from ._encode import encode_call, encode_ports, encode_question, encode_run, friendly_errors, one_negative_each
from ._handle import Handle, model_defaults
from ._images import NoisePort, image_ports, images_question, run_images, with_size
from ._loras import trace_loras
from ._pipeline import call_class, check_call
from ._plain import RecordMissing, from_plain
from ._ports import PhaseDone, Port, Records, ReplayPort, RunPort, StopPort
from ._quantised import component_sizes, unpacking
from ._records import Embeds, Images, Latents, plain_call
from ._scope import OpenPhase, Phase
from ._tiling import tile

Poll = Callable[[], None]


@dataclass(frozen=True)
class TracedCall:
    """One way in which a phase uses a component. name: the entry point, "" for the component itself. times: how often
    it does so."""

    component: str
    name: str
    times: int
    trace: Trace


@dataclass(frozen=True)
class PhaseTrace:
    """What a phase does. job: the same as a plan sees it. calls: in the order of the first of each kind."""

    job: PhaseJob
    calls: tuple[TracedCall, ...] = field(repr=False)


def foresee(
    handle: Handle,
    prompt: Any = "",
    negative_prompt: Any = None,
    *,
    images: Any = None,
    mask: Any = None,
    seed: int = 0,
    scheduler: str | None = None,
    source: ModelSource | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> tuple[Iterable[PhaseTrace], ...]:
    """What the phases encode, denoise and decode would do for these arguments (those of `encode` and `denoise`): for
    each the ways to do it. Decode has several, whole and in tiles, which are traced when they are asked for. images,
    mask: pictures as `encode_images` takes them; what it would do then comes first, and height and width are its.

    Reads configs and headers only, and LoRA files. source: the model, if it isn't the handle's folder. session: whose
    observer may interrupt; nothing is reported to it. Raises what these phases would raise for the arguments and the
    LoRAs, and TraceError for a model whose code can't be traced.
    """
    records, poll, seen = Records(), _poll(session), []
    if images is not None:
        handle, source, shown, trace = _pictures(handle, source, images, mask, pipeline_kwargs, records, poll)
        pipeline_kwargs = {**shown, **pipeline_kwargs}
        seen.append((trace,))
    source = source or handle.source()
    call = encode_call(source, prompt, negative_prompt, {**given_by(handle, source), **pipeline_kwargs})
    encoded = _encode(handle, source, call, records, poll)
    here, there, call = controlled(handle, source, call)
    run = one_negative_each({**model_defaults(there), **call})
    check_call(call_class(there), run)
    denoised, latents = _denoise_or_encode(here, there, run, records, seed, poll, scheduler)
    return *seen, (encoded,), (denoised,), _decode(handle, source, latents, handle.settings.vae_tiling, poll)


def _pictures(
    handle: Handle,
    source: ModelSource | None,
    images: Any,
    mask: Any,
    options: dict[str, Any],
    records: Records,
    poll: Poll,
) -> tuple[Handle, ModelSource, dict[str, Any], PhaseTrace]:
    """The model as the pipeline that takes the pictures, the arguments they are, and what encoding them would do. What
    the VAE would answer is put into `records`. The size is taken out of `options`."""
    size = {name: options.pop(name, None) for name in ("height", "width")}
    frames = {name: options[name] for name in ("num_frames",) if name in options}
    handle, source, call = images_question(handle, images, mask, None, frames, source)
    trace, call = _encode_images(handle, source, call, size, records, poll)
    return handle, source, call, trace


def trace_encode(
    handle: Handle,
    prompt: Any,
    negative_prompt: Any = None,
    *,
    images: Images | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> PhaseTrace:
    """What `encode` would do for these arguments. See `foresee`."""
    handle, source, call = encode_question(handle, prompt, negative_prompt, images, pipeline_kwargs)
    return _encode(handle, source, call, Records(images.records if images is not None else None), _poll(session))


def trace_images(
    handle: Handle,
    images: Any,
    *,
    mask: Any = None,
    height: int | None = None,
    width: int | None = None,
    task: str | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> PhaseTrace:
    """What `encode_images` would do for these arguments. See `foresee`."""
    handle, source, call = images_question(handle, images, mask, task, pipeline_kwargs)
    size = {"height": height, "width": width}
    return _encode_images(handle, source, call, size, Records(), _poll(session))[0]


def trace_cached_encode(
    handle: Handle,
    prompt: Any,
    negative_prompt: Any = None,
    *,
    images: Images | None = None,
    session: Session,
    **pipeline_kwargs: Any,
) -> PhaseTrace | None:
    """What `encode` would do beside taking answers from the session's prompt cache: nothing, if it holds them all. None
    if it holds none of this model. Raises what `trace_encode` does."""
    handle, source, call = encode_question(handle, prompt, negative_prompt, images, pipeline_kwargs)
    answers = Answers(session.prompt_cache, handle, source, encode_run(source, call))
    if not answers.hopeful:
        return None
    known = images.records if images is not None else None
    try:
        traced = _encode(replace(handle, device="cpu"), source, call, Records(known, answers), _poll(session))
    except RecordMissing:  # a kept answer lacks a part: `encode` would ask all anew
        return None
    return traced if answers.taken else None


def trace_denoise(
    handle: Handle,
    embeds: Embeds,
    *,
    images: Images | None = None,
    seed: int = 0,
    scheduler: str | None = None,
    session: Session | None = None,
    **pipeline_kwargs: Any,
) -> PhaseTrace:
    """What `denoise` would do for these arguments. See `foresee`."""
    handle, source, call, known = denoise_question(handle, embeds, images, pipeline_kwargs)
    return _denoise_or_encode(handle, source, call, Records(known), seed, _poll(session), scheduler)[0]


def trace_decode(
    handle: Handle, latents: Latents, *, tiling: str | None = None, session: Session | None = None
) -> Iterator[PhaseTrace]:
    """The ways in which `decode` could decode `latents`, each traced when it is asked for. See `foresee`."""
    return _decode(handle, handle.source(), latents, tiling or handle.settings.vae_tiling, _poll(session))


def _poll(session: Session | None) -> Poll:
    return (session or Session()).observer.check_interrupt


class _Watch:
    """Collects the traces of a phase."""

    def __init__(self, poll: Poll) -> None:
        self.tracer = Tracer(poll)
        self.estimable: dict[str, nn.Module] = {}  # components whose answer can be guessed
        self._estimates: dict[str, Trace] = {}
        self.steps = 0
        self._own: dict[str, tuple[PartSize, ...]] = {}  # of components with LoRAs: the weights without them
        self._added: dict[str, int] = {}  # and the bytes of the LoRAs
        self._turns: list[str] = []  # whose call came after whose, each once for calls in a row
        self._times: Counter[tuple[str, str, int]] = Counter()
        self._traces: dict[int, Trace] = {}

    def call(self, component: str, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            result, trace = self.tracer.call(".".join(filter(None, (component, name))), run, args, kwargs)
        except TraceError as error:
            result = likely_result(args, kwargs) if component in self.estimable and not name else None
            if result is None:
                raise
            trace = self._estimate(component, args, kwargs, str(error))
        self._add(component, name, trace)
        return result

    def _estimate(self, component: str, args: Any, kwargs: Any, reason: str) -> Trace:
        if component not in self._estimates:
            module = self.estimable[component]
            self._estimates[component] = estimated_trace(module, args, kwargs, reason)
        trace = self._estimates[component]
        self.tracer.reach(self.tracer.live_bytes + trace.peak_bytes)
        return trace

    def trace(self, component: str, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._add(component, name, self.tracer.trace(f"{component}.{name}", run, args, kwargs))

    def add_loras(self, phase: Phase, owned: Iterable[str]) -> None:
        """Traces these components with their LoRAs. They get them after their weights were placed, as in the phase."""
        own = {name: component_sizes(phase.components[name]) for name in owned if phase.handle.loras}
        self._added = trace_loras(phase, set(owned))
        self._own = {name: own[name] for name in self._added}

    def step(self, done: int, total: int) -> None:
        self.steps = max(self.steps, total)

    @contextlib.contextmanager
    def watching(self, phase: Phase) -> Iterator[None]:
        phase.on_step = self.step
        for module in phase.modules.values():
            _skip_loops_over_rows(module)
        try:
            with repeated_blocks(phase.modules.values(), self.tracer), self.tracer:
                yield
        finally:
            self.tracer.forget()
            for component in phase.components.values():
                forget_method_caches(component.module)

    def result(self, phase: Phase) -> PhaseTrace:
        calls = tuple(TracedCall(*key[:2], times, self._traces[key[2]]) for key, times in self._times.items())
        used = dict.fromkeys(call.component for call in calls)
        components = [self._component_job(phase.components[name], calls) for name in used]
        if phase.name == "denoise":
            components = _alone(components, phase, self._turns)
        assumed = tuple(
            dict.fromkeys(f"{call.component}: {call.trace.assumed}" for call in calls if call.trace.assumed)
        )
        beside, added = unpacking(phase.components[name] for name in used)
        peak = self.tracer.peak_bytes + beside
        job = PhaseJob(phase.name, peak, tuple(components), self.steps, assumed=(*assumed, *added))
        return PhaseTrace(job, calls)

    def _component_job(self, component: Component, calls: tuple[TracedCall, ...]) -> ComponentJob:
        name, source = component.source.name, component.source
        dtype = component.recast or component.dtype
        parts = self._own.get(name) or component_sizes(component)
        stored = getattr(torch, source.dtype or "float32").itemsize / dtype.itemsize
        if component.quantised:
            stored = 1.0
        elif component.packed:
            stored = source.weight_bytes / max(sum(part.nbytes for part in component.part_sizes()), 1)
        return ComponentJob(
            name,
            str(dtype).removeprefix("torch."),
            parts,
            tuple((call.trace, call.times) for call in calls if call.component == name),
            stored,
            added_bytes=self._added.get(name, 0),
            unpacking_bytes=component.packed.unpacking_bytes,
            unpacked=component.packed.moved_bytes,
            saved_bytes=component.packed.saved_bytes,
        )

    def _add(self, component: str, name: str, trace: Trace) -> None:
        self._traces[id(trace)] = trace
        self._times[component, name, id(trace)] += 1
        if self._turns[-1:] != [component]:
            self._turns.append(component)


class _TracedPort:
    """Before another port: what that would run is traced instead."""

    def __init__(self, component: str, inner: Port, watch: _Watch) -> None:
        self.component, self.inner, self.watch = component, inner, watch

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self.watch.call(self.component, name, run, args, kwargs)

        return self.inner.call(module, name, traced, args, kwargs)


class _GuessedPort:
    """Stands for a component whose answer is guessed in the phase, too: what tracing it takes isn't counted."""

    def __init__(self, component: str, watch: _Watch) -> None:
        self.component, self.watch = component, watch

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        peak = self.watch.tracer.peak_bytes
        result, _ = self.watch.tracer.call(f"{self.component}.{name}", run, args, kwargs)
        self.watch.tracer.peak_bytes = peak
        return result


def _encode_images(
    handle: Handle, source: ModelSource, call: dict[str, Any], size: dict[str, Any], records: Records, poll: Poll
) -> tuple[PhaseTrace, dict[str, Any]]:
    """What the phase would do, and the arguments of the call with the size that the picture gives. `records` gets what
    the VAE would answer."""
    watch = _Watch(poll)
    ports: dict[str, Port] = image_ports(source, records, handle.device_here())
    guessed = {name: _GuessedPort(name, watch) for name, port in ports.items() if isinstance(port, NoisePort)}
    with OpenPhase(handle, source, "images", Session(), {**_traced(ports, watch), **guessed}) as phase:
        call = with_size(phase, source, call, **size)
        with watch.watching(phase):
            run_images(phase, source, call)
        records.settle()
        return watch.result(phase), call


def _encode(handle: Handle, source: ModelSource, call: dict[str, Any], records: Records, poll: Poll) -> PhaseTrace:
    run = from_plain(plain_call(encode_run(source, call)), torch.device("cpu"))
    watch = _Watch(poll)
    ports = encode_ports(source, records, handle.device_here())
    with OpenPhase(handle, source, "encode", Session(), _traced(ports, watch)) as phase:
        watch.add_loras(phase, [name for name, port in ports.items() if not isinstance(port, StopPort)])
        with watch.watching(phase), contextlib.suppress(PhaseDone), friendly_errors():
            phase.pipeline(**run, generator=torch.Generator("cpu").manual_seed(0))
        records.settle()
        return watch.result(phase)


def _denoise(
    handle: Handle,
    source: ModelSource,
    call: dict[str, Any],
    records: Records,
    seed: int,
    poll: Poll,
    scheduler: str | None = None,
) -> tuple[PhaseTrace, Latents]:
    watch = _Watch(poll)
    ports = denoise_ports(source, records, handle.device_here())
    with OpenPhase(handle, source, "denoise", Session(), _traced(ports, watch)) as phase:
        use_scheduler(phase, scheduler)
        check_size(phase.pipeline, call)
        let_vaes_run(phase, ports)
        watch.estimable = {name: phase.components[name].module for name, port in ports.items() if type(port) is RunPort}
        watch.add_loras(phase, watch.estimable)
        with watch.watching(phase), contextlib.suppress(PhaseDone), friendly_errors():
            phase.pipeline(**call, generator=torch.Generator("cpu").manual_seed(seed))
        return watch.result(phase), collect_latents(handle, source, phase, ports, call, seed)


def _denoise_or_encode(
    handle: Handle, source: ModelSource, call: dict[str, Any], records: Records, seed: int, poll: Poll, scheduler: Any
) -> tuple[PhaseTrace, Latents]:
    """What the phase would do. If it lacks an answer, `denoise` runs the encoders again, in a phase of their own."""
    try:
        return _denoise(handle, source, call, records, seed, poll, scheduler)
    except RecordMissing:
        _encode(handle, source, call, records, poll)
        return _denoise(handle, source, call, records, seed, poll, scheduler)


def _decode(handle: Handle, source: ModelSource, latents: Latents, tiling: str, poll: Poll) -> Iterator[PhaseTrace]:
    for pixels in TILE_SIZES[tiling]:
        with OpenPhase(handle, source, "decode", Session()) as phase:
            component = phase.components[latents.component]
            vae: Any = component.module
            if pixels is not None and not tile(vae, pixels) and tiling == "auto":
                return
            component.recast = getattr(torch, latents.dtype)  # an SDXL VAE in float16 is upcast
            vae.to(dtype=component.recast)
            watch = _Watch(poll)
            with watch.watching(phase):
                args, kwargs = decode_arguments(latents, vae, phase.device)
                watch.trace(latents.component, "decode", vae.decode, args, kwargs)
            for half in ENCODER_HALF:
                vae._modules.pop(half, None)  # stays on disk
            traced = watch.result(phase)
        yield replace(traced, job=replace(traced.job, tile=pixels))  # outside: whoever asks may ask for no more


def _skip_loops_over_rows(module: nn.Module) -> None:
    """VAEs blend tiles row by row in place, and one fills its mask so: many thousand operators that take no memory
    worth counting."""
    for part in module.modules():
        for name in ("blend_v", "blend_h", "blend_t"):
            if hasattr(part, name):
                part.__dict__[name] = lambda above, tile, *_: tile
        if hasattr(part, "prepare_causal_attention_mask"):
            part.__dict__["prepare_causal_attention_mask"] = _mask


def _mask(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None) -> torch.Tensor:
    mask = torch.zeros(n_frame * n_hw, n_frame * n_hw, dtype=dtype, device=device)
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)


def _traced(ports: dict[str, Port], watch: _Watch) -> dict[str, Port]:
    """Those that run something trace it; those that answer or stop stay."""
    quiet = (StopPort, ReplayPort)
    return {name: port if isinstance(port, quiet) else _TracedPort(name, port, watch) for name, port in ports.items()}


def _alone(components: list[ComponentJob], phase: Phase, turns: list[str]) -> list[ComponentJob]:
    """Experts of one class take turns: each makes room for the next. Those that alternate (Ideogram 4's) both stay."""
    classes = {component.name: phase.components[component.name].source.class_name for component in components}
    alone = set()
    for cls, count in Counter(classes.values()).items():
        mine = [name for name in turns if classes.get(name) == cls]
        changes = sum(before != after for before, after in itertools.pairwise(mine))
        if count > 1 and changes == count - 1:  # none comes back
            alone.add(cls)
    return [replace(component, alone=classes[component.name] in alone) for component in components]
