"""`phase-offload plan`: what a job will take, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _picture_files as files
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
from .errors import BudgetError, InputError, TraceError

if TYPE_CHECKING:
    from .foresight import Foresight

CHART_FORMATS = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or file, or the name of a known model (--list shows them)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="default: one of common length")
    parser.add_argument("--negative-prompt", metavar="TEXT")
    parser.add_argument("--width", type=int, metavar="PIXELS", help="default: the model's own")
    parser.add_argument("--height", type=int, metavar="PIXELS", help="default: the model's own")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps; default: the model's own")
    parser.add_argument("--guidance-scale", type=float, metavar="X", help="default: the model's own")
    parser.add_argument("--scheduler", metavar="NAME", help="as generate takes it; default: the model's own")
    add_lora_argument(parser)
    parser.add_argument("--num-images", type=int, default=1, metavar="N", help="pictures in one go (1)")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of a video; default: the model's own")
    parser.add_argument("--seconds", type=float, metavar="X", help="of a sound; default: the model's own")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ... (auto)")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="auto (the files' own), bfloat16, float32, ...")
    add_weights_argument(parser)
    parser.add_argument("--hardware", metavar="NAME", help="plan for a known machine, e.g. rtx4060-8gb (--list)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw the memory over time, as a picture (.png) or a drawing (.svg)"
    )
    parser.add_argument("--list", action="store_true", help="list the known models and machines")
    add_picture_arguments(parser)
    add_control_arguments(parser)
    add_file_arguments(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Raises BudgetError, after the table, if the job doesn't fit."""
    if args.list:
        terminal.say(_listing())
        return
    model = chosen_model(args)
    for path in filter(None, (args.json, args.chart)):
        files.check_writable(path)
    _check_chart_file(args.chart)
    from .foresight import foresee_job
    from .plan_table import plan_json, plan_line, plan_table

    settings = replace(memory_settings(args), execution_device=args.device)
    with terminal.session() as session:
        found = foresee_job(
            model,
            args.prompt,
            args.negative_prompt,
            settings=settings,
            dtype=args.dtype,
            weight_storage=args.weights,
            hardware=args.hardware,
            loras=given_loras(args),
            session=session,
            **given_pictures(args),
            **given_control(args),
            **_call(args),
            **_seconds(args.seconds, model),
        )
    terminal.say(plan_table(found))
    asked = []
    if args.json is not None:
        asked.append((args.json, files.text_writer(json.dumps(plan_json(found), indent=2) + "\n")))
    if args.chart is not None:
        asked.append((args.chart, _chart_writer(args.chart, found)))
    for path in files.write_files(asked):
        terminal.say(f"Wrote {path}")
    if not found.plan.fits:
        raise BudgetError(plan_line(found.plan))


def plan_first(
    terminal: Terminal, session: Any, model: Any, args: argparse.Namespace, settings: Any, negative: Any, **options: Any
) -> Any:
    """What is foreseen for the job of `generate` that is about to run, told in one line; None if it isn't to go by."""
    import offload_core

    from .plan_table import plan_line

    settings = replace(settings, execution_device=args.device, vae_tiling=args.tiling)
    asked = {"seed": args.seed, "dtype": args.dtype, "weight_storage": args.weights, **options}
    try:
        found = offload_core.foresee_job(model, args.prompt, negative, settings=settings, session=session, **asked)
    except TraceError as error:
        terminal.note(f"No plan: {error}")
        return None
    terminal.note(plan_line(found.plan))
    return found if found.plan.fits else None


def _check_chart_file(path: Path | None) -> None:
    if path is not None and path.suffix.lower() not in CHART_FORMATS:
        what = f"of type '{path.suffix}'" if path.suffix else "without an extension"
        raise InputError(f"Can't write a chart {what} ({path}); use one of {', '.join(CHART_FORMATS)}.")


def _chart_writer(path: Path, found: Foresight) -> files.Writer:
    from .plan_chart import plan_png, plan_svg

    draw = plan_svg if path.suffix.lower() == ".svg" else plan_png
    return files.bytes_writer(draw(found))


def _call(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "width": args.width,
        "height": args.height,
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "num_frames": args.frames,
        "strength": args.strength,
        "scheduler": args.scheduler,
        "num_images_per_prompt": args.num_images if args.num_images != 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _seconds(seconds: float | None, model: Any) -> dict[str, Any]:
    """The length of the job's sound, by the name that its pipeline has for it."""
    if seconds is None:
        return {}
    from .phases import load

    is_name = isinstance(model, str) and not os.path.exists(model)  # the known models make pictures and videos
    name = None if is_name else load(model, device="cpu").seconds_name
    if name is None:
        raise InputError("This model makes more than sound; leave --seconds out.")
    return {name: seconds}


def _listing() -> str:
    from .known import known_machines, known_models

    models = [f"  {model.name:<20} {model.title}" for model in known_models().values()]
    machines = [f"  {machine.name:<20} {machine.title}" for machine in known_machines().values()]
    return "\n".join(["Models:", *models, "", "Machines:", *machines])
