"""Subgraph blueprints: a broken file of `subgraphs/` would greet every person of a newer ComfyUI with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phase_offload_nodes.catalog import NODES

FILES = sorted((Path(__file__).parents[1] / "subgraphs").glob("*.json"))
INPUT, OUTPUT = -10, -20  # ids of the subgraph's own ends
OPTIONAL = 7  # the shape of an input that may be left open


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def blueprint(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text("utf-8"))


def definition(blueprint: dict[str, Any]) -> dict[str, Any]:
    (only,) = blueprint["definitions"]["subgraphs"]
    return only


def test_there_is_one_node_of_one_subgraph_with_its_ends(blueprint: dict[str, Any]) -> None:
    (outer,), inner = blueprint["nodes"], definition(blueprint)
    assert blueprint["version"] == 0.4 and blueprint["links"] == []
    assert outer["type"] == inner["id"] and outer["title"] == inner["name"]
    for side in ("inputs", "outputs"):
        assert [(end["name"], end["type"]) for end in outer[side]] == [
            (end["name"], end["type"]) for end in inner[side]
        ]
    widgets = [entry["name"] for entry in outer["inputs"] if "widget" in entry]
    assert [name for _, name in outer["properties"]["proxyWidgets"]] == widgets
    assert len(outer["widgets_values"]) == len(widgets)


def test_nodes_inside_have_the_inputs_and_widgets_of_their_schemas(blueprint: dict[str, Any]) -> None:
    """What a schema has beyond them came later and is optional."""
    for node in definition(blueprint)["nodes"]:
        schema = NODES[node["type"]].schema
        known = schema.inputs[: len(node["inputs"])]
        assert [(entry["name"], entry["type"]) for entry in node["inputs"]] == [(s.name, s.type) for s in known]
        assert all(spec.optional for spec in schema.inputs[len(known) :])
        widgets = [spec for spec in known if spec.is_widget]
        assert len(node["widgets_values"]) == len(widgets) + sum(spec.control_after_generate for spec in widgets)
        assert [out["type"] for out in node["outputs"]] == [out.type for out in schema.outputs][: len(node["outputs"])]


def test_links_inside_join_ends_of_one_type(blueprint: dict[str, Any]) -> None:
    inner = definition(blueprint)
    nodes = {node["id"]: node for node in inner["nodes"]}
    links = {link["id"]: link for link in inner["links"]}
    assert len(links) == len(inner["links"])
    for link in links.values():
        start = inner["inputs"] if link["origin_id"] == INPUT else nodes[link["origin_id"]]["outputs"]
        end = inner["outputs"] if link["target_id"] == OUTPUT else nodes[link["target_id"]]["inputs"]
        origin, target = start[link["origin_slot"]], end[link["target_slot"]]
        assert origin["type"] == target["type"] == link["type"]
        assert link["id"] in (origin["linkIds"] if link["origin_id"] == INPUT else origin["links"])
        assert target.get("link") == link["id"] or link["id"] in target.get("linkIds", ())
    sockets = [entry for node in nodes.values() for entry in node["inputs"] if "widget" not in entry]
    required = [entry for entry in sockets if entry.get("shape") != OPTIONAL]
    assert all(entry["link"] in links for entry in required)
