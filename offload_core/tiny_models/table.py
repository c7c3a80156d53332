"""The table of families: what to build, how to call it, and what is odd about it.

True of all: latent cells are not 8 x 8 pixels where the pipeline allows another size, heights differ from widths, and
texts are cut off after ``max_sequence_length`` letters (or bytes), where a real tokenizer would count word pieces.
"""

from . import image_families, other_image_families, other_video_families, video_families
from .calls import BY_32, GUIDANCE, LTX2_PLAIN, PICTURE, SHORT_TEXT, TRUE_CFG, UNGUIDED, VIDEO, VIDEOS
from .control_table import CONTROL_ROWS
from .family import Family
from .more_image_table import MORE_IMAGE_ROWS
from .more_video_families import MORE_VIDEO_ROWS
from .pictures import picture
from .sound_families import SOUND_ROWS

REQUIRED_ROWS = (
    Family("sd15", image_families.sd15, PICTURE | UNGUIDED, GUIDANCE, title="Stable Diffusion 1.5"),
    Family(
        "sd15_safety",
        image_families.sd15_safety,
        PICTURE | UNGUIDED,
        GUIDANCE,
        oddities=(
            "the weights of sd15; the small call passes at seeds 0, 1 and 4 and comes back black at 2, 3 and 5",
            "a black picture is a verdict on pixels, so the checker belongs to decode",
        ),
    ),
    Family(
        "flux",
        image_families.flux,
        PICTURE | SHORT_TEXT,
        TRUE_CFG,
        oddities=(
            "guidance_scale is an input of the transformer; real guidance needs true_cfg_scale and a negative prompt",
            "bfloat16 is far from float32 (0.1 on average), because the timestep is rounded before its sines are taken",
        ),
        title="FLUX.1 dev",
    ),
    Family(
        "sdxl",
        image_families.sdxl,
        PICTURE | UNGUIDED,
        GUIDANCE,
        oddities=("tokenizer_2 pads with '!', so the two encoders see different ids",),
        title="SDXL",
    ),
    Family(
        "sdxl_fp16_force_upcast",
        image_families.sdxl_fp16_force_upcast,
        PICTURE | UNGUIDED,
        GUIDANCE,
        oddities=("the weights of sdxl; only a float16 run differs, its VAE decodes in float32",),
    ),
    Family("sd3", image_families.sd3, PICTURE | SHORT_TEXT | UNGUIDED, GUIDANCE, title="Stable Diffusion 3.5"),
    Family(
        "flux2_klein",
        image_families.flux2_klein,
        PICTURE | SHORT_TEXT | UNGUIDED,
        {"guidance_scale": 4.0},
        oddities=(
            "takes no negative prompt: guidance encodes an empty one",
            "28 text layers, because the default call reads hidden states 9, 18 and 27",
            "bfloat16 is far from float32, as with flux",
        ),
        title="FLUX.2 klein",
    ),
    Family(
        "z_image",
        image_families.z_image,
        PICTURE | SHORT_TEXT | {"guidance_scale": 0.0},
        GUIDANCE,
        oddities=("a prompt given as a list is overwritten in place with its chat template: pass a copy",),
        title="Z-Image",
    ),
    Family(
        "qwen_image",
        image_families.qwen_image,
        PICTURE | SHORT_TEXT | {"true_cfg_scale": 1.0},
        TRUE_CFG,
        oddities=(
            "guided by default (true_cfg_scale 4), but only with a negative prompt",
            "the first 34 tokens of the template are cut off by number, and here too they are its fixed text",
        ),
        title="Qwen-Image",
    ),
    Family("chroma", image_families.chroma, PICTURE | SHORT_TEXT | UNGUIDED, GUIDANCE, title="Chroma"),
    Family(
        "wan22_a14b",
        video_families.wan22_a14b,
        VIDEO | SHORT_TEXT | UNGUIDED,
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=("of the two steps the first is transformer's and the second transformer_2's",),
        title="Wan 2.2 A14B",
    ),
    Family(
        "wan22_5b",
        video_families.wan22_5b,
        VIDEO | BY_32 | SHORT_TEXT | UNGUIDED,
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=("latent cells are 16 x 16 pixels and patches 2 x 2 cells: sizes are multiples of 32",),
        title="Wan 2.2 5B",
    ),
)

