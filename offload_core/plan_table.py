"""A plan as a table of plain text, and as JSON."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ._report_table import WIDTH, human_bytes, human_seconds

if TYPE_CHECKING:
    from .foresight import Foresight
    from .plan import PhasePlan, Plan

COLUMNS = ("phase", "weights", "resident", "streamed", "activations", "device peak", "least", "load", "step", "all")


def plan_table(foresight: Foresight) -> str:
    """One row per phase, one of totals, then the reasons and what would help. At most 110 characters wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plan = foresight.plan
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in plan.phases:
        table.add_row(*_cells(phase))
    table.add_section()
    weights = human_bytes(sum(phase.weight_bytes for phase in plan.phases))
    peak, least = human_bytes(plan.device_peak_bytes), human_bytes(plan.smallest_budget_bytes)
    table.add_row("all", weights, "", "", "", peak, least, "", "", human_seconds(plan.seconds))
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, color_system=None, force_terminal=False, highlight=False)
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    lines += [reason for phase in plan.phases for reason in phase.reasons]
    lines += [f"Hint: {hint}" for hint in plan.hints]
    lines.append(f"Rates: {foresight.rates.source}.")
    return "\n".join(lines)


def plan_line(plan: Plan) -> str:
    """A plan in one sentence."""
    if not plan.fits:
        least = human_bytes(plan.smallest_budget_bytes)
        return f"This doesn't fit {human_bytes(plan.budget_bytes)} of device memory; it needs {least} at least."
    if not any(phase.weight_bytes for phase in plan.phases):
        return "Plan: nothing is loaded, the embeds are in the cache."
    streamed = sum(phase.streamed_bytes for phase in plan.phases)
    how = f"streams {human_bytes(streamed)} of weights" if streamed else "keeps all weights of a phase resident"
    peak, budget = human_bytes(plan.device_peak_bytes), human_bytes(plan.budget_bytes)
    return f"Plan: {how}, peaks at {peak} of {budget}, takes about {human_seconds(plan.seconds)}."


def plan_json(foresight: Foresight) -> dict[str, Any]:
    """The plan as plain data."""
    plan = foresight.plan
    return {
        "model": foresight.model,
        "fits": plan.fits,
        "budget_bytes": plan.budget_bytes,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "device_peak_bytes": plan.device_peak_bytes,
        "seconds": plan.seconds,
        "rates": foresight.rates.source,
        "phases": [
            {
                "name": phase.name,
                "fits": phase.fits,
                "weight_bytes": phase.weight_bytes,
                "resident_bytes": phase.resident_bytes,
                "streamed_bytes": phase.streamed_bytes,
                "ring_bytes": phase.ring_bytes,
                "activation_peak_bytes": phase.activation_peak_bytes,
                "device_peak_bytes": phase.device_peak_bytes,
                "host_peak_bytes": phase.host_peak_bytes,
                "smallest_budget_bytes": phase.smallest_budget_bytes,
                "load_s": phase.load_s,
                "step_s": phase.step_s,
                "seconds": phase.seconds,
                "tile": phase.tile,
                "components": {
                    component.name: {
                        "weight_bytes": component.weight_bytes,
                        "added_bytes": component.added_bytes,
                        "resident_bytes": component.weights.resident_bytes + component.weights.small_bytes,
                        "streamed_bytes": component.weights.streamed_bytes,
                        "times": component.times,
                        "pass_s": component.pass_s,
                        "compute_s": component.compute_s,
                        "tier": component.tier,
                    }
                    for component in phase.components
                },
                "reasons": list(phase.reasons),
            }
            for phase in plan.phases
        ],
        "hints": list(plan.hints),
    }


def _cells(phase: PhasePlan) -> tuple[str, ...]:
    figures = (
        phase.weight_bytes,
        phase.resident_bytes,
        phase.streamed_bytes,
        phase.activation_peak_bytes,
        phase.device_peak_bytes,
        phase.smallest_budget_bytes,
    )
    seconds = (phase.load_s, phase.step_s, phase.seconds)
    name = phase.name if phase.fits else f"{phase.name} !"
    return (name, *map(human_bytes, figures), *map(human_seconds, seconds))
