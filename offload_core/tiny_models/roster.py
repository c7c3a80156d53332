"""The families in the order of docs/families.md, and what can't be made or run in phases, and why."""

#: Families of the table; those that aren't here come last, in the table's order.
ORDER = (
    "sd15",
    "sd21",
    "sdxl",
    "sdxl_refiner",
    "sd3",
    "pixart_sigma",
    "sana",
    "lumina2",
    "hidream",
    "auraflow",
    "flux",
    "flux_schnell",
    "flux_fill",
    "flux_kontext",
    "flux_control",
    "flux2_dev",
    "flux2_klein",
    "chroma",
    "qwen_image",
    "z_image",
    "krea2",
    "ernie_image",
    "ovis_image",
    "ideogram4",
    "wan22_a14b",
    "wan22_i2v_a14b",
    "wan22_5b",
    "ltx",
    "ltx2",
    "hunyuan_video",
    "hunyuan_video15",
    "cogvideox",
)

#: Name -> the sentence that says why it has no row.
LEFT_OUT: dict[str, str] = {}
