"""ControlNets, which are loaded beside a model and never as a part of one.

Sources: for Stable Diffusion the names in the files of https://github.com/lllyasviel/ControlNet-v1-1-nightly
(cldm/cldm.py); for all, diffusers' ControlNetModel, ControlNetUnionModel and FluxControlNetModel, whose names the files
for SDXL and FLUX.1 have.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import PartLayout, Shapes, count
from ..near_misses import NearMiss
from ..rules import Rule, keep, rename
from .unet import original_unet


def _original(shapes: Shapes) -> Iterator[Rule]:
    """The half of a UNet, a convolution for each thing that it gives, and what brings the picture to its size.

    The latter's convolutions stand at every other number there: 0 is the first, the highest the last.
    """
    last = count(shapes, "input_hint_block.") - 1
    yield rename("zero_convs.{n}.0.{p}", "controlnet_down_blocks.{n}.{p}")
    yield rename("middle_block_out.0.{p}", "controlnet_mid_block.{p}")
    yield rename("input_hint_block.0.{p}", "controlnet_cond_embedding.conv_in.{p}")
    yield rename(f"input_hint_block.{last}.{{p}}", "controlnet_cond_embedding.conv_out.{p}")
    for number in range(2, last, 2):
        yield rename(f"input_hint_block.{number}.{{p}}", f"controlnet_cond_embedding.blocks.{number // 2 - 1}.{{p}}")
    yield from original_unet(shapes)


def _as_saved(_: Shapes) -> Iterator[Rule]:
    yield keep("{rest}")


def _row(
    class_name: str, names: str, needs: tuple[str, ...], lacks: tuple[str, ...] = (), *, original: bool = False
) -> PartLayout:
    """Sizes aren't compared with a description: the config is made of them."""
    return PartLayout(
        name=f"{class_name}, {names} names",
        title="a ControlNet",
        role="other",
        classes=(class_name,),
        prefixes=("control_model.", "") if original else ("",),
        needs=needs,
        rules=_original if original else _as_saved,
        sizes=lambda config: {},
        lacks=lacks,
    )


_UNET = ("controlnet_cond_embedding.conv_in.weight", "controlnet_mid_block.weight", "conv_in.weight")
_UNION = "control_add_embedding.linear_1.weight"

CONTROLNETS = (
    _row(
        "ControlNetModel",
        "original",
        ("zero_convs.0.0.weight", "input_hint_block.0.weight", "middle_block_out.0.weight", "time_embed.0.weight"),
        original=True,
    ),
    _row("ControlNetModel", "diffusers'", _UNET, (_UNION,)),
    _row("ControlNetUnionModel", "diffusers'", (*_UNET, _UNION, "task_embedding")),
    _row(
        "FluxControlNetModel",
        "diffusers'",
        ("controlnet_blocks.0.weight", "controlnet_x_embedder.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        ("transformer_blocks.0.img_mlp.net.0.proj.weight",),  # Qwen-Image's
    ),
)

_OTHER = "Use a ControlNet."
_FOLDER = "Give the folder of its diffusers version."

#: What people keep beside ControlNets, and ControlNets that aren't known.
NO_CONTROLNETS = (
    NearMiss("is a Control-LoRA, which isn't known here", _OTHER, ("lora_controlnet",)),
    NearMiss("is a ControlNet-LLLite, which isn't known here", _OTHER, ("lllite_",)),
    NearMiss("is a T2I-Adapter, which isn't known here", _OTHER, ("body.0.resnets.0.block1.",)),
    NearMiss("is a T2I-Adapter, which isn't known here", _OTHER, ("body.0.block1.", "conv_in.")),
    NearMiss("is a T2I-Adapter, which isn't known here", _OTHER, ("body.0.in_conv.",)),
    NearMiss("is an IP-Adapter, not a ControlNet", "Give it as an IP-Adapter instead.", ("to_k_ip.",)),
    NearMiss("is an IP-Adapter, not a ControlNet", "Give it as an IP-Adapter instead.", ("ip_adapter_double_stream",)),
    NearMiss(
        "is a ControlNet for FLUX.1 in XLabs' names, which diffusers doesn't convert",
        _FOLDER,
        ("controlnet_blocks.", "double_blocks."),
    ),
    NearMiss("is a ControlNet of a kind that isn't known as a file", _FOLDER, ("controlnet_",)),
    NearMiss("is a ControlNet of a kind that isn't known as a file", _FOLDER, ("control_",)),
)
