"""Encode Image Phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..foreseen import foreseen
from ..pictures import mask_as_picture, pictures_of
from ..results import NodeResult
from ..schema import IMAGES_TYPE, MODEL, Input, Node, NodeSchema, Output
from ._job import MODEL_DEFAULT

if TYPE_CHECKING:
    from ..calls import NodeCall

SCHEMA = NodeSchema(
    id="PhaseOffloadEncodeImage",
    display_name="Encode Image Phase",
    description=(
        "Loads the encoder half of the model's VAE, encodes a picture to start from, to look at or to set in motion, "
        "and gives the memory back."
    ),
    inputs=(
        MODEL,
        Input(
            "image",
            "IMAGE",
            "The picture. Several in a batch are references, for models that read more than one, or a clip, for video "
            "models that start from one; elsewhere each is a start of its own.",
        ),
        Input(
            "mask",
            "MASK",
            "Where to repaint: 1 is painted anew, 0 stays. Models made for texts alone can do it, too.",
            optional=True,
        ),
        Input(
            "images",
            IMAGES_TYPE,
            "Earlier references, from another Encode Image Phase. This picture comes after them; it may be of another "
            "size.",
            optional=True,
        ),
        Input(
            "width",
            "INT",
            "Width of the result in pixels. 0: the picture's, or the model's own default where it only looks at the "
            "picture or makes a video.",
            default=MODEL_DEFAULT,
            min=0,
            max=16384,
            step=8,
            optional=True,
        ),
        Input(
            "height",
            "INT",
            "Height of the result in pixels. 0: as with the width.",
            default=MODEL_DEFAULT,
            min=0,
            max=16384,
            step=8,
            optional=True,
        ),
    ),
    outputs=(
        Output(
            "images",
            IMAGES_TYPE,
            "The encoded pictures, in RAM. For Denoise Phase; for Encode Prompt Phase, too, where the model reads them "
            "together with the prompt.",
        ),
    ),
    search_aliases=(
        "vae encode",
        "image to image",
        "img2img",
        "inpaint",
        "reference image",
        "edit",
        "kontext",
        "image to video",
        "video to video",
        "offload",
    ),
)


def encode_image(
    call: NodeCall,
    *,
    model: Any,
    image: Any,
    mask: Any = None,
    images: Any = None,
    width: int = MODEL_DEFAULT,
    height: int = MODEL_DEFAULT,
) -> NodeResult:
    """PhaseOffloadEncodeImage: the pictures as the model's VAE sees them, and which pipeline takes them."""
    pictures = [*(images.pictures if images is not None else ()), *pictures_of(image)]
    options: dict[str, Any] = {"height": height or None, "width": width or None}
    if mask is not None:
        options["mask"] = mask_as_picture(mask)
    with foreseen(call, offload_core.foresee_images, model, pictures, **options) as plan:
        encoded = offload_core.encode_images(model, pictures, session=call.session, plan=plan, **options)
    call.say_how_it_went()
    return NodeResult((encoded,))


NODE = Node(SCHEMA, encode_image)
