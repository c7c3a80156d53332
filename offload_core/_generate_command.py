"""`phase-offload generate`: pictures, a video or a sound from a prompt."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import _picture_files as files
from . import _sound_files as sounds
from ._console import Terminal
from ._extra_options import (
    add_control_arguments,
    add_lora_argument,
    add_picture_arguments,
    given_control,
    given_loras,
    given_pictures,
)
from ._memory_options import memory_settings
from ._model_options import add_file_arguments, add_weights_argument, chosen_model
from .errors import InputError
from .report import RunReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="model folder, or checkpoint file")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the picture should show, or be heard")
    parser.add_argument("--negative-prompt", metavar="TEXT", help="what it should not show")
    parser.add_argument("--width", type=int, metavar="PIXELS", help="default: the model's own")
    parser.add_argument("--height", type=int, metavar="PIXELS", help="default: the model's own")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps; default: the model's own")
    parser.add_argument("--guidance-scale", type=float, metavar="X", help="default: the model's own")
    parser.add_argument(
        "--scheduler",
        metavar="NAME",
        help="a scheduler of diffusers in place of the model's own, as 'EulerDiscreteScheduler karras'; for one that "
        "doesn't fit, such as list, those that do are named",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same picture (0)")
    parser.add_argument("--num-images", type=int, default=1, metavar="N", help="pictures, or sounds, in one go (1)")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of a video; default: the model's own")
    parser.add_argument("--seconds", type=float, metavar="X", help="of a sound; default: the model's own")
    add_lora_argument(parser)
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ... (auto)")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="auto (the files' own), bfloat16, float32, ...")
    add_weights_argument(parser)
    parser.add_argument("--tiling", default="auto", choices=("auto", "on", "off"), help="decode in tiles (auto)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="picture to write: .png, .jpg, .webp; a video as .gif, .webp or a sequence of .png; a sound as .wav, that "
        "of a video beside it. An existing file is replaced; several become NAME-0.png, NAME-1.png, ... "
        "(phase-offload.png or .wav)",
    )
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="DIR",
        help="keep what encoders answer in this folder, made if it isn't there: a prompt that was encoded before loads "
        "no encoder. It holds no words of prompts",
    )
    parser.add_argument("--no-plan", action="store_true", help="don't foretell memory and time, just run")
    add_picture_arguments(parser)
    add_control_arguments(parser)
    add_file_arguments(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> tuple[RunReport, list[Path]]:
    """The report of the phases, and the files that were written."""
    if args.output is not None:
        files.check_picture_file(args.output)
    model, pictures, loras = chosen_model(args), given_pictures(args), given_loras(args)
    parts = {**given_control(args), **({"loras": loras} if loras else {})}
    settings = memory_settings(args)
    if args.prompt_cache is not None:
        settings = replace(settings, prompt_cache_folder=str(args.prompt_cache))
    with terminal.session() as session:
        import offload_core

        how = {"dtype": args.dtype, "weight_storage": args.weights, **parts}
        handle = offload_core.load(model, device=args.device, settings=settings, **how)
        shown_to = handle
        if pictures:
            shown_to = handle.for_pictures(masked=pictures["mask"] is not None, count=len(pictures["images"]))
        output = _output_file(args.output, shown_to)
        size = {name: getattr(args, name) for name in ("width", "height") if getattr(args, name) is not None}
        options = _denoise_options(args, shown_to)
        options |= {} if pictures else size  # a picture brings its own to Denoise
        offload_core.check_denoise(shown_to, seed=args.seed, **options)
        negative = args.negative_prompt
        if negative is None and shown_to.guidance_name == "true_cfg_scale":
            negative = ""  # true CFG does nothing without one
        found = None
        if not args.no_plan:
            from ._plan_command import plan_first

            asked = {**parts, **pictures, **options, **size}
            found = plan_first(terminal, session, model, args, settings, negative, **asked)
        how_it_runs: dict[str, Any] = {"session": session, "plan": found.plan if found is not None else None}
        if pictures:
            frames = {name: options[name] for name in ("num_frames",) if name in options}
            options["images"] = offload_core.encode_images(handle, **pictures, **size, **frames, **how_it_runs)
        encoded = {name: value for name, value in options.items() if name in ("images", handle.seconds_name)}
        embeds = offload_core.encode(handle, args.prompt, negative, **encoded, **how_it_runs)
        latents = offload_core.denoise(handle, embeds, seed=args.seed, **options, **how_it_runs)
        writers = _decoded(handle, latents, output, video=shown_to.makes_video, tiling=args.tiling, **how_it_runs)
        if found is not None:
            found.learn(session.report)
    return session.report, files.write_files(writers)


def _output_file(path: Path | None, handle: Any) -> Path:
    """The file to write, which must be of a kind that the model makes."""
    if handle.only_sound:
        path = path or Path("phase-offload.wav")
        sounds.check_sound_file(path)
    else:
        path = path or Path("phase-offload.png")
        files.check_picture_file(path, video=handle.makes_video)
    return path


def _denoise_options(args: argparse.Namespace, handle: Any) -> dict[str, Any]:
    """Arguments of `denoise`, but for the size, for those that were given; the rest is left to the model's defaults."""
    given = {"num_inference_steps": args.steps, "scheduler": args.scheduler, "strength": args.strength}
    options = {name: value for name, value in given.items() if value is not None}
    if args.guidance_scale is not None:
        if handle.guidance_name is None:
            raise InputError("This model has no guidance; leave --guidance-scale out.")
        options[handle.guidance_name] = args.guidance_scale
    if handle.only_sound:
        for name in ("width", "height", "frames"):
            if getattr(args, name) is not None:
                raise InputError(f"This model makes sound, which has no {name}; leave --{name} out.")
    if args.seconds is not None:
        if handle.seconds_name is None:
            raise InputError("This model makes more than sound; leave --seconds out.")
        options[handle.seconds_name] = args.seconds
    if args.frames is not None:
        if not handle.makes_video:
            raise InputError("This model makes pictures, not videos; leave --frames out.")
        options["num_frames"] = args.frames
    if args.num_images != 1:
        if handle.images_name is None:
            thing = "sound" if handle.only_sound else "picture"
            raise InputError(f"This model makes one {thing} at a time; leave --num-images out.")
        options[handle.images_name] = args.num_images
    return options


def _decoded(
    handle: Any, latents: Any, output: Path, *, video: bool, **options: Any
) -> list[tuple[Path, files.Writer]]:
    """The files of what the model made. options: of `decode`."""
    import offload_core

    if handle.only_sound:
        sound = offload_core.decode_sound(handle, latents, **options)
        assert sound is not None
        return sounds.sound_writers(output, *sound)
    images = offload_core.decode(handle, latents, output_type="pil", **options)
    if not video:
        return files.picture_writers(output, images)
    writers = files.video_writers(output, images if isinstance(images[0], (list, tuple)) else [images])
    sound = offload_core.decode_sound(handle, latents, session=options["session"])
    return writers if sound is None else [*writers, *sounds.sound_writers(output.with_suffix(".wav"), *sound)]
