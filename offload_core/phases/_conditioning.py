"""Embeddings as ComfyUI's CONDITIONING holds them, and back: for each text the tensor that the denoiser reads.

Nothing is computed on the way, so the denoiser sees the very values that the other side's encoders made. That is right
only where both sides mean the same by the tensor: its shape, what stands in its padding, no mask beside it. The table
has the families of which that is known; the others are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError, MissingRecordError
from ..model_source import ModelSource
from ..session import Session
from ._denoise import check_embeds
from ._encode import encode, encode_ports, encode_run, friendly_errors
from ._handle import Handle
from ._plain import RecordMissing, from_plain
from ._ports import PhaseDone, Port, RecordingPort, Records, ReplayPort
from ._records import Embeds
from ._roles import Role, models, role_of
from ._scope import OpenPhase


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a denoiser reads of one text, on the CPU. tokens: (B, length, width). pooled: (B, width) of families whose
    denoiser reads a summary beside them."""

    tokens: torch.Tensor
    pooled: torch.Tensor | None = None


@dataclass(frozen=True)
class _Family:
    """answers: what `encode_prompt` gives, in order; "" for what isn't about the text. width, pooled_width: of the
    denoiser's inputs, from its config. one_length: whether both texts go through the denoiser in one batch."""

    answers: tuple[str, ...]
    width: str
    pooled_width: Callable[[dict[str, Any]], int] | None = None
    one_length: bool = True


