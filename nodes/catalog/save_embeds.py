"""Save Embeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..record_files import EMBEDS_ENDING, save_record
from ..results import NodeResult
from ..schema import EMBEDS_TYPE, Input, Node, NodeSchema
from ._records import FILE, prefix_input

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadSaveEmbeds",
    display_name="Save Embeds",
    description="Writes encoded prompts to a file, so that another run, or another machine, needs no text encoder.",
    inputs=(
        Input("embeds", EMBEDS_TYPE, "The encoded prompts, from Encode Prompt Phase."),
        prefix_input("embeds/phase_offload"),
    ),
    outputs=(FILE,),
    search_aliases=("save embeds", "save conditioning", "cache prompt", "export", "offload"),
    is_output=True,
)


def save_embeds(call: NodeCall, *, embeds: Any, filename_prefix: str) -> NodeResult:
    """PhaseOffloadSaveEmbeds: a safetensors file in the output folder, written whole or not at all."""
    if not isinstance(embeds, offload_core.Embeds):
        raise InputError(f"Save Embeds needs what Encode Prompt Phase made, not {type(embeds).__name__}.")
    name = save_record(call.state.host, embeds, filename_prefix, EMBEDS_ENDING)
    call.observer.status(f"saved {name}")
    return NodeResult((name,), ui={"text": [name]})


NODE = Node(SCHEMA, save_embeds)
