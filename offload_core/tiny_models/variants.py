"""Calls that start from a picture: other pipelines over the folders of the table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers

from .pictures import mask, picture
from .table import FAMILIES


@dataclass(frozen=True)
class Variant:
    """A picture-conditioned call.

    name: the key in VARIANTS.
    family: whose folder it runs on.
    pipeline_class: what to load the folder with.
    call: keyword arguments of a small run, the picture among them.
    """

    name: str
    family: str
    pipeline_class: type[diffusers.DiffusionPipeline]
    call: Mapping[str, Any]


def _variant(name: str, family: str, pipeline_class: type, *, without: tuple[str, ...] = (), **extra: Any) -> Variant:
    """Return a variant whose call is the family's own, less some arguments, plus others."""
    call = {key: value for key, value in FAMILIES[family].call.items() if key not in without}
    return Variant(name, family, pipeline_class, call | extra)


FOX = picture("fox")
WIDE_FOX = picture("fox", 64, 96)
SIZE = ("height", "width")
FOUR_STEPS: dict[str, Any] = {"num_inference_steps": 4, "strength": 0.6}  # two of them are run

ROWS = (
    _variant("sd15_img2img", "sd15", diffusers.StableDiffusionImg2ImgPipeline, without=SIZE, image=FOX, **FOUR_STEPS),
    _variant("sdxl_img2img", "sdxl", diffusers.StableDiffusionXLImg2ImgPipeline, without=SIZE, image=FOX, **FOUR_STEPS),
    _variant(
        "sdxl_inpaint", "sdxl", diffusers.StableDiffusionXLInpaintPipeline, image=FOX, mask_image=mask(), **FOUR_STEPS
    ),
    _variant("flux_img2img", "flux", diffusers.FluxImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    _variant("flux_kontext", "flux", diffusers.FluxKontextPipeline, image=FOX, max_area=48 * 64, _auto_resize=False),
    _variant(
        "flux2_klein_edit",
        "flux2_klein",
        diffusers.Flux2KleinPipeline,
        image=[picture("first", 64, 64), picture("second", 64, 64)],
    ),
    _variant("z_image_img2img", "z_image", diffusers.ZImageImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    _variant("qwen_image_img2img", "qwen_image", diffusers.QwenImageImg2ImgPipeline, image=FOX, **FOUR_STEPS),
    _variant("wan22_5b_i2v", "wan22_5b", diffusers.WanImageToVideoPipeline, image=WIDE_FOX),
    _variant("ltx_i2v", "ltx", diffusers.LTXImageToVideoPipeline, image=WIDE_FOX),
    _variant("ltx2_i2v", "ltx2", diffusers.LTX2ImageToVideoPipeline, image=WIDE_FOX, image_crf=0),
)

VARIANTS: dict[str, Variant] = {row.name: row for row in ROWS}
