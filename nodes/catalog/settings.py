"""Offload Settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload_core.errors import OffloadError
from offload_core.presets import AUTO, ENGINE, PRESETS, resolve_preset
from offload_core.settings import OffloadSettings, check_settings

from ..results import NodeResult
from ..schema import SETTINGS_TYPE, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

# A word for "as the preset has it": where auto has a meaning of its own, and for numbers.
PRESET, PRESET_NUMBER = "preset", -1
ON_OFF = {"on": True, "off": False}

SCHEMA = NodeSchema(
    id="PhaseOffloadSettings",
    display_name="Offload Settings",
    description=(
        "How phases use memory: a preset, budgets, and the numbers behind them. Connect it to Load With Dynamic "
        "Offload; it then wins over the two budgets there. The pictures are the same with any settings."
    ),
    inputs=(
        Input(
            "preset",
            "COMBO",
            "A name for a few of the numbers below. plain: the engine's own defaults. auto: the one for this machine. "
            "`phase-offload presets` lists all and says when to use each.",
            default="plain",
            options=(
                "plain",
                AUTO,
                *(name for name, each in PRESETS.items() if each.route == ENGINE and name != "plain"),
            ),
        ),
        Input(
            "device_memory",
            "STRING",
            "The most a phase may take of the device's memory. auto: the preset's, else what is free, less a headroom. "
            "Or a size (6GiB), a share (60%), or what to keep free (leave 2GiB).",
            default="auto",
        ),
        Input(
            "host_memory",
            "STRING",
            "The most a phase may take of RAM. auto: the preset's, else what is free, less a headroom. Or a size "
            "(6GiB), a share (60%), or what to keep free (leave 2GiB).",
            default="auto",
        ),
        Input(
            "activation_memory",
            "STRING",
            "The part of device_memory that is kept from weights, for what the model computes. preset: the preset's. "
            "auto: what the plan foretells. Or a size (1GiB) or a share (15%).",
            default=PRESET,
            advanced=True,
        ),
        Input(
            "resident_memory",
            "STRING",
            "The most that the larger weights may take on the device after their use. preset: the preset's. auto: all "
            "that the budget has room for. 0: none stays. Or a size (3GiB).",
            default=PRESET,
            advanced=True,
        ),
        Input(
            "pinned_memory",
            "STRING",
            "The most pinned RAM, for fast copies to the device. preset: the preset's. auto: a share of RAM. 0: none. "
            "Or a size (1GiB).",
            default=PRESET,
            advanced=True,
        ),
        Input(
            "resident_below",
            "STRING",
            "Weights smaller than this always stay on the device. preset: the preset's, else 1MiB. Or a size (64KiB), "
            "or 0.",
            default=PRESET,
            advanced=True,
        ),
        Input(
            "read_threads",
            "INT",
            "Threads that read weights ahead of their use, each with a buffer in the ring. -1: the preset's, else 2. "
            "0 reads a weight only when it is needed.",
            default=PRESET_NUMBER,
            min=PRESET_NUMBER,
            max=64,
            advanced=True,
        ),
        Input(
            "direct_io",
            "COMBO",
            "Whether files are read past the system's page cache. preset: the preset's. auto: if the model doesn't fit "
            "there.",
            default=PRESET,
            options=(PRESET, AUTO, "on", "off"),
            advanced=True,
        ),
        Input(
            "drop_page_cache",
            "COMBO",
            "Whether pages of files leave the page cache once they were read. preset: the preset's, else off.",
            default=PRESET,
            options=(PRESET, "on", "off"),
            advanced=True,
        ),
        Input(
            "encode_missing",
            "COMBO",
            "Whether Denoise Phase may encode again what the embeds don't hold. preset: the preset's, else on. off: it "
            "stops with a sentence instead.",
            default=PRESET,
            options=(PRESET, "on", "off"),
            advanced=True,
        ),
    ),
    outputs=(Output("settings", SETTINGS_TYPE, "The settings, for Load With Dynamic Offload."),),
    search_aliases=("settings", "preset", "budget", "low vram", "memory", "ring", "prefetch", "pinned", "offload"),
)


def offload_settings(
    call: NodeCall,
    *,
    preset: str,
    device_memory: str,
    host_memory: str,
    activation_memory: str,
    resident_memory: str,
    pinned_memory: str,
    resident_below: str,
    read_threads: int,
    direct_io: str,
    drop_page_cache: str,
    encode_missing: str,
) -> NodeResult:
    """PhaseOffloadSettings: OffloadSettings of the preset, with what was given in its place."""
    given = {
        "activation_memory": activation_memory,
        "resident_memory": resident_memory,
        "pinned_memory": pinned_memory,
        "resident_below": resident_below,
        "read_threads": read_threads,
        "direct_io": direct_io,
        "drop_page_cache": drop_page_cache,
        "encode_missing": encode_missing,
    }
    budgets = {"device_memory": device_memory, "host_memory": host_memory}
    settings = call.state.settings(_settings(preset, given), **budgets)
    check_settings(settings)
    told = {name: value for name, value in vars(settings).items() if value != getattr(OffloadSettings(), name)}
    call.observer.status(", ".join(f"{name}={value}" for name, value in told.items()) or "the engine's own defaults")
    return NodeResult((settings,))


def _settings(preset: str, given: dict[str, Any]) -> OffloadSettings:
    """Settings of the preset with those of `given` that don't leave it to the preset. Budgets aren't checked."""
    mine = {name: value for name, value in given.items() if value not in (None, PRESET, PRESET_NUMBER)}
    for name in ("drop_page_cache", "encode_missing"):
        if name in mine:
            mine[name] = ON_OFF[mine[name]]
    if "resident_below" in mine:
        mine["resident_below"] = _size(mine["resident_below"], "resident_below")
    return replace(resolve_preset(preset).settings(), **mine)


def _size(text: str, name: str) -> int:
    """Bytes of a size in words, 0 too."""
    from offload_core.limits import parse_budget

    if str(text).strip() == "0":
        return 0
    return parse_budget(text, free=0, total=0, auto=OffloadSettings().resident_below, name=name)


def problem(state: PackState, *, preset: Any = None, **given: Any) -> str | None:
    """Why these settings can't be used. Only the words are looked at, not the machine."""
    try:
        budgets = {name: given.pop(name, None) for name in ("device_memory", "host_memory")}
        settings = _settings(preset or "plain", given)
        check_settings(replace(settings, **{name: value for name, value in budgets.items() if value is not None}))
    except OffloadError as error:
        return str(error)
    return None


NODE = Node(SCHEMA, offload_settings, problem=problem)
