"""Plan Preview."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..pictures import mask_as_picture, picture_as_image, pictures_of
from ..results import NodeResult
from ..schema import MODEL, Input, Node, NodeSchema, Output
from ._job import (
    JOB,
    MODELS_OWN,
    SCHEDULER,
    SECONDS,
    SECONDS_DEFAULT,
    STRENGTH,
    STRENGTH_DEFAULT,
    add_strength,
    pipeline_options,
)

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadPlanPreview",
    display_name="Plan Preview",
    description=(
        "Says what a job will take, phase by phase, before anything is loaded: whether it fits, its peak of memory, "
        "what is streamed, and how long it takes. Shows a table and a chart of memory over time."
    ),
    inputs=(
        MODEL,
        Input(
            "prompt",
            "STRING",
            "The prompt of the job; its length can matter. Empty: one of common length.",
            default="",
            multiline=True,
        ),
        *JOB,
        Input(
            "image",
            "IMAGE",
            "The picture of the job, as Encode Image Phase gets it. Only its size matters. Encoding it is planned, "
            "too; width and height are then those that Encode Image Phase is given.",
            optional=True,
        ),
        Input("mask", "MASK", "Where to repaint, as Encode Image Phase gets it.", optional=True),
        STRENGTH,
        SCHEDULER,
        SECONDS,
    ),
    outputs=(
        Output("report", "STRING", "The plan as a table, with its reasons."),
        Output("chart", "IMAGE", "The memory of the device over time, phase by phase, as a picture of 1800 x 800."),
    ),
    search_aliases=("predict", "estimate", "vram", "memory", "will it fit", "plan", "offload"),
    is_output=True,
)


def plan_preview(
    call: NodeCall,
    *,
    model: Any,
    prompt: str,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    batch: int,
    image: Any = None,
    mask: Any = None,
    strength: float = STRENGTH_DEFAULT,
    scheduler: str = MODELS_OWN,
    seconds: float = SECONDS_DEFAULT,
) -> NodeResult:
    """PhaseOffloadPlanPreview: what the job will take, as a table and as a chart. Reads configs and headers only."""
    from offload_core.plan_chart import plan_picture
    from offload_core.plan_table import plan_line, plan_table

    options, notes = pipeline_options(
        model, steps=steps, guidance=guidance, width=width, height=height, batch=batch, seconds=seconds
    )
    shown = None if image is None else model.for_pictures(masked=mask is not None, count=len(image))
    notes += add_strength(options, shown, strength)
    if image is not None:
        options["images"] = pictures_of(image)
    if mask is not None:
        if image is None:
            raise InputError("Plan Preview has a mask and no picture: link the picture, too.")
        options["mask"] = mask_as_picture(mask)
    if scheduler != MODELS_OWN:
        options["scheduler"] = scheduler
    found = offload_core.foresee_job(
        model.files or model.model,
        prompt or None,
        settings=replace(model.settings, execution_device=model.device),
        dtype=model.dtype,
        weight_storage=model.weight_storage,
        loras=model.loras,
        controlnet=model.control,
        ip_adapter=model.ip_adapter,
        session=call.session,
        **options,
    )
    table = "\n".join((plan_table(found), *notes))
    call.observer.status("\n".join((plan_line(found.plan), *found.plan.hints, *notes)))
    chart = picture_as_image(plan_picture(found))
    values = (table, chart.to(**call.state.host.image_placement()))
    return NodeResult(values, ui={"text": [table]}, shown=chart)


NODE = Node(SCHEMA, plan_preview)
