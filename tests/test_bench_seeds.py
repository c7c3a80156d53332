"""``phase-offload bench seeds``: its arithmetic, and one run on a small model. Never how fast anything is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from offload_core.bench import seed_table, seeds
from offload_core.bench.pipeline_model import MARK, PipelineSpec, flux_pipeline, make_pipeline
from offload_core.bench.seed_ways import SEED_WAYS, STAGES, Watch
from offload_core.bench.seeds import SeedRow, compare, summarise
from offload_core.bench.swap_cost import _Rounds
from offload_core.errors import InputError

MIB = 1 << 20


class Quiet:
    """A terminal that keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        pass


def bench(*options: str) -> str:
    parser, terminal = argparse.ArgumentParser(), Quiet()
    seeds.add_arguments(parser)
    seeds.run(parser.parse_args(options), terminal)  # type: ignore[arg-type]
    return "\n".join(terminal.said)


def row(way: str, seconds: float, digest: str, peak: int = 110) -> SeedRow:
    return SeedRow(
        way,
        setup_s=seconds / 4,
        encode_s=seconds / 4,
        denoise_s=seconds / 4,
        decode_s=seconds / 4,
        total_s=seconds,
        baseline_resident_bytes=10,
        resident_peak_bytes=peak,
        baseline_private_bytes=10,
        private_peak_bytes=peak - 50,
        picture_digest=digest,
    )


SKIPPED = SeedRow("model_offload", "skipped", "it needs an accelerator")
SWAP = {
    "status": "ok",
    "ours": {"swap_s": 1.0, "bytes_in": 100, "bytes_back": 0, "weight_bytes": 100},
    "copy_back": {"swap_s": 4.0, "bytes_in": 100, "bytes_back": 60, "weight_bytes": 100},
    "link": False,
    "rounds": 3,
}


def test_ratios_are_against_plain_diffusers_and_growth_against_the_model() -> None:
    rows = [row("plain", 8.0, "a"), SKIPPED, row("phases", 12.0, "a", peak=60)]
    compare(rows)
    found = summarise(rows, SWAP, model_bytes=100)
    assert found["ways"]["phases"]["total_to_plain"] == found["ways"]["phases"]["denoise_to_plain"] == 1.5
    assert found["ways"]["plain"]["resident_growth"] == 1.0
    assert found["ways"]["phases"]["resident_growth"] == 0.5
    assert found["ways"]["phases"]["private_growth"] == 0.0
    assert set(found["ways"]["model_offload"].values()) == {"skipped", None}
    assert found["ours_same_picture"] is True
    assert found["swap"]["bytes_to_copy_back"] == 100 / 160
    assert found["swap"]["seconds_to_copy_back"] is None  # without a link they are of different things
    assert summarise(rows, SWAP | {"link": True}, 100)["swap"]["seconds_to_copy_back"] == 0.25
    assert found["swap"]["bytes_to_weights"] == 1.0


def test_a_way_here_with_another_picture_is_told_and_a_peer_with_another_is_its_own_affair() -> None:
    rows = [row("plain", 1.0, "a"), row("ddo", 1.0, "b"), row("phases", 1.0, "a"), row("sequential", 1.0, "c")]
    compare(rows)
    assert [each.same_picture for each in rows] == [True, False, True, False]
    assert summarise(rows, SWAP, 100)["ours_same_picture"] is False
    assert summarise(rows[:-1], SWAP, 100)["ours_same_picture"] is True


def test_without_plain_diffusers_nothing_is_compared() -> None:
    rows = [SeedRow("plain", "failed", "no memory"), row("phases", 1.0, "a")]
    compare(rows)
    found = summarise(rows, {"status": "skipped", "reason": "--no-swap"}, 100)
    assert rows[1].same_picture is None
    assert found["ours_same_picture"] is None
    assert found["ways"]["phases"]["total_to_plain"] is None
    assert found["swap"] is None


