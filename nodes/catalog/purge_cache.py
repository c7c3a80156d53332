"""Purge Cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..results import NodeResult
from ..schema import ANY_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadPurgeCache",
    display_name="Purge Cache",
    description=(
        "Gives back memory that is cached but unused (on the device, pinned, and in RAM) at this place of the graph, "
        "passes its input through unchanged, and says what it freed."
    ),
    inputs=(Input("anything", ANY_TYPE, "Any value. The purge runs after it was made."),),
    outputs=(
        Output("anything", ANY_TYPE, "The same value, unchanged."),
        Output("report", "STRING", "One sentence: what was freed."),
    ),
    search_aliases=("purge", "free memory", "clear cache", "unload", "vram", "empty cache", "cleanup"),
    is_output=True,
)


def purge_cache(call: NodeCall, *, anything: Any) -> NodeResult:
    """PhaseOffloadPurgeCache: the same value, and a sentence that says what was freed."""
    call.state.host.release_cache()
    sentence = offload_core.purge(device=call.state.host.auto_device(), session=call.session).sentence()
    call.observer.status(sentence)
    return NodeResult((anything, sentence), ui={"text": [sentence]})


NODE = Node(SCHEMA, purge_cache)
