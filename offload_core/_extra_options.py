"""Command-line options for what a job is given beside a model and words: LoRAs, pictures, a ControlNet, an IP-Adapter.

Each `add_...` gives a parser the options, each `given_...` says what they came to, as the library takes it. Files of
pictures are read here, so that a missing one is told before a model is touched.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _picture_files as files
from .errors import InputError

# ---------------------------------------------------------------------------------------------------- LoRAs


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        nargs="+",
        metavar=("FILE:STRENGTH", "STRENGTH"),
        help="a LoRA of the job as FILE or FILE:STRENGTH, such as fox.safetensors:0.8 (1 is as trained); the strength "
        "may also follow as a word of its own. Again for one more",
    )


def given_loras(args: argparse.Namespace) -> list[tuple[str, float]]:
    """(file, strength) of each. Raises InputError for a strength that is no number."""
    return [_lora(words) for words in args.lora]


def _lora(words: Sequence[str]) -> tuple[str, float]:
    file, *strengths = words
    if not strengths:
        file, strength = _file_and_strength(file)
        strengths = [strength] if strength else []
    try:
        number = float(strengths[0]) if strengths else 1.0
    except ValueError:
        number = math.nan
    if len(strengths) > 1 or not math.isfinite(number):
        raise InputError(f"--lora takes a file and one number (FILE or FILE:STRENGTH), not {' '.join(words)}.")
    return file, number


def _file_and_strength(text: str) -> tuple[str, str]:
    """The two sides of FILE:STRENGTH, the second empty if the text is a file alone.

    A colon is also part of a path: after the letter of a drive on Windows, and anywhere in a name elsewhere.
    """
    file, colon, strength = text.rpartition(":")
    of_the_path = not file or re.search(r"[/\\]|\.safetensors$", strength, re.IGNORECASE) or Path(text).is_file()
    return (text, "") if not colon or of_the_path else (file, strength or "nothing")


# -------------------------------------------------------------------------------------------------- pictures


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures to start from, to look at or to set in motion")
    group.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a picture; again for one more. Width and height are then those of the result",
    )
    group.add_argument("--mask", type=Path, metavar="FILE", help="where to repaint the picture: white is painted anew")
    group.add_argument("--strength", type=float, metavar="X", help="how much of the picture to make anew, 0 to 1")


def given_pictures(args: argparse.Namespace) -> dict[str, Any]:
    """`images` and `mask` as `foresee_job` and `encode_images` take them; nothing if there is no picture.

    Raises InputError for a file that is no picture, and for options that need one.
    """
    if not args.image:
        for name in ("mask", "strength"):
            if getattr(args, name) is not None:
                raise InputError(f"There is no picture for --{name}: give --image, too.")
        return {}
    mask = None if args.mask is None else files.read_picture(args.mask)
    return {"images": [files.read_picture(path) for path in args.image], "mask": mask}


# --------------------------------------------------------------------------------- ControlNet and IP-Adapter


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ControlNet and IP-Adapter")
    group.add_argument("--controlnet", metavar="DIR or FILE", help="a ControlNet for the model")
    group.add_argument("--control-image", type=Path, metavar="FILE", help="what it follows: edges, a pose, depths, ...")
    group.add_argument("--control-scale", type=float, metavar="X", help="how closely: 1 is as trained (1)")
    group.add_argument("--control-mode", type=int, metavar="N", help="of a union ControlNet: what the picture shows")
    group.add_argument("--ip-adapter", metavar="FILE", help="an IP-Adapter for the model, in safetensors")
    group.add_argument("--ip-adapter-image", type=Path, metavar="FILE", help="the picture that it takes as a prompt")
    group.add_argument("--ip-adapter-scale", type=float, metavar="X", help="how much that picture counts (1)")
    group.add_argument(
        "--image-encoder",
        metavar="DIR or FILE",
        help="the encoder that the IP-Adapter was trained with, if the model has none",
    )


def given_control(args: argparse.Namespace) -> dict[str, Any]:
    """`controlnet` and `ip_adapter` with their pictures, as `load` and `foresee_job` take them; nothing of what isn't
    named. Raises InputError if one lacks another that it needs, or a file is no picture."""
    _check_together(args, "controlnet", "control_image", ("control_scale", "control_mode"))
    _check_together(args, "ip_adapter", "ip_adapter_image", ("ip_adapter_scale", "image_encoder"))
    found: dict[str, Any] = {}
    if args.controlnet is not None:
        from .phases import Control

        strength = 1.0 if args.control_scale is None else args.control_scale
        picture = files.read_picture(args.control_image)
        found["controlnet"] = Control(args.controlnet, picture, strength, mode=args.control_mode)
    if args.ip_adapter is not None:
        from .phases import IPAdapter

        scale = 1.0 if args.ip_adapter_scale is None else args.ip_adapter_scale
        picture = files.read_picture(args.ip_adapter_image)
        found["ip_adapter"] = IPAdapter(args.ip_adapter, scale, args.image_encoder, picture)
    return found


def _check_together(args: argparse.Namespace, part: str, picture: str, more: Sequence[str]) -> None:
    """A part and its picture need each other, and what else is said of it needs the part."""
    given = [name for name in (part, picture, *more) if getattr(args, name) is not None]
    missing = next((name for name in (part, picture) if given and name not in given), None)
    if missing is not None:
        asked, needed = (f"--{name.replace('_', '-')}" for name in (given[0], missing))
        raise InputError(f"{asked} needs {needed}: give both.")
