"""Load With Dynamic Offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_core.errors import OffloadError

from ..results import NodeResult
from ..schema import Input, Node, NodeSchema
from ._loading import OPTIONAL, OUTPUT, REQUIRED, budget_problem, handle_of, model_fingerprint

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadLoad",
    display_name="Load With Dynamic Offload",
    description=(
        "Picks a model: a diffusers folder, or a checkpoint with everything in it. It reads only configs and file "
        "headers: each phase loads the weights it needs when it runs and gives them back when it ends."
    ),
    inputs=(
        Input(
            "model",
            "COMBO",
            "A diffusers model folder (one with a model_index.json or a modular_model_index.json) found below a "
            "models/diffusers folder, or a checkpoint that holds a whole model. "
            "The demo model comes with this pack and draws simple coloured shapes.",
            options="models",
        ),
        *REQUIRED,
        *OPTIONAL,
    ),
    outputs=(OUTPUT,),
    search_aliases=("load diffusers", "diffusers loader", "low vram", "offload", "load checkpoint"),
)


def load(
    call: NodeCall,
    *,
    model: str,
    dtype: str,
    device: str,
    device_memory: str = "auto",
    host_memory: str = "auto",
    warm: bool = False,
    settings: Any = None,
    weight_storage: str = "as stored",
) -> NodeResult:
    """PhaseOffloadLoad: a handle of the chosen model. Reads configs and headers only."""
    handle = handle_of(
        call,
        "Load",
        call.state.model(model),
        dtype=dtype,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        warm=warm,
        settings=settings,
        weight_storage=weight_storage,
    )
    call.observer.status(f"{model}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(state: PackState, *, model: Any = None, **_unused: Any) -> str:
    """Changes with the files of the model, and with what is set for all graphs. A model that can't be used has its
    error as the fingerprint."""
    try:
        return model_fingerprint(state, state.model(str(model)))
    except OffloadError as error:
        return f"unusable: {error}"


def problem(
    state: PackState, *, model: Any = None, device_memory: Any = None, host_memory: Any = None, **_unused: Any
) -> str | None:
    """Why a model name or a budget can't be used. Only the words are looked at, not the files or the machine."""
    try:
        if model is not None:
            state.model(str(model))
    except OffloadError as error:
        return str(error)
    return budget_problem(device_memory=device_memory, host_memory=host_memory)


NODE = Node(SCHEMA, load, fingerprint, problem)
