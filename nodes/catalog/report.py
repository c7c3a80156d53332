"""Phase Report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..pictures import picture_as_image
from ..results import NodeResult
from ..schema import ANY_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadReport",
    display_name="Phase Report",
    description=(
        "Says what the phases of this run took, beside what was foretold of them: memory, time, and what was streamed. "
        "Shows a table and a chart. Connect it behind the last phase."
    ),
    inputs=(
        Input(
            "anything",
            ANY_TYPE,
            "Any value, such as the image of VAE Decode Phase. The report tells of the phases that ran before it was "
            "made.",
        ),
    ),
    outputs=(
        Output("report", "STRING", "The report as a table."),
        Output("chart", "IMAGE", "What was taken and what was foretold, as a picture of 1800 x 800."),
        Output("json", "STRING", "All figures of the report as JSON."),
    ),
    search_aliases=("report", "memory", "vram", "peak", "time", "statistics", "profile", "offload"),
    is_output=True,
    takes_lists=True,
)


def phase_report(call: NodeCall, *, anything: Any) -> NodeResult:
    """PhaseOffloadReport: table, chart and JSON of the phases that this run of the graph has had so far."""
    from offload_core.report_chart import report_picture

    del anything  # it only says when
    report = call.state.this_run()
    table = report.table()
    if not report.phases:
        table = "No phase has run in this run of the graph: its results were all there from the one before."
    call.observer.status(", ".join(phase.name for phase in report.phases) or "no phase has run")
    chart = picture_as_image(report_picture(report.phases))
    values = (table, chart.to(**call.state.host.image_placement()), report.to_json())
    return NodeResult(values, ui={"text": [table]}, shown=chart)


NODE = Node(SCHEMA, phase_report)
