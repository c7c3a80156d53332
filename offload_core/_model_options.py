"""Command-line options that say which model, and what of it lies in which file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    from .single_files import SplitFiles

_FILES = ("denoiser", "denoiser_2", "encoder", "vae", "configs", "tokenizers")


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for models that aren't diffusers folders."""
    group = parser.add_argument_group("models made of files")
    group.add_argument("--denoiser", metavar="FILE", help="the UNet or transformer, if it has a file of its own")
    group.add_argument("--denoiser-2", metavar="FILE", help="the second one (Wan 2.2: the one for low noise)")
    group.add_argument("--encoder", metavar="FILE", action="append", help="a text encoder; may be given again")
    group.add_argument("--vae", metavar="FILE", help="the VAE, if it has a file of its own")
    group.add_argument("--family", default="auto", metavar="NAME", help="what the files are, if they don't tell (auto)")
    group.add_argument("--configs", metavar="DIR", help="diffusers folder whose configs and tokenizers are used")
    group.add_argument(
        "--tokenizers", metavar="DIR", action="append", help="folder with tokenizers, e.g. the comfy folder of ComfyUI"
    )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        default="as stored",
        metavar="HOW",
        help="fp8: pack large weights of denoiser and encoders to 8 bits on their way in; half the memory of bfloat16, "
        "and results change a little (as stored)",
    )


def chosen_model(args: argparse.Namespace) -> str | SplitFiles:
    """The model that the options name. Raises InputError if they name none, or a folder and files of another."""
    given = [name for name in _FILES if getattr(args, name)]
    if not given and args.family == "auto":
        if not args.model:
            raise InputError("Give a model: --model DIR or FILE, or the files it is made of (--denoiser FILE, ...).")
        return str(args.model)
    from pathlib import Path

    from .single_files import SplitFiles

    if args.model and Path(args.model).is_dir():
        option = f"--{(given or ['family'])[0].replace('_', '-')}"
        raise InputError(f"{option} goes with files, and {args.model} is a folder. Give only one of the two.")
    return SplitFiles(
        checkpoint=args.model,
        denoiser=args.denoiser,
        denoiser_2=args.denoiser_2,
        encoders=tuple(args.encoder or ()),
        vae=args.vae,
        family=args.family,
        configs=args.configs,
        tokenizers=tuple(args.tokenizers or ()),
    )
