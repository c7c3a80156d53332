"""Load Latents With Record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..results import NodeResult
from ..schema import RECORD_KEY, Node, NodeSchema, Output
from ._records import file_fingerprint, file_input

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadLoadLatents",
    display_name="Load Latents With Record",
    description=(
        "Reads a latent that Save Latents With Record wrote. VAE Decode Phase decodes it exactly, and refuses one of "
        "another kind of model."
    ),
    inputs=(file_input("latents"),),
    outputs=(
        Output(
            "latent",
            "LATENT",
            "The latent picture, in ComfyUI's convention. It also carries the exact values VAE Decode Phase needs.",
        ),
    ),
    search_aliases=("load latent", "import", "offload"),
)


def load_latents(call: NodeCall, *, file: str) -> NodeResult:
    """PhaseOffloadLoadLatents: the LATENT of a file, with its record."""
    latents = offload_core.Latents.load(call.state.latents.file(file))
    call.observer.status(f"made with {latents.pipeline}")
    return NodeResult(({"samples": latents.samples, RECORD_KEY: latents},))


def fingerprint(state: PackState, *, file: Any = None, **_unused: Any) -> str:
    """Changes when the file is written again."""
    return file_fingerprint(state.latents, file)


NODE = Node(SCHEMA, load_latents, fingerprint)
