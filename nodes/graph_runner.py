"""Runs a graph without ComfyUI, the way ComfyUI runs it: checked, in order, under inference mode, with cached results.

Used by `phase-offload run` and by the tests of the nodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from .calls import fingerprint, forget_locals, jobs_of, merged_ui, problem, run_node, run_node_on_lists
from .catalog import NODES
from .graph import Graph, GraphError, GraphNode, Link, check_graph, prompt_of
from .image_files import IMAGE_NODES, LOAD_IMAGE, ImageFolders, image_bodies, image_fingerprint, save_images
from .local_host import LocalHost
from .results import NodeResult
from .schema import Input, NodeSchema
from .state import PackState

SCHEMAS: Mapping[str, NodeSchema] = {name: node.schema for name, node in NODES.items()} | IMAGE_NODES
CacheMode = Literal["classic", "none"]


@dataclass
class GraphResult:
    """What a run gave. ui: what nodes showed, by node id. executed/cached: ids of nodes, in order.

    images: the files that were written, in order.
    """

    ui: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    executed: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)


class Several(tuple[Any, ...]):
    """The values of an output that gave a list: what follows runs for each, or takes them all."""


class GraphRunner:
    """Runs graphs one after another on one pack state.

    cache "classic": results stay while the next graph has the same node with the same ancestors; what it doesn't have
    is dropped before it starts. "none": a result goes as soon as its last consumer has run.
    """

    def __init__(
        self,
        host: LocalHost,
        *,
        output_dir: Path,
        input_dir: Path | None = None,
        preview_dir: Path | None = None,
        cache: CacheMode = "classic",
    ) -> None:
        self.host = host
        self.state = PackState(host)
        self.folders = ImageFolders(input_dir or Path(), output_dir, preview_dir or output_dir / "preview")
        host.use_folder("input", self.folders.input)
        host.use_folder("output", self.folders.output)
        self._keep = cache == "classic"
        self._results: dict[str, NodeResult] = {}

    def run(self, prompt: Mapping[str, Any]) -> GraphResult:
        """Runs a graph. Raises GraphError before anything runs if it is wrong; a node's error passes through."""
        graph = self.check(prompt)
        self.host.begin_run()
        self.folders.output.mkdir(parents=True, exist_ok=True)
        try:
            return self._execute(graph)
        except BaseException as error:
            forget_locals(error)
            raise
        finally:
            if not self._keep:
                self.forget()

    def check(self, prompt: Mapping[str, Any]) -> Graph:
        """The graph, checked and in order, or a GraphError."""
        graph = check_graph(prompt_of(dict(prompt)), SCHEMAS, self._options)
        found = [(node, problem(node.schema.id, self.state, node.constants)) for node in graph.nodes.values()]
        problems = [f"Node {node.id} ({node.schema.id}): {text}" for node, text in found if text]
        if problems:
            raise GraphError(*problems)
        return graph

    def forget(self) -> None:
        """Drops all cached results."""
        self._results.clear()

    def _execute(self, graph: Graph) -> GraphResult:
        keys = self._cache_keys(graph)
        self._results = {key: result for key, result in self._results.items() if key in set(keys.values())}
        waiting = Counter(link.source for node in graph.nodes.values() for link in node.links.values())
        done = GraphResult()
        for node in graph.nodes.values():
            key = keys[node.id]
            result = self._results.get(key)
            if result is None:
                self.host.check_interrupt()
                result = self._results[key] = self._run_node(graph, node, keys)
                done.executed.append(node.id)
            else:
                done.cached.append(node.id)
            if result.ui:
                done.ui[node.id] = result.ui
                done.images += [self._path(image) for image in result.ui.get("images", ())]
            if not self._keep:
                self._drop_used_up(node, keys, waiting)
        return done

    def _run_node(self, graph: Graph, node: GraphNode, keys: Mapping[str, str]) -> NodeResult:
        lists: dict[str, Any] = {}
        for name, value in node.inputs.items():
            made = self._results[keys[value.source]].values[value.slot] if isinstance(value, Link) else value
            lists[name] = made if isinstance(made, Several) else [made]
        jobs = [lists] if node.schema.takes_lists else jobs_of(lists)
        return _as_several(node.schema, [self._run_once(graph, node, inputs) for inputs in jobs])

    def _run_once(self, graph: Graph, node: GraphNode, inputs: dict[str, Any]) -> NodeResult:
        with torch.inference_mode():
            if node.schema.id in IMAGE_NODES:
                return image_bodies(self.folders, graph.prompt)[node.schema.id](**inputs)
            run = run_node_on_lists if node.schema.takes_lists else run_node
            result = run(node.schema.id, self.state, self.host.observer(node.id), inputs)
            if result.shown is None:
                return result
            files = save_images(self.folders.preview, result.shown, "preview", graph.prompt, kind="temp")
            return replace(result, ui={**result.ui, **files.ui})

    def _drop_used_up(self, node: GraphNode, keys: Mapping[str, str], waiting: Counter[str]) -> None:
        for link in node.links.values():
            waiting[link.source] -= 1
        for node_id in {node.id, *(link.source for link in node.links.values())}:
            if not waiting[node_id]:
                self._results.pop(keys[node_id], None)

    def _cache_keys(self, graph: Graph) -> dict[str, str]:
        """A digest of what each result depends on: class, constants, fingerprint, the same of all ancestors; no ids.

        Without a cache every node has a key of its own and runs each time.
        """
        if not self._keep:
            return {node_id: node_id for node_id in graph.nodes}
        keys: dict[str, str] = {}
        for node in graph.nodes.values():
            inputs = [
                (name, "link", keys[value.source], value.slot) if isinstance(value, Link) else (name, _constant(value))
                for name, value in sorted(node.inputs.items())
            ]
            parts = repr((node.schema.id, _constant(self._fingerprint(node)), inputs))
            keys[node.id] = hashlib.sha256(parts.encode()).hexdigest()
        return keys

    def _fingerprint(self, node: GraphNode) -> Any:
        constants = node.constants
        if node.schema.id == LOAD_IMAGE.id:
            return None if constants["image"] is None else image_fingerprint(self.folders.input, constants["image"])
        return fingerprint(node.schema.id, self.state, constants)

    def _options(self, schema: NodeSchema, spec: Input) -> list[str] | None:
        """What a combo allows. Pictures are looked for when they are read, with a better sentence."""
        if not isinstance(spec.options, str):
            return list(spec.options)
        return None if schema.id == LOAD_IMAGE.id else self.state.choices(spec.options)

    def _path(self, image: Mapping[str, str]) -> Path:
        folder = self.folders.output if image["type"] == "output" else self.folders.preview
        return folder / image["subfolder"] / image["filename"]


def _as_several(schema: NodeSchema, results: Sequence[NodeResult]) -> NodeResult:
    """One result of what a node gave in one run or more, where lists of values are `Several`; one value is itself."""
    columns: list[Any] = []
    for slot, output in enumerate(schema.outputs):
        given = [result.values[slot] for result in results]
        values = [value for each in given for value in each] if output.is_list else given
        columns.append(values[0] if len(values) == 1 else Several(values))
    return NodeResult(tuple(columns), ui=merged_ui(results))


def _constant(value: Any) -> str:
    """A text that tells constants apart, 1 and 1.0 too. NaN equals nothing, itself included, as in ComfyUI."""
    if isinstance(value, float) and math.isnan(value):
        return uuid.uuid4().hex
    return f"{type(value).__name__}:{json.dumps(value, sort_keys=True)}"
