"""Denoise: run the pipeline with its encoders answered from the embeddings and its VAE captured."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from ..errors import InputError, MissingRecordError, NumericalError, RecordError
from ..model_source import ModelSource
from ..plan import Plan
from ..schedulers import scheduler_like
from ..session import Session
from ._clips import given_pictures
from ._components import Component
from ._control import controlled, given_by
from ._encode import friendly_errors, one_negative_each, pictures_call, run_encode, with_defaults, with_pictures
from ._handle import COUNT_ARGUMENTS, Handle, model_defaults
from ._jobs import each_job, need_jobs
from ._layout import Layout
from ._loras import plan_loras
from ._marks import encoders_mark, vae_mark
from ._pipeline import call_class, check_call
from ._plain import Plain, RecordMissing, from_plain
from ._ports import CapturePort, PhaseDone, Port, Records, ReplayPort, RunPort
from ._preview import Previewer
from ._records import Embeds, Images, Latents, Sound
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._sound import frame_rate_of
from ._tasks import needs_pictures, starts_from_a_clip
from ._waveforms import Ending, check_ending, ending_of, makes_sound, only_sound

SEED_LIMIT = 2**64


def denoise(
    handle: Handle,
    embeds: Embeds,
    *,
    images: Images | None = None,
    seed: int = 0,
    scheduler: str | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
    **pipeline_kwargs: Any,
) -> Latents:
    """Latents for `embeds`: the pipeline's own loop, equal bit for bit to a one-shot run with the same seed.

    The noise comes from a CPU generator seeded with `seed` (0 to 2**64 - 1). scheduler: a name of `schedulers`, for one
    in the place of the model's own, with its configuration (`from_config`). pipeline_kwargs are those of the
    pipeline's call (height, width, num_inference_steps, guidance_scale, num_images_per_prompt, ...); what is left out
    is what Encode was given, else the model's default. images: what `encode_images` or `images_from_samples` made; the
    pipeline is then the one that takes them, and has arguments of its own (strength). plan: see `encode`.

    Raises InputError for a bad argument, RecordError for embeddings of other encoders, MissingRecordError for an
    encoding that the embeddings lack if `settings.encode_missing` is off, InsufficientMemoryError, NumericalError.
    """
    session = session or Session()
    _check_seed(seed)
    handle, source, call, known = denoise_question(handle, embeds, images, pipeline_kwargs)
    try:
        return _run(handle, source, known, call, seed, session, plan=plan, scheduler=scheduler)
    except RecordMissing as missing:
        if not handle.settings.encode_missing:
            raise MissingRecordError(_missing_sentence(embeds, call, missing.component)) from None
        component = missing.component
    known = known if component else {}  # a record that lacks a part must be made again whole
    again = run_encode(handle, source, call, call, session, known, plan)
    note = f"{component or 'Every encoder'} was run again for Denoise."
    try:
        return _run(handle, source, again.records, call, seed, session, note, plan, scheduler)
    except RecordMissing as missing:
        raise MissingRecordError(_missing_sentence(embeds, call, missing.component)) from None


def denoise_many(
    handle: Handle, jobs: Sequence[Mapping[str, Any]], *, session: Session | None = None, plan: Plan | None = None
) -> list[Latents]:
    """Latents for each of `jobs`, with the denoiser loaded once for all that follow each other with one pipeline.

    jobs: the arguments of `denoise` (embeds, images, seed, scheduler, ...), one mapping for each; the latents are those
    that `denoise` gives for them one by one, bit for bit. One whose embeds lack an encoding runs by itself in the end.
    plan: of the most demanding one. Raises what `denoise` does, and InputError for no jobs; then there are no latents
    of any.
    """
    session, asked = session or Session(), []
    for job in need_jobs(jobs):
        kwargs = dict(job)
        embeds, images = kwargs.pop("embeds", None), kwargs.pop("images", None)
        seed, scheduler = kwargs.pop("seed", 0), kwargs.pop("scheduler", None)
        _check_seed(seed)
        here, source, call, known = denoise_question(handle, embeds, images, kwargs)
        asked.append((here, source, _Job(known, call, seed, scheduler)))
    made: list[Latents | RecordMissing] = []
    for here, group in itertools.groupby(asked, key=itemgetter(0)):
        same = list(group)
        made += _run_all(here, same[0][1], [job for _, _, job in same], session, plan=plan)
    return [
        denoise(handle, **job, session=session) if isinstance(latents, RecordMissing) else latents
        for latents, job in zip(made, jobs, strict=True)
    ]


def denoise_question(
    handle: Handle, embeds: Any, images: Images | None, kwargs: dict[str, Any]
) -> tuple[Handle, ModelSource, dict[str, Any], dict[str, Any]]:
    """The model as the pipeline that takes what it is given; the arguments of its call (the caller's, those of the
    pictures, what Encode was given, the model's defaults), checked; and what is encoded already."""
    check_embeds(handle, handle.source(), embeds)
    encoded = from_plain(embeds.call, torch.device("cpu"))
    handle = with_pictures(handle, images)
    if images is None and given_pictures(encoded):  # the embeddings carry the pictures
        handle = replace(handle, pipeline=embeds.pipeline)
    source = handle.source()
    given = {**encoded, **pictures_call(handle, source, images), **given_by(handle, source)}
    handle, source, given = controlled(handle, source, given)
    call = one_negative_each(with_defaults(source, {**given, **kwargs}))
    check_call(call_class(source), call)
    if only_sound(source):
        check_ending(handle.pipeline)
    if not given_pictures(call) and needs_pictures(source):
        raise InputError(f"{source.pipeline_class} needs a picture: give Denoise the images.")
    if "video" in call and call.get("num_videos_per_prompt", 1) != 1 and starts_from_a_clip(source):
        raise InputError(f"{source.pipeline_class} makes one video of a clip: leave num_videos_per_prompt at 1.")
    if images is not None and call.get("num_images_per_prompt", 1) % images.starts:
        raise InputError(
            f"There are {images.starts} pictures to start from and num_images_per_prompt is "
            f"{call['num_images_per_prompt']}: leave it out, or ask for a multiple."
        )
    return handle, source, call, {**embeds.records, **(images.records if images is not None else {})}


def check_denoise(handle: Handle, *, seed: int = 0, scheduler: str | None = None, **pipeline_kwargs: Any) -> None:
    """Raises the InputError that `denoise` would raise for these arguments, before anything is encoded or loaded."""
    _check_seed(seed)
    handle, source, given = controlled(handle, handle.source(), {})
    call = {**model_defaults(source), **given, **pipeline_kwargs}
    check_call(call_class(source), call)
    with OpenPhase(handle, source, "check", Session()) as phase:
        use_scheduler(phase, scheduler)
        check_size(phase.pipeline, call)
        if only_sound(source):
            check_ending(handle.pipeline)
        elif not any(hasattr(phase.pipeline, name) for name in ("image_processor", "video_processor")):
            raise InputError(f"{handle.pipeline} makes neither pictures nor videos, so it can't run in phases yet.")


def _run(
    handle: Handle,
    source: ModelSource,
    records_of: dict[str, Any],
    call: dict[str, Any],
    seed: int,
    session: Session,
    note: str | None = None,
    plan: Plan | None = None,
    scheduler: str | None = None,
) -> Latents:
    (latents,) = _run_all(handle, source, [_Job(records_of, call, seed, scheduler)], session, note, plan)
    if isinstance(latents, RecordMissing):
        raise latents
    return latents


@dataclass(frozen=True)
class _Job:
    """What a run of the pipeline needs. records: of the embeds. call: the pipeline's arguments."""

    records: dict[str, Any]
    call: dict[str, Any]
    seed: int
    scheduler: str | None = None


def _run_all(
    handle: Handle,
    source: ModelSource,
    jobs: Sequence[_Job],
    session: Session,
    note: str | None = None,
    plan: Plan | None = None,
) -> list[Latents | RecordMissing]:
    """Runs one phase: for each job its latents, or what its embeds lack."""
    device = handle.device_here()
    records = Records()
    ports = denoise_ports(source, records, device)
    owned = {name for name, port in ports.items() if isinstance(port, RunPort)}
    vaes = {name for name, port in ports.items() if isinstance(port, CapturePort)} if source.blocks else set()
    with OpenPhase(handle, source, "denoise", session, ports, owned | vaes, plan) as phase:
        let_vaes_run(phase, ports)
        if note:
            phase.notes.append(note)
        plan_loras(phase, owned)
        for name in owned:
            phase.components[name].gate.after_oom = functools.partial(phase.make_room, phase.components[name])
        for job in jobs:
            check_size(phase.pipeline, job.call)
        made: list[Latents | RecordMissing] = []
        for job in each_job(phase, jobs):
            records.start(job.records)
            _one_expert_at_a_time(phase, owned)
            try:
                made.append(_run_job(handle, source, phase, ports, job))
            except RecordMissing as missing:
                made.append(RecordMissing(missing.component))  # without its frames
        return made


def _run_job(handle: Handle, source: ModelSource, phase: Phase, ports: dict[str, Port], job: _Job) -> Latents:
    use_scheduler(phase, job.scheduler)
    for port in ports.values():
        if isinstance(port, CapturePort):
            port.captured = None
    preview = Previewer(phase, source, job.call)
    with contextlib.suppress(PhaseDone), friendly_errors():
        generator = torch.Generator("cpu").manual_seed(job.seed)
        phase.pipeline(**job.call, **preview.arguments(), generator=generator)
    return collect_latents(handle, source, phase, ports, job.call, job.seed)


def use_scheduler(phase: Phase, name: str | None) -> None:
    """Puts the scheduler of a name in the place of the model's own in the pipeline of a phase; None leaves that."""
    if name is None:
        return
    own = getattr(phase.pipeline, "scheduler", None)
    if own is None:
        raise InputError(f"{phase.handle.pipeline} has no scheduler, so none can take its place: leave it out.")
    phase.pipeline.scheduler = scheduler_like(own, name)


def denoise_ports(source: ModelSource, records: Records, device: torch.device) -> dict[str, Port]:
    """What the denoise phase does with each component."""
    ports = {name: _port(role_of(part), name, records, device) for name, part in models(source)}
    captures = [port for port in ports.values() if isinstance(port, CapturePort)]
    sounds = any(makes_sound(source.components[port.component]) for port in captures)
    if sounds and len(captures) == 2 and source.blocks is None:
        captures[0].waits_for, captures[1].waits_for = captures[1], captures[0]
    return ports


def _port(role: Role, name: str, records: Records, device: torch.device) -> Port:
    if role is Role.VAE:
        return CapturePort(name, records, device)
    return ReplayPort(name, records, device) if role is Role.ENCODER else RunPort()


def let_vaes_run(phase: Phase, ports: dict[str, Port]) -> None:
    """A VAE that the denoise block calls takes part in the denoising. Only blocks say where they are."""
    for port in ports.values():
        if phase.source.blocks is not None and isinstance(port, CapturePort):
            port.runs = lambda: phase.pipeline.in_loop


def collect_latents(
    handle: Handle,
    source: ModelSource,
    phase: Phase,
    ports: dict[str, Port],
    call: dict[str, Any],
    seed: int,
) -> Latents:
    """What the VAE was asked in a phase with `ports` whose pipeline was called with `call`."""
    captures = [port for port in ports.values() if isinstance(port, CapturePort) and port.captured is not None]
    alone = only_sound(source)
    used = next((port for port in captures if alone or not makes_sound(source.components[port.component])), None)
    if used is None or used.captured is None:
        raise InputError(f"{handle.pipeline} never asked a VAE to decode, so it can't run in phases.")
    sound = _sound(source, captures, ending_of(phase.pipeline, call) if alone else None)
    if any(t.is_floating_point() and not torch.isfinite(t).all() for t in used.captured.tensors):
        raise NumericalError(
            f"Denoise produced values that aren't numbers (NaN), so there is no {'sound' if alone else 'picture'}. "
            "Try dtype=float32 or bfloat16, or less guidance."
        )
    module = phase.components[used.component].module
    dtype = str(used.dtype or torch.float32).removeprefix("torch.")
    height, width = (call.get(name) if isinstance(call.get(name), int) else None for name in ("height", "width"))
    mark = vae_mark(source.components[used.component])
    layout = Layout.of(module)
    rest = _rest(phase) if source.blocks is not None else None
    rate = frame_rate_of(source, call)
    return Latents(
        handle.pipeline, mark, used.component, dtype, used.captured, layout, seed, height, width, rest, rate, sound
    )


def _rest(phase: Phase) -> Plain | None:
    """What the blocks after the denoise block read. None, and a note, if it isn't plain data."""
    try:
        rest: Plain | None = phase.pipeline.left_to_do()
    except RecordError as error:
        phase.notes.append(f"{error} Decode ends with the model's processor, not with its own blocks.")
        return None
    return rest


def _sound(source: ModelSource, captures: list[CapturePort], ending: Ending | None) -> Sound | None:
    for port in captures:
        part = source.components[port.component]
        if makes_sound(part) and port.captured is not None:
            return Sound(port.component, vae_mark(part), port.captured, ending)
    return None


def _one_expert_at_a_time(phase: Phase, owned: set[str]) -> None:
    """Releases an expert when another of its class takes over (Wan 2.2). Those that alternate every step both stay."""
    seen: set[str] = set()
    for name in owned:
        me = phase.components[name]
        others = [phase.components[other] for other in owned if other != name]
        peers = [other for other in others if other.source.class_name == me.source.class_name]
        if peers:
            me.before_load = _evict(name, peers, phase, seen)


def _evict(name: str, peers: list[Component], phase: Phase, seen: set[str]) -> Callable[[], None]:
    def evict() -> None:
        if name not in seen:
            phase.give_back(peers)
        seen.add(name)

    return evict


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_LIMIT:
        raise InputError(f"The seed is {seed!r}; it must be a whole number from 0 to {SEED_LIMIT - 1}.")


def check_embeds(handle: Handle, source: ModelSource, embeds: Any) -> None:
    """Raises InputError for what isn't embeds, RecordError for those of other encoders."""
    if not isinstance(embeds, Embeds):
        raise InputError(f"Denoise needs the embeddings that Encode made, not {type(embeds).__name__}.")
    if embeds.encoders != encoders_mark(handle, source, embeds.records):
        raise RecordError(
            "The embeddings' field encoders doesn't match this model: they were made by other encoder weights, another "
            "dtype or other LoRAs. Run Encode with this model."
        )


def check_size(pipeline: Any, call: dict[str, Any]) -> None:
    """Raises InputError for a size the pipeline would silently round or fail on."""
    multiple = size_multiple(pipeline)
    for name in ("height", "width"):
        value = call.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{name} is {value!r}; it must be a whole number of pixels above 0.")
        if value % multiple:
            below = value // multiple * multiple
            near = f"{below} or {below + multiple}" if below else str(multiple)
            raise InputError(f"{name} is {value}, and this model needs a multiple of {multiple}: use {near}.")
    for name in ("num_inference_steps", *COUNT_ARGUMENTS):
        value = call.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1.")


def size_multiple(pipeline: Any) -> int:
    spatial = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(pipeline, "vae_scale_factor", None) or 8
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    packed = any(hasattr(pipeline, name) for name in ("_pack_latents", "_patchify_latents"))
    packed = packed or getattr(pipeline, "packs_latents", False)
    return int(spatial) * (max(2, int(patch or 1)) if packed else int(patch or 1))


def _missing_sentence(embeds: Embeds, call: dict[str, Any], component: str | None) -> str:
    encoded = from_plain(embeds.call, torch.device("cpu"))
    changed = [name for name, value in call.items() if name in encoded and repr(encoded[name]) != repr(value)]
    new = [name for name in call if name not in encoded]
    near = difflib.get_close_matches("max_sequence_length", changed + new, n=1)
    suspects = ", ".join(near or changed or new) or "the prompt"
    return (
        f"Denoise asks {component or 'an encoder'} for something that Encode didn't encode; it differs in: {suspects}. "
        "Give Encode the same arguments."
    )
