"""What a person set once for all graphs: what "auto" in a Load node stands for, and what is kept between prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from offload_core.errors import InputError
from offload_core.limits import check_budget
from offload_core.presets import ENGINE, PRESETS

# Those that are numbers of this engine; the others are for comparing with another one.
PRESET_NAMES = tuple(preset.name for preset in PRESETS.values() if preset.route == ENGINE)
BUDGETS = ("device_memory", "host_memory")


@dataclass(frozen=True)
class Defaults:
    """preset: a name of PRESET_NAMES. device_memory, host_memory: what "auto" in a Load node stands for; "auto" is the
    preset's, or the engine's. warm: whether host copies of weights stay between prompts. prompt_cache: whether encoded
    prompts are kept on disk. downloads: whether Download Model may fetch models."""

    preset: str = "plain"
    device_memory: str = "auto"
    host_memory: str = "auto"
    warm: bool = False
    prompt_cache: bool = False
    downloads: bool = False

    def numbers(self) -> dict[str, Any]:
        """Fields of OffloadSettings that differ from their defaults."""
        budgets = {name: getattr(self, name) for name in BUDGETS}
        return {**PRESETS[self.preset].numbers, **{name: size for name, size in budgets.items() if not is_auto(size)}}


def with_values(defaults: Defaults, values: Mapping[str, Any]) -> Defaults:
    """`defaults` with other values, by the names of its fields. Raises InputError, and names the field, for one that
    can't be used."""
    known = {field.name: getattr(Defaults, field.name) for field in fields(Defaults)}
    for name, value in values.items():
        if name not in known:
            raise InputError(f"There is no setting {name!r}; use {', '.join(known)}.")
        if type(value) is not type(known[name]):
            kind = "true or false" if isinstance(known[name], bool) else "a text"
            raise InputError(f"{name} is {value!r}; use {kind}.")
        if name in BUDGETS:
            check_budget(value, name)
        if name == "preset" and value not in PRESET_NAMES:
            raise InputError(f"There is no preset {value!r} for phases; use {', '.join(PRESET_NAMES)}.")
    return replace(defaults, **values)


def is_auto(budget: object) -> bool:
    return str(budget).strip().lower() == "auto"
