"""``phase-offload bench foresight``: its counter is right and independent, and its figures are what they say."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_core.bench import activations, budgets, foresight, live_bytes
from offload_core.bench import foresight_table as table
from offload_core.bench.activations import ActivationRow, activation_rows
from offload_core.bench.budgets import FitRow, PeakRow
from offload_core.bench.foresight import Extent, Rows
from offload_core.bench.foresight_cases import FAMILIES, Case, Foretold, chosen
from offload_core.bench.foresight_summary import summarise
from offload_core.bench.live_bytes import LiveBytes
from offload_core.bench.step_times import StepRow, _Clock, lesson_of, step_row, timed_case
from offload_core.cli import main
from offload_core.errors import BudgetError, InputError, TraceError
from offload_core.plan import Rates
from offload_core.session import Progress
from staging import tiny_model

FLOAT = 4
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)


def nothing() -> None:
    """A poll that never interrupts."""


def case(family: str, size: int = 0) -> Case:
    return Case(family, FAMILIES[family][size], tiny_model(family))


# ---------------------------------------------------------------------------------------------- the counter


def test_the_counter_shares_no_code_with_the_trace() -> None:
    tree = ast.parse(Path(live_bytes.__file__).read_text("utf-8"))
    found = [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(not node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    assert not [name for name in found if name.startswith("offload_core")]


def test_a_view_makes_nothing_and_keeps_all_of_its_storage() -> None:
    with LiveBytes() as count:
        whole = torch.zeros(1000)
        part = whole.view(10, 100)[3]
        assert count.recount() == 1000 * FLOAT
        del whole
        assert count.recount() == 1000 * FLOAT
        del part
        assert count.recount() == 0
    assert count.peak_bytes == 1000 * FLOAT


def test_an_operator_in_place_or_with_out_makes_nothing() -> None:
    with LiveBytes() as count:
        x, into = torch.zeros(1000), torch.empty(1000)
        x.add_(1).mul_(2)
        torch.add(x, x, out=into)
        assert count.peak_bytes == 2 * 1000 * FLOAT


def test_what_was_there_before_is_not_counted() -> None:
    weight = torch.ones(100, 100)
    with LiveBytes() as count:
        turned = weight.t()
        assert count.recount() == 0
        product = turned @ weight
        assert count.recount() == product.nbytes


def test_what_an_expression_frees_on_its_way_is_in_the_peak_and_not_in_the_end() -> None:
    x = torch.zeros(1000)
    with LiveBytes() as count:
        y = (x + 1).exp() * 2  # two at a time: what goes in and what comes out
    assert (count.peak_bytes, count.recount()) == (2 * 1000 * FLOAT, y.nbytes)


def test_storages_freed_inside_an_operator_made_of_others_are_seen() -> None:
    """`linear` on three dimensions is a view, a product and a view; `layer_norm` makes two more small results."""
    x, weight = torch.zeros(2, 5, 8), torch.zeros(16, 8)
    with LiveBytes() as count:
        y = torch.nn.functional.linear(x, weight)
        assert count.recount() == count.peak_bytes == y.nbytes
        torch.nn.functional.layer_norm(y, (16,))
        assert count.recount() == y.nbytes
    assert count.peak_bytes == 2 * y.nbytes + 2 * 10 * FLOAT  # the result, a mean and a deviation for each row


def test_a_tensor_made_from_numbers_and_one_that_was_resized_count_with_their_size() -> None:
    with LiveBytes() as count:
        made = torch.tensor([1.0, 2.0])
        assert count.recount() == 2 * FLOAT
        made.resize_(50)
        assert count.recount() == 50 * FLOAT


def test_a_peak_is_counted_anew_after_a_restart() -> None:
    with LiveBytes() as count:
        kept = torch.zeros(10)
        torch.zeros(1000)
        assert count.restart() == kept.nbytes
        torch.zeros(20)
        assert count.peak_bytes == kept.nbytes + 20 * FLOAT


# -------------------------------------------------------------------------------------- rows of activations


def row(predicted: int | None, measured: int | None, *, status: str = "ok", reason: str = "") -> ActivationRow:
    return ActivationRow("flux", "64x48", "vae", "decode", predicted, measured, status, reason)


class Traced:
    """What is foretold of a case, as far as rows of activations ask."""

    def __init__(self, **peaks: int) -> None:
        self.calls = [_TracedCall(name, peak) for name, peak in peaks.items()]


class _TracedCall:
    def __init__(self, component: str, peak: int) -> None:
        self.component, self.name = component, ""
        self.trace = type("Trace", (), {"peak_bytes": peak})


def rows_of(foretold: Any, counted: dict[Any, int] | Exception, monkeypatch: pytest.MonkeyPatch, family: str) -> Any:
    def counted_peaks(*_: Any) -> Any:
        if isinstance(counted, Exception):
            raise counted
        return counted

    monkeypatch.setattr(activations, "counted_peaks", counted_peaks)
    found = activation_rows(Case(family, FAMILIES[family][0], Path()), nothing, foretold)
    return {(r.component, r.status, r.reason) for r in found}


def test_a_miss_that_nobody_can_explain_is_said_to_be_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {("vae", ""): 10, ("unet", ""): 10}
    found = rows_of(Traced(vae=10, unet=9), counted, monkeypatch, "sd15")
    assert found == {("vae", "ok", ""), ("unet", "ok", "unexplained")}
    monkeypatch.setitem(activations.KNOWN_MISSES, ("sd15", "unet"), "it has a reason")
    assert ("unet", "ok", "it has a reason") in rows_of(Traced(vae=10, unet=9), counted, monkeypatch, "sd15")


def test_what_only_ran_or_was_only_foretold_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(Traced(unet=9), {("vae", ""): 10}, monkeypatch, "sd15")
    assert {(component, status) for component, status, _ in found} == {("unet", "failed"), ("vae", "failed")}


def test_what_no_phase_does_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of(Traced(vae=10), {("vae", ""): 10, ("vocoder", ""): 5}, monkeypatch, "ltx2")
    assert ("vocoder", "left out", "the sound isn't decoded in phases yet") in found


@pytest.mark.parametrize("both", [False, True])
def test_an_error_is_a_failed_row_with_its_sentence(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Any = RuntimeError("no run") if both else {("vae", ""): 10}
    found = rows_of(TraceError("no trace\nmore"), counted, monkeypatch, "sd15")
    assert found == {("" if both else "vae", "failed", "TraceError: no trace")}


def test_ctrl_c_in_mid_run_is_no_row() -> None:
    calls: list[int] = []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        activation_rows(case("sd15"), interrupted, TraceError("not asked"))


# --------------------------------------------------------------------------------------------------- truth


@pytest.mark.slow
def test_a_job_fits_down_to_the_byte_and_no_further() -> None:
    """Found out by running: what is told of the smallest budget, and of one byte less, is true."""
    one = case("sd15")
    found = budgets.fit_rows(one, Foretold(one, nothing), budgets.Truth(one, nothing), ("+0", "-1"), RATES)
    assert [(r.fits, r.right) for r in found] == [(True, True), (False, True)]
    assert found[1].reason.startswith("decode: ")


@pytest.mark.slow
def test_the_truth_knows_nothing_of_the_plan() -> None:
    """With a plan that asks for far too little the answer is wrong, and the row says so."""

    careless = plans(least=100_000, fits=True)
    (found,) = budgets.fit_rows(case("sd15"), careless, budgets.Truth(case("sd15"), nothing), ("+0",), RATES)
    assert found.predicted and found.fits is False and not found.right


class Asked:
    """A truth with one answer."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer

    def refusal(self, budget: int) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def plans(*, least: int, fits: bool) -> Any:
    """What is foretold of a case, as far as rows of fits ask."""
    plan = type("Plan", (), {"smallest_budget_bytes": least, "fits": fits})
    return type("Plans", (), {"plan": lambda *_: plan})()


