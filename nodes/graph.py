"""A graph in ComfyUI's API format: read, checked as ComfyUI checks it, and put in order.

`{"id": {"class_type": "...", "inputs": {"name": value or ["other id", output number]}}, ...}`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_core.errors import InputError

from .schema import ANY_TYPE, Input, NodeSchema


class GraphError(InputError):
    """A graph that can't run. `problems`: one sentence each, with the node's id and the input's name."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Link:
    """An input that is the output number `slot` of node `source`."""

    source: str
    slot: int


@dataclass(frozen=True)
class GraphNode:
    """One node. inputs: only those its schema names, as values of the right type or links; an optional one may miss."""

    id: str
    schema: NodeSchema
    inputs: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Its inputs, with None for those that are links."""
        return {name: None if isinstance(value, Link) else value for name, value in self.inputs.items()}

    @property
    def links(self) -> dict[str, Link]:
        return {name: value for name, value in self.inputs.items() if isinstance(value, Link)}


@dataclass(frozen=True)
class Graph:
    """The nodes that lead to an output, each after those it needs. prompt: the graph as it was given."""

    nodes: dict[str, GraphNode]
    prompt: dict[str, Any]


Options = Callable[[NodeSchema, Input], list[str] | None]


def read_graph(path: Path) -> dict[str, Any]:
    """The JSON of a graph file. Raises GraphError if there is none in it."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise GraphError(f"The graph {path} can't be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise GraphError(f"The graph {path} isn't JSON: {error}.") from None
    return prompt_of(data)


def prompt_of(data: Any) -> dict[str, Any]:
    """The graph in parsed JSON: an API-format graph, or what a client posts ({"prompt": graph})."""
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        raise GraphError(
            "This is a workflow in the editor's format: open it in ComfyUI and save it with Workflow > Export (API)."
        )
    if isinstance(data, dict) and isinstance(data.get("prompt"), dict) and "class_type" not in data["prompt"]:
        data = data["prompt"]
    if not isinstance(data, dict) or not data:
        raise GraphError(
            "This isn't a graph in API format: it must be an object of nodes by id, with one node at least."
        )
    return data


def check_graph(prompt: Mapping[str, Any], schemas: Mapping[str, NodeSchema], options: Options) -> Graph:
    """The checked graph, in the order to run it. Raises GraphError with everything that is wrong.

    options: the values that a combo allows now, or None if anything goes. As in ComfyUI, nodes that lead to no output
    node must be known but need not be complete.
    """
    _require_known_nodes(prompt, schemas)
    outputs = [node_id for node_id, node in prompt.items() if schemas[node["class_type"]].is_output]
    if not outputs:
        raise GraphError("The graph has no output node: add a node that saves or shows something, such as SaveImage.")
    nodes: dict[str, GraphNode] = {}
    problems: list[str] = []
    for node_id in _in_order(prompt, outputs, schemas):
        schema = schemas[prompt[node_id]["class_type"]]
        inputs = {}
        for spec in schema.inputs:
            if spec.optional and spec.name not in prompt[node_id].get("inputs", {}):
                continue
            try:
                inputs[spec.name] = _check_input(node_id, schema, spec, prompt, schemas, options)
            except GraphError as error:
                problems += error.problems
        nodes[node_id] = GraphNode(node_id, schema, inputs)
    if problems:
        raise GraphError(*problems)
    return Graph(nodes, dict(prompt))


def _require_known_nodes(prompt: Mapping[str, Any], schemas: Mapping[str, NodeSchema]) -> None:
    problems = []
    for node_id, node in prompt.items():
        if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
            problems.append(f"Node {node_id} has no class_type: this isn't a graph in API format.")
        elif not isinstance(node.get("inputs", {}), dict):
            problems.append(f"Node {node_id} ({node['class_type']}): its inputs must be an object of values by name.")
        elif node["class_type"] not in schemas:
            problems.append(f"Node {node_id}: there is no node {node['class_type']!r} here, only {', '.join(schemas)}.")
    if problems:
        raise GraphError(*problems)


