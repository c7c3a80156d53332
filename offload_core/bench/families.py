"""The command ``families``: which models run in phases, found out by running a tiny one of every family."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _picture_files as files
from ..errors import InputError

if TYPE_CHECKING:
    from .._console import Terminal
    from .family_cells import FamilyRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``families``."""
    parser.add_argument(
        "--only", metavar="A,B", help="some of the families, by their names here; a wrong one lists all"
    )
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the page of all families here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows here")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Runs every row, shows each on stdout as it is done and progress on stderr, and writes what is asked for.

    Raises InputError for an unknown family, a file that can't be written, or a page of only some of the families.
    """
    if args.write is not None and args.only is not None:
        raise InputError("--write makes the page of all families; leave --only out, or write --json.")
    for file in (args.write, args.json):
        if file is not None:
            files.check_writable(file)
    rows = _rows(args.only.split(",") if args.only else None, terminal)
    pages = []
    if args.write is not None:
        from ..tiny_models.roster import LEFT_OUT
        from .families_table import page

        pages.append((args.write, files.text_writer(page(rows, LEFT_OUT))))
    if args.json is not None:
        found = {"rows": [row.to_dict() for row in rows]}
        pages.append((args.json, files.text_writer(json.dumps(found, indent=2) + "\n")))
    for path in files.write_files(pages):
        terminal.say(f"Wrote {path}")


def _rows(names: list[str] | None, terminal: Terminal) -> list[FamilyRow]:
    from .families_table import summary_line
    from .family_cases import family_cases
    from .family_cells import family_row

    cases, rows = family_cases(names), []
    with tempfile.TemporaryDirectory(prefix="phase-offload-families-") as home:
        for number, case in enumerate(cases, 1):
            terminal.note(f"{number} of {len(cases)}: {case}")
            rows.append(family_row(case, Path(home), terminal.check_interrupt))
            terminal.say(summary_line(rows[-1]))
    return rows