@pytest.mark.parametrize(("answer", "right"), [("decode: too large", True), ("", False), (ValueError("broken"), False)])
def test_an_answer_is_right_where_the_truth_says_the_same_and_a_failure_never_is(answer: Any, right: bool) -> None:
    truth: Any = Asked(answer)
    found = budgets.fit_rows(
        Case("sd15", FAMILIES["sd15"][0], Path()), plans(least=100, fits=False), truth, ["-1"], RATES
    )
    assert [(r.budget_bytes, r.right) for r in found] == [(99, right)]


def test_a_job_fits_if_no_phase_is_refused_and_asks_the_hungriest_phase_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that alone fill the budget need no run; any error but a refused budget isn't an answer."""
    ran: list[str] = []

    def run(self: Any, name: str, handle: Any, session: Any) -> None:
        ran.append(name)
        session.report.phases.append(type("Report", (), {"reserved_peak_bytes": 10}))
        if name == "denoise":
            raise refused

    monkeypatch.setattr(budgets.Truth, "_run", run)
    monkeypatch.setattr(budgets, "_handle", lambda *_: None)
    truth = object.__new__(budgets.Truth)
    truth._case, truth._poll, truth.activations = Case("", FAMILIES["sd15"][0], Path()), nothing, {}
    truth.activations |= {"encode": 10, "denoise": 20, "decode": 30}
    refused: Exception = BudgetError("no room")
    assert truth.refusal(100) == "denoise: no room" and ran == ["decode", "denoise"]
    assert truth.refusal(30).startswith("decode: its activations alone") and len(ran) == 2
    refused = ValueError("something else")
    with pytest.raises(ValueError, match="something else"):
        truth.refusal(100)


