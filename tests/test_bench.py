"""``phase-offload bench offload`` at tiny sizes: that it measures what it says, never how fast anything is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.bench import offload, process, table
from offload_core.bench.floor import floor_s, measure_floor
from offload_core.bench.job import Job, Row
from offload_core.bench.memory_limit import MemoryGroup, NoMemoryLimit
from offload_core.bench.model import (
    MARK,
    drop_from_page_cache,
    flux_like,
    make_model,
    mark_matches,
    model_class,
    step_inputs,
    weight_bytes,
    weight_files,
)
from offload_core.errors import InputError

SIZE = 12 << 20


class Quiet:
    """A terminal that keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return make_model(flux_like(SIZE), home / "flux")


def bench(home: Path, *options: str) -> tuple[dict[str, Any], str]:
    parser = argparse.ArgumentParser()
    offload.add_arguments(parser)
    result = home / "result.json"
    common = ["--model-dir", str(home), "--size", str(SIZE), "--device", "cpu", "--json", str(result)]
    terminal = Quiet()
    offload.run(parser.parse_args([*common, "--steps", "1", "--tokens", "16", "8", *options]), terminal)  # type: ignore[arg-type]
    return json.loads(result.read_text()), "\n".join(terminal.said)


# ----------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("size", [8 << 20, 64 << 20, 2 << 30])
def test_a_flux_like_model_has_about_the_size_it_was_asked_for(size: int) -> None:
    with torch.device("meta"):
        module = model_class("flux")(**flux_like(size).config)
    made = 2 * sum(parameter.numel() for parameter in module.parameters())
    assert 0.5 * size < made < 1.6 * size


