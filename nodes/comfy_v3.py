"""Turns the table of node schemas into ComfyUI V3 node classes.

Uses what `comfy_api.latest` has in 0.3.64 and in later versions alike; newer fields are set where they exist.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .calls import fingerprint, problem, run_node, run_node_on_lists
from .catalog import NODES
from .results import NodeResult
from .schema import ANY_TYPE, Input, NodeSchema, Output
from .state import PackState


def make_extension(state: PackState) -> Any:
    """The ComfyExtension with all nodes of the pack. They share `state`, passed in by closure."""
    from comfy_api.latest import ComfyExtension

    classes = [make_node(node.schema, state) for node in NODES.values()]

    class PhaseOffloadExtension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return list(classes)

    return PhaseOffloadExtension()


def make_node(node: NodeSchema, state: PackState) -> type:
    """The V3 class of one node."""
    from comfy_api.latest import io

    class PhaseOffloadNode(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> Any:
            return make_schema(io, node, state)

        @classmethod
        def execute(cls, **inputs: Any) -> Any:
            run = run_node_on_lists if node.takes_lists else run_node
            result = run(node.id, state, state.host.observer(None), inputs)
            return io.NodeOutput(*result.values, ui=_ui(result) or None)

    class FileNode(PhaseOffloadNode):
        """A node with a choice of files: it runs again when they change."""

        @classmethod
        def fingerprint_inputs(cls, **inputs: Any) -> Any:
            return fingerprint(node.id, state, inputs)

    class ModelNode(FileNode):
        """A node with a choice of models: it also checks the name by itself."""

        @classmethod
        def validate_inputs(cls, model: Any = None) -> Any:
            # Only `model`: the host's own checks stay on for the other inputs, and it blames every input that is named
            # here for one that is wrong. Budgets are checked when the node runs. None: it is linked or missing.
            return problem(node.id, state, {"model": model}) or True

    has_models = any(spec.options == "models" for spec in node.inputs)
    made: Any = FileNode if NODES[node.id].fingerprint else PhaseOffloadNode
    made = ModelNode if has_models else made
    made.__name__ = made.__qualname__ = node.id
    return made


def make_schema(io: Any, node: NodeSchema, state: PackState) -> Any:
    """The V3 schema of a node. Called by the host for every prompt, so it must be quick."""
    known = {
        "node_id": node.id,
        "display_name": node.display_name,
        "category": node.category,
        "description": node.description,
        "search_aliases": list(node.search_aliases),
        "is_output_node": node.is_output,
        "is_input_list": node.takes_lists,
        "inputs": [_input(io, spec, state) for spec in node.inputs],
        "outputs": [_output(io, spec) for spec in node.outputs],
    }
    return io.Schema(**_accepted(io.Schema, known))


def _ui(result: NodeResult) -> dict[str, Any]:
    """What the host shows on the node. A picture goes into the host's temp folder, which it empties at its start."""
    if result.shown is None:
        return result.ui
    from comfy_api.latest import ui

    return {**result.ui, **ui.PreviewImage(result.shown).as_dict()}


def _input(io: Any, spec: Input, state: PackState) -> Any:
    make = _type(io, spec.type).Input
    settings: dict[str, Any] = {"tooltip": spec.tooltip}
    if spec.optional:
        settings["optional"] = True
    if spec.is_widget:
        widget = {
            "default": spec.default,
            "min": spec.min,
            "max": spec.max,
            "step": spec.step,
            "multiline": spec.multiline or None,
            "control_after_generate": spec.control_after_generate or None,
            "advanced": spec.advanced or None,
        }
        settings |= {name: value for name, value in widget.items() if value is not None}
    if spec.type == "COMBO":
        settings["options"] = state.choices(spec.options) if isinstance(spec.options, str) else list(spec.options)
    return make(spec.name, **_accepted(make, settings))


def _output(io: Any, spec: Output) -> Any:
    lists = {"is_output_list": True} if spec.is_list else {}
    return _type(io, spec.type).Output(display_name=spec.name, tooltip=spec.tooltip, **lists)


def _type(io: Any, name: str) -> Any:
    known = {
        "STRING": "String",
        "INT": "Int",
        "FLOAT": "Float",
        "BOOLEAN": "Boolean",
        "COMBO": "Combo",
        "IMAGE": "Image",
        "MASK": "Mask",
        "LATENT": "Latent",
        "AUDIO": "Audio",
        "VIDEO": "Video",
        "CONDITIONING": "Conditioning",
        ANY_TYPE: "AnyType",
    }
    return getattr(io, known[name]) if name in known else _custom(io.Custom, name)


@functools.cache
def _custom(make: Callable[[str], Any], name: str) -> Any:
    """A type of ours, made once: the host asks for schemas several times a prompt, and a class for each would stay."""
    return make(name)


def _accepted(callee: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that this version of the host knows."""
    known = _parameters(callee)
    return {name: value for name, value in settings.items() if name in known}


@functools.cache  # a page asks for all schemas at once, and they are made of a few kinds of specs
def _parameters(callee: Any) -> frozenset[str]:
    return frozenset(inspect.signature(callee).parameters)
