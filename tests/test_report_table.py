"""The report's table is plain text of bounded width with units a person reads."""

from __future__ import annotations

import pytest

from offload_core._report_table import WIDTH, human_bytes, human_seconds, render
from offload_core.report import PhaseReport, RunReport


def phase(name: str, **changes: object) -> PhaseReport:
    values: dict = {
        "name": name,
        "wall_s": 1.5,
        "load_s": 0.25,
        "weight_bytes": 3 * 2**20,
        "device_peak_bytes": 0,
        "host_peak_bytes": 2**30,
        "bytes_read": 2**20,
        "leaked_bytes": 0,
        "forwards": {"transformer": 20},
    }
    return PhaseReport(**(values | changes))


def test_table_has_a_row_per_phase_and_a_row_of_totals():
    table = RunReport([phase("encode"), phase("denoise", host_peak_bytes=3 * 2**30)]).table()
    lines = table.splitlines()
    first_words = [line.split()[0] for line in lines if line[:1].isalpha()]
    assert first_words == ["phase", "encode", "denoise", "all", "encode", "denoise"]
    total = lines[-3]
    assert "3.00 s" in total and "0.50 s" in total and "6.0 MiB" in total and "3.0 GiB" in total
    assert lines[-1] == "denoise ran transformer 20x"


def test_table_is_plain_text_within_its_width():
    many = {f"text_encoder_{i}": 1000 for i in range(4)}
    notes = ("The decode ran out of memory and was done in tiles.",)
    table = render([phase("decode", forwards=many, device="cuda:0", device_peak_bytes=2**34, notes=notes)])
    assert "\x1b" not in table
    assert max(len(line) for line in table.splitlines()) <= WIDTH
    assert table.splitlines()[-1] == f"decode: {notes[0]}"


def test_table_of_nothing_says_so():
    assert RunReport().table() == "No phase has run."


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (812, "812 B"), (2**20, "1.0 MiB"), (2**30 - 1, "1.0 GiB"), (int(22.2 * 2**30), "22.2 GiB")],
)
def test_bytes_have_binary_units(count: int, text: str):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.081, "0.08 s"), (74.24, "74.2 s"), (725.4, "12:05 min")])
def test_seconds_stay_short(seconds: float, text: str):
    assert human_seconds(seconds) == text
