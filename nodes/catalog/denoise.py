"""Denoise Phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import offload_core

from ..foreseen import foreseen
from ..results import NodeResult
from ..schema import EMBEDS_TYPE, MODEL, RECORD_KEY, Input, Node, NodeSchema, Output
from ._job import JOB, pipeline_options

if TYPE_CHECKING:
    from ..calls import NodeCall

LARGEST_SEED = 2**64 - 1

SCHEMA = NodeSchema(
    id="PhaseOffloadDenoise",
    display_name="Denoise Phase",
    description="Loads the denoiser, makes a latent picture from noise step by step, and gives the memory back.",
    inputs=(
        MODEL,
        Input("embeds", EMBEDS_TYPE, "The encoded prompts, from Encode Prompt Phase."),
        Input(
            "seed",
            "INT",
            "The number the noise is made from. The same seed gives the same picture.",
            default=0,
            min=0,
            max=LARGEST_SEED,
            control_after_generate=True,
        ),
        *JOB,
    ),
    outputs=(
        Output(
            "latent",
            "LATENT",
            "The latent picture, in ComfyUI's convention. It also carries the exact values VAE Decode Phase needs.",
        ),
    ),
    search_aliases=("ksampler", "sampler", "generate", "denoise", "seed", "steps", "guidance", "cfg", "offload"),
)


def denoise(
    call: NodeCall,
    *,
    model: Any,
    embeds: Any,
    seed: int,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    batch: int,
) -> NodeResult:
    """PhaseOffloadDenoise: a LATENT of `batch` pictures. 0 (and a negative guidance) leave the model's own default."""
    options, notes = pipeline_options(model, steps=steps, guidance=guidance, width=width, height=height, batch=batch)
    with foreseen(call, offload_core.foresee_denoise, model, embeds, seed=seed, **options) as plan:
        latents = offload_core.denoise(model, embeds, seed=seed, session=call.session, plan=plan, **options)
    call.say_how_it_went(*notes)
    return NodeResult(({"samples": latents.samples, RECORD_KEY: latents},))


NODE = Node(SCHEMA, denoise)
