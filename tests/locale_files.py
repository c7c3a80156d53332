"""The nodes' texts as ComfyUI's translation files have them, made from the schemas and one list of phrases a language.

    python tests/locale_files.py

writes every locales/<language>/nodeDefs.json anew from the schemas and from locales/<language>.json, which has a
translation for each English phrase; and says which phrases have none, or aren't used any more. So a phrase that was
changed in English can't keep an old translation. Names of inputs and outputs stay as they are: messages and help pages
call them by these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phase_offload_nodes.catalog import NODES
from phase_offload_nodes.schema import NodeSchema

LOCALES = Path(__file__).parents[1] / "locales"
LANGUAGES = ("en", "zh", "ja", "ko", "de", "fr", "es", "ru")
FILES = ("nodeDefs.json", "main.json", "settings.json", "commands.json")

Tree = dict[str, Any]


def node_texts(language: str) -> Tree:
    """What locales/<language>/nodeDefs.json has to be. A phrase without a translation stays English."""
    phrases = {} if language == "en" else read(f"{language}.json")
    return {node.schema.id: translated(_texts(node.schema), phrases) for node in NODES.values()}


def english_phrases() -> set[str]:
    """Everything that the nodes say in their texts."""
    return {text for _, text in texts(node_texts("en"))}


def _texts(node: NodeSchema) -> Tree:
    return {
        "display_name": node.display_name,
        "description": node.description,
        "inputs": {spec.name: {"tooltip": spec.tooltip} for spec in node.inputs},
        "outputs": {str(slot): {"tooltip": out.tooltip} for slot, out in enumerate(node.outputs)},
    }


def translated(tree: Mapping[str, Any], phrases: Mapping[str, str]) -> Tree:
    return {
        key: translated(value, phrases) if isinstance(value, Mapping) else phrases.get(value, value)
        for key, value in tree.items()
    }


def read(name: str) -> Tree:
    """A file of the locales folder."""
    return json.loads((LOCALES / name).read_text("utf-8"))


def texts(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a file with its place in it, such as PhaseOffloadLoad/inputs/model/tooltip."""
    for key, value in tree.items():
        place = f"{above}/{key}" if above else key
        if isinstance(value, Mapping):
            yield from texts(value, place)
        else:
            yield place, value


def main() -> None:
    for language in LANGUAGES:
        text = json.dumps(node_texts(language), ensure_ascii=False, indent=2) + "\n"
        (LOCALES / language / "nodeDefs.json").write_text(text, "utf-8")
    for language in LANGUAGES[1:]:
        for phrase in sorted(english_phrases() ^ set(read(f"{language}.json"))):
            print(f"{language}.json: {'missing' if phrase in english_phrases() else 'not used'}: {phrase}")


if __name__ == "__main__":
    main()