def test_rounds_give_the_median_of_seconds_and_the_most_of_bytes() -> None:
    rounds = _Rounds()
    for seconds, bytes_in, bytes_back in ((9.0, 100, 0), (1.0, 120, 5), (2.0, 100, 0)):
        rounds.add(seconds, bytes_in, bytes_back)
    assert rounds.to_dict(100) == {"swap_s": 2.0, "bytes_in": 120, "bytes_back": 5, "weight_bytes": 100}


def test_a_stage_that_comes_in_parts_is_their_sum_and_an_error_is_timed_too() -> None:
    watch = Watch()
    assert tuple(watch.seconds) == STAGES
    with pytest.raises(ZeroDivisionError), watch("setup"):
        1 / 0  # noqa: B018
    first = watch.seconds["setup"]
    with watch("setup"):
        pass
    assert watch.seconds["setup"] > first > 0
    assert watch.seconds["decode"] == 0
    watch.seconds["encode"], total = 3.0, watch.seconds["setup"] + 3.0
    watch.was_setup("encode", 2.0)
    assert watch.seconds["encode"] == 1.0 and sum(watch.seconds.values()) == pytest.approx(total)


def test_tables_name_every_way_and_say_why_one_did_not_run() -> None:
    rows = [row("plain", 1.0, "a"), SKIPPED]
    compare(rows)
    said = seed_table.render(rows)
    assert "bits" in said and "diffusers model offload: skipped, it needs an accelerator" in said
    swap = seed_table.render_swap(SWAP)
    assert "The CPU has no link" in swap and "60 B" in swap
    assert "4.00 s" in seed_table.render_swap(SWAP | {"link": True}) and "4.00 s" not in swap
    assert seed_table.render_swap({"status": "failed", "reason": "no"}) == "Swap: failed, no"


def test_no_steps_are_an_input_error_and_another_folder_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--steps"):
        bench("--steps", "0")
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InputError, match="--model-dir"):
        make_pipeline(PipelineSpec({}, {}, {}, ()), tmp_path)


@pytest.mark.slow
def test_every_way_that_runs_makes_the_picture_of_plain_diffusers(tmp_path: Path) -> None:
    options = ("--model-dir", str(tmp_path), "--size", "40M", "--steps", "1", "--tokens", "4", "8", "--device", "cpu")
    said = bench(*options, "--json", str(tmp_path / "seeds.json"))
    found: dict[str, Any] = json.loads((tmp_path / "seeds.json").read_text())
    rows = {each["way"]: each for each in found["rows"]}
    assert set(rows) == set(SEED_WAYS)
    assert rows["model_offload"]["status"] == "skipped" and "accelerator" in rows["model_offload"]["reason"]
    assert rows["ddo"]["status"] in ("ok", "skipped")
    for name in ("plain", "group_offload", "phases", "ddo_names", "sequential"):
        assert rows[name]["status"] == "ok", rows[name]["reason"]
        assert rows[name]["same_picture"] is True
        assert rows[name]["total_s"] == pytest.approx(sum(rows[name][f"{stage}_s"] for stage in STAGES))
        assert 0 < rows[name]["baseline_private_bytes"] <= rows[name]["private_peak_bytes"]
    assert found["summary"]["ours_same_picture"] is True
    assert 0.7 * 40 * MIB < found["model_bytes"] < 1.4 * 40 * MIB
    swap = found["swap"]
    assert swap["ours"]["bytes_back"] == 0 < swap["copy_back"]["bytes_back"]
    assert 0.9 * swap["ours"]["weight_bytes"] < swap["ours"]["bytes_in"] <= swap["ours"]["weight_bytes"]
    assert "Diffusers Dynamic Offloader" in said

    marked = (tmp_path / "pipeline" / MARK).stat().st_mtime_ns
    make_pipeline(flux_pipeline(40 * MIB), tmp_path / "pipeline")
    assert (tmp_path / "pipeline" / MARK).stat().st_mtime_ns == marked  # it is used again
