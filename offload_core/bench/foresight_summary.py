"""The rows of `bench foresight` in a few figures: shares, medians, what was missed, and whether targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activations import ActivationRow
    from .budgets import FitRow, PeakRow
    from .foresight import Rows
    from .step_times import StepRow

#: Figure -> the least that is aimed at; of errors, the most.
LEAST = {
    "activations_equal": 0.85,
    "activations_within_5_percent": 0.95,
    "activation_misses_explained": 1.0,
    "device_peaks_within_3_percent": 1.0,
    "fits_right": 1.0,
}
MOST = {"step_time_median_error": 0.20}


def summarise(rows: Rows) -> dict[str, Any]:
    """Counts, shares and failures of each part. A failed row counts as one that misses."""
    parts: dict[str, Any] = {
        "activations": _activations(rows.activations),
        "device_peaks": _peaks(rows.device_peaks),
        "fits": _fits(rows.fits),
        "step_times": _steps(rows.step_times),
    }
    figures = {
        "activations_equal": parts["activations"]["equal_share"],
        "activations_within_5_percent": parts["activations"]["within_5_percent_share"],
        "activation_misses_explained": parts["activations"]["explained_share"],
        "device_peaks_within_3_percent": parts["device_peaks"]["within_3_percent_share"],
        "fits_right": parts["fits"]["right_share"],
        "step_time_median_error": parts["step_times"]["median_error"],
    }
    return {**parts, "targets": {name: _target(name, figure) for name, figure in figures.items()}}


def _target(name: str, figure: float | None) -> dict[str, Any]:
    aim = LEAST.get(name, MOST.get(name))
    assert aim is not None
    met = None if figure is None else figure >= aim if name in LEAST else figure <= aim
    return {"figure": figure, "aim": aim, "at_most": name in MOST, "met": met}


def _activations(rows: Sequence[ActivationRow]) -> dict[str, Any]:
    counted = [row for row in rows if row.status != "left out"]
    missed = [row for row in counted if not row.equal]
    unexplained = [row for row in missed if row.status == "failed" or row.reason == "unexplained"]
    return {
        "rows": len(counted),
        "equal": len(counted) - len(missed),
        "equal_share": _share(len(counted) - len(missed), len(counted)),
        "within_5_percent_share": _share(sum(_near(row.ratio, 0.05) for row in counted), len(counted)),
        "explained_share": 1.0 if not missed else _share(len(missed) - len(unexplained), len(missed)),
        "failures": sum(row.status == "failed" for row in counted),
        "misses": [row.to_dict() for row in missed],
        "left_out": [row.to_dict() for row in rows if row.status == "left out"],
    }


def _peaks(rows: Sequence[PeakRow]) -> dict[str, Any]:
    near = sum(_near(row.ratio, 0.03) for row in rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return {
        "rows": len(rows),
        "within_3_percent": near,
        "within_3_percent_share": _share(near, len(rows)),
        "equal": sum(ratio == 1 for ratio in ratios),
        "above_plan": sum(ratio > 1 for ratio in ratios),
        "farthest_ratio": max(ratios, key=lambda ratio: abs(ratio - 1), default=None),
        "failures": sum(row.status == "failed" for row in rows),
        "misses": [row.to_dict() for row in rows if not _near(row.ratio, 0.03)],
    }


def _fits(rows: Sequence[FitRow]) -> dict[str, Any]:
    right = sum(row.right for row in rows)
    return {
        "cases": len(rows),
        "that_fit": sum(row.fits is True for row in rows),
        "right": right,
        "right_share": _share(right, len(rows)),
        "failures": sum(row.status == "failed" for row in rows),
        "wrong": [row.to_dict() for row in rows if not row.right],
    }


def _steps(rows: Sequence[StepRow]) -> dict[str, Any]:
    first = [_error(row.predicted_s, row.measured_s) for row in rows]
    second = [_error(row.second_s, row.measured_s) for row in rows]
    return {
        "rows": len(rows),
        "median_error": _median(first),
        "within_20_percent": sum(error is not None and error <= 0.2 for error in first),
        "second_median_error": _median(second),
        "second_within_20_percent": sum(error is not None and error <= 0.2 for error in second),
        "failures": sum(row.status == "failed" for row in rows),
    }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return abs(predicted - measured) / measured if predicted is not None and measured else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _near(ratio: float | None, error: float) -> bool:
    return ratio is not None and abs(ratio - 1) <= error


def _share(count: int, total: int) -> float | None:
    return count / total if total else None
