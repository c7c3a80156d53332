"""Load Embeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..results import NodeResult
from ..schema import EMBEDS_TYPE, Node, NodeSchema, Output
from ._records import file_fingerprint, file_input

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadLoadEmbeds",
    display_name="Load Embeds",
    description="Reads encoded prompts that Save Embeds wrote. Denoise Phase refuses those of other encoders.",
    inputs=(file_input("embeds"),),
    outputs=(Output("embeds", EMBEDS_TYPE, "The encoded prompts, in RAM."),),
    search_aliases=("load embeds", "load conditioning", "import", "offload"),
)


def load_embeds(call: NodeCall, *, file: str) -> NodeResult:
    """PhaseOffloadLoadEmbeds: the embeds of a file."""
    embeds = offload_core.Embeds.load(call.state.embeds.file(file))
    call.observer.status(f"made with {embeds.pipeline}")
    return NodeResult((embeds,))


def fingerprint(state: PackState, *, file: Any = None, **_unused: Any) -> str:
    """Changes when the file is written again."""
    return file_fingerprint(state.embeds, file)


NODE = Node(SCHEMA, load_embeds, fingerprint)
