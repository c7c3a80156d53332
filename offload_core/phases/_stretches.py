"""A clip decoded a stretch of frames at a time, without a second copy of it.

Some VAEs (Wan, Qwen-Image, CogVideoX) run their decoder on a few latent frames after another and join what comes out.
Joining makes a copy of all that is there already, and what they do with the whole (clamp it, lay its patches out)
makes another. Here the decoder's stretches are taken off their hands as they come, and the VAE joins nothing. Each is
then finished by the VAE's own code, on its way to the result: decoding one latent frame, where the decoder answers
with that stretch. What a VAE does after its decoder it does to every frame by itself, so no bit differs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._ports import Gate


class Stretches:
    """What a decoder made of a clip, in order, each to be finished once. frames: of the whole clip."""

    def __init__(self, vae: Any, gate: Gate, latents: torch.Tensor, args: Any, kwargs: Any) -> None:
        self._vae, self._gate, self._args, self._kwargs = vae, gate, args, kwargs
        self._one = latents[:, :, :1]
        self._parts: list[tuple[torch.Tensor, bool]] = []
        self._latent_frames = latents.shape[2]
        self._taken = 0
        self.frames = 0

    def take(self, forward: Callable[..., Any], latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In the place of the decoder's forward: keeps what it makes of a part of the clip, and gives no frames."""
        made = forward(latents, *args, **kwargs)
        if latents.shape[2] >= self._latent_frames:
            return made
        frames = made[0] if isinstance(made, tuple) else made
        self._parts.append((frames.to("cpu"), isinstance(made, tuple)))  # the result is there, too
        self.frames += frames.shape[2]
        self._taken += latents.shape[2]
        none = frames.new_empty(*frames.shape[:2], 0, *frames.shape[3:])
        return (none, *made[1:]) if isinstance(made, tuple) else none

    @property
    def overlap(self) -> bool:
        """Whether the decoder saw latent frames twice: then the VAE blends what came out, it doesn't just join it."""
        return self._taken > self._latent_frames

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Finished stretches (B, C, f, H, W). Each is forgotten here when it is given."""
        while self._parts:
            frames, in_tuple = self._parts.pop(0)
            answer = frames.to(self._one.device)
            del frames
            given = functools.partial(_given, (answer, None) if in_tuple else answer)
            with _answering(self._vae.decoder, given), self._gate.inside():
                yield self._vae.decode(self._one, *self._args, return_dict=False, **self._kwargs)[0]
            del answer, given


def _given(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def decode_in_stretches(vae: Any, gate: Gate, args: Any, kwargs: Any) -> Stretches | torch.Tensor:
    """What `vae.decode` makes of a clip: its stretches, or the whole if it doesn't decode so."""
    kwargs = {name: value for name, value in kwargs.items() if name != "return_dict"}
    latents, *rest = args
    forward = vae.decoder.forward
    stretches = Stretches(vae, gate, latents, rest, kwargs)
    with _answering(vae.decoder, functools.partial(stretches.take, forward)):
        whole = vae.decode(latents, *rest, return_dict=False, **kwargs)[0]
    if stretches.overlap:
        del stretches
        return vae.decode(latents, *rest, return_dict=False, **kwargs)[0]
    return stretches if stretches.frames else whole


def can_stretch(vae: Any, args: Any) -> bool:
    """Whether it is worth trying: a clip, and no tiles or slices, which are joined in other ways. HunyuanVideo decodes
    a clip of more than 16 frames in tiles of time, whose ends are blended."""
    latents = args[0] if args and isinstance(args[0], torch.Tensor) else None
    is_clip = latents is not None and latents.ndim == 5 and latents.shape[2] > 1
    plain = not getattr(vae, "use_tiling", False) and not getattr(vae, "use_slicing", False)
    blends = getattr(vae, "use_framewise_decoding", False) and hasattr(vae, "_temporal_tiled_decode")
    return is_clip and plain and not blends and isinstance(getattr(vae, "decoder", None), torch.nn.Module)


@contextlib.contextmanager
def _answering(decoder: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`decoder` with another forward, for the time of the scope."""
    before = vars(decoder).get("forward")
    vars(decoder)["forward"] = forward
    try:
        yield
    finally:
        del vars(decoder)["forward"]
        if before is not None:
            vars(decoder)["forward"] = before
