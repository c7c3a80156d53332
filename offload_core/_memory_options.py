"""The options of commands that say how much memory may be taken, and the settings that they become."""

from __future__ import annotations

import argparse
from dataclasses import replace

from .errors import InputError
from .presets import ENGINE, resolve_preset
from .settings import OffloadSettings


def add_memory_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """The options for memory budgets, explained in a few lines; `more` lines may follow them."""
    explained = (
        'A BUDGET is a size (6GiB, 512MiB), a share (60%), what to keep free ("leave 2GiB"), or auto.',
        "Weights that don't fit are streamed from their files; the pictures stay the same.",
    )
    group = parser.add_argument_group("memory budgets", "\n".join((*explained, *more)))
    group.add_argument(
        "--device-memory",
        default="auto",
        metavar="BUDGET",
        help="of the device that computes, for weights and activations (auto: what is free, less a headroom)",
    )
    group.add_argument(
        "--host-memory",
        default="auto",
        metavar="BUDGET",
        help="of RAM, for weights on their way to the device, and for all weights where the CPU computes "
        "(auto: what is free, less a headroom)",
    )


def add_preset_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", default="plain", metavar="NAME", help="numbers of a preset; budgets that are given win (plain)"
    )


def memory_settings(args: argparse.Namespace) -> OffloadSettings:
    """Settings of the preset with the budgets that were given. Raises InputError for a preset phases don't have."""
    preset = resolve_preset(args.preset)
    if preset.route != ENGINE:
        raise InputError(f"The preset {preset.name} is for enable_offload, not for phases; use one of a byte budget.")
    budgets = {name: getattr(args, name) for name in ("device_memory", "host_memory")}
    return replace(preset.settings(), **{name: value for name, value in budgets.items() if value != "auto"})
