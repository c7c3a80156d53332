"""docs/families.md, written from rows: a table of marks, and below it what is said about those that aren't plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .family_cells import CHECKS, Cell, FamilyRow

HEADS = {
    "staged": "staged = one run",
    "streamed": "streamed at 40 %",
    "planned": "plan \u2265 measured",
    "lora": "LoRA",
    "cancelled": "cancel",
}

INTRODUCTION = """\
# Families

Which models run in phases, and what was tried with each. This page is written by a command, and every cell is a run:

    phase-offload families --write docs/families.md
    phase-offload families --only flux,qwen_image --json rows.json

Each row makes a tiny model of its family with random weights (`offload_core/tiny_models/`), runs its pipeline whole in
float32 on the CPU, and compares with that. A tiny model has the classes, the options and the oddities of the real one,
and few small blocks. So the table says that the code of a family runs in phases; what the real weights take, or what
their pictures look like, it doesn't say.

| column | yes means |
|---|---|
| staged = one run | encode, denoise and decode one after another give the bits of the whole pipeline |
| streamed at 40 % | so they do with the denoiser in a budget of 40 % of its weights, the rest streamed |
| plan \u2265 measured | in 1.3 times the least budget no phase takes more than planned (activations: counted apart) |
| LoRA | a LoRA on the denoiser changes the result, to the bits of diffusers' `load_lora_weights` |
| cancel | an interrupt in the middle of each phase gives every byte back, and the next run has the same bits |
"""


def page(rows: Sequence[FamilyRow], left_out: Mapping[str, str]) -> str:
    """The whole page. left_out: name -> the sentence that says why there is no row."""
    notes: dict[str, int] = {}
    lines = [_line(row, notes) for row in rows]
    parts = [INTRODUCTION, _summary(rows), "\n".join([*_head(), *lines])]
    if notes:
        parts.append("\n".join(f"{number}. {says}" for says, number in notes.items()))
    if left_out:
        parts.append("## What has no row\n\n" + "\n".join(f"- **{name}**: {says}" for name, says in left_out.items()))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def summary_line(row: FamilyRow) -> str:
    """A row in one line for a terminal: its marks, and what is said of those that aren't yes."""
    marks = ", ".join(f"{HEADS[name]}: {row.cells[name].mark}" for name in CHECKS)
    says = [f"    {HEADS[name]}: {row.cells[name].says}" for name in CHECKS if row.cells[name].says]
    return "\n".join([f"{row.title}, {row.task}: {marks}", *says])


def _summary(rows: Sequence[FamilyRow]) -> str:
    families, cells = {row.title for row in rows}, [cell for row in rows for cell in row.cells.values()]
    counts = {mark: sum(cell.mark == mark for cell in cells) for mark in ("yes", "no", "-")}
    return (
        f"{len(families)} families, {len(rows)} tasks, {len(cells)} cells: {counts['yes']} yes, {counts['no']} no, "
        f"{counts['-']} where there is nothing to check."
    )


def _head() -> list[str]:
    names = ["family", "task", "pipeline", *(HEADS[name] for name in CHECKS)]
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def _line(row: FamilyRow, notes: dict[str, int]) -> str:
    """notes: every sentence so far with its number; new ones are added."""
    cells = [_mark(row.cells[name], notes) for name in CHECKS]
    return "| " + " | ".join([row.title, row.task, f"`{row.pipeline}`", *cells]) + " |"


def _mark(cell: Cell, notes: dict[str, int]) -> str:
    if not cell.says:
        return cell.mark
    number = notes.setdefault(cell.says, len(notes) + 1)
    return f"{cell.mark} ({number})"