# ------------------------------------------------------------------------------------------------- the sums


def test_shares_count_failures_as_misses_and_leave_out_what_no_phase_does() -> None:
    some = [row(100, 100), row(103, 100, reason="unexplained"), row(None, 100, status="failed", reason="why")]
    left_out = row(None, 5, status="left out", reason="sound")
    found = summarise(Rows(activations=[*some, row(100, 100), left_out]))["activations"]
    assert (found["rows"], found["equal"], found["failures"]) == (4, 2, 1)
    assert (found["equal_share"], found["within_5_percent_share"], found["explained_share"]) == (0.5, 0.75, 0.0)
    assert len(found["misses"]) == 2 and len(found["left_out"]) == 1


def test_an_explained_miss_is_a_miss_that_is_explained() -> None:
    found = summarise(Rows(activations=[row(100, 100), row(90, 100, reason="a reason")]))
    assert found["activations"]["explained_share"] == 1.0
    assert found["targets"]["activations_equal"] == {"figure": 0.5, "aim": 0.85, "at_most": False, "met": False}


def test_the_sums_of_peaks_fits_and_steps() -> None:
    peaks = [PeakRow("flux", "64x48", 1.0, 10, "encode", 100, measured) for measured in (100, 98, 96, 101)]
    fits = [FitRow("flux", "64x48", "+0", 10, True, True), FitRow("flux", "64x48", "-1", 9, False, True)]
    steps = [StepRow("flux", "64x48", predicted_s=p, measured_s=1.0, second_s=s) for p, s in ((1.1, 1.0), (1.5, 1.1))]
    found = summarise(Rows(device_peaks=peaks, fits=fits, step_times=[*steps, StepRow("sd15", "", status="failed")]))
    assert found["device_peaks"]["within_3_percent_share"] == 0.75
    assert (found["device_peaks"]["equal"], found["device_peaks"]["above_plan"]) == (1, 1)
    assert found["device_peaks"]["farthest_ratio"] == 0.96
    assert (found["fits"]["right_share"], found["fits"]["that_fit"], len(found["fits"]["wrong"])) == (0.5, 2, 1)
    assert found["step_times"]["median_error"] == pytest.approx(0.3)
    assert found["step_times"]["second_median_error"] == pytest.approx(0.05)
    assert (found["step_times"]["within_20_percent"], found["step_times"]["failures"]) == (1, 1)
    met = {name: target["met"] for name, target in found["targets"].items()}
    assert met["step_time_median_error"] is False and met["fits_right"] is False
    assert met["activations_equal"] is None  # nothing was asked


