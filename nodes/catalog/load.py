"""Load With Dynamic Offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError, OffloadError
from offload_core.settings import OffloadSettings

from ..results import NodeResult
from ..schema import MODEL_TYPE, SETTINGS_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadLoad",
    display_name="Load With Dynamic Offload",
    description=(
        "Picks a diffusers model folder. It reads only its configs and file headers: each phase loads the weights it "
        "needs when it runs and gives them back when it ends."
    ),
    inputs=(
        Input(
            "model",
            "COMBO",
            "A diffusers model folder (one with a model_index.json or a modular_model_index.json) found below a "
            "models/diffusers folder. "
            "The demo model comes with this pack and draws simple coloured shapes.",
            options="models",
        ),
        Input(
            "dtype",
            "COMBO",
            "The number format to compute in. auto: the format of the files. "
            "float32 needs twice the memory of the other two.",
            default="auto",
            options=("auto", "bfloat16", "float16", "float32"),
        ),
        Input(
            "device",
            "COMBO",
            "Where the phases compute. auto: the device ComfyUI uses.",
            default="auto",
            options="devices",
        ),
        Input(
            "device_memory",
            "STRING",
            "The most a phase may take of the device's memory, for weights and activations. Weights that don't fit are "
            "streamed from their files. auto: what is free, less a headroom. Or a size (6GiB), a share (60%), or what "
            "to keep free (leave 2GiB).",
            default="auto",
            optional=True,
        ),
        Input(
            "host_memory",
            "STRING",
            "The most a phase may take of RAM, for weights on their way to the device, and for all weights where the "
            "CPU computes. auto: what is free, less a headroom. Or a size (6GiB), a share (60%), or what to keep free "
            "(leave 2GiB).",
            default="auto",
            optional=True,
        ),
        Input(
            "warm",
            "BOOLEAN",
            "Keep weights in RAM between prompts, so that the next one needn't read them from their files. They take "
            "only what host_memory has left, and give way to everything else.",
            default=False,
            advanced=True,
            optional=True,
        ),
        Input(
            "settings",
            SETTINGS_TYPE,
            "From Offload Settings. Where it is connected, the two budgets above have no effect.",
            optional=True,
        ),
    ),
    outputs=(Output("model", MODEL_TYPE, "A description of the model. It holds no weights."),),
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
) -> NodeResult:
    """PhaseOffloadLoad: a handle of the chosen model. Reads configs and headers only."""
    folder = call.state.model_folder(model)
    if settings is None:
        settings = call.state.settings(device_memory=device_memory, host_memory=host_memory)
    elif not isinstance(settings, OffloadSettings):
        raise InputError(f"Load's settings must come from Offload Settings, not be {type(settings).__name__}.")
    settings = call.state.with_kept(settings, warm=warm)
    handle = offload_core.load(folder, device=call.state.device(device), dtype=dtype, settings=settings)
    call.observer.status(f"{model}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(state: PackState, *, model: Any = None, **_unused: Any) -> str:
    """Changes with the files of the model, and with what is set for all graphs. A model that can't be used has its
    error as the fingerprint."""
    try:
        return f"{state.fingerprint(str(model))} {state.defaults}"
    except OffloadError as error:
        return f"unusable: {error}"


def problem(
    state: PackState, *, model: Any = None, device_memory: Any = None, host_memory: Any = None, **_unused: Any
) -> str | None:
    """Why a model name or a budget can't be used. Only the words are looked at, not the files or the machine."""
    from offload_core.limits import check_budget

    try:
        if model is not None:
            state.model_folder(str(model))
        for name, value in (("device_memory", device_memory), ("host_memory", host_memory)):
            if value is not None:
                check_budget(value, name)
    except OffloadError as error:
        return str(error)
    return None


NODE = Node(SCHEMA, load, fingerprint, problem)
