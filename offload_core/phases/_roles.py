"""Which phase a component belongs to, from its class and name; no table of pipeline families."""

from __future__ import annotations

from enum import Enum

from ..model_source import ComponentSource, ModelSource, component_class


class Role(Enum):
    """encoder: its answers are recorded in Encode. head: runs before the loop in Encode and again in Denoise, because
    what it is asked depends on guidance (LTX-2's connectors). denoiser, vae, and tail: what runs after the VAE.
    """

    ENCODER = "encoder"
    HEAD = "head"
    DENOISER = "denoiser"
    VAE = "vae"
    TAIL = "tail"


# Components that aren't what their class says: run before the loop though they are diffusers models (LTX-2's
# connectors), or after the VAE though they are neither (a vocoder turns decoded mel bins into sound).
_ROLE_BY_NAME = {
    "connectors": Role.HEAD,
    "projection_model": Role.HEAD,
    "image_embedder": Role.HEAD,
    "qformer": Role.HEAD,
    "vocoder": Role.TAIL,
    "safety_checker": Role.TAIL,
}


def role_of(source: ComponentSource) -> Role:
    """The phase that runs a component: text and image encoders are transformers models, VAEs can decode."""
    if source.name in _ROLE_BY_NAME:
        return _ROLE_BY_NAME[source.name]
    if source.library == "transformers":
        return Role.ENCODER
    return Role.VAE if hasattr(component_class(source), "decode") else Role.DENOISER


def models(source: ModelSource) -> list[tuple[str, ComponentSource]]:
    """The components that have weights, in the pipeline's order."""
    return [(name, part) for name, part in source.components.items() if part.has_weights]
