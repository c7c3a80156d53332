"""Calls that start from a picture: other pipelines over the folders of the table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers

from .pictures import mask, picture
from .table import FAMILIES

IMAGE, VIDEO, EDIT, INPAINT, CONTROL = "image to image", "image to video", "edit", "inpaint", "control"
SHORT = {IMAGE: "img2img", VIDEO: "i2v", EDIT: "edit", INPAINT: "inpaint", CONTROL: "control"}


@dataclass(frozen=True)
class Variant:
    """A picture-conditioned call.

    name: the key in VARIANTS.
    family: whose folder it runs on.
    task: what it does: "image to image", "image to video", "edit", "inpaint" or "control".
    pipeline_class: what to load the folder with.
    call: keyword arguments of a small run, the picture among them.
    """

    name: str
    family: str
    task: str
    pipeline_class: type[diffusers.DiffusionPipeline]
    call: Mapping[str, Any]


def variant(
    family: str, task: str, pipeline_class: type, *, name: str = "", without: tuple[str, ...] = (), **extra: Any
) -> Variant:
    """Return a variant whose call is the family's own, less some arguments, plus others."""
    call = {key: value for key, value in FAMILIES[family].call.items() if key not in without}
    return Variant(name or f"{family}_{SHORT[task]}", family, task, pipeline_class, call | extra)


FOX = picture("fox")
WIDE_FOX = picture("fox", 64, 96)
SIZE = ("height", "width")
FOUR_STEPS: dict[str, Any] = {"num_inference_steps": 4, "strength": 0.6}  # two of them are run
REPAINT: dict[str, Any] = {"image": FOX, "mask_image": mask(), **FOUR_STEPS}

ROWS = (
    variant("sd15", INPAINT, diffusers.StableDiffusionInpaintPipeline, **REPAINT),
    variant("sd21", IMAGE, diffusers.StableDiffusionImg2ImgPipeline, without=SIZE, image=FOX, **FOUR_STEPS),
    variant("sd21", INPAINT, diffusers.StableDiffusionInpaintPipeline, **REPAINT),
    variant("sd3", IMAGE, diffusers.StableDiffusion3Img2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("flux", INPAINT, diffusers.FluxInpaintPipeline, **REPAINT),
    variant("flux_schnell", IMAGE, diffusers.FluxImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("flux_schnell", INPAINT, diffusers.FluxInpaintPipeline, **REPAINT),
    variant("flux_kontext", INPAINT, diffusers.FluxKontextInpaintPipeline, without=("max_area",), **REPAINT),
    variant("flux2_dev", EDIT, diffusers.Flux2Pipeline, image=[picture("first", 64, 64), picture("second", 64, 64)]),
    variant("flux2_klein", INPAINT, diffusers.Flux2KleinInpaintPipeline, **REPAINT),
    variant("kolors", IMAGE, diffusers.KolorsImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("chroma", IMAGE, diffusers.ChromaImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("qwen_image", INPAINT, diffusers.QwenImageInpaintPipeline, **REPAINT),
    variant("z_image", INPAINT, diffusers.ZImageInpaintPipeline, **REPAINT),
    variant("sd15", IMAGE, diffusers.StableDiffusionImg2ImgPipeline, without=SIZE, image=FOX, **FOUR_STEPS),
    variant("sdxl", IMAGE, diffusers.StableDiffusionXLImg2ImgPipeline, without=SIZE, image=FOX, **FOUR_STEPS),
    variant("sdxl", INPAINT, diffusers.StableDiffusionXLInpaintPipeline, **REPAINT),
    variant("flux", IMAGE, diffusers.FluxImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("flux_kontext", EDIT, diffusers.FluxKontextPipeline, name="flux_kontext"),
    variant(
        "flux2_klein",
        EDIT,
        diffusers.Flux2KleinPipeline,
        image=[picture("first", 64, 64), picture("second", 64, 64)],
    ),
    variant("z_image", IMAGE, diffusers.ZImageImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("qwen_image", IMAGE, diffusers.QwenImageImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    variant("wan22_5b", VIDEO, diffusers.WanImageToVideoPipeline, image=WIDE_FOX),
    variant("ltx", VIDEO, diffusers.LTXImageToVideoPipeline, image=WIDE_FOX),
    variant("ltx2", VIDEO, diffusers.LTX2ImageToVideoPipeline, image=WIDE_FOX, image_crf=0),
)

VARIANTS: dict[str, Variant] = {row.name: row for row in ROWS}