_TOKENS = ("prompt_embeds", "negative_prompt_embeds")
_WITH_POOLED = (*_TOKENS, "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

# What ComfyUI's encoders give for these (comfy/text_encoders of 0.3.64 and 0.33) is what diffusers 0.42 has from
# encode_prompt: the last hidden states after the norm for SD 1.5; for SDXL those before the last layer of both CLIPs,
# side by side, and the projection of the second; for SD 3 the same, padded to the width of the T5 states that follow,
# and both pooled outputs; for FLUX.1 the T5 states of all tokens, padding too, without a mask, and CLIP's pooled
# output; for Wan the UMT5 states with zeros in place of the padding. The length may differ (FLUX.1: 512 here, 256
# there), which changes the picture as `max_sequence_length` does, but not what the tensor means.
_FAMILIES = {
    "StableDiffusionPipeline": _Family(_TOKENS, "cross_attention_dim"),
    "StableDiffusionXLPipeline": _Family(
        _WITH_POOLED,
        "cross_attention_dim",
        lambda config: config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"],
    ),
    "StableDiffusion3Pipeline": _Family(
        _WITH_POOLED, "joint_attention_dim", lambda config: config["pooled_projection_dim"]
    ),
    "FluxPipeline": _Family(
        ("prompt_embeds", "pooled_prompt_embeds", ""),
        "joint_attention_dim",
        lambda config: config["pooled_projection_dim"],
        one_length=False,
    ),
    "WanPipeline": _Family(_TOKENS, "text_dim", one_length=False),
}

_REASONS = {
    "QwenImage": "its pipeline reads a mask beside the embeddings",
    "Chroma": "its pipeline reads a mask beside the embeddings",
    "ZImage": "its pipeline reads a list of texts without padding, and a CONDITIONING is one tensor",
}


def conditioning_of(
    handle: Handle, embeds: Embeds, session: Session | None = None
) -> tuple[Conditioning, Conditioning | None]:
    """What the denoiser reads of the prompt and of the negative prompt (None if Encode had none). No weight is loaded.

    Raises InputError for a family whose embeddings ComfyUI's CONDITIONING can't hold exactly, RecordError for embeds of
    other encoders, MissingRecordError for embeds that lack an encoding.
    """
    source = handle.source()
    family = _family(source)
    check_embeds(handle, source, embeds)
    answers: list[tuple[Any, ...]] = []
    call = encode_run(source, from_plain(embeds.call, torch.device("cpu")))
    ports = _replaying(source, Records(embeds.records), handle.device_here())
    with OpenPhase(handle, source, "conditioning", session or Session(), ports, set()) as phase:
        pipeline: Any = phase.pipeline
        ask = pipeline.encode_prompt

        def noted(*args: Any, **kwargs: Any) -> Any:
            answers.append(ask(*args, **kwargs))
            return answers[-1]

        pipeline.encode_prompt = noted
        try:
            with contextlib.suppress(PhaseDone), friendly_errors():
                pipeline(**call, generator=torch.Generator("cpu").manual_seed(0))
        except RecordMissing as missing:
            raise MissingRecordError(
                f"The embeds lack what {missing.component} answers. Run Encode Prompt with this model again."
            ) from None
    named = _named(family, answers)
    positive = _conditioning(named, "")
    if positive is None:
        raise InputError(f"{source.pipeline_class} encoded no prompt, so there is no conditioning to give.")
    return positive, _conditioning(named, "negative_")


def embeds_from_conditioning(
    handle: Handle, positive: Conditioning, negative: Conditioning | None = None, *, session: Session | None = None
) -> Embeds:
    """Embeddings for `denoise` that hold these values, in the dtype of the model's denoiser.

    A prompt without a `negative` gets the empty text as one, encoded by the model's own encoders, if its family uses
    guidance. Nothing says which encoders made a CONDITIONING; only its shape is checked.

    Raises InputError for a family whose embeddings ComfyUI's CONDITIONING can't hold exactly, and for shapes that the
    denoiser doesn't take.
    """
    source = handle.source()
    family = _family(source)
    config, dtype = _denoiser(handle, source)
    given: dict[str, Any] = {}
    for prefix, text in (("", positive), ("negative_", negative)):
        if text is None:
            continue
        _check(family, config, text, "negative" if prefix else "positive")
        given[f"{prefix}prompt_embeds"] = text.tokens.detach().to("cpu", dtype, copy=True)
        if family.pooled_width is not None and text.pooled is not None:
            given[f"{prefix}pooled_prompt_embeds"] = text.pooled.detach().to("cpu", dtype, copy=True)
    if family.one_length and negative is not None and negative.tokens.shape != positive.tokens.shape:
        lengths = f"{positive.tokens.shape[1]} and {negative.tokens.shape[1]}"
        raise InputError(
            f"The positive and the negative conditioning have {lengths} tokens, and {source.pipeline_class} needs as "
            "many of each: make both texts short, or both as long."
        )
    return encode(handle, session=session, **given)


def _family(source: ModelSource) -> _Family:
    name = source.pipeline_class
    if name in _FAMILIES and source.blocks is None:
        return _FAMILIES[name]
    starts = (reason for start, reason in _REASONS.items() if name.startswith(start))
    reason = next(starts, "nobody has shown yet that both sides mean the same by its embeddings")
    raise InputError(
        f"There is no exact way between the embeddings of {name} and ComfyUI's CONDITIONING: {reason}. Use Encode "
        "Prompt Phase and Denoise Phase together."
    )


def _replaying(source: ModelSource, records: Records, device: torch.device) -> dict[str, Port]:
    ports = encode_ports(source, records, device)
    return {
        name: ReplayPort(name, records, device) if isinstance(port, RecordingPort) else port
        for name, port in ports.items()
    }


def _named(family: _Family, answers: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Answers by the names of the pipeline's arguments. A second question, of families that ask twice, is about the
    negative prompt."""
    named: dict[str, Any] = {}
    for number, answer in enumerate(answers[:2]):
        for name, value in zip(family.answers, answer, strict=False):
            if name:
                named[f"negative_{name}" if number else name] = value
    return named


def _conditioning(named: dict[str, Any], prefix: str) -> Conditioning | None:
    tokens, pooled = named.get(f"{prefix}prompt_embeds"), named.get(f"{prefix}pooled_prompt_embeds")
    if tokens is None:
        return None
    return Conditioning(_fresh(tokens), None if pooled is None else _fresh(pooled))


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float32, as ComfyUI's encoders give theirs."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to("cpu", torch.float32, copy=True)


def _denoiser(handle: Handle, source: ModelSource) -> tuple[dict[str, Any], torch.dtype]:
    part = next(part for _, part in models(source) if role_of(part) is Role.DENOISER)
    return dict(part.config or {}), handle.dtype_of(part)


def _check(family: _Family, config: dict[str, Any], text: Conditioning, which: str) -> None:
    width = config.get(family.width)
    if text.tokens.ndim != 3 or text.tokens.shape[-1] != width:
        raise InputError(
            f"The {which} conditioning has shape {tuple(text.tokens.shape)}, and this model reads (texts, tokens, "
            f"{width}): it was made by another model's encoders."
        )
    if family.pooled_width is None:
        return
    width = family.pooled_width(config)
    shape = None if text.pooled is None else tuple(text.pooled.shape)
    if shape is None or shape != (text.tokens.shape[0], width):
        raise InputError(
            f"The {which} conditioning has a pooled output of shape {shape}, and this model reads (texts, {width}): it "
            "was made by another model's encoders."
        )
