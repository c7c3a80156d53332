"""Encode: run the pipeline up to its denoiser with only the encoders real, and keep what they answered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from ..errors import InputError, RecordError
from ..model_source import ModelSource
from ..plan import Plan
from ..session import Session
from ._answers import Answers
from ._clips import given_pictures
from ._control import given_by
from ._handle import Handle, model_defaults
from ._jobs import each_job, need_jobs
from ._loras import plan_loras
from ._marks import encoders_mark
from ._pipeline import call_class, call_parameters, check_call
from ._plain import Plain, RecordMissing, from_plain
from ._ports import EncodeOnlyPort, HeadPort, PhaseDone, Port, RecordingPort, Records, StopPort
from ._records import Embeds, Images, plain_call
from ._roles import Role, models, role_of
from ._scope import OpenPhase, Phase
from ._tasks import needs_pictures

# Raised above 1 while encoding, so that the negative prompt is always encoded and Denoise may choose any guidance.
GUIDANCE_ARGUMENTS = ("guidance_scale", "true_cfg_scale")
FORCED_GUIDANCE = 2.0


def encode(
    handle: Handle,
    prompt: str | list[str] | None = None,
    negative_prompt: str | list[str] | None = None,
    *,
    images: Images | None = None,
    session: Session | None = None,
    plan: Plan | None = None,
    **pipeline_kwargs: Any,
) -> Embeds:
    """Embeddings of `prompt` and `negative_prompt` that serve any Denoise, whatever its guidance, size or batch.

    pipeline_kwargs are those of the pipeline's own call (prompt_2, max_sequence_length, clip_skip, image, ...). Each
    encoder runs at most as often as in a one-shot run with guidance on. images: what `encode_images` made, for a model
    whose text encoder sees the picture; the embeddings then carry them to Denoise, too. plan: of this job, made before
    (`foresee_job`); memory is then kept for the activations that it foretells.

    Raises InputError for arguments the pipeline doesn't take, ModelError for files that changed,
    InsufficientMemoryError.
    """
    handle, source, call = encode_question(handle, prompt, negative_prompt, images, pipeline_kwargs)
    run = encode_run(source, call)
    known = dict(images.records) if images is not None else {}
    return run_encode(handle, source, run, call, session or Session(), known, plan)


def encode_question(
    handle: Handle, prompt: Any, negative_prompt: Any, images: Images | None, kwargs: dict[str, Any]
) -> tuple[Handle, ModelSource, dict[str, Any]]:
    """The model as the pipeline that takes `images`, and the arguments of its call that the caller gives, checked."""
    handle = with_pictures(handle, images)
    source = handle.source()
    pictures = pictures_call(handle, source, images)
    if not given_pictures({**pictures, **kwargs}) and needs_pictures(source):
        raise InputError(f"{source.pipeline_class} needs a picture beside the prompt: give Encode the images.")
    given = {**pictures, **given_by(handle, source), **kwargs}
    return handle, source, encode_call(source, prompt, negative_prompt, given)


def with_pictures(handle: Handle, images: Images | None) -> Handle:
    """The model as the pipeline that takes these pictures."""
    if images is None:
        return handle
    if not isinstance(images, Images):
        raise InputError(f"images must be what encode_images made, not {type(images).__name__}.")
    return replace(handle, pipeline=images.pipeline)


def pictures_call(handle: Handle, source: ModelSource, images: Images | None) -> dict[str, Any]:
    """The arguments that the pictures are. Raises RecordError for those of another VAE."""
    if images is None:
        return {}
    if images.encoders != encoders_mark(handle, source, images.records):
        raise RecordError(
            "The images' field encoders doesn't match this model: another VAE, dtype or LoRA made them. "
            "Run Encode Image with this model."
        )
    call: dict[str, Any] = from_plain(images.call, torch.device("cpu"))
    return call


def encode_many(
    handle: Handle, jobs: Sequence[Mapping[str, Any]], *, session: Session | None = None, plan: Plan | None = None
) -> list[Embeds]:
    """Embeddings for each of `jobs`, with every encoder loaded once for all of them.

    jobs: the arguments of `encode` (prompt, negative_prompt, ...), one mapping for each; the embeddings are those that
    `encode` gives for them one by one, bit for bit. plan: of the most demanding one. Raises what `encode` does, and
    InputError for no jobs at all; then there are no embeddings of any.
    """
    asked = []
    for kwargs in map(dict, need_jobs(jobs)):
        prompt, negative, images = (kwargs.pop(name, None) for name in ("prompt", "negative_prompt", "images"))
        asked.append((*encode_question(handle, prompt, negative, images, kwargs), images))
    made: list[Embeds] = []
    for here, group in itertools.groupby(asked, key=itemgetter(0)):
        same = list(group)
        runs = [
            _Job(encode_run(source, call), call, dict(images.records) if images is not None else {})
            for _, source, call, images in same
        ]
        made += _run_all(here, same[0][1], runs, session or Session(), plan)
    return made


def encode_call(source: ModelSource, prompt: Any, negative_prompt: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the pipeline's call that the caller gives, checked."""
    cls: Any = call_class(source)
    known = call_parameters(cls)
    call = dict(kwargs)
    for name, text in (("prompt", prompt), ("negative_prompt", negative_prompt)):
        if text is None:
            continue
        if not (isinstance(text, str) or (isinstance(text, list) and text and all(isinstance(t, str) for t in text))):
            raise InputError(f"{name} must be a text or a non-empty list of texts, not {type(text).__name__}.")
        if name in known:
            call[name] = text
        elif text and any(text):
            raise InputError(f"{cls.__name__} takes no {name}. Leave it empty.")
    if "prompt" in known and call.get("prompt") is None and call.get("prompt_embeds") is None:
        raise InputError("Encode needs a prompt (it may be empty: '').")
    count = len(call["prompt"]) if isinstance(call.get("prompt"), list) else 1
    negative = call.get("negative_prompt")
    if isinstance(negative, list) and len(negative) != count:
        raise InputError(f"There are {count} prompts and {len(negative)} negative prompts; give as many of each.")
    check_call(cls, call)
    return call


