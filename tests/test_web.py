"""What the pack gives ComfyUI's page: its scripts, and its texts in eight languages, complete and of one source."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from locale_files import FILES, LANGUAGES, LOCALES, english_phrases, node_texts, read, texts
from phase_offload_nodes.defaults import PRESET_NAMES, Defaults
from phase_offload_nodes.routes import ROUTES

WEB = Path(__file__).parents[1] / "web"
SCRIPTS = {path.name: path.read_text("utf-8") for path in sorted(WEB.glob("*.js"))}
SPECIAL = re.compile(r"[{}@|]")  # ComfyUI's translations read these as instructions
PLACEHOLDER = re.compile(r"\{\w+\}")
FORBIDDEN = ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "new Function", "window.", "http:", "https:")

# Keys that the panel looks up by what the server says.
OUTCOMES = {"running", "done", "failed", "interrupted"}
PHASES = {"encode", "denoise", "decode"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_is_translated_from_what_its_schema_says_now(language: str) -> None:
    """`python tests/locale_files.py` writes the files anew and names the phrases that lack a translation."""
    assert read(f"{language}/nodeDefs.json") == node_texts(language)
    if language != "en":
        assert set(read(f"{language}.json")) == english_phrases()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("file", FILES)
def test_every_language_has_the_texts_of_english(language: str, file: str) -> None:
    own, english = dict(texts(read(f"{language}/{file}"))), dict(texts(read(f"en/{file}")))
    assert own.keys() == english.keys()
    for place, text in own.items():
        assert text.strip() == text != "", place
        placeholders = set(PLACEHOLDER.findall(text))
        assert placeholders == set(PLACEHOLDER.findall(english[place])), place
        assert not SPECIAL.search(PLACEHOLDER.sub("", text)), place
        assert not placeholders or file == "main.json", place


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_translations_are_translated(language: str) -> None:
    """But for words that are the same in both languages."""
    same = [phrase for phrase, own in read(f"{language}.json").items() if phrase == own]
    assert same == []
    page, english = (read(f"{each}/main.json")["phaseOffload"] for each in (language, "en"))
    assert len([key for key in page if page[key] == english[key]]) <= 3


def test_locales_hold_nothing_else() -> None:
    expected = {f"{language}/{file}" for language in LANGUAGES for file in FILES}
    expected |= {f"{language}.json" for language in LANGUAGES[1:]}
    assert {path.relative_to(LOCALES).as_posix() for path in LOCALES.rglob("*") if path.is_file()} == expected


def test_panel_has_a_text_for_everything_it_says_and_no_other() -> None:
    said = {key for script in SCRIPTS.values() for key in re.findall(r'say\("(\w+)"', script)}
    said |= {key for script in SCRIPTS.values() for key in re.findall(r'key: "(\w+)"', script)}
    said |= {key for pair in re.findall(r'say\(\w+ \? "(\w+)" : "(\w+)"', SCRIPTS["panel.js"]) for key in pair}
    assert said | OUTCOMES | PHASES == set(read("en/main.json")["phaseOffload"])


def test_settings_of_the_page_are_those_of_the_server() -> None:
    script = SCRIPTS["sidebar.js"]
    found = re.findall(r'setting\("(\w+)", "(\w+)", "([^"]+)", "\w+", ("\w+"|false|true),', script)
    assert {field: json.loads(default) for field, _, _, default in found} == asdict(Defaults())
    assert {f"PhaseOffload_{name}": label for _, name, label, _ in found} == {
        key: value["name"] for key, value in read("en/settings.json").items()
    }
    (presets,) = re.findall(r"const PRESETS = (\[.*?\]);", script, re.DOTALL)
    assert tuple(json.loads(presets.replace(",\n]", "\n]"))) == PRESET_NAMES


def test_commands_of_the_page_are_translated() -> None:
    found = re.findall(r'\{ id: "PhaseOffload\.(\w+)", label: "([^"]+)"', SCRIPTS["sidebar.js"])
    assert {f"PhaseOffload_{name}": {"label": label} for name, label in found} == read("en/commands.json")


def test_page_asks_only_for_routes_that_are_there() -> None:
    asked = set(re.findall(r'(get|post)\("(/\w+)"', SCRIPTS["sidebar.js"]))
    assert asked == {(route.method.lower(), route.path.removeprefix("/phase_offload")) for route in ROUTES}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_keep_to_their_place(name: str) -> None:
    """No HTML from texts, no code from texts, nothing global, nothing from elsewhere, text that every Windows reads."""
    script = SCRIPTS[name]
    assert [word for word in FORBIDDEN if word in script.replace('"http://www.w3.org/2000/svg"', "")] == []
    script.encode("cp1252")
    assert re.findall(r'name: "(.+)",', script) in ([], ["phaseoffload.sidebar"], ["phaseoffload.tables"])
    imports = re.findall(r'from "(.+)";', script)
    assert all(path.startswith(("../../scripts/ap", "./")) for path in imports)


def test_styles_of_the_panel_touch_nothing_else() -> None:
    (css,) = re.findall(r"textContent = `(.*?)`;", SCRIPTS["panel.js"], re.DOTALL)
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", css) for part in rule.split(",")]
    assert selectors and all(selector.startswith(".po-") for selector in selectors)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_javascript(name: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js isn't installed")
    command = [node, "--input-type=module", "--check"]
    done = subprocess.run(command, input=SCRIPTS[name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
