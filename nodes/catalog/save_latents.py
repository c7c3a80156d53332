"""Save Latents With Record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError

from ..record_files import LATENTS_ENDING, save_record
from ..results import NodeResult
from ..schema import RECORD_KEY, Input, Node, NodeSchema
from ._records import FILE, prefix_input

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadSaveLatents",
    display_name="Save Latents With Record",
    description=(
        "Writes a latent of Denoise Phase to a file, with the exact values that the model's own VAE wants. Decode it "
        "later, or on another machine."
    ),
    inputs=(
        Input("latent", "LATENT", "From Denoise Phase. If another node changed it, the changed values are saved."),
        prefix_input("latents/phase_offload"),
    ),
    outputs=(FILE,),
    search_aliases=("save latent", "export", "offload"),
    is_output=True,
)


def save_latents(call: NodeCall, *, latent: Mapping[str, Any], filename_prefix: str) -> NodeResult:
    """PhaseOffloadSaveLatents: a safetensors file in the output folder, written whole or not at all."""
    record = latent.get(RECORD_KEY)
    if record is None:
        raise InputError(
            "This LATENT has no record of Denoise Phase: save it with ComfyUI's own Save Latent, or connect "
            "Denoise Phase."
        )
    samples = latent["samples"].to("cpu")  # the host may keep latents on the device
    if record.is_stale(samples):
        record = record.with_samples(samples)
    size = (record.width or 0, record.height or 0)
    name = save_record(call.state.host, record, filename_prefix, LATENTS_ENDING, size)
    call.observer.status(f"saved {name}")
    return NodeResult((name,), ui={"text": [name]})


NODE = Node(SCHEMA, save_latents)