def encode_run(source: ModelSource, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments that Encode runs the pipeline with: the caller's, the model's defaults, and guidance on."""
    return force_guidance(source, one_negative_each(with_defaults(source, call)))


def with_defaults(source: ModelSource, call: dict[str, Any]) -> dict[str, Any]:
    """`call` with the model's own defaults, but for texts whose embeddings are given: pipelines refuse both."""
    given = tuple(name.removesuffix("_embeds") for name in ("prompt_embeds", "negative_prompt_embeds") if name in call)
    own = {name: value for name, value in model_defaults(source).items() if not name.startswith(given)}
    return {**own, **call}


def one_negative_each(call: dict[str, Any]) -> dict[str, Any]:
    """`call` with a single negative prompt repeated for a list of prompts."""
    if isinstance(call.get("negative_prompt"), str) and isinstance(call.get("prompt"), list):
        return {**call, "negative_prompt": [call["negative_prompt"]] * len(call["prompt"])}
    return call


def run_encode(
    handle: Handle,
    source: ModelSource,
    run: dict[str, Any],
    call: dict[str, Any],
    session: Session,
    known: dict[str, Any],
    plan: Plan | None = None,
) -> Embeds:
    """Runs the phase with the arguments `run`; `call` is kept for Denoise, `known` needn't be encoded again. What the
    session's prompt cache holds needn't, either."""
    (embeds,) = _run_all(handle, source, [_Job(run, call, known)], session, plan)
    return embeds


@dataclass(frozen=True)
class _Job:
    """See `run_encode`."""

    run: dict[str, Any]
    call: dict[str, Any]
    known: dict[str, Any] = field(default_factory=dict)


def _run_all(
    handle: Handle, source: ModelSource, jobs: Sequence[_Job], session: Session, plan: Plan | None
) -> list[Embeds]:
    """Runs one phase, and another for jobs of which a known answer lacks a part that nobody read before: there all of
    them are made again, whole."""
    made = _run_phase(handle, source, jobs, session, plan)
    lacking = [replace(job, known={}) for job, embeds in zip(jobs, made, strict=True) if embeds is None]
    again = iter(_run_phase(handle, source, lacking, session, plan, anew=True) if lacking else ())
    return [embeds or next(again) for embeds in made]  # type: ignore[misc]  # anew, none is None


def _run_phase(
    handle: Handle,
    source: ModelSource,
    jobs: Sequence[_Job],
    session: Session,
    plan: Plan | None,
    *,
    anew: bool = False,
) -> list[Embeds | None]:
    """The embeddings of each job, None where a known answer lacks a part. anew: no answer is taken from the cache."""
    # Pipelines write into their lists.
    plain = [(plain_call(job.call), from_plain(plain_call(job.run), torch.device("cpu"))) for job in jobs]
    records, device = Records(), handle.device_here()
    ports = encode_ports(source, records, device)
    owned = {name for name, port in ports.items() if not isinstance(port, StopPort)}
    found: list[tuple[dict[str, Plain], tuple[str, ...]] | None] = []
    taken: set[str] = set()
    with OpenPhase(handle, source, "encode", session, ports, owned, plan) as phase:
        plan_loras(phase, owned)
        for job, (_, run) in each_job(phase, list(zip(jobs, plain, strict=True))):
            answers = Answers(session.prompt_cache, handle, source, run, reads=not anew)
            records.start(job.known, answers)
            try:
                with contextlib.suppress(PhaseDone), friendly_errors():
                    phase.pipeline(**run, generator=torch.Generator("cpu").manual_seed(0))
            except RecordMissing:
                found.append(None)
                continue
            notes = _prompt_notes(phase, job.call, ports)
            phase.notes += notes
            taken |= answers.taken
            found.append((_keep_answers(records, answers, ports), tuple(notes)))
        phase.notes += _cache_notes(phase, taken)
    return [
        Embeds(handle.pipeline, encoders_mark(handle, source, one[0]), call, *one) if one is not None else None
        for one, (call, _) in zip(found, plain, strict=True)
    ]


def _keep_answers(records: Records, answers: Answers, ports: dict[str, Port]) -> dict[str, Plain]:
    """Puts what was answered into the cache. Returns the embeddings' own records: those that Denoise will ask for."""
    asked = dict.fromkeys(records.live)
    plain = records.settle()
    for key in asked:
        if key not in records.drawn:
            answers.put(key.split(".")[0], key, plain[key])
    return {key: record for key, record in plain.items() if not isinstance(ports[key.split(".")[0]], HeadPort)}


def _cache_notes(phase: Phase, taken: set[str]) -> list[str]:
    """taken: components that answered from the cache."""
    if not taken:
        return []
    if not phase.forwards():
        return ["The embeds are from the cache: no weights were loaded."]
    return [f"From the cache, without its weights: {name}." for name in taken if name not in phase.forwards()]


def encode_ports(source: ModelSource, records: Records, device: torch.device) -> dict[str, Port]:
    """What the encode phase does with each component."""
    return {name: _port(role_of(part), name, records, device) for name, part in models(source)}


def _port(role: Role, name: str, records: Records, device: torch.device) -> Port:
    if role is Role.ENCODER:
        return RecordingPort(name, records, device)
    if role is Role.VAE:
        return EncodeOnlyPort(name, records, device)
    return HeadPort(name, records, device) if role is Role.HEAD else StopPort()


def force_guidance(source: ModelSource, call: dict[str, Any]) -> dict[str, Any]:
    forced = dict(call)
    for name, parameter in call_parameters(call_class(source)).items():
        if name in GUIDANCE_ARGUMENTS:
            value = call.get(name, parameter.default)
            if isinstance(value, int | float) and value <= 1:
                forced[name] = FORCED_GUIDANCE
    return forced


@contextlib.contextmanager
def friendly_errors() -> Any:
    """Turns a pipeline's complaint about its arguments into ours; it is a sentence already."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or not _from_check(error):
            raise
        raise InputError(str(error).strip().replace("`", "")) from None


def _from_check(error: ValueError) -> bool:
    """Whether the pipeline itself raised it, not something below it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename.replace("\\", "/") if trace is not None else ""
    return "diffusers/pipelines" in file or "diffusers/modular_pipelines" in file


def _prompt_notes(phase: Phase, call: dict[str, Any], ports: dict[str, Port]) -> list[str]:
    """Sentences about a prompt that is empty or longer than every encoder takes."""
    tokens = _take_token_counts(ports)
    prompts = call.get("prompt")
    texts = [prompts] if isinstance(prompts, str) else list(prompts or [])
    if any(not text.strip() for text in texts):
        return ["The prompt is empty: nothing guides the picture."]
    cut = []
    for name in ports:
        tokenizer = getattr(phase.pipeline, name.replace("text_encoder", "tokenizer"), None)
        if not tokens.get(name) or tokenizer is None:
            continue
        longest = max((_count_tokens(tokenizer, text) for text in texts), default=0)
        cut.append((longest, tokens[name]))
    if cut and all(there > kept for there, kept in cut):
        there, kept = max(cut, key=lambda pair: pair[1])
        return [f"The prompt has {there} tokens and the model reads the first {kept}; the rest has no effect."]
    return []


def _take_token_counts(ports: dict[str, Port]) -> dict[str, int]:
    """How many tokens each encoder was given at most since this was asked the last time."""
    counts = {}
    for name, port in ports.items():
        if isinstance(port, RecordingPort):
            counts[name], port.tokens = port.tokens, 0
    return counts


def _count_tokens(tokenizer: Any, text: str) -> int:
    try:
        return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
    except (TypeError, ValueError, KeyError):
        return 0
