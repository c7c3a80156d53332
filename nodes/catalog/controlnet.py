"""ControlNet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError, OffloadError

from ..companion_files import content
from ..pictures import pictures_of
from ..results import NodeResult
from ..schema import MODEL_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

NO_MODE = -1

SCHEMA = NodeSchema(
    id="PhaseOffloadControlNet",
    display_name="ControlNet",
    description=(
        "Adds a ControlNet and the picture that it follows to the model. Nothing is loaded here: Denoise Phase runs it "
        "beside the denoiser, within the memory budget."
    ),
    inputs=(
        Input("model", MODEL_TYPE, "The model, from Load With Dynamic Offload or LoRA."),
        Input(
            "controlnet",
            "COMBO",
            "A .safetensors file in a controlnet folder, made for this kind of model.",
            options="controlnets",
        ),
        Input(
            "image",
            "IMAGE",
            "The picture to follow, as the ControlNet wants it (edges, depth, a pose, ...). It is resized to the size "
            "of the result.",
        ),
        Input(
            "strength",
            "FLOAT",
            "How much it counts: 1 is as trained, 0 leaves it out.",
            default=1.0,
            min=0.0,
            max=10.0,
            step=0.01,
        ),
        Input(
            "start_percent",
            "FLOAT",
            "From which part of the steps on it counts: 0 is the beginning.",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.001,
        ),
        Input(
            "end_percent",
            "FLOAT",
            "Up to which part of the steps it counts: 1 is the end.",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.001,
        ),
        Input(
            "mode",
            "INT",
            "For a union ControlNet: the number of what the picture shows, as its page lists them. -1 for all others.",
            default=NO_MODE,
            min=NO_MODE,
            max=99,
            advanced=True,
            optional=True,
        ),
    ),
    outputs=(
        Output(
            "model",
            MODEL_TYPE,
            "The description of the model with this ControlNet and its picture. It holds no weights. For Denoise Phase "
            "and Plan Preview; the other phases don't need it.",
        ),
    ),
    search_aliases=("controlnet", "apply controlnet", "canny", "depth", "pose", "offload"),
)


def controlnet(
    call: NodeCall,
    *,
    model: Any,
    controlnet: str,
    image: Any,
    strength: float,
    start_percent: float,
    end_percent: float,
    mode: int = NO_MODE,
) -> NodeResult:
    """PhaseOffloadControlNet: the handle with a ControlNet. Reads the file's header only."""
    from offload_core.phases import Control, Handle

    if not isinstance(model, Handle):
        raise InputError(f"ControlNet needs the model of Load With Dynamic Offload, not {type(model).__name__}.")
    file = call.state.companions.controlnets.file(controlnet)
    if strength == 0:
        call.observer.status(f"{file.name}: left out, because its strength is 0")
        return NodeResult((model,))
    pictures = pictures_of(image)
    if len(pictures) > 1:
        raise InputError(f"A ControlNet follows one picture, and there are {len(pictures)}. Choose one.")
    control = Control(
        file, pictures[0], float(strength), float(start_percent), float(end_percent), None if mode < 0 else mode
    )
    handle = model.with_control(control)
    call.observer.status(f"{file.name} {strength:g}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(state: PackState, *, controlnet: Any = None, **_unused: Any) -> str:
    """Changes with the content of the file. A file that can't be used has its error as the fingerprint."""
    try:
        return content(state.companions.controlnets.file(str(controlnet)))
    except OffloadError as error:
        return f"unusable: {error}"


NODE = Node(SCHEMA, controlnet, fingerprint)