def test_the_made_model_loads_with_nothing_missing_and_gives_finite_values(folder: Path) -> None:
    module, info = model_class("flux").from_pretrained(folder, torch_dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        output = module(**step_inputs("flux", module.config, "cpu", 16, 8))[0]
    assert output.isfinite().all()
    assert output.float().std() > 0.01


def test_the_model_is_written_in_shards_that_the_index_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_core.bench.model.SHARD_BYTES", 2 << 20)
    made = make_model(flux_like(SIZE), home / "sharded")
    index = json.loads(next(made.glob("*.index.json")).read_text())
    assert len(weight_files(made)) > 2
    assert {file.name for file in weight_files(made)} == set(index["weight_map"].values())
    model_class("flux").from_pretrained(made)


def test_a_model_that_is_there_is_used_again_and_a_changed_one_is_made_again(home: Path) -> None:
    spec = flux_like(SIZE)
    made = make_model(spec, home / "again")
    first = weight_files(made)[0]
    stamp, content = first.stat().st_mtime_ns, first.read_bytes()
    make_model(spec, made)
    assert first.stat().st_mtime_ns == stamp

    first.write_bytes(content[:-2])
    assert not mark_matches(spec, made)
    make_model(spec, made)
    assert first.read_bytes() == content


def test_an_unfinished_model_is_not_taken_for_a_finished_one(home: Path) -> None:
    made = make_model(flux_like(SIZE), home / "unfinished")
    (made / MARK).write_text(json.dumps({"state": "unfinished"}))
    assert not mark_matches(flux_like(SIZE), made)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear")
    with pytest.raises(InputError, match="give another --model-dir"):
        make_model(flux_like(SIZE), tmp_path)
    assert (tmp_path / "diary.txt").read_text() == "dear"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts disk reads with /proc")
def test_dropped_files_come_from_the_disk_again(folder: Path) -> None:
    def read() -> int:
        before = process.disk_read_bytes()
        for file in weight_files(folder):
            file.read_bytes()
        after = process.disk_read_bytes()
        assert before is not None
        assert after is not None
        return after - before

    drop_from_page_cache(folder)
    cold, warm = read(), read()
    if cold == 0:
        pytest.skip("the temporary folder is in memory")
    assert cold >= 0.9 * weight_bytes(folder)
    assert warm < 0.1 * weight_bytes(folder)


# ------------------------------------------------------------------------------------------ the whole command


@pytest.mark.slow
def test_every_way_that_runs_gives_the_bits_of_the_resident_twin(home: Path, folder: Path) -> None:
    ways = ["resident", "mmap", "group_block", "group_leaf_disk", "accelerate_disk"]
    result, said = bench(home, "--ways", *ways, "--cases", "a", "--no-micro")
    rows = {row["way"]: row for row in result["rows"]}
    assert set(rows) == set(ways)
    assert {way: row["status"] for way, row in rows.items()} == dict.fromkeys(ways, "ok")
    assert all(row["same_bits"] and row["same_sum"] for row in rows.values())
    assert rows["resident"]["extra_disk_bytes"] == rows["mmap"]["extra_disk_bytes"] == 0
    for way in ("group_leaf_disk", "accelerate_disk"):
        assert rows[way]["extra_disk_bytes"] >= 0.9 * result["model_bytes"]
    assert result["summary"]["cases"]["a"]["best_peer"] in set(ways) - {"resident"}
    assert result["summary"]["cases"]["a"]["ours_to_floor"] is None
    assert "diffusers group, leaf, disk" in said
    assert not list(home.glob("scratch-*"))


@pytest.mark.slow
def test_a_way_that_cannot_be_imported_is_a_row_with_the_reason(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diffusers_dynamic_offloader.py").write_text("raise ImportError('not today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result, said = bench(home, "--ways", "ddo", "--cases", "a", "--no-micro")
    (row,) = result["rows"]
    assert row["status"] == "skipped"
    assert "not today" in row["reason"]
    assert "not today" in said


@pytest.mark.slow
def test_a_way_that_dies_is_a_row_and_the_next_way_still_runs(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diffusers_dynamic_offloader.py").write_text("import os, signal; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result, _ = bench(home, "--ways", "ddo", "mmap", "--cases", "a", "--no-micro")
    died, mapped = result["rows"]
    assert died["status"] == "failed"
    assert "ended with" in died["reason"]
    assert mapped["status"] == "ok"


def test_a_way_that_takes_too_long_is_a_row_with_the_reason() -> None:
    answer = offload.answer_of([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert answer["status"] == "failed"
    assert "not done" in answer["reason"]


def test_unknown_cases_and_no_steps_are_input_errors(home: Path) -> None:
    with pytest.raises(InputError, match="b60"):
        bench(home, "--cases", "zz")
    with pytest.raises(InputError, match="--steps"):
        bench(home, "--steps", "0")


@pytest.mark.parametrize(("text", "value"), [("2G", 2 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("77", 77)])
def test_sizes_are_read_with_their_unit(text: str, value: int) -> None:
    assert offload.parse_size(text) == value


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2G"):
        offload.parse_size("big")


# ------------------------------------------------------------------------------------------- memory limits


def limited(limit: int) -> MemoryGroup:
    try:
        return MemoryGroup(limit)
    except NoMemoryLimit as error:
        pytest.skip(str(error))


HOG = "data = bytearray({size})\nprint(len(data))"


def test_a_process_within_its_limit_runs_and_its_peak_is_counted() -> None:
    with limited(200 << 20) as group:
        command = group.wrap([sys.executable, "-S", "-c", HOG.format(size=50 << 20)])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == str(50 << 20)
        assert group.kills() == 0
        peak = group.peak_bytes()
        assert peak is None or 50 << 20 <= peak <= 200 << 20
    assert not group.folder.exists()


def test_a_process_over_its_limit_is_killed_and_counted() -> None:
    with limited(50 << 20) as group:
        command = group.wrap([sys.executable, "-S", "-c", HOG.format(size=200 << 20)])
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
        assert group.kills() == 1


@pytest.mark.slow
def test_without_a_group_a_limited_case_is_skipped_with_the_reason(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_core.bench.memory_limit._own_groups", lambda: iter(()))
    result, _ = bench(home, "--ways", "mmap", "--cases", "b60", "--no-micro")
    (row,) = result["rows"]
    assert row["status"] == "skipped"
    assert "this system has none" in row["reason"]


# ------------------------------------------------------------------------------------------ floor and ratios


def test_the_floor_is_the_slower_of_compute_and_reads() -> None:
    floor = {"compute_s": 0.5, "read_beside": 1e9, "cached_beside": 4e9}
    assert floor_s(floor, int(0.2e9)) == 0.5
    assert floor_s(floor, int(2e9)) == 2.0
    assert floor_s(floor, int(4e9), cached=True) == 1.0


def test_the_floor_is_measured_with_reads_beside_the_models_own_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_core.bench.floor.ALONE_S", 0.02)
    floor = measure_floor(Job("", "flux", str(folder), steps=1, image_tokens=16, text_tokens=8))
    assert floor["compute_s"] > 0
    assert min(floor["read_alone"], floor["read_beside"], floor["cached_beside"]) > 0


def test_the_summary_compares_ours_with_floor_best_peer_and_resident() -> None:
    ours = Row("b60", "ours", step_s=1.0, floor_s=0.8, extra_disk_bytes=0, budget_bytes=100, limit_bytes=200)
    ours.private_peak_bytes, ours.baseline_private_bytes, ours.group_peak_bytes = 120, 20, 150
    rows = [
        ours,
        Row("b60", "mmap", step_s=4.0),
        Row("b60", "ddo", step_s=2.0),
        Row("b60", "mmgp", "failed", step_s=0.1),
    ]
    summary = offload.summarise(rows, {"compute_s": 0.5}, 1000)["cases"]["b60"]
    assert summary["best_peer"] == "ddo"
    assert summary["ours_to_best_peer"] == 0.5
    assert summary["ours_to_floor"] == 1.25
    assert summary["ours_to_resident"] == 2.0
    assert summary["private_growth_to_budget"] == 1.0
    assert summary["group_peak_to_limit"] == 0.75


def test_a_row_that_differs_in_bits_only_says_so() -> None:
    twin = Row("a", "resident", output_sum=1.0, output_digest="x")
    row = Row("a", "mmap", output_sum=1.0, output_digest="y", step_s=1.0)
    offload._compare(row, twin)
    assert row.same_sum
    assert not row.same_bits
    assert " sum " in table.render("case", [row], 1.0)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_private_memory_counts_what_no_file_backs() -> None:
    before = process.private_bytes()
    with process.PrivatePeak() as peak:
        held = b"x" * (64 << 20)
    assert peak.highest - before >= 60 << 20
    del held
