"""LoRA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError, OffloadError

from ..results import NodeResult
from ..schema import MODEL_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadLora",
    display_name="LoRA",
    description=(
        "Adds a LoRA to the model. Nothing is loaded here: each phase puts it on the components that it changes, "
        "within the memory budget. Chain several of these for several LoRAs."
    ),
    inputs=(
        Input("model", MODEL_TYPE, "The model, from Load With Dynamic Offload or another LoRA."),
        Input("lora", "COMBO", "A .safetensors file in a loras folder.", options="loras"),
        Input(
            "strength",
            "FLOAT",
            "How much of it: 1 is as trained, 0 leaves it out. A file that comes twice in a chain is applied once, "
            "with the sum of both strengths.",
            default=1.0,
            min=-20.0,
            max=20.0,
            step=0.05,
        ),
    ),
    outputs=(Output("model", MODEL_TYPE, "The description of the model with this LoRA. It holds no weights."),),
    search_aliases=("lora", "lora loader", "load lora", "adapter", "style", "offload"),
)


def lora(call: NodeCall, *, model: Any, lora: str, strength: float) -> NodeResult:
    """PhaseOffloadLora: the handle with one more LoRA. Reads the file's header only."""
    from offload_core.phases import Handle, as_loras

    if not isinstance(model, Handle):
        raise InputError(f"LoRA needs the model of Load With Dynamic Offload, not {type(model).__name__}.")
    handle = replace(model, loras=as_loras([*model.loras, (call.state.loras.file(lora), float(strength))]))
    applied = ", ".join(f"{Path(each.path).name} {each.scale:g}" for each in handle.loras) or "no LoRA"
    call.observer.status(f"{applied}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(state: PackState, *, lora: Any = None, **_unused: Any) -> str:
    """Changes with the content of the file. A file that can't be used has its error as the fingerprint."""
    from offload_core.checkpoint import content_mark

    try:
        return content_mark(state.loras.file(str(lora)))
    except OffloadError as error:
        return f"unusable: {error}"


NODE = Node(SCHEMA, lora, fingerprint)
