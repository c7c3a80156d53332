"""Presets: a name for a few numbers of the plan and a sentence on when to use it. Everything else keeps its default.

The names that Diffusers Dynamic Offloader uses mean here what they are for there; its numbers are kept where the engine
has such a number at all (bytes that stay, pinned memory, readers). `offload_core.ddo` says how its variables act.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import InputError
from .limits import Machine
from .settings import OffloadSettings

ENGINE, GROUP, WHOLE = "dynamic_offload", "diffusers_group_offload", "none"


@dataclass(frozen=True)
class Preset:
    """when: a sentence on when to use it. numbers: fields of OffloadSettings that differ from their defaults.

    route: what runs the components: this engine, diffusers' group offload, or nothing (they are moved whole). group:
    arguments of group offload. standby_phases: moments at which the Windows standby list is purged.
    """

    name: str
    when: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    route: str = ENGINE
    group: Mapping[str, Any] = field(default_factory=dict)
    standby_phases: tuple[str, ...] = ()

    def settings(self, base: OffloadSettings | None = None) -> OffloadSettings:
        """`base` (the defaults) with the preset's numbers."""
        return replace(base or OffloadSettings(), **self.numbers)

    def summary(self) -> str:
        """Its numbers in one line."""
        parts = [f"{name}={value}" for name, value in (*self.numbers.items(), *self.group.items())]
        if self.route != ENGINE:
            parts.insert(0, f"route={self.route}")
        if self.standby_phases:
            parts.append(f"purges the Windows standby list {', '.join(self.standby_phases)}")
        return ", ".join(parts) or "the defaults"


_GROUP = {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("plain", "To have the engine's own defaults and nothing else."),
        Preset(
            "one_shot_fast",
            "One picture per start of the program, on a card that the model doesn't fit: four readers fill the link.",
            {"read_threads": 4},
            standby_phases=("before_run", "after_text_encoder", "before_transformer"),
        ),
        Preset(
            "warm_process",
            "Many pictures in one process: files stay in the page cache, and up to 6 GiB of weights on the card.",
            {"read_threads": 4, "resident_memory": "6GiB", "direct_io": "off"},
        ),
        Preset(
            "low_ram_safe",
            "RAM is short: nothing is pinned, pages are dropped once they were read, up to 3 GiB stay on the card.",
            {"read_threads": 1, "resident_memory": "3GiB", "pinned_memory": 0, "drop_page_cache": True},
        ),
        Preset(
            "wsl_compat",
            "Under WSL, where a large pin that fails can break the CUDA context: nothing is pinned.",
            {"resident_memory": "6GiB", "pinned_memory": 0},
        ),
        Preset(
            "least_device_memory",
            "Something else needs the card: no large weight stays on it, only the smallest ring is taken.",
            {"read_threads": 0, "resident_memory": 0, "resident_below": 65536, "vae_tiling": "on"},
        ),
        Preset(
            "shared_desktop",
            "The card also drives the screen or a game: 2 GiB of it stay free.",
            {"device_memory": "leave 2GiB"},
        ),
        Preset(
            "larger_than_ram",
            "The model is larger than RAM: it is read past the page cache, and at most 1 GiB is pinned.",
            {"pinned_memory": "1GiB", "direct_io": "on"},
        ),
        Preset(
            "diffusers_offload_compat",
            "To compare with diffusers' group offload of one block at a time. It has no byte budget.",
            route=GROUP,
            group={"offload_type": "block_level", "num_blocks_per_group": 1, **_GROUP},
        ),
        Preset(
            "diffusers_leaf_offload_compat",
            "To compare with diffusers' group offload of single layers. It has no byte budget.",
            route=GROUP,
            group={"offload_type": "leaf_level", **_GROUP},
        ),
        Preset("off", "Everything fits: components are moved whole to the execution device.", route=WHOLE),
    )
}
AUTO = "auto"


def resolve_preset(name: str, *, on_wsl: bool | None = None) -> Preset:
    """The preset of a name. "auto" (and no name) is wsl_compat under WSL, else one_shot_fast.

    on_wsl: None asks the machine. Raises InputError for any other name.
    """
    key = str(name).strip().lower() or AUTO
    if key == AUTO:
        key = "wsl_compat" if (Machine().is_wsl() if on_wsl is None else on_wsl) else "one_shot_fast"
    if key not in PRESETS:
        raise InputError(f"There is no preset {name!r}; use {AUTO}, {', '.join(PRESETS)}.")
    return PRESETS[key]


def presets_table() -> str:
    """All presets for a terminal: when to use each, and its numbers."""
    lines = [f"{AUTO} is {resolve_preset(AUTO).name} on this machine."]
    for preset in PRESETS.values():
        lines += ["", preset.name, f"  {preset.when}", f"  {preset.summary()}"]
    return "\n".join(lines)
