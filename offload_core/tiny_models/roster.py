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
    "wan21",
    "wan21_i2v",
    "wan_vace",
    "wan22_a14b",
    "wan22_i2v_a14b",
    "wan22_5b",
    "ltx",
    "ltx_condition",
    "ltx2",
    "hunyuan_video",
    "hunyuan_video15",
    "cogvideox",
    "cogvideox_i2v",
    "mochi",
    "kandinsky5",
)

#: Name -> the sentence that says why it has no row.
LEFT_OUT: dict[str, str] = {
    "Chroma, inpaint": "ChromaInpaintPipeline of diffusers 0.42.1 can't run at all: it asks the transformer's config "
    "for guidance_embeds, which it doesn't have.",
    "Cosmos": "Its pipelines make NVIDIA's guardrail models (the package cosmos_guardrail) a part of themselves and "
    "can't be made without them; these are several models of their own, not weights that a phase could hold.",
    "Stable Audio, ACE-Step": "What their pipelines do to the sound after the VAE (cut it to its length, level its "
    "loudness) is written in their __call__ and not in a processor that Decode could run, so they are refused by name. "
    "Sound beside a picture (LTX-2) ends with a vocoder, which Decode runs.",
}
