"""Parts that a model is loaded with and that aren't in its folder: a ControlNet, an image encoder of an IP-Adapter.

They become components like the model's own, so what phases do with components they do with these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelError
from ..library_classes import library_class
from ..model_source import ComponentSource, ModelSource, resolve_part


@dataclass(frozen=True)
class Companion:
    """A component from a folder of its own. name: as the pipeline calls it. fingerprint: of its files."""

    name: str
    directory: str = field(repr=False)
    library: str
    fingerprint: str = field(repr=False)

    def source(self) -> ComponentSource:
        """The component, checked again. Raises ModelError if it changed since the model was loaded."""
        part, fingerprint = resolve_part(self.directory, self.name, self.library)
        if fingerprint != self.fingerprint:
            raise ModelError(f"The {self.name} {Path(self.directory).name} changed since the model was loaded.")
        return part


def companion(name: str, directory: str | os.PathLike[str], library: str) -> Companion:
    """The component `name` in a folder that holds config.json and safetensors weights. Raises ModelError."""
    place = Path(directory).absolute()
    _, fingerprint = resolve_part(place, name, library)
    return Companion(name, str(place), library, fingerprint)


def with_companions(source: ModelSource, companions: tuple[Companion, ...]) -> ModelSource:
    """`source` with these components beside its own, as the pipeline that takes them."""
    for one in companions:
        part = one.source()
        if one.name == "controlnet":
            source = replace(source, pipeline_class=_with_controlnet(source, part))
        more = {one.name: part}
        if one.name == "image_encoder" and "feature_extractor" not in source.components:
            more["feature_extractor"] = _feature_extractor(part)
        source = replace(source, components={**source.components, **more})
    return source


def _with_controlnet(source: ModelSource, part: ComponentSource) -> str:
    """The class that runs the model with a ControlNet, by the names that diffusers gives such pipelines."""
    own = source.pipeline_class
    if "controlnet" in source.components:
        return own
    kind = "ControlNetUnionPipeline" if part.class_name == "ControlNetUnionModel" else "ControlNetPipeline"
    wanted = own.removesuffix("Pipeline") + kind
    try:
        library_class("diffusers", wanted, own)
    except ModelError:
        raise InputError(
            f"{own} can't be run with a ControlNet: diffusers has no {wanted}. Load the model without it."
        ) from None
    return wanted


def _feature_extractor(encoder: ComponentSource) -> ComponentSource:
    """The processor that diffusers makes for an image encoder that comes with none: its picture size, cropped."""
    size = int((encoder.config or {}).get("image_size", 224))
    options: dict[str, Any] = {"size": size, "crop_size": size}
    return ComponentSource(
        "feature_extractor", "transformers", "CLIPImageProcessor", encoder.directory, options, described=True
    )