def _in_order(prompt: Mapping[str, Any], outputs: list[str], schemas: Mapping[str, NodeSchema]) -> list[str]:
    """The outputs and all they need, each after its sources. Raises GraphError for a cycle."""
    order: dict[str, None] = {}
    for output in outputs:
        path: dict[str, None] = {}  # from the output down to where we are
        stack = [(output, False)]
        while stack:
            node_id, sources_done = stack.pop()
            if sources_done:
                path.pop(node_id)
                order[node_id] = None
                continue
            if node_id in order:
                continue
            if node_id in path:
                raise GraphError(f"The graph has a cycle: {_cycle(path, node_id)}.")
            path[node_id] = None
            stack.append((node_id, True))
            sources = list(dict.fromkeys(_sources(prompt[node_id], schemas)))
            stack += [(source, False) for source in reversed(sources) if source in prompt]
    return list(order)


def _cycle(path: Mapping[str, None], node_id: str) -> str:
    ids = list(path)
    return " needs ".join([*ids[ids.index(node_id) :], node_id])


def _sources(node: Mapping[str, Any], schemas: Mapping[str, NodeSchema]) -> list[str]:
    inputs = node.get("inputs", {})
    values = [inputs.get(spec.name) for spec in schemas[node["class_type"]].inputs]
    return [str(value[0]) for value in values if isinstance(value, list) and value]


def _check_input(
    node_id: str,
    schema: NodeSchema,
    spec: Input,
    prompt: Mapping[str, Any],
    schemas: Mapping[str, NodeSchema],
    options: Options,
) -> Any:
    here = f"Node {node_id} ({schema.id}), input {spec.name!r}"
    inputs = prompt[node_id].get("inputs", {})
    if spec.name not in inputs:
        raise GraphError(f"{here}: it is missing.")
    value = inputs[spec.name]
    if isinstance(value, list):
        return _check_link(here, spec, value, prompt, schemas)
    if not spec.is_widget:
        raise GraphError(f"{here}: it needs a link to a node that makes {spec.type}, not the value {value!r}.")
    value = _converted(here, spec, value)
    if spec.min is not None and value < spec.min:
        raise GraphError(f"{here}: {value} is smaller than the least, {spec.min:g}.")
    if spec.max is not None and value > spec.max:
        raise GraphError(f"{here}: {value} is larger than the most, {spec.max}.")
    if spec.type == "COMBO":
        allowed = options(schema, spec)
        if allowed is not None and value not in allowed:
            raise GraphError(f"{here}: {value!r} isn't in the list: {', '.join(map(repr, allowed))}.")
    return value


def _check_link(
    here: str, spec: Input, value: list[Any], prompt: Mapping[str, Any], schemas: Mapping[str, NodeSchema]
) -> Link:
    if len(value) != 2 or not isinstance(value[1], int) or isinstance(value[1], bool):
        raise GraphError(f"{here}: a link must be [node id, output number], not {value!r}.")
    source, slot = str(value[0]), value[1]
    if source not in prompt:
        raise GraphError(f"{here}: it links to node {source}, which isn't in the graph.")
    outputs = schemas[prompt[source]["class_type"]].outputs
    if not 0 <= slot < len(outputs):
        raise GraphError(f"{here}: it links to output {slot} of node {source}, which has {len(outputs)}.")
    made = outputs[slot].type
    if made != spec.type and ANY_TYPE not in (made, spec.type) and not (made == "STRING" and spec.type == "COMBO"):
        raise GraphError(f"{here}: it needs {spec.type}, but output {slot} of node {source} makes {made}.")
    return Link(source, slot)


def _converted(here: str, spec: Input, value: Any) -> Any:
    """The value as the type of the input, converted as ComfyUI does: numbers and strings into each other."""
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    convert = {"INT": int, "FLOAT": float, "BOOLEAN": bool}.get(spec.type, str)
    try:
        if isinstance(value, dict | None) or (convert is str and not isinstance(value, str | int | float)):
            raise TypeError
        value = convert(value)
        if value != value:  # NaN
            raise ValueError
        return value
    except (TypeError, ValueError, OverflowError):
        raise GraphError(f"{here}: {value!r} isn't {_ARTICLES.get(spec.type, 'a text')}.") from None


_ARTICLES = {"INT": "a whole number", "FLOAT": "a number", "BOOLEAN": "true or false"}
