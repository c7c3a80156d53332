"""ComfyUI's CONDITIONING, and what of one can be taken over: one text, as its encoders gave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError

if TYPE_CHECKING:
    from offload_core import Conditioning

POOLED = "pooled_output"


def as_conditioning(text: Conditioning) -> list[list[Any]]:
    """The value of a CONDITIONING socket: a list of pairs of a tensor and what goes with it."""
    return [[text.tokens, {} if text.pooled is None else {POOLED: text.pooled}]]


def text_of(conditioning: Any, name: str) -> Conditioning:
    """The text of a CONDITIONING that an encode node of ComfyUI made.

    Raises InputError for several texts, and for one that another node gave more to (an area, a range of steps, a
    control picture, a guidance): a pipeline can't be told of it, and without it the picture would be another one.
    """
    import torch

    from offload_core import Conditioning

    if not isinstance(conditioning, list | tuple) or not conditioning:
        raise InputError(f"The input {name} holds no conditioning. Link it to CLIP Text Encode.")
    if len(conditioning) > 1:
        raise InputError(
            f"The input {name} holds {len(conditioning)} texts that were combined, and a pipeline reads one. Write "
            "them as one text."
        )
    tokens, more = conditioning[0]
    if getattr(tokens, "is_quantized", False) or not isinstance(tokens, torch.Tensor):
        raise InputError(f"The input {name} holds no tensor. Link it to CLIP Text Encode.")
    added = sorted(key for key, value in more.items() if key != POOLED and not _is_nothing(key, value))
    if added:
        raise InputError(
            f"The conditioning of {name} carries {', '.join(added)}, which a pipeline can't be told of. Link the "
            "input to CLIP Text Encode itself."
        )
    return Conditioning(tokens, more.get(POOLED))


def _is_nothing(key: str, value: Any) -> bool:
    """Whether an entry changes nothing: a mask that leaves all tokens, or none at all."""
    return value is None or (key == "attention_mask" and bool((value == 1).all()))
