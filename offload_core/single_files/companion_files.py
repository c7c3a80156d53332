"""Files of what is loaded beside a model: a ControlNet, or the image encoder of an IP-Adapter.

Their configs aren't in the files. A ControlNet's is made of its shapes and of the model's denoiser
(`controlnet_config`), an encoder's of its shapes and a table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Header, show
from ..errors import InputError, ModelError
from ..model_source import ComponentSource, ModelSource, component_class
from .controlnet_config import config_of, unlike
from .layout import PartLayout, Shapes, count
from .layouts.controlnets import CONTROLNETS, NO_CONTROLNETS
from .layouts.vision_encoders import LAYOUTS as VISION_ENCODERS
from .near_misses import NEAR_MISSES
from .recognise import FoundPart, find_parts, open_file, what_else
from .resolve import component_of
from .rules import convert
from .template import TemplatePart

# The denoisers whose ControlNets are known as files.
_DENOISERS = {
    "UNet2DConditionModel": ("ControlNetModel", "ControlNetUnionModel"),
    "FluxTransformer2DModel": ("FluxControlNetModel",),
}
# Activation functions by width: OpenAI's ViT-L has its own, LAION's ViT-H and ViT-bigG don't. All have 16 heads.
# Sources: the config.json of openai/clip-vit-large-patch14, laion/CLIP-ViT-H-14-laion2B-s32B-b79K and
# laion/CLIP-ViT-bigG-14-laion2B-39B-b160k.
_ACTIVATIONS = {1024: "quick_gelu", 1280: "gelu", 1664: "gelu"}
_HEADS = 16
_AVERAGED = ("_shuffle", "_shuffle_fp16")  # how names of ControlNets end whose answers are averaged; no tensor tells it


def controlnet_file(path: str | os.PathLike[str], model: ModelSource) -> tuple[ComponentSource, str]:
    """The ControlNet in a file, for this model, and the fingerprint of the file. Reads its header only.

    Raises ModelError, one sentence with what to do, for a file of another kind or for another model, and InputError for
    a model whose ControlNets aren't known as files.
    """
    file, header = open_file(os.fspath(path))
    found = _found(file, header, CONTROLNETS)
    if found is None or "difference" in header.tensors:
        raise ModelError(f"{show(file.name)} {_no_controlnet(file, header)}")
    denoiser = next((part for part in model.components.values() if part.class_name in _DENOISERS), None)
    if denoiser is None:
        raise InputError(
            f"ControlNets of {model.pipeline_class} aren't known as files. Give the diffusers folder of one."
        )
    (class_name,) = found.layout.classes
    told, whose = denoiser.config or {}, _DENOISERS[denoiser.class_name]
    if class_name not in whose:
        what = f"{show(file.name)} is a ControlNet for another kind of model ({class_name})"
        raise ModelError(f"{what}, and {model.pipeline_class} takes a {whose[0]}. Use one made for this model.")
    converted = convert(file, header, found.prefix, found.layout.rules(found.shapes))
    config = _config(class_name, file, {name: stored.shape for name, stored in converted.stored.items()}, told)
    other = unlike(config, told)
    if other is not None:
        raise ModelError(f"{show(file.name)} is a ControlNet for another model: {other}. Use one made for this model.")
    if file.stem.endswith(_AVERAGED) and "block_out_channels" in config:
        config["global_pool_conditions"] = True
    return _component("controlnet", "diffusers", class_name, found, config)


def image_encoder_file(path: str | os.PathLike[str]) -> tuple[ComponentSource, str]:
    """The CLIP vision encoder in a file, and the fingerprint of the file. Reads its header only.

    Raises ModelError, one sentence with what to do, for a file of another kind or of a size that isn't known.
    """
    file, header = open_file(os.fspath(path))
    found = _found(file, header, VISION_ENCODERS)
    if found is None or "visual_projection.weight" not in header.tensors:
        raise ModelError(f"{show(file.name)} {_no_encoder(header)}")
    shapes = found.shapes
    width, _, patch, _ = shapes["vision_model.embeddings.patch_embedding.weight"]
    if width not in _ACTIVATIONS:
        raise ModelError(
            f"{show(file.name)} holds a CLIP vision encoder that is {width} wide, which isn't known as a file. "
            "Give its folder with the config.json."
        )
    places = shapes["vision_model.embeddings.position_embedding.weight"][0]
    config = {
        "hidden_size": width,
        "intermediate_size": shapes["vision_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": count(shapes, "vision_model.encoder.layers."),
        "num_attention_heads": _HEADS,
        "hidden_act": _ACTIVATIONS[width],
        "patch_size": patch,
        "image_size": int((places - 1) ** 0.5) * patch,
        "projection_dim": shapes["visual_projection.weight"][0],
    }
    return _component("image_encoder", "transformers", "CLIPVisionModelWithProjection", found, config)


def _found(file: Path, header: Header, layouts: tuple[PartLayout, ...]) -> FoundPart | None:
    for layout in layouts:
        for prefix in layout.prefixes:
            there = all(prefix + name in header.tensors for name in layout.needs)
            if there and not any(prefix + name in header.tensors for name in layout.lacks):
                return FoundPart(file, header, layout, prefix)
    return None


def _config(class_name: str, file: Path, shapes: Shapes, denoiser: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return config_of(class_name, shapes, denoiser)
    except (KeyError, IndexError, ValueError) as error:
        what = f"{show(file.name)} looks like a {class_name}, and a part of it is missing ({error})"
        raise ModelError(f"{what}. Download it again.") from None


def _component(
    name: str, library: str, class_name: str, found: FoundPart, config: dict[str, Any]
) -> tuple[ComponentSource, str]:
    part = component_of(TemplatePart(name, library, class_name, config), found, [])
    component_class(part)
    header = found.header
    marks = [found.path.name, header.file_bytes, header.mtime_ns, header.header_sha256, class_name, config]
    return part, hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()


def _no_controlnet(file: Path, header: Header) -> str:
    """What a file is instead of a ControlNet, in words, and what to do."""
    if "difference" in header.tensors:
        return "holds the difference of a ControlNet to a UNet. Use the whole ControlNet."
    misses = [miss for miss in NEAR_MISSES if "ControlNet" not in miss.what]
    for miss in (*misses, *NO_CONTROLNETS):
        if miss.fits(header.tensors):
            return f"{miss.what}. {miss.advice}"
    parts = find_parts(file, header)
    if parts:
        what = " and ".join(dict.fromkeys(part.layout.title for part in parts))
        return f"holds {what}, not a ControlNet. Choose another file."
    return what_else(header)


def _no_encoder(header: Header) -> str:
    """The same for an image encoder."""
    names = header.tensors
    if "vision_model.embeddings.patch_embedding.weight" in names:
        kind = "without its projection" if "vision_model.embeddings.class_embedding" in names else "that is no CLIP"
        return f"holds a vision encoder {kind}, which IP-Adapters don't read. Use the file that the adapter names."
    return "holds no CLIP vision encoder. Use the file that the adapter was trained with."