def test_tables_have_a_row_for_each_family_and_a_line_for_each_miss() -> None:
    rows = [row(100, 100), row(90, 100, reason="unexplained"), ActivationRow("sd15", "64x48", "unet", "", 7, 7)]
    text = table.render_activations(rows)
    begins = [line.split()[0] for line in text.splitlines() if line.startswith(("flux", "sd15"))]
    assert begins == ["flux", "sd15", "flux"]  # two rows, and the line of the miss
    assert "flux 64x48 vae.decode: 90 foretold, 100 counted; unexplained." in text
    wrong = table.render_fits([FitRow("flux", "64x48", "-1", 9, False, True)])
    assert "flux 64x48 budget -1 (9 bytes): foretold not to fit, fits" in wrong
    failed = table.render_peaks([PeakRow("flux", "64x48", 1.5, 10, "encode", status="failed", reason="why")])
    assert "failed" in failed and "flux x 1.5 encode: why." in failed
    assert "failed" in table.render_steps([StepRow("flux", "64x48", status="failed", reason="why")])
    assert max(len(line) for line in text.splitlines()) <= table.WIDTH


def test_the_first_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = _Clock(nothing), iter([1.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    for done in range(4):  # the bar is drawn before the first step, too
        clock.progress(Progress("denoise", "step", done, 3, "steps"))
    assert clock.steps_s() == [1.0, 2.0]


# ---------------------------------------------------------------------------------------------- the command


def test_the_grid_has_every_family_three_sizes_and_more_than_sixty_cases_of_fitting() -> None:
    extent = Extent()
    assert len(FAMILIES) == 17
    assert all(len(sizes) == extent.sizes == len(set(sizes)) for sizes in FAMILIES.values())
    assert len(FAMILIES) * extent.fit_sizes * len(extent.fit_budgets) >= 60
    assert len(extent.times_least) == 5


def test_an_unknown_family_is_an_input_error_with_the_known_ones() -> None:
    assert list(chosen(["flux", "sd15"])) == ["flux", "sd15"]
    with pytest.raises(InputError, match="no family 'flix' here; the families are sd15"):
        chosen(["flux", "flix"])


def test_one_family_that_breaks_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its rows are failed ones in every part."""

    def broken(*_: Any, **__: Any) -> Any:
        raise TraceError("no trace")

    monkeypatch.setattr(foresight, "Foretold", broken)
    monkeypatch.setattr(foresight, "tiny_folder", lambda *_: tmp_path)
    monkeypatch.setattr(activations, "counted_peaks", lambda *_: {("unet", ""): 10})
    monkeypatch.setattr("offload_core.rates.measured_rates", lambda *_: RATES)
    terminal: Any = type("Quiet", (), {"note": lambda *_: None, "check_interrupt": nothing})
    rows, _ = foresight._Bench(terminal, tmp_path, foresight.QUICK).run(chosen(["sd15"]))
    assert [len(part) for part in vars(rows).values()] == [1, 6, 2, 1]
    assert all(r.status == "failed" and "no trace" in r.reason for part in vars(rows).values() for r in part)


@pytest.mark.slow
def test_a_quick_run_of_two_families_meets_its_targets_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "found.json"
    assert main(["bench", "foresight", "--quick", "--families", "flux,sd15", "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))
    assert {len(found[part]) for part in ("activations", "device_peaks", "fits", "step_times")} == {7, 12, 4, 2}
    met = {name: target["met"] for name, target in found["summary"]["targets"].items()}
    met.pop("step_time_median_error")  # how fast a machine is is no matter of a test
    assert all(met.values()) and len(met) == 5
    assert all(step["streamed_bytes"] > 0 and step["measured_s"] > 0 for step in found["step_times"])
    assert not list(tmp_path.glob("phase-offload-bench-*"))
    assert "activations equal to the byte" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_run_of_one_size_taught_is_used_for_another() -> None:
    first, timed = (timed_case(each) for each in (case("sd15"), case("sd15", 1)))
    taught = lesson_of(first, Foretold(first, nothing), RATES, nothing)
    assert taught is not None and taught.compute != 1.0
    found = step_row(timed, "sd15", Foretold(timed, nothing), RATES, nothing, taught)
    assert found.second_s and found.second_s != found.predicted_s and found.size != str(first.size)
    assert found.second_ratio == found.measured_s / found.second_s
    assert len(found.steps_s) == 5 and found.streamed_bytes > 0
