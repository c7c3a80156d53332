"""What each node looks like: ids, inputs, outputs, labels and help. Plain data, one table for every host.

The V3 adapter turns the table into ComfyUI classes; the graph runner validates graphs against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODEL_TYPE = "PHASE_OFFLOAD_MODEL"
EMBEDS_TYPE = "PHASE_OFFLOAD_EMBEDS"
ANY_TYPE = "*"

LARGEST_SEED = 2**64 - 1
MODEL_DEFAULT = 0  # steps, width, height: the model's own default
GUIDANCE_DEFAULT = -1.0  # guidance: the model's own default


@dataclass(frozen=True)
class Input:
    """One input of a node.

    type: "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO" (widgets), or a socket type. options: the values of a COMBO, or
    the name of a list that only the running pack knows ("models", "devices"). default, min, max, step: of a widget.
    optional: a graph may leave it out, as graphs do that were saved before there was such an input.
    """

    name: str
    type: str
    tooltip: str
    default: Any = None
    min: float | None = None
    max: float | None = None
    step: float | None = None
    options: tuple[str, ...] | str = ()
    multiline: bool = False
    control_after_generate: bool = False
    advanced: bool = False
    optional: bool = False

    @property
    def is_widget(self) -> bool:
        return self.type in ("STRING", "INT", "FLOAT", "BOOLEAN", "COMBO")


@dataclass(frozen=True)
class Output:
    """One output of a node. name: its label."""

    name: str
    type: str
    tooltip: str


@dataclass(frozen=True)
class NodeSchema:
    """One node. is_output: it runs even if nothing follows it, like a node that saves a file."""

    id: str
    display_name: str
    description: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    category: str = "phase offload"
    search_aliases: tuple[str, ...] = ()
    is_output: bool = False

    def input(self, name: str) -> Input | None:
        return next((spec for spec in self.inputs if spec.name == name), None)


_MODEL = Input("model", MODEL_TYPE, "The model, from Load With Dynamic Offload.")

# What Denoise Phase is asked for, and Plan Preview about.
_JOB = (
    Input(
        "steps",
        "INT",
        "Denoising steps. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=1000,
    ),
    Input(
        "guidance",
        "FLOAT",
        "How closely to follow the prompt. -1: the model's own default. It sets true_cfg_scale for models that "
        "have it, else guidance_scale.",
        default=GUIDANCE_DEFAULT,
        min=-1.0,
        max=100.0,
        step=0.1,
    ),
    Input(
        "width",
        "INT",
        "Width in pixels. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=16384,
        step=8,
    ),
    Input(
        "height",
        "INT",
        "Height in pixels. 0: the model's own default.",
        default=MODEL_DEFAULT,
        min=0,
        max=16384,
        step=8,
    ),
    Input("batch", "INT", "Pictures made at once. Memory grows with each.", default=1, min=1, max=64),
)

LOAD = NodeSchema(
    id="PhaseOffloadLoad",
    display_name="Load With Dynamic Offload",
    description=(
        "Picks a diffusers model folder. It reads only its configs and file headers: each phase loads the weights it "
        "needs when it runs and gives them back when it ends."
    ),
    inputs=(
        Input(
            "model",
            "COMBO",
            "A diffusers model folder (one with a model_index.json) found below a models/diffusers folder. "
            "The demo model comes with this pack and draws simple coloured shapes.",
            options="models",
        ),
        Input(
            "dtype",
            "COMBO",
            "The number format to compute in. auto: the format of the files. "
            "float32 needs twice the memory of the other two.",
            default="auto",
            options=("auto", "bfloat16", "float16", "float32"),
        ),
        Input(
            "device",
            "COMBO",
            "Where the phases compute. auto: the device ComfyUI uses.",
            default="auto",
            options="devices",
        ),
        Input(
            "device_memory",
            "STRING",
            "The most a phase may take of the device's memory, for weights and activations. Weights that don't fit are "
            "streamed from their files. auto: what is free, less a headroom. Or a size (6GiB), a share (60%), or what "
            "to keep free (leave 2GiB).",
            default="auto",
            optional=True,
        ),
        Input(
            "host_memory",
            "STRING",
            "The most a phase may take of RAM, for weights on their way to the device, and for all weights where the "
            "CPU computes. auto: what is free, less a headroom. Or a size (6GiB), a share (60%), or what to keep free "
            "(leave 2GiB).",
            default="auto",
            optional=True,
        ),
    ),
    outputs=(Output("model", MODEL_TYPE, "A description of the model. It holds no weights."),),
    search_aliases=("load diffusers", "diffusers loader", "low vram", "offload", "load checkpoint"),
)

ENCODE = NodeSchema(
    id="PhaseOffloadEncodePrompt",
    display_name="Encode Prompt Phase",
    description="Loads the text encoders, encodes the prompt and the negative prompt, and gives the memory back.",
    inputs=(
        _MODEL,
        Input("prompt", "STRING", "What the picture should show.", default="", multiline=True),
        Input(
            "negative_prompt",
            "STRING",
            "What the picture should not show. Empty: the model's own default. It has an effect only where the "
            "guidance is on.",
            default="",
            multiline=True,
        ),
    ),
    outputs=(Output("embeds", EMBEDS_TYPE, "The encoded prompts, in RAM."),),
    search_aliases=("prompt", "text encode", "clip text encode", "negative prompt", "offload"),
)

DENOISE = NodeSchema(
    id="PhaseOffloadDenoise",
    display_name="Denoise Phase",
    description="Loads the denoiser, makes a latent picture from noise step by step, and gives the memory back.",
    inputs=(
        _MODEL,
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
        *_JOB,
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

DECODE = NodeSchema(
    id="PhaseOffloadVAEDecode",
    display_name="VAE Decode Phase",
    description="Loads the VAE, turns the latent picture into pixels, and gives the memory back.",
    inputs=(
        _MODEL,
        Input(
            "latent",
            "LATENT",
            "From Denoise Phase, or any LATENT of the same kind of model. If another node changed it, the changed "
            "values are decoded.",
        ),
        Input(
            "tiling",
            "COMBO",
            "Decode in tiles, which needs less memory and can leave faint seams. auto: only if the whole picture "
            "doesn't fit.",
            default="auto",
            options=("auto", "on", "off"),
        ),
    ),
    outputs=(Output("image", "IMAGE", "The pictures; the frames of a video come as a batch."),),
    search_aliases=("vae decode", "latent to image", "tiled", "tiling", "offload"),
)

PLAN = NodeSchema(
    id="PhaseOffloadPlanPreview",
    display_name="Plan Preview",
    description=(
        "Says what a job will take, phase by phase, before anything is loaded: whether it fits, its peak of memory, "
        "what is streamed, and how long it takes. Shows a table and a chart of memory over time."
    ),
    inputs=(
        _MODEL,
        Input(
            "prompt",
            "STRING",
            "The prompt of the job; its length can matter. Empty: one of common length.",
            default="",
            multiline=True,
        ),
        *_JOB,
    ),
    outputs=(
        Output("report", "STRING", "The plan as a table, with its reasons."),
        Output("chart", "IMAGE", "The memory of the device over time, phase by phase, as a picture of 1800 x 800."),
    ),
    search_aliases=("predict", "estimate", "vram", "memory", "will it fit", "plan", "offload"),
    is_output=True,
)

PURGE = NodeSchema(
    id="PhaseOffloadPurgeCache",
    display_name="Purge Cache",
    description=(
        "Gives back memory that is cached but unused (on the device, pinned, and in RAM) at this place of the graph, "
        "passes its input through unchanged, and says what it freed."
    ),
    inputs=(Input("anything", ANY_TYPE, "Any value. The purge runs after it was made."),),
    outputs=(
        Output("anything", ANY_TYPE, "The same value, unchanged."),
        Output("report", "STRING", "One sentence: what was freed."),
    ),
    search_aliases=("purge", "free memory", "clear cache", "unload", "vram", "empty cache", "cleanup"),
    is_output=True,
)

NODES: dict[str, NodeSchema] = {node.id: node for node in (LOAD, ENCODE, DENOISE, DECODE, PLAN, PURGE)}
