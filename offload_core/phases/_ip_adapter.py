"""IP-Adapter: a picture as a prompt. Its image encoder belongs to Encode, its projection and attention layers to the
denoiser, which gets them right after it is loaded, as it gets LoRAs.

A denoiser that isn't loaded has these layers, too, without memory: pipelines look at them before they encode the
picture.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint import content_mark, read_header
from ..errors import InputError, ModelError
from ._cold import make_added_cold
from ._control import as_picture
from ._ports import attach_gate

if TYPE_CHECKING:
    from ..model_source import ComponentSource
    from ._scope import Phase

State = Mapping[str, Mapping[str, torch.Tensor]]  # "image_proj" and "ip_adapter", by the names of diffusers


@dataclass(frozen=True)
class IPAdapter:
    """An IP-Adapter for `load`. The picture goes to `encode` as `ip_adapter_image`, or is given here.

    file: its weights, in safetensors. scale: how much the picture counts, 1.0 is as trained. image_encoder: the folder
    or the file of the encoder it was trained with; None if the model has one. picture: a PIL image, for Encode and
    Denoise. fingerprint: of the file, set by `load`.
    """

    file: str | os.PathLike[str] = field(repr=False)
    scale: float = 1.0
    image_encoder: str | os.PathLike[str] | None = field(default=None, repr=False)
    picture: Any = field(default=None, repr=False)
    fingerprint: str = field(default="", repr=False)


def checked_adapter(adapter: IPAdapter) -> IPAdapter:
    """`adapter` with the fingerprint of its file. Raises InputError or ModelError for one that can't be used."""
    file = Path(adapter.file).absolute()
    if isinstance(adapter.scale, bool) or not isinstance(adapter.scale, int | float):
        raise InputError(f"The scale of an IP-Adapter is a number, not {adapter.scale!r}.")
    if not file.is_file():
        raise ModelError(f"There is no IP-Adapter file {file.name} in {file.parent.name or '.'}.")
    if file.suffix != ".safetensors":
        raise ModelError(f"The IP-Adapter {file.name} isn't a safetensors file; pickled weights aren't loaded.")
    if any("_lora." in name for name in read_header(file).tensors):
        raise InputError(f"The IP-Adapter {file.name} brings a LoRA of its own (FaceID), which phases can't apply.")
    encoder = None if adapter.image_encoder is None else str(Path(adapter.image_encoder).absolute())
    picture = None if adapter.picture is None else as_picture(adapter.picture, "An IP-Adapter")
    return IPAdapter(str(file), float(adapter.scale), encoder, picture, content_mark(file))


# What an adapter's first matrix reads: (its name, the entry of the encoder's config that is as wide). Source: the
# loaders of diffusers, which give the projection to the plain ones and the hidden states to those called "plus".
_READS = (
    ("image_proj.proj.weight", "projection_dim"),
    ("ip_adapter_proj_model.proj.weight", "projection_dim"),
    ("image_proj.proj_in.weight", "hidden_size"),
    ("image_proj.proj.0.weight", "hidden_size"),
)


def check_encoder(adapter: IPAdapter, encoder: ComponentSource) -> None:
    """Raises ModelError if the adapter was trained with an image encoder of another width."""
    tensors, file = read_header(Path(adapter.file)).tensors, Path(adapter.file).name
    for name, entry in _READS:
        gives, shape = (encoder.config or {}).get(entry), tensors[name].shape if name in tensors else ()
        if len(shape) == 2 and gives is not None and shape[1] != gives:
            raise ModelError(
                f"The IP-Adapter {file} reads another image encoder: one whose {entry} is {shape[1]}, and this one's "
                f"is {gives}. Use the encoder that it was trained with."
            )


def wear_ip_adapter(phase: Phase, adapter: IPAdapter | None) -> None:
    """Gives the denoiser of a phase the adapter's layers: without memory now, with their weights when it is loaded."""
    if adapter is None:
        return
    name = next((name for name in ("unet", "transformer") if name in phase.components), None)
    if name is None or not hasattr(type(phase.pipeline), "load_ip_adapter"):
        raise InputError(f"{phase.handle.pipeline} takes no IP-Adapter. Load the model without it.")
    if getattr(phase.pipeline, "image_encoder", None) is None:
        raise InputError("The model has no image encoder for the IP-Adapter: give IPAdapter its image_encoder folder.")
    state, component = _read(phase.pipeline, adapter), phase.components[name]
    _wear_without_memory(component.module, state, Path(adapter.file).name)
    attach_gate(component.module, component.gate)
    make_added_cold(component.module, name, phase.device)
    phase.pipeline.set_ip_adapter_scale(adapter.scale)
    component.after_load = functools.partial(_wear, phase.pipeline, adapter, state)
    numbers = sum(tensor.numel() for group in state.values() for tensor in group.values())
    component.added_bytes = numbers * component.dtype.itemsize


def _read(pipeline: Any, adapter: IPAdapter) -> State:
    """The file as the pipeline's own loader reads it; the tensors are mapped from the file."""
    file = Path(adapter.file)
    if not file.is_file() or content_mark(file) != adapter.fingerprint:
        raise ModelError(f"The IP-Adapter {file.name} changed since the model was loaded. Load both again.")
    taken: list[State] = []
    taker = SimpleNamespace(
        _load_ip_adapter_weights=lambda states, **_: taken.extend(states), _load_ip_adapter_loras=lambda _: {}
    )
    place = SimpleNamespace(unet=taker, transformer=taker, unet_name="unet")
    options = {"subfolder": "", "weight_name": file.name, "local_files_only": True}
    try:
        type(pipeline).load_ip_adapter(place, str(file.parent), **options)
    except (ValueError, KeyError) as error:
        who = type(pipeline).__name__
        raise ModelError(f"{file.name} can't be read as an IP-Adapter for {who}: {error}.") from error
    if not taken or not taken[0].get("image_proj") or not taken[0].get("ip_adapter"):
        raise ModelError(f"{file.name} holds no IP-Adapter for {type(pipeline).__name__}. Use one made for this model.")
    return taken[0]


def _wear_without_memory(module: Any, state: State, file: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _staying(module):
        shapes = {group: {name: fake.from_tensor(t) for name, t in part.items()} for group, part in state.items()}
        before = {id(parameter) for parameter in module.parameters()}
        _load(module, shapes, file, low_cpu_mem_usage=False)
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                if id(parameter) not in before:
                    parameter.data = parameter.data.to(module.dtype)


def _wear(pipeline: Any, adapter: IPAdapter, state: State, module: nn.Module) -> None:
    """Gives the loaded denoiser the layers with their weights, in its dtype."""
    # Copies: in the file a weight may begin at an address at which products end in other bits.
    own = {group: {name: tensor.clone() for name, tensor in part.items()} for group, part in state.items()}
    with _staying(module):
        _load(module, own, Path(adapter.file).name, low_cpu_mem_usage=True)
    pipeline.set_ip_adapter_scale(adapter.scale)


def _load(module: Any, state: State, file: str, **options: bool) -> None:
    try:
        module._load_ip_adapter_weights([state], **options)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"The IP-Adapter {file} doesn't fit {type(module).__name__}: it was made for a model with other layers or "
            "sizes."
        ) from error


@contextmanager
def _staying(module: nn.Module) -> Iterator[None]:
    """The loader ends with a `.to()` of the whole denoiser, which is where it belongs already."""
    vars(module)["to"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(module)["to"]
