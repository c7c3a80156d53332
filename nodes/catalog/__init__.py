"""The nodes, one module each: what it looks like, and beside it the function that it runs.

The functions know the engine and nothing of ComfyUI. No weights pass through them: a handle, embeds, latents and
pictures are all that they ever hold.
"""

from __future__ import annotations

from ..schema import Node
from . import (
    conditioning_to_embeds,
    controlnet,
    denoise,
    download_model,
    embeds_to_conditioning,
    encode_image,
    encode_prompt,
    ip_adapter,
    load,
    load_embeds,
    load_files,
    load_latents,
    lora,
    plan_preview,
    prompt_lines,
    purge_cache,
    report,
    save_embeds,
    save_latents,
    settings,
    vae_decode,
)

# In the order in which a host lists them.
_MODULES = (
    load,
    load_files,
    download_model,
    lora,
    controlnet,
    ip_adapter,
    settings,
    prompt_lines,
    encode_prompt,
    encode_image,
    denoise,
    vae_decode,
    save_embeds,
    load_embeds,
    save_latents,
    load_latents,
    embeds_to_conditioning,
    conditioning_to_embeds,
    plan_preview,
    report,
    purge_cache,
)

NODES: dict[str, Node] = {module.NODE.schema.id: module.NODE for module in _MODULES}
