"""What the nodes that make the description of a model have in common: how it is to be run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError, OffloadError
from offload_core.settings import WEIGHT_STORAGES, OffloadSettings

from ..schema import MODEL_TYPE, SETTINGS_TYPE, Input, Output

if TYPE_CHECKING:
    from pathlib import Path

    from offload_core.single_files import SplitFiles

    from ..calls import NodeCall
    from ..state import PackState

REQUIRED = (
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
)
OPTIONAL = (
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
    Input(
        "weight_storage",
        "COMBO",
        "How weights are held. as stored: as the files have them. fp8: large weights of the denoiser and the encoders "
        "are packed to 8 bits on their way in and unpacked where they are used. That takes half the memory of "
        "bfloat16, and pictures change a little. Plan Preview shows what it saves.",
        default="as stored",
        options=WEIGHT_STORAGES,
        advanced=True,
        optional=True,
    ),
)
OUTPUT = Output("model", MODEL_TYPE, "A description of the model. It holds no weights.")


def handle_of(
    call: NodeCall,
    who: str,
    model: Path | SplitFiles,
    *,
    dtype: str,
    device: str,
    device_memory: str = "auto",
    host_memory: str = "auto",
    warm: bool = False,
    settings: Any = None,
    weight_storage: str = "as stored",
) -> Any:
    """A handle of the model, to be run as the inputs above say. Reads configs and headers only. who: the node."""
    if settings is None:
        settings = call.state.settings(device_memory=device_memory, host_memory=host_memory)
    elif not isinstance(settings, OffloadSettings):
        raise InputError(f"{who}'s settings must come from Offload Settings, not be {type(settings).__name__}.")
    settings = call.state.with_kept(settings, warm=warm)
    how = {"dtype": dtype, "settings": settings, "weight_storage": weight_storage}
    return offload_core.load(model, device=call.state.device(device), **how)


def model_fingerprint(state: PackState, model: Path | SplitFiles) -> str:
    """Changes with the files of the model, and with what is set for all graphs."""
    return f"{state.fingerprint(model)} {state.defaults}"


def budget_problem(**budgets: Any) -> str | None:
    """Why a memory budget can't be used. Only the words are looked at; one that is None is linked or missing."""
    from offload_core.limits import check_budget

    try:
        for name, value in budgets.items():
            if value is not None:
                check_budget(value, name)
    except OffloadError as error:
        return str(error)
    return None
