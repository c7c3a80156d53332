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
# connectors; Stable Audio's projection, whose times may then be chosen in Denoise), or after the VAE though they are
# neither (a vocoder turns decoded mel bins into sound). What ACE-Step's encoder of conditions is asked depends on
# nothing that only Denoise knows, so it is recorded.
_ROLE_BY_NAME = {
    "connectors": Role.HEAD,
    "projection_model": Role.HEAD,
    "image_embedder": Role.HEAD,
    "qformer": Role.HEAD,
    "condition_encoder": Role.ENCODER,
    "vocoder": Role.TAIL,
    "safety_checker": Role.TAIL,
}


# Of a model that is made of blocks: where they list it.
_ROLE_BY_STAGE = {"before": Role.ENCODER, "denoise": Role.DENOISER, "after": Role.TAIL}


def role_of(source: ComponentSource) -> Role:
    """The phase that runs a component: text and image encoders are transformers models, VAEs can decode. Blocks say it
    themselves of all but their VAEs, which they list for what they ask of them or only for their sizes."""
    if source.name in _ROLE_BY_NAME:
        return _ROLE_BY_NAME[source.name]
    if source.stage is not None and (source.library == "transformers" or not _is_vae(source)):
        return _ROLE_BY_STAGE[source.stage]
    if source.library == "transformers" or _is_of_transformers(source):
        return Role.ENCODER
    return Role.VAE if _is_vae(source) else Role.DENOISER


def _is_of_transformers(source: ComponentSource) -> bool:
    """Whether its class is one of their models, though its code is in a folder of diffusers (ChatGLM, of Kolors)."""
    from transformers import PreTrainedModel

    return issubclass(component_class(source), PreTrainedModel)


def _is_vae(source: ComponentSource) -> bool:
    return hasattr(component_class(source), "decode")


def models(source: ModelSource) -> list[tuple[str, ComponentSource]]:
    """The components that have weights, in the pipeline's order."""
    return [(name, part) for name, part in source.components.items() if part.has_weights]
