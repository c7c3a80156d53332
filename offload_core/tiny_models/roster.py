"""The families in the order of docs/families.md, and what can't be made or run in phases, and why."""

#: Families of the table; those that aren't here come last, in the table's order.
ORDER = (
    "sd15",
    "sd15_control",
    "sd21",
    "sdxl",
    "sdxl_control",
    "sdxl_refiner",
    "sd3",
    "sd3_inpaint",
    "sd3_control",
    "pixart_sigma",
    "sana",
    "sana_control",
    "lumina2",
    "hidream",
    "kolors",
    "auraflow",
    "flux",
    "flux_control_net",
    "flux_schnell",
    "flux_fill",
    "flux_kontext",
    "flux_control",
    "flux2_dev",
    "flux2_klein",
    "chroma",
    "qwen_image",
    "qwen_image_control",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "qwen_image_layered",
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
LEFT_OUT: dict[str, str] = {
    "Chroma, inpaint": "ChromaInpaintPipeline of diffusers 0.42.1 can't run at all: it asks the transformer's config "
    "for guidance_embeds, which it doesn't have.",
}
