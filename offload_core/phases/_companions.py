"""Parts that a model is loaded with and that aren't in its folder: a ControlNet, an image encoder of an IP-Adapter.

They become components like the model's own, so what phases do with components they do with these. Where the dtype is
"auto", they run in the denoiser's, as if the whole pipeline had been cast to it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelError
from ..library_classes import library_class
from ..model_source import ComponentSource, ModelSource, resolve_part

# How pipelines for what is done with a picture end, behind the name of the model.
_TASKS = ("Img2ImgPipeline", "InpaintPipeline", "Pipeline")
_OF_A_FOLDER = ("diffusion_pytorch_model.safetensors", "model.safetensors")


@dataclass(frozen=True)
class Companion:
    """A component from a folder or a file of its own. name: as the pipeline calls it. fingerprint: of its files."""

    name: str
    place: str = field(repr=False)
    library: str
    fingerprint: str = field(repr=False)

    def source(self, model: ModelSource) -> ComponentSource:
        """The component for this model, checked again. Raises ModelError if it changed since the model was loaded."""
        part, fingerprint = _resolved(self.name, Path(self.place), self.library, model)
        if fingerprint != self.fingerprint:
            raise ModelError(f"The {self.name} {Path(self.place).name} changed since the model was loaded.")
        denoiser = model.components.get("unet") or model.components.get("transformer")
        return part if denoiser is None else replace(part, runs_in=denoiser.dtype)


def companion(name: str, place: str | os.PathLike[str], library: str, model: ModelSource) -> Companion:
    """The component `name` of a folder that holds config.json and safetensors weights, or of a file, for this model.

    Raises ModelError and InputError.
    """
    full = Path(place).expanduser().absolute()
    _, fingerprint = _resolved(name, full, library, model)
    return Companion(name, str(full), library, fingerprint)


def with_companions(source: ModelSource, companions: tuple[Companion, ...]) -> ModelSource:
    """`source` with these components beside its own, as the pipeline that takes them."""
    for one in companions:
        part = one.source(source)
        if one.name == "controlnet":
            source = replace(source, pipeline_class=controlled_class(source, part))
        more = {one.name: part}
        if one.name == "image_encoder" and "feature_extractor" not in source.components:
            more["feature_extractor"] = _feature_extractor(part)
        source = replace(source, components={**source.components, **more})
    return source


def controlled_class(source: ModelSource, part: ComponentSource) -> str:
    """The class that does with a ControlNet what the model's does without, by the names that diffusers gives them."""
    own = source.pipeline_class
    if "controlnet" in source.components:
        return own
    task = next((task for task in _TASKS if own.endswith(task)), "Pipeline")
    kind = "ControlNetUnion" if part.class_name == "ControlNetUnionModel" else "ControlNet"
    wanted = own.removesuffix(task) + kind + task
    try:
        library_class("diffusers", wanted, own)
    except ModelError:
        raise InputError(
            f"{own} can't be run with a ControlNet: diffusers has no {wanted}. Load the model without it."
        ) from None
    return wanted


def _resolved(name: str, place: Path, library: str, model: ModelSource) -> tuple[ComponentSource, str]:
    """The component and the fingerprint of its files. A weight file of a folder with its config means the folder."""
    if not place.is_file():
        return resolve_part(place, name, library)
    if place.name in _OF_A_FOLDER and (place.parent / "config.json").is_file():
        return resolve_part(place.parent, name, library)
    from ..single_files.companion_files import controlnet_file, image_encoder_file

    return controlnet_file(place, model) if name == "controlnet" else image_encoder_file(place)


def _feature_extractor(encoder: ComponentSource) -> ComponentSource:
    """The processor that diffusers makes for an image encoder that comes with none: its picture size, cropped."""
    size = int((encoder.config or {}).get("image_size", 224))
    options: dict[str, Any] = {"size": size, "crop_size": size}
    return ComponentSource(
        "feature_extractor", "transformers", "CLIPImageProcessor", encoder.directory, options, described=True
    )
