"""What a node is made of: ids, inputs, outputs, labels and help as plain data, for every host alike.

The V3 adapter turns it into ComfyUI classes; the graph runner validates graphs against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .results import NodeResult

MODEL_TYPE = "PHASE_OFFLOAD_MODEL"
EMBEDS_TYPE = "PHASE_OFFLOAD_EMBEDS"
IMAGES_TYPE = "PHASE_OFFLOAD_IMAGES"
SETTINGS_TYPE = "PHASE_OFFLOAD_SETTINGS"
CONDITIONING_TYPE = "CONDITIONING"
ANY_TYPE = "*"

RECORD_KEY = "phase_offload"  # of our exact record, in a LATENT


@dataclass(frozen=True)
class Input:
    """One input of a node.

    type: "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO" (widgets), or a socket type. options: the values of a COMBO, or
    the name of a list that only the running pack knows ("models", "devices", "loras", ...). default, min, max, step: of
    a widget. optional: a graph may leave it out, as graphs do that were saved before there was such an input.
    """

    name: str
    type: str
    tooltip: str
    default: Any = None
    min: float | None = None
    max: float | None = None
    step: float | None = None
    options: tuple[str, ...] | str = ()
    multiline: bool = False
    control_after_generate: bool = False
    advanced: bool = False
    optional: bool = False

    @property
    def is_widget(self) -> bool:
        return self.type in ("STRING", "INT", "FLOAT", "BOOLEAN", "COMBO")


@dataclass(frozen=True)
class Output:
    """One output of a node. name: its label. is_list: it gives a list of values, and what follows runs for each."""

    name: str
    type: str
    tooltip: str
    is_list: bool = False


@dataclass(frozen=True)
class NodeSchema:
    """One node. is_output: it runs even if nothing follows it, like a node that saves a file. takes_lists: lists that
    reach it are worked on in one go, not in a run of the node for each value."""

    id: str
    display_name: str
    description: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    category: str = "phase offload"
    search_aliases: tuple[str, ...] = ()
    is_output: bool = False
    takes_lists: bool = False

    def input(self, name: str) -> Input | None:
        return next((spec for spec in self.inputs if spec.name == name), None)


@dataclass(frozen=True)
class Node:
    """A node: its schema and what it does.

    run: from a call and the inputs to a result. fingerprint: changes when the node must run again though its inputs
    are the same. problem: why it can't run with these constants, as a sentence, or None; an input that is linked or
    missing is None. run_many: for a node that takes lists, the results of several jobs, which are the inputs of a run
    each.
    """

    schema: NodeSchema
    run: Callable[..., NodeResult]
    fingerprint: Callable[..., Any] | None = None
    problem: Callable[..., str | None] | None = None
    run_many: Callable[..., list[NodeResult]] | None = None


MODEL = Input("model", MODEL_TYPE, "The model, from Load With Dynamic Offload.")
