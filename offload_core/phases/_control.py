"""A ControlNet with its picture, for a handle: how much it counts, and during which part of the steps.

A handle is a light description, and a picture isn't light. It is carried all the same, as the 8-bit pixels of a file:
in a graph the picture, the strength and the file belong to one node, which has nothing but the handle to give. So
handles are equal if their pictures are, pixel by pixel, and hold no tensor that a cache would have to account for.
Only Denoise knows of it. Texts and pictures are encoded by the model's own pipeline, as if there were no ControlNet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..model_source import ModelSource
from ._clips import given_pictures
from ._companions import Companion, companion
from ._pipeline import call_class, call_parameters

if TYPE_CHECKING:
    from PIL.Image import Image

    from ._handle import Handle


@dataclass(frozen=True)
class Picture:
    """An RGB picture as plain data. pixels: 3 bytes each, row by row."""

    width: int
    height: int
    pixels: bytes = field(repr=False)

    def image(self) -> Image:
        """The same for a pipeline."""
        from PIL import Image

        return Image.frombytes("RGB", (self.width, self.height), self.pixels)


def as_picture(given: Any, what: str) -> Picture:
    """A PIL image as plain data. Raises InputError for anything else. what: begins the sentence."""
    if isinstance(given, Picture):
        return given
    if not hasattr(given, "getbands"):
        raise InputError(f"{what} needs one picture, as a PIL image, not {type(given).__name__}.")
    rgb = given.convert("RGB")
    return Picture(rgb.width, rgb.height, rgb.tobytes())


@dataclass(frozen=True)
class Control:
    """A ControlNet and its picture, for `load`.

    place: its folder or its file. picture: a PIL image; it gets the size of the result as the pipeline does it.
    strength: how much it counts, 1.0 is as trained. start, end: the part of the steps in which it does, from 0.0 to
    1.0. mode: of a union ControlNet, the number of what the picture shows; None for others. fingerprint: of the files,
    set by `load`.
    """

    place: str | os.PathLike[str] = field(repr=False)
    picture: Any = field(repr=False)
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None
    fingerprint: str = field(default="", repr=False)

    @property
    def companion(self) -> Companion:
        return Companion("controlnet", str(self.place), "diffusers", self.fingerprint)


def checked_control(control: Control, source: ModelSource) -> Control:
    """`control` as plain data, with the fingerprint of its files. source: the model that it is for.

    Raises InputError or ModelError for one that can't be used with it.
    """
    for name in ("strength", "start", "end"):
        value = getattr(control, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"The {name} of a ControlNet is a number, not {value!r}.")
    if not 0 <= control.start < control.end <= 1:
        raise InputError(
            f"A ControlNet that counts from {control.start:g} to {control.end:g} of the steps never does: "
            "give a start from 0 to 1 and an end after it."
        )
    if "controlnet" in source.components:
        raise InputError(f"{source.root.name} has a ControlNet already, and one at a time works. Take one of them off.")
    found = companion("controlnet", control.place, "diffusers", source)
    config = found.source(source).config or {}
    modes = config.get("num_mode") or config.get("num_control_type")
    if modes and control.mode is None:
        raise InputError(
            f"{Path(found.place).name} is a union ControlNet: say by its mode, from 0 to {modes - 1}, what the picture "
            "shows. Its page lists them."
        )
    if control.mode is not None and not 0 <= control.mode < (modes or 0):
        known = f"has the modes 0 to {modes - 1}" if modes else "is no union ControlNet and has no modes"
        raise InputError(f"{Path(found.place).name} {known}; its mode can't be {control.mode}.")
    return replace(
        control,
        place=found.place,
        picture=as_picture(control.picture, "A ControlNet"),
        fingerprint=found.fingerprint,
    )


def given_by(handle: Handle, source: ModelSource) -> dict[str, Any]:
    """The arguments of the pipeline's call that the handle itself has: the picture of its IP-Adapter."""
    adapter = handle.ip_adapter
    if adapter is None or adapter.picture is None:
        return {}
    if "ip_adapter_image" not in call_parameters(call_class(source)):
        raise InputError(f"{source.pipeline_class} takes no IP-Adapter. Load the model without it.")
    return {"ip_adapter_image": adapter.picture.image()}


def controlled(
    handle: Handle, source: ModelSource, call: Mapping[str, Any]
) -> tuple[Handle, ModelSource, dict[str, Any]]:
    """The model and the arguments of its call as the pipeline with its ControlNet takes them. All as they are without
    one. call: of the pipeline without.

    A pipeline that starts from a picture would take its size from the ControlNet's: it is told that of its start.
    """
    control = handle.control
    if control is None:
        return handle, source, dict(call)
    handle = handle.controlled()
    source = handle.source()
    known = call_parameters(call_class(source))
    more: dict[str, Any] = {
        "control_image" if "control_image" in known else "image": control.picture.image(),
        "controlnet_conditioning_scale": control.strength,
    }
    part = {"control_guidance_start": control.start, "control_guidance_end": control.end}
    if part.keys() <= known.keys():
        more |= part
    elif tuple(part.values()) != (0.0, 1.0):
        raise InputError(f"{source.pipeline_class} runs its ControlNet in all steps: leave start at 0 and end at 1.")
    if control.mode is not None:
        more["control_mode"] = control.mode
    starts = given_pictures(call)
    if starts and "height" in known and "height" not in call:
        more["width"], more["height"] = (side // _cell(source) * _cell(source) for side in starts[0].size)
    return handle, source, {**call, **more}


def _cell(source: ModelSource) -> int:
    """How many pixels across one value of the latents stands for."""
    return 2 ** (len((source.components["vae"].config or {})["block_out_channels"]) - 1)
