"""What a model consists of beside its weights: classes, configs, scheduler, tokenizers.

From a diffusers folder that the user names, or from this project's description of a known model (`known/models`), so
that no network is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import show
from ..errors import ModelError
from ..known import KnownModel, known_model
from ..model_folder import ModelFolder

#: Known models whose files are recognised, in the order in which they are tried. Of two that have the same
#: architecture only the first is told by its files; the other has to be asked for by name.
FAMILIES = (
    "sd1.5",
    "sdxl",
    "flux.1-dev",
    "flux.1-schnell",
    "flux.1-kontext-dev",
    "sd3.5-large",
    "sd3.5-medium",
    "chroma",
    "flux.2-klein-4b",
    "flux.2-klein-9b",
    "z-image-turbo",
    "qwen-image",
    "wan2.1-t2v-1.3b",
    "wan2.2-t2v-a14b",
    "wan2.1-t2v-14b",
    "wan2.2-ti2v-5b",
    "wan2.1-i2v-14b",
    "wan2.1-flf2v-14b",
    "wan2.2-i2v-a14b",
    "wan2.1-vace-1.3b",
    "wan2.1-vace-14b",
    "sd1.5-inpainting",
    "sdxl-inpainting",
    "sdxl-refiner",
    "flux.1-fill-dev",
    "flux.1-control-dev",
    "qwen-image-edit",
    "qwen-image-edit-2509",
    "lumina-2",
    "auraflow",
    "hunyuanvideo",
    "ltx-2",
    "ltx-video",
    "ltx-video-0.9.1",
    "ltx-video-0.9.5",
    "ltx-video-0.9.7",
    "sd2.1",
    "sd2.1-base",
    "sd2-inpainting",
)
ALIKE = {
    "flux.1-kontext-dev": "flux.1-dev",
    "wan2.1-t2v-14b": "wan2.2-t2v-a14b",
    "qwen-image-edit": "qwen-image",
    "qwen-image-edit-2509": "qwen-image",
    "sd2.1-base": "sd2.1",
}
#: Parts that a pipeline can do without and single files don't have, but for pipelines that see through an encoder.
_LEFT_OUT = {"safety_checker", "feature_extractor", "image_encoder", "image_processor"}
_SEEING = {"WanImageToVideoPipeline": {"image_encoder", "image_processor"}}


@dataclass(frozen=True)
class TemplatePart:
    """One component. config: of its class; of a tokenizer, options for its loader. directory: of its own files, None
    for one that is described."""

    name: str
    library: str
    class_name: str
    config: Mapping[str, Any] = field(repr=False)
    directory: Path | None = None


@dataclass(frozen=True)
class Template:
    """title: for sentences. defaults: arguments of the pipeline's call. folder: the one it was read from, if any.
    looks_like: a sentence on models whose denoiser looks the same."""

    title: str
    pipeline: str
    parts: dict[str, TemplatePart] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    defaults: dict[str, Any] = field(repr=False)
    folder: ModelFolder | None = field(default=None, repr=False)
    looks_like: str = field(default="", repr=False)


def known_templates(family: str) -> list[Template]:
    """The templates to try: all that files can be told to be, or the one of that name.

    Raises ModelError for a name that isn't one of them.
    """
    if family == "auto":
        told = [name for name in FAMILIES if name not in ALIKE]
        return [_described(model) for name in told if (model := known_model(name)) is not None]
    model = known_model(family)
    if model is None or model.name not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise ModelError(f"{show(family)} is no family that files can be loaded as. Use auto, or one of {names}.")
    return [_described(model)]


def _described(model: KnownModel) -> Template:
    parts = {
        name: TemplatePart(name, part["library"], part["class"], part.get("config") or {})
        for name, part in model.components.items()
        if name not in _left_out(model.pipeline)
    }
    options = {name: value for name, value in model.options.items() if value is not None}
    others = [name for name, first in ALIKE.items() if first == model.name]
    looks_like = f"If it is another model that looks the same, choose it as the family ({others[0]})." if others else ""
    defaults = dict(model.defaults)
    return Template(model.title, model.pipeline, parts, _without_checker(options), defaults, looks_like=looks_like)


def folder_template(path: str) -> Template:
    """The configs of a diffusers folder, whose weights may be missing. Raises ModelError if it isn't one."""
    folder = ModelFolder(Path(path).expanduser())
    if not folder.root.is_dir():
        raise ModelError(f"There is no folder {show(path, 250)} to take configs from. Check the path.")
    index_path = folder.root / "model_index.json"
    index = folder.read_json(index_path)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise folder.error(index_path, "doesn't name a pipeline class (_class_name)", "Give another folder.")
    parts: dict[str, TemplatePart] = {}
    options: dict[str, Any] = {}
    value: Any
    for name, value in index.items():
        if name.startswith("_") or name in _left_out(pipeline):
            continue
        if not (isinstance(value, list) and len(value) == 2):
            options[name] = value
        elif isinstance(value[0], str) and isinstance(value[1], str):
            directory = folder.child(folder.root, name, index_path)
            config = directory / "config.json"
            known = folder.read_json(config) if config.is_file() else {}
            parts[name] = TemplatePart(name, value[0], value[1], known, directory)
    return Template(folder.name, pipeline, parts, _without_checker(options), {}, folder)


def _left_out(pipeline: str) -> set[str]:
    return _LEFT_OUT - _SEEING.get(pipeline, set())


def _without_checker(options: dict[str, Any]) -> dict[str, Any]:
    return {name: False if name == "requires_safety_checker" else value for name, value in options.items()}
