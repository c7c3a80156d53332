"""The rows of the families with a ControlNet. See `table`."""

from . import control_families as made
from .calls import BY_32, GUIDANCE, PICTURE, SHORT_TEXT, TRUE_CFG, UNGUIDED
from .family import Family
from .pictures import picture

FOX, WIDE_FOX = picture("fox"), picture("fox", 64, 96)
NO_BINNING = {"use_resolution_binning": False}

CONTROL_ROWS = (
    Family(
        "sd15_control",
        made.sd15_control,
        PICTURE | UNGUIDED | {"image": FOX},
        GUIDANCE,
        title="Stable Diffusion 1.5",
        task="control",
    ),
    Family(
        "sdxl_control", made.sdxl_control, PICTURE | UNGUIDED | {"image": FOX}, GUIDANCE, title="SDXL", task="control"
    ),
    Family(
        "sd3_control",
        made.sd3_control,
        PICTURE | SHORT_TEXT | UNGUIDED | {"control_image": FOX},
        GUIDANCE,
        oddities=("draws the control picture's latents from torch's own generator: a seed alone doesn't repeat a run",),
        title="Stable Diffusion 3.5",
        task="control",
    ),
    Family(
        "sana_control",
        made.sana_control,
        PICTURE | BY_32 | SHORT_TEXT | UNGUIDED | NO_BINNING | {"control_image": WIDE_FOX},
        GUIDANCE,
        title="Sana",
        task="control",
    ),
    Family(
        "flux_control_net",
        made.flux_control_net,
        PICTURE | SHORT_TEXT | {"control_image": FOX},
        TRUE_CFG,
        oddities=("a ControlNet beside the model; flux_control is a model that was trained to see the picture itself",),
        title="FLUX.1 dev",
        task="control",
    ),
    Family(
        "qwen_image_control",
        made.qwen_image_control,
        PICTURE | SHORT_TEXT | {"true_cfg_scale": 1.0, "control_image": FOX},
        TRUE_CFG,
        title="Qwen-Image",
        task="control",
    ),
)
