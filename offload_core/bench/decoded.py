"""What latents are decoded to, whatever a model makes: pictures, frames, sound."""

from __future__ import annotations

import torch

from ..phases import Handle, Latents, decode, decode_sound
from ..plan import Plan
from ..session import Session


def decoded_whole(
    handle: Handle, latents: Latents, session: Session, plan: Plan | None = None
) -> tuple[torch.Tensor, ...]:
    """The pictures or frames, if there are any, and the sound, if there is some, in float32; as `tiny_models.run_all`
    gives what the whole pipeline makes."""
    made = []
    if not latents.only_sound:
        made.append(torch.as_tensor(decode(handle, latents, "pt", session=session, plan=plan)).float())
    sound = decode_sound(handle, latents, session=session, plan=plan)
    return tuple(made) if sound is None else (*made, sound[0])


def decode_only(handle: Handle, latents: Latents, session: Session, plan: Plan | None = None) -> None:
    """Runs the phase decode, and no other for sound beside the picture."""
    if latents.only_sound:
        decode_sound(handle, latents, session=session, plan=plan)
    else:
        decode(handle, latents, "pt", session=session, plan=plan)
