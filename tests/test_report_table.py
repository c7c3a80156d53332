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


STREAMED = {"streamed_bytes": int(12.3 * 2**30), "device_budget_bytes": 6 * 2**30, "stall_s": 0.8}


def test_a_phase_that_streamed_says_how_much_inside_what_and_how_long_it_waited():
    table = render(
        [phase("encode", device="cuda:0"), phase("denoise", device="cuda:0", **STREAMED, notes=("A note.",))]
    )
    assert table.splitlines()[-4:] == [
        "encode ran transformer 20x",
        "denoise ran transformer 20x",
        "denoise streamed 12.3 GiB of weights within 6.0 GiB on cuda:0 and waited 0.80 s for them",
        "denoise: A note.",
    ]


def test_a_phase_within_its_budget_says_nothing_of_streaming():
    assert "streamed" not in render([phase("denoise", device_budget_bytes=6 * 2**30)])


def test_a_budget_that_nobody_could_tell_is_not_named():
    table = render([phase("denoise", device="mps:0", **STREAMED | {"device_budget_bytes": 1 << 62})])
    assert table.splitlines()[-1] == "denoise streamed 12.3 GiB of weights on mps:0 and waited 0.80 s for them"


def test_streaming_keeps_the_tables_columns_and_width():
    table = render([phase("a phase of a long name", device="cuda:12", **STREAMED)])
    assert max(len(line) for line in table.splitlines()) <= WIDTH
    assert table.splitlines()[0].split() == render([phase("denoise")]).splitlines()[0].split()


def test_json_has_what_was_streamed():
    (values,) = RunReport([phase("denoise", **STREAMED, reserved_peak_bytes=5 * 2**30)]).to_dict()["phases"]
    assert values["streamed_bytes"] == STREAMED["streamed_bytes"]
    assert (values["device_budget_bytes"], values["reserved_peak_bytes"], values["stall_s"]) == (6 << 30, 5 << 30, 0.8)


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
