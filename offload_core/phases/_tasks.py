"""What a model does with a picture: which pipeline class does it, over the same components.

A folder names one class (FluxPipeline). Its siblings (FluxImg2ImgPipeline, FluxInpaintPipeline) take the same weights.
Which class is whose sibling is diffusers' own knowledge: the tables of its AutoPipelines. A few rows are added for
pairs that those tables lack.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..library_classes import library_class
from ..model_source import ModelSource, pipeline_class
from ._pipeline import call_class, call_parameters

IMAGE_TO_IMAGE, INPAINT, IMAGE_TO_VIDEO = "image-to-image", "inpaint", "image-to-video"
VIDEO_TO_VIDEO = "video-to-video"
TASKS = (IMAGE_TO_IMAGE, INPAINT, IMAGE_TO_VIDEO, VIDEO_TO_VIDEO)

# (class, task, sibling, option of the folder that must be set or None). Source: the pipelines' pages in the
# documentation of diffusers 0.42, which run them on one checkpoint. Wan 2.1 and Wan 2.2 A14B have other weights for
# pictures than for texts; only Wan 2.2 5B (expand_timesteps) does both.
_MORE_SIBLINGS = (
    ("ChromaPipeline", IMAGE_TO_IMAGE, "ChromaImg2ImgPipeline", None),
    ("ChromaPipeline", INPAINT, "ChromaInpaintPipeline", None),
    ("Flux2KleinPipeline", INPAINT, "Flux2KleinInpaintPipeline", None),
    ("FluxKontextPipeline", INPAINT, "FluxKontextInpaintPipeline", None),
    ("SanaSprintPipeline", IMAGE_TO_IMAGE, "SanaSprintImg2ImgPipeline", None),
    ("LTX2Pipeline", IMAGE_TO_VIDEO, "LTX2ImageToVideoPipeline", None),
    ("WanPipeline", IMAGE_TO_VIDEO, "WanImageToVideoPipeline", "expand_timesteps"),
    ("CogVideoXPipeline", VIDEO_TO_VIDEO, "CogVideoXVideoToVideoPipeline", None),
)

# What a folder has whose every step is another: a second expert, or a time for each token. A sibling whose constructor
# doesn't take it would run without and make something else (WanVideoToVideoPipeline with a model of Wan 2.2).
_CHANGES_EVERY_STEP = ("transformer_2", "expand_timesteps")

# Pipelines that read a list of pictures as references for one result, not as one picture per result.
_MANY_REFERENCES = ("Flux2KleinPipeline", "Flux2Pipeline", "QwenImageEditPlusPipeline")


def task_of(source: ModelSource, *, masked: bool, count: int = 1) -> str:
    """What a model is asked for when it is given a picture, with or without a mask, or so many pictures.

    Several are a clip for a model that makes videos and can start from one, but for a first and a last frame where its
    own pipeline takes these.
    """
    asked = call_parameters(call_class(source))
    if starts_from_a_clip(source):
        return VIDEO_TO_VIDEO
    if "num_frames" in asked:
        first_and_last = count == 2 and "last_image" in asked
        clip = count > 1 and not first_and_last and VIDEO_TO_VIDEO in _siblings(source)
        return VIDEO_TO_VIDEO if clip else IMAGE_TO_VIDEO
    return INPAINT if masked else IMAGE_TO_IMAGE


def class_for_task(source: ModelSource, task: str) -> str:
    """The name of the pipeline class that does `task` with this model: its own if that takes a picture.

    Raises InputError if there is none, or if its own needs another task.
    """
    if task not in TASKS:
        raise InputError(f"There is no task {task!r}; use one of {', '.join(TASKS)}.")
    own = source.pipeline_class
    asked = call_parameters(call_class(source))
    if task == VIDEO_TO_VIDEO:
        return own if starts_from_a_clip(source) else _sibling(source, task)
    if "mask_image" in asked and task != INPAINT:
        raise InputError(f"{own} repaints what a mask marks: give it a mask beside the picture.")
    if "image" in asked and (task != INPAINT or "mask_image" in asked):
        return own
    return _sibling(source, task)


def _sibling(source: ModelSource, task: str) -> str:
    found = _siblings(source).get(task)
    if found is None:
        raise InputError(f"{source.pipeline_class} has no {task}: {_instead(source)}")
    return found


def check_sibling(source: ModelSource, name: str) -> None:
    """Raises InputError for a class that isn't the model's own or one of its siblings."""
    if name != source.pipeline_class and name not in _siblings(source).values():
        raise InputError(f"This was made for a {name}, and the model is a {source.pipeline_class}. Make it again.")


def takes_many(source: ModelSource) -> bool:
    """Whether several pictures are references for one result."""
    return source.pipeline_class in _MANY_REFERENCES


def reads_pictures_with_the_prompt(source: ModelSource) -> bool:
    """Whether the text encoder sees the picture beside the prompt (Qwen-Image-Edit)."""
    encode_prompt = getattr(pipeline_class(source), "encode_prompt", None)
    return encode_prompt is not None and "image" in inspect.signature(encode_prompt).parameters


def starts_from_a_clip(source: ModelSource) -> bool:
    """Whether the pipeline makes a clip anew, as much of it as its strength says. Those that take a number of frames,
    too, look at the clip and make another (LTXConditionPipeline)."""
    asked = call_parameters(call_class(source))
    return {"video", "strength"} <= asked.keys() and not {"num_frames", "image"} & asked.keys()


def needs_pictures(source: ModelSource) -> bool:
    """Whether the pipeline can't be called without a picture, or a clip."""
    if starts_from_a_clip(source):
        return True
    image = call_parameters(call_class(source)).get("image")
    return image is not None and (image.default is image.empty or reads_pictures_with_the_prompt(source))