OTHER_ROWS = (
    Family(
        "wan22_i2v_a14b",
        video_families.wan22_i2v_a14b,
        VIDEO | SHORT_TEXT | UNGUIDED | {"image": picture("fox")},
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=("needs a picture, which the VAE encodes before the first step", "both experts run, one step each"),
        title="Wan 2.2 I2V A14B",
        task="image to video",
    ),
    Family(
        "sana",
        other_image_families.sana,
        PICTURE | BY_32 | SHORT_TEXT | UNGUIDED | {"use_resolution_binning": False},
        GUIDANCE,
        oddities=(
            "sizes are multiples of 32; resolution binning would round them to about 1024",
            "the call's long default instruction is put before the prompt, but not by encode_prompt's default",
        ),
        title="Sana",
    ),
    Family(
        "lumina2",
        other_image_families.lumina2,
        PICTURE | UNGUIDED,
        GUIDANCE,
        oddities=("the pipeline takes latent cells of 8 x 8 pixels for granted, so the VAE has that scale",),
        title="Lumina 2",
    ),
    Family(
        "pixart_sigma",
        other_image_families.pixart_sigma,
        PICTURE | SHORT_TEXT | UNGUIDED | {"use_resolution_binning": False, "clean_caption": False},
        GUIDANCE,
        oddities=("clean_caption, on by default, needs two more packages and falls back with a warning",),
        title="PixArt-Sigma",
    ),
    Family(
        "krea2",
        other_image_families.krea2,
        PICTURE | SHORT_TEXT | {"guidance_scale": 0.0},
        GUIDANCE,
        oddities=("reads hidden states 1, 2 and 4, as its config says; guided above 0, not above 1",),
        title="Krea 2",
    ),
    Family(
        "ltx",
        other_video_families.ltx,
        VIDEO | BY_32 | SHORT_TEXT | UNGUIDED,
        GUIDANCE,
        count_argument=VIDEOS,
        title="LTX-Video",
    ),
    Family(
        "ltx_timestep",
        other_video_families.ltx_timestep,
        VIDEO | BY_32 | SHORT_TEXT | UNGUIDED | {"decode_timestep": 0.05},
        GUIDANCE,
        count_argument=None,
        oddities=(
            "decode draws noise from the same generator after the last step",
            "two videos of one prompt raise in the VAE: its timesteps are counted per prompt",
        ),
    ),
    Family(
        "ltx2",
        other_video_families.ltx2,
        VIDEO | BY_32 | SHORT_TEXT | LTX2_PLAIN,
        GUIDANCE,
        count_argument=VIDEOS,
        oddities=(
            "one_shot gives the video alone; the pipeline's second result is the sound",
            "by default it runs two extra forwards per step, one of them without block 28, which is not here",
        ),
        title="LTX-2",
    ),
    Family(
        "cogvideox",
        other_video_families.cogvideox,
        VIDEO | UNGUIDED | {"num_frames": 9},
        GUIDANCE,
        count_argument=None,
        oddities=("makes one video whatever num_videos_per_prompt says", "5 frames would come back as 8, 9 stay 9"),
        title="CogVideoX",
    ),
    Family(
        "hunyuan_video",
        other_video_families.hunyuan_video,
        VIDEO,
        TRUE_CFG,
        count_argument=VIDEOS,
        oddities=("guidance_scale is an input of the transformer, as with flux",),
        title="HunyuanVideo",
    ),
    Family(
        "hunyuan_video15",
        other_video_families.hunyuan_video15,
        VIDEO | {"prompt": 'a sign that says "fox"'},
        {"negative_prompt": "blurry"},
        count_argument=None,
        oddities=(
            "guidance is a component (guider), so the plain call is guided too, against an empty prompt",
            "the second text encoder runs only for words in quotes",
            "two videos of one prompt raise in the transformer, and so do two prompts",
            "20 MB and 2 s a run: a layer 2048 wide and text of 1000 tokens are fixed in the library",
        ),
        title="HunyuanVideo 1.5",
    ),
)

REQUIRED: tuple[str, ...] = tuple(row.name for row in REQUIRED_ROWS)
_ROWS = (*REQUIRED_ROWS, *OTHER_ROWS, *MORE_IMAGE_ROWS, *CONTROL_ROWS, *MORE_VIDEO_ROWS, *SOUND_ROWS)
FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}
