"""The machine's rates are measured once, kept in a file that a person may edit, and never stand in the way."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from offload_core import rates
from offload_core.known import known_machine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "others_busy_s", lambda: 0.0)


def test_a_measurement_gives_figures_of_the_right_size(tmp_path: Path) -> None:
    found = rates.measure(CPU, tmp_path)
    assert set(found.flops) == {"float32", "bfloat16", "float16"}
    assert all(1e7 < rate < 1e15 for rate in found.flops.values())
    assert 1e7 < found.disk_bytes_per_s < 1e12 and 1e7 < found.cached_bytes_per_s < 1e12
    assert 1e-8 < found.operator_s < 1e-2
    assert found.link_bytes_per_s is None
    assert list(tmp_path.iterdir()) == []


def test_rates_are_measured_once_and_an_edit_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    made = rates.rates_of(known_machine("rtx4060-8gb"))

    def measure(*_: object) -> rates.Rates:
        measured.append(1)
        return made

    monkeypatch.setattr(rates, "measure", measure)
    file = tmp_path / "cache" / "rates.json"
    assert rates.measured_rates(CPU, file=file) == rates.measured_rates(CPU, file=file) == made
    assert len(measured) == 1
    kept = json.loads(file.read_text("utf-8"))
    (key,) = kept
    kept[key]["disk_bytes_per_s"] = 123.0
    file.write_text(json.dumps(kept), "utf-8")
    assert rates.measured_rates(CPU, file=file).disk_bytes_per_s == 123.0
    assert len(measured) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', "KEY"])
def test_a_damaged_file_is_measured_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rates.rates_of(known_machine("rtx4060-8gb"))
    monkeypatch.setattr(rates, "measure", lambda *_: made)
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({rates.machine_key(CPU): {"other": 1}}) if content == "KEY" else content, "utf-8")
    assert rates.measured_rates(CPU, file=file) == made
    assert json.loads(file.read_text("utf-8"))[rates.machine_key(CPU)] == asdict(made)


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rates.rates_of(known_machine("rtx4060-8gb"))
    monkeypatch.setattr(rates, "measure", lambda *_: made)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert rates.measured_rates(CPU, file=blocked / "rates.json") == made


def test_rates_that_were_measured_beside_busy_programs_are_kept_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, measured = rates.rates_of(known_machine("rtx4060-8gb")), []
    monkeypatch.setattr(rates, "measure", lambda *_: measured.append(1) or made)
    busy = iter([0.0, 1e6, 0.0, 0.0])
    monkeypatch.setattr(rates, "others_busy_s", lambda: next(busy))
    file = tmp_path / "rates.json"
    for _ in range(2):
        assert rates.measured_rates(CPU, file=file) == made
    assert len(measured) == 1
    monkeypatch.setattr(rates.time, "time", lambda: 1e12)
    for _ in range(2):
        assert rates.measured_rates(CPU, file=file) == made
    assert len(measured) == 2
    assert json.loads(file.read_text("utf-8"))[rates.machine_key(CPU)] == asdict(made)