def _siblings(source: ModelSource) -> dict[str, str]:
    """The other classes by task, of those that this folder has every component for."""
    own = source.pipeline_class
    family = {task: cls.__name__ for task, cls in _diffusers_siblings(own).items()}
    for name, task, sibling, option in _MORE_SIBLINGS:
        if name == own and (option is None or source.options.get(option)):
            family.setdefault(task, sibling)
    return {
        task: name
        for task, name in family.items()
        if name != own and not _missing(source, name) and not _ignored(source, name)
    }


def _diffusers_siblings(own: str) -> dict[str, type]:
    from diffusers.pipelines import auto_pipeline as auto

    tables: Mapping[str, Mapping[str, type]] = {
        IMAGE_TO_IMAGE: auto.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        INPAINT: auto.AUTO_INPAINT_PIPELINES_MAPPING,
        IMAGE_TO_VIDEO: auto.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
        VIDEO_TO_VIDEO: auto.AUTO_VIDEO2VIDEO_PIPELINES_MAPPING,
    }
    keys = [key for table in auto.SUPPORTED_TASKS_MAPPINGS for key, cls in table.items() if cls.__name__ == own]
    return {task: table[key] for task, table in tables.items() for key in keys if key in table}


def _missing(source: ModelSource, name: str) -> list[str]:
    """Components that a class must have and the folder doesn't hold, but for those that its own may do without."""
    cls: Any = library_class("diffusers", name, "The task")
    own: Any = pipeline_class(source)
    optional = {*getattr(cls, "_optional_components", ()), *inspect.signature(own.__init__).parameters}
    needed = [key for key, p in inspect.signature(cls.__init__).parameters.items() if p.default is p.empty]
    return [key for key in needed if key not in ("self", *source.components, *optional)]


def _ignored(source: ModelSource, name: str) -> list[str]:
    """What changes every step of this folder's own pipeline and a class doesn't take."""
    cls: Any = library_class("diffusers", name, "The task")
    taken = inspect.signature(cls.__init__).parameters
    has = {*source.components, *(name for name, value in source.options.items() if value)}
    return [key for key in _CHANGES_EVERY_STEP if key in has and key not in taken]


def _instead(source: ModelSource) -> str:
    known = _siblings(source)
    if not known:
        return "diffusers knows no pipeline for its components that does. Use another model."
    return f"with this model there is {', '.join(f'{task} ({name})' for task, name in known.items())}."
