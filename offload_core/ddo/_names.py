"""DDO's functions about presets and variables, and the listing that `phase-offload presets` shows."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping

from ..limits import Machine
from ..presets import PRESETS, presets_table
from ._options import IDLE_VARIABLES, OPTIONS, RENAMED
from ._routes import ROUTE_VARIABLES
from ._settings import STANDBY_PHASES, load_dynamic_offload_settings_from_env


def is_wsl_environment() -> bool:
    """Whether this is Linux inside Windows."""
    return Machine().is_wsl()


def resolve_dynamic_offload_preset(requested_preset: str, *, running_on_wsl: bool | None = None) -> str:
    """The name of the preset that is used for a name. "auto" is wsl_compat under WSL, else one_shot_fast.

    Raises InputError for a name that is none.
    """
    settings = load_dynamic_offload_settings_from_env(
        environ={}, default_preset=requested_preset, running_on_wsl=running_on_wsl
    )
    return settings.effective_preset


def get_dynamic_offload_presets() -> dict[str, dict[str, str]]:
    """Each preset's numbers, as text by the name of the setting."""
    return {
        name: {"route": preset.route}
        | {key: str(value) for key, value in (*preset.numbers.items(), *preset.group.items())}
        for name, preset in PRESETS.items()
    }


# The same under the name of a constant of DDO.
DDO_PRESETS = types.MappingProxyType(
    {name: types.MappingProxyType(numbers) for name, numbers in get_dynamic_offload_presets().items()}
)


def format_dynamic_offload_presets(*, default_preset: str = "auto", running_on_wsl: bool | None = None) -> str:
    """The presets as text, and which one `default_preset` is."""
    name = resolve_dynamic_offload_preset(default_preset, running_on_wsl=running_on_wsl)
    return f"{default_preset} -> {name}\n\n{presets_table()}"


def dynamic_offload_env_value(name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
    """The text of a variable, `default` where it isn't set or blank."""
    return (os.environ if environ is None else environ).get(name, "").strip() or default


def dynamic_offload_preset_env_value(
    name: str,
    default: str = "",
    *,
    requested_preset: str = "",
    effective_preset: str | None = None,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """The text of a variable: as it is set, else as the preset says, else `default`."""
    settings = load_dynamic_offload_settings_from_env(
        environ=environ, default_preset=effective_preset or requested_preset, running_on_wsl=running_on_wsl
    )
    return settings.preset_value(name, default)


def variables_table(environ: Mapping[str, str]) -> str:
    """Every DDO_... variable with what it does here, those without an effect at the end; a star marks what is set."""
    acting = [("DDO_PRESET", "the preset")]
    idle: list[tuple[str, str]] = []
    for option in OPTIONS:
        if option.variable:
            (acting if option.change else idle).append((option.variable, option.says))
    acting += [
        ("DDO_DISABLE_PIN_ON_WSL", "0: pin under WSL, too"),
        *((f"DDO_PURGE_WINDOWS_STANDBY_{phase.upper()}", "0 or 1") for phase in STANDBY_PHASES),
        *(
            (f"DDO_<COMPONENT>_{name}", f"{says}; also DDO_RUNNER_<COMPONENT>_{name}")
            for name, says in ROUTE_VARIABLES.items()
        ),
        ("DDO_PROFILE_DIR", "the folder of learnt profiles"),
        *((old, f"older name of {new}") for old, new in RENAMED.items()),
    ]
    idle += IDLE_VARIABLES.items()
    width = max(len(name) for name, _ in (*acting, *idle))

    def line(name: str, says: str) -> str:
        return f"{'*' if environ.get(name, '').strip() else ' '} {name:<{width}}  {says}"

    heads = "Variables that act (* is set here):", "Accepted, no effect:"
    blocks = [heads[0], *(line(*row) for row in acting), "", heads[1], *(line(*row) for row in idle)]
    return "\n".join(blocks)
