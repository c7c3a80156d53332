"""Prompt Lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_core.errors import InputError

from ..results import NodeResult
from ..schema import Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadPromptLines",
    display_name="Prompt Lines",
    description=(
        "Makes a list of prompts, one of each line. Encode Prompt Phase encodes them in one go, and the phases behind "
        "it load their weights once for all pictures."
    ),
    inputs=(Input("lines", "STRING", "A prompt in each line. Empty lines don't count.", default="", multiline=True),),
    outputs=(Output("prompts", "STRING", "The prompts, as a list.", is_list=True),),
    search_aliases=("prompt list", "batch prompts", "several prompts", "multiline", "offload"),
)


def prompt_lines(call: NodeCall, *, lines: str) -> NodeResult:
    """PhaseOffloadPromptLines: a list of the lines, without blanks around them."""
    prompts = [line.strip() for line in lines.splitlines() if line.strip()]
    if not prompts:
        raise InputError("Prompt Lines has no prompt: write one in each line.")
    call.observer.status(f"{len(prompts)} prompts" if len(prompts) > 1 else "1 prompt")
    return NodeResult((prompts,))


NODE = Node(SCHEMA, prompt_lines)
