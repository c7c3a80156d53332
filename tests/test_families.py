"""The table of families: every row of docs/families.md is a run, and the page has a row for every family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.bench import families_table, family_cells, family_loras
from offload_core.bench.family_cases import FamilyCase, family_cases
from offload_core.bench.family_cells import CHECKS, Cell, FamilyRow, family_row
from offload_core.cli import main
from offload_core.errors import InputError
from offload_core.phases import load
from offload_core.report import PhaseReport
from offload_core.session import Session
from offload_core.tiny_models import FAMILIES, VARIANTS, load_tiny
from offload_core.tiny_models.roster import LEFT_OUT, ORDER
from staging import tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
CASES = {str(case): case for case in family_cases()}


def nothing() -> None:
    """A poll that never interrupts."""


def row(title: str = "FLUX", **cells: Cell) -> FamilyRow:
    return FamilyRow("flux", title, "edit", "FluxPipeline", dict.fromkeys(CHECKS, Cell("yes")) | cells)


# ------------------------------------------------------------------------------------------------ the runs


@pytest.mark.parametrize(
    "name",
    [name if name == "Chroma, text to image" else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_family_runs_in_phases_as_its_row_of_the_page_says(name: str, tmp_path: Path) -> None:
    found = family_row(CASES[name], tmp_path, nothing)
    written = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {found.title} | {found.task} |")
    ]
    assert len(written) == 1
    marks = [re.sub(r" \(\d+\)$", "", part.strip()) for part in written[0].strip("|").split("|")[3:]]
    assert marks == [found.cells[check].mark for check in CHECKS]


def test_what_goes_wrong_is_a_cell_and_the_other_checks_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Run:
        """Its phases give other bits than the whole pipeline, its plan and its LoRA break."""

        def __init__(self, *_: Any) -> None:
            self.staged = self.streamed = self.cancelled = lambda: Cell("no", "The bits differ.")

        def planned(self) -> Cell:
            raise RuntimeError("out of order")

        lora = planned

    monkeypatch.setattr(family_cells, "_Run", Run)
    cells = family_row(CASES["Chroma, text to image"], tmp_path, nothing).cells
    assert list(cells) == list(CHECKS)
    assert cells["planned"] == cells["lora"] == Cell("no", "RuntimeError: out of order")
    assert cells["staged"] == cells["streamed"] == cells["cancelled"] == Cell("no", "The bits differ.")


def test_other_bits_leaked_bytes_and_phases_that_cant_be_stopped_are_no(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = CASES["Stable Diffusion 1.5, text to image"].made(tmp_path)
    handle = load(asked.folder, device="cpu", settings=family_cells.SETTINGS)
    run = family_cells._Run(asked, handle, tmp_path, nothing)
    right, run.expected = run.expected, (run.expected[0] + 1e-6,)
    assert run.staged() == Cell("no", "The bits differ from those of one run.")
    run.expected = right
    assert run.staged() == Cell("yes")
    run.polls = dict.fromkeys(run.polls, 10**9)  # an interrupt that never comes
    assert run.cancelled() == Cell("no", "An interrupt in encode stops nothing.")
    session = Session()
    session.report.phases.append(PhaseReport("denoise", 1.0, 0.0, 8, 0, 0, 8, leaked_bytes=4))
    assert family_cells._leaked(session) == Cell("no", "4 bytes of denoise are still held by something.")


def test_a_model_that_cant_be_made_is_a_row_of_no(tmp_path: Path) -> None:
    case = FamilyCase("sd15", "SD", "edit", None, {"prompt": "a star", "no_such_argument": 1})
    found = family_row(case, tmp_path, nothing)
    assert {cell.mark for cell in found.cells.values()} == {"no"}
    assert "no_such_argument" in found.cells["staged"].says


def test_a_lora_changes_four_layers_of_the_attention(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pipeline = load_tiny(tiny_model("sd15"), dtype=torch.float32)
    keys = load_file(family_loras.write_lora(pipeline, tmp_path / "lora.safetensors"))
    layers = {key.partition(".lora_")[0] for key in keys}
    assert len(layers) == family_loras.LAYERS
    assert all(layer.startswith("unet.") and layer.rpartition(".")[2] in family_loras.ATTENTION for layer in layers)


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_has_a_row_for_every_family_and_task_in_their_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `\w+` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [f"{title}, {task}" for title, task in rows] == list(CASES)


def test_every_family_with_a_title_and_every_call_of_its_folder_is_a_row() -> None:
    assert {case.family for case in CASES.values()} == {name for name, family in FAMILIES.items() if family.title}
    tasks = {(case.family, case.task) for case in CASES.values()}
    listed = [row for row in VARIANTS.values() if FAMILIES[row.family].title]
    assert all((row.family, row.task) in tasks for row in listed)
    assert set(ORDER) <= set(FAMILIES)
    assert len(set(ORDER)) == len(ORDER)
    assert all(says.endswith(".") for says in LEFT_OUT.values())


def test_a_remark_is_written_once_and_found_by_its_number() -> None:
    says = "There is no loader."
    rows = [row(lora=Cell("-", says)), row("SD", lora=Cell("-", says), staged=Cell("no", "It breaks."))]
    text = families_table.page(rows, {"Old": "It is gone."})
    assert "| FLUX | edit | `FluxPipeline` | yes | yes | yes | - (1) | yes |" in text
    assert "| SD | edit | `FluxPipeline` | no (2) | yes | yes | - (1) | yes |" in text
    assert "1. There is no loader.\n2. It breaks.\n" in text
    assert "- **Old**: It is gone.\n" in text
    assert "2 families, 2 tasks, 10 cells: 7 yes, 1 no, 2 where" in text


# --------------------------------------------------------------------------------------------- the command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows without runs. Which were asked for is in the list."""
    asked: list[str] = []

    def quick_row(case: FamilyCase, home: Path, poll: Any) -> FamilyRow:
        asked.append(str(case))
        return FamilyRow(case.family, case.title, case.task, "P", dict.fromkeys(CHECKS, Cell("yes")))

    monkeypatch.setattr(family_cells, "family_row", quick_row)
    return asked


def test_the_command_writes_the_page_of_all_rows(quick: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["families", "--write", str(tmp_path / "page.md"), "--json", str(tmp_path / "rows.json")]) == 0
    assert quick == list(CASES)
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == len(CASES)
    text = (tmp_path / "page.md").read_text("utf-8")
    assert all(f"| {case.title} | {case.task} |" in text for case in CASES.values())
    assert f"1 of {len(CASES)}: {next(iter(CASES))}" in capsys.readouterr().err


def test_only_some_families_are_run_and_are_no_page(quick: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["families", "--only", "chroma"]) == 0
    assert {CASES[name].family for name in quick} == {"chroma"}
    assert main(["families", "--only", "chroma", "--write", str(tmp_path / "page.md")]) == InputError.exit_code
    assert main(["families", "--only", "chrome"]) == InputError.exit_code
    assert "no family 'chrome' here; the families are sd15" in capsys.readouterr().err.replace("\n", " ")


def test_ctrl_c_ends_the_run_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    def interrupted(case: FamilyCase, home: Path, poll: Any) -> FamilyRow:
        raise KeyboardInterrupt

    monkeypatch.setattr(family_cells, "family_row", interrupted)
    assert main(["families", "--write", str(tmp_path / "page.md")]) == 130
    assert list(tmp_path.iterdir()) == []
