"""VAE Decode Phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..foreseen import foreseen
from ..pictures import as_image
from ..results import NodeResult
from ..schema import MODEL, RECORD_KEY, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadVAEDecode",
    display_name="VAE Decode Phase",
    description="Loads the VAE, turns the latent picture into pixels, and gives the memory back.",
    inputs=(
        MODEL,
        Input(
            "latent",
            "LATENT",
            "From Denoise Phase, or any LATENT of the same kind of model. If another node changed it, the changed "
            "values are decoded.",
        ),
        Input(
            "tiling",
            "COMBO",
            "Decode in tiles, which needs less memory and can leave faint seams. auto: only if the whole picture "
            "doesn't fit.",
            default="auto",
            options=("auto", "on", "off"),
        ),
    ),
    outputs=(Output("image", "IMAGE", "The pictures; the frames of a video come as a batch."),),
    search_aliases=("vae decode", "latent to image", "tiled", "tiling", "offload"),
)


def vae_decode(call: NodeCall, *, model: Any, latent: Mapping[str, Any], tiling: str) -> NodeResult:
    """PhaseOffloadVAEDecode: IMAGE [B, H, W, 3], 0 to 1. The frames of videos follow each other in the batch."""
    latents, notes = _latents_to_decode(model, latent)
    with foreseen(call, offload_core.foresee_decode, model, latents, tiling=tiling) as plan:
        pixels = offload_core.decode(model, latents, "pt", tiling=tiling, session=call.session, plan=plan)
    image = as_image(pixels).to(**call.state.host.image_placement())
    call.say_how_it_went(*notes)
    return NodeResult((image,))


def _latents_to_decode(model: Any, latent: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The exact record of Denoise Phase if the LATENT still agrees with it; else what its `samples` say."""
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        raise InputError("This LATENT holds several tensors (sound and picture): split it before VAE Decode Phase.")
    samples = samples.to("cpu")  # the host may keep latents on the device
    record = latent.get(RECORD_KEY)
    if record is None:
        return offload_core.latents_from_samples(model, samples), []
    if record.is_stale(samples):
        return record.with_samples(samples), ["The latent was changed after Denoise Phase; the change is decoded."]
    return record, []


NODE = Node(SCHEMA, vae_decode)
