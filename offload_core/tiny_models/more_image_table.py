"""The rows of the picture families that came last. See `table`."""

from . import more_image_families as made
from . import qwen_edit_families as qwen_edit
from .calls import GUIDANCE, PICTURE, SHORT_TEXT, TRUE_CFG, UNGUIDED
from .family import Family
from .kolors_family import kolors
from .pictures import mask, picture

FOX = picture("fox")
FOUR_STEPS = {"num_inference_steps": 4, "strength": 0.6}  # two of them are run
EDIT = {"prompt": PICTURE["prompt"], "height": 64, "width": 128, "num_inference_steps": 2}

MORE_IMAGE_ROWS = (
    Family("sd21", made.sd21, PICTURE | UNGUIDED, GUIDANCE, title="Stable Diffusion 2.1"),
    Family(
        "sdxl_refiner",
        made.sdxl_refiner,
        {"prompt": PICTURE["prompt"], "image": FOX, **FOUR_STEPS} | UNGUIDED,
        GUIDANCE,
        title="SDXL refiner",
        task="image to image",
    ),
    Family(
        "sd3_inpaint",
        made.sd3_inpaint,
        PICTURE | SHORT_TEXT | UNGUIDED | {"image": FOX, "mask_image": mask(), **FOUR_STEPS},
        GUIDANCE,
        oddities=("another folder than sd3, because the pipeline allows only 16 latent channels",),
        title="Stable Diffusion 3.5",
        task="inpaint",
    ),
    Family(
        "hidream",
        made.hidream,
        PICTURE | SHORT_TEXT | UNGUIDED,
        GUIDANCE,
        oddities=("the size is scaled to that of 128 x 128 latent cells, so the result isn't of the size asked for",),
        title="HiDream-I1",
    ),
    Family("kolors", kolors, PICTURE | SHORT_TEXT | UNGUIDED, GUIDANCE, title="Kolors"),
    Family("auraflow", made.auraflow, PICTURE | SHORT_TEXT | UNGUIDED, GUIDANCE, title="AuraFlow"),
    Family("flux_schnell", made.flux_schnell, PICTURE | SHORT_TEXT, TRUE_CFG, title="FLUX.1 schnell"),
    Family(
        "flux_fill",
        made.flux_fill,
        PICTURE | SHORT_TEXT | {"image": FOX, "mask_image": mask()},
        {},
        oddities=("guidance is an input of the transformer, and there is no other",),
        title="FLUX.1 Fill",
        task="inpaint",
    ),
    Family(
        "flux_kontext",
        made.flux_kontext,
        PICTURE | SHORT_TEXT | {"image": FOX, "max_area": 48 * 64, "_auto_resize": False},
        TRUE_CFG,
        title="FLUX.1 Kontext",
        task="edit",
    ),
    Family(
        "flux_control",
        made.flux_control,
        PICTURE | SHORT_TEXT | {"control_image": FOX},
        {},
        oddities=("guidance is an input of the transformer, and there is no other",),
        title="FLUX.1 Control",
        task="control",
    ),
    Family(
        "flux2_dev",
        made.flux2_dev,
        PICTURE | UNGUIDED | {"max_sequence_length": 384},
        {"guidance_scale": 4.0},
        oddities=(
            "takes no negative prompt: guidance is an input of the transformer",
            "31 text layers, because the default call reads hidden states 10, 20 and 30",
            "the text is cut off after the long instruction before it, so there is room for that and the prompt",
        ),
        title="FLUX.2 dev",
    ),
    Family(
        "qwen_image_edit",
        qwen_edit.qwen_image_edit,
        EDIT | {"image": FOX},
        {"negative_prompt": "blurry"},
        oddities=(
            "pictures are encoded at about a million pixels, whatever the size asked for",
            "guided by default (true_cfg_scale 4), but only with a negative prompt",
        ),
        title="Qwen-Image-Edit",
        task="edit",
    ),
    Family(
        "qwen_image_edit_plus",
        qwen_edit.qwen_image_edit_plus,
        EDIT | {"image": [FOX, picture("second")]},
        {"negative_prompt": "blurry"},
        count_argument=None,
        oddities=("as qwen_image_edit, and several pictures are references for one result",),
        title="Qwen-Image-Edit-Plus",
        task="edit",
    ),
    Family(
        "qwen_image_layered",
        qwen_edit.qwen_image_layered,
        {"prompt": PICTURE["prompt"], "num_inference_steps": 2, "layers": 1, "image": FOX.convert("RGBA")},
        {"negative_prompt": "blurry"},
        count_argument=None,
        oddities=("chooses its size: 640 x 640 pixels in area", "the result has all layers of a prompt in one tensor"),
        title="Qwen-Image-Layered",
        task="edit",
    ),
    Family("ernie_image", made.ernie_image, PICTURE | UNGUIDED, GUIDANCE, title="Ernie-Image"),
    Family("ovis_image", made.ovis_image, PICTURE | SHORT_TEXT | UNGUIDED, GUIDANCE, title="Ovis-Image"),
    Family(
        "ideogram4",
        made.ideogram4,
        PICTURE | SHORT_TEXT | {"guidance_scale": 4.0, "guidance_schedule": None},
        {},
        oddities=(
            "always guided: a transformer of its own makes the other half, from no text",
            "guidance_scale needs guidance_schedule=None, whose default has 48 steps",
            "36 text layers, because the pipeline calls them one by one and reads 13 by number",
        ),
        title="Ideogram 4",
    ),
)
