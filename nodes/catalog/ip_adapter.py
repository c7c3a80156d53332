"""IP-Adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError, OffloadError

from ..companion_files import OWN_ENCODER, content
from ..pictures import pictures_of
from ..results import NodeResult
from ..schema import MODEL_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

SCHEMA = NodeSchema(
    id="PhaseOffloadIPAdapter",
    display_name="IP-Adapter",
    description=(
        "Adds an IP-Adapter to the model: a picture that works as a prompt. Nothing is loaded here: its image encoder "
        "runs in Encode Prompt Phase, and its layers in Denoise Phase."
    ),
    inputs=(
        Input("model", MODEL_TYPE, "The model, from Load With Dynamic Offload or LoRA."),
        Input(
            "ip_adapter",
            "COMBO",
            "A .safetensors file in an ipadapter folder, made for this kind of model.",
            options="ip_adapters",
        ),
        Input(
            "clip_vision",
            "COMBO",
            "The image encoder that the IP-Adapter was trained with: a file in a clip_vision folder, or the model's "
            "own where it has one.",
            default=OWN_ENCODER,
            options="image_encoders",
        ),
        Input("image", "IMAGE", "The picture that works as a prompt."),
        Input(
            "weight",
            "FLOAT",
            "How much the picture counts beside the prompt: 1 is as trained, 0 leaves it out.",
            default=1.0,
            min=0.0,
            max=5.0,
            step=0.05,
        ),
    ),
    outputs=(
        Output(
            "model",
            MODEL_TYPE,
            "The description of the model with this IP-Adapter and its picture. It holds no weights. Connect it to all "
            "phase nodes and to Plan Preview.",
        ),
    ),
    search_aliases=("ipadapter", "ip adapter", "image prompt", "style", "reference image", "offload"),
)


def ip_adapter(
    call: NodeCall, *, model: Any, ip_adapter: str, clip_vision: str, image: Any, weight: float
) -> NodeResult:
    """PhaseOffloadIPAdapter: the handle with an IP-Adapter. Reads the files' headers only."""
    from offload_core.phases import Handle, IPAdapter

    if not isinstance(model, Handle):
        raise InputError(f"IP-Adapter needs the model of Load With Dynamic Offload, not {type(model).__name__}.")
    companions = call.state.companions
    file, encoder = companions.ip_adapters.file(ip_adapter), companions.encoder(clip_vision)
    if weight == 0:
        call.observer.status(f"{file.name}: left out, because its weight is 0")
        return NodeResult((model,))
    pictures = pictures_of(image)
    if len(pictures) > 1:
        raise InputError(f"An IP-Adapter reads one picture, and there are {len(pictures)}. Choose one.")
    handle = model.with_ip_adapter(IPAdapter(file, float(weight), encoder, pictures[0]))
    call.observer.status(f"{file.name} {weight:g}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(state: PackState, *, ip_adapter: Any = None, clip_vision: Any = OWN_ENCODER, **_unused: Any) -> str:
    """Changes with the content of the files. One that can't be used has its error as the fingerprint."""
    try:
        file = state.companions.ip_adapters.file(str(ip_adapter))
        return content(file, state.companions.encoder(str(clip_vision)))
    except OffloadError as error:
        return f"unusable: {error}"


NODE = Node(SCHEMA, ip_adapter, fingerprint)
