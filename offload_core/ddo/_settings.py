"""DDO's settings as a view of `OffloadSettings`: a preset, what options and variables change of it, and routes.

This is where the environment is read, once, into plain values. What is said to a function wins over a variable, a
variable over the preset, the preset over the defaults, which are those of `OffloadSettings`.
"""

from __future__ import annotations

import logging
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..limits import Machine
from ..presets import AUTO, ENGINE, PRESETS, WHOLE, resolve_preset
from ..settings import OffloadSettings, check_settings
from ._options import BY_FIELD, IDLE_VARIABLES, OPTIONS, RENAMED, changes_of, fields_in, flag, no_effect
from ._routes import ROUTE_VARIABLES, Route, route_in, route_of_preset, with_group, with_route, with_switches

log = logging.getLogger(__name__)


class _Default(str):
    """A default of DDO's signature that can be told from the same word said by a caller."""

    __slots__ = ()


# DDO's default device is cuda:0. Where nobody names a device, it is the accelerator that is there, or the CPU.
DEFAULT_DEVICE = _Default("cuda:0")
STANDBY_PHASES = ("before_run", "after_text_encoder", "before_transformer", "after_run")


class DynamicOffloadConfig:
    """Options under DDO's names, as far as they were given; everything else is left to the preset and the defaults.

    Any of DDO's 57 fields is accepted (TypeError for another). An attribute that wasn't given is None.
    """

    def __init__(self, **given: Any) -> None:
        unknown = [name for name in given if name not in BY_FIELD]
        if unknown:
            raise TypeError(f"Unknown option(s) of dynamic offload: {', '.join(unknown)}.")
        self.given = types.MappingProxyType(dict(given))

    def __getattr__(self, name: str) -> Any:
        if name not in BY_FIELD:
            raise AttributeError(f"DynamicOffloadConfig has no field {name!r}")
        return self.given.get(name)

    def __repr__(self) -> str:
        return f"DynamicOffloadConfig({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DynamicOffloadConfig) and dict(self.given) == dict(other.given)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class DynamicOffloadSettings:
    """A preset with everything that was said beside it.

    offload: what the engine gets. config: the options that came from variables and arguments. route: of components
    that nothing is said about. component_policies: routes and arguments of group offload by component. variables: the
    DDO_... variables that were set. standby_phases: when the Windows standby list is purged.
    """

    requested_preset: str = AUTO
    effective_preset: str = "plain"
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    config: DynamicOffloadConfig = field(default_factory=DynamicOffloadConfig)
    route: Route = field(default_factory=Route)
    component_policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    standby_phases: frozenset[str] = frozenset()
    running_on_wsl: bool = False
    disable_pin_on_wsl: bool = True

    @classmethod
    def from_env(cls, **kwargs: Any) -> DynamicOffloadSettings:
        """Same as `load_dynamic_offload_settings_from_env`."""
        return load_dynamic_offload_settings_from_env(**kwargs)

    @property
    def enabled(self) -> bool:
        """Whether components go through this engine if nothing else is said about them."""
        return self.route.name == ENGINE

    @property
    def plan(self) -> bool:
        """Whether DDO_PLAN asks for a plan only. Here it has no effect: `phase-offload plan` makes one."""
        return flag(self.variables.get("DDO_PLAN", "0"), "DDO_PLAN")

    @property
    def execution_mode(self) -> str:
        return self.config.execution_mode or (ENGINE if self.enabled else "plan")

    @property
    def requested_pin_cpu_memory(self) -> bool:
        asked = self.config.pin_cpu_memory
        if asked is None:
            return PRESETS[self.effective_preset].settings().pinned_memory != 0
        return flag(asked, "pin_cpu_memory")

    @property
    def effective_pin_cpu_memory(self) -> bool:
        return self.offload.pinned_memory not in (0, "0")

    def route_of(self, component: str) -> Route:
        """The route of a component. Raises InputError or ValueError for a variable or policy that can't be used."""
        route = route_in(self.variables, component, self.route)
        policy = dict(self.component_policies.get(component, {}))
        route = with_switches(route, policy.pop("group_offload", None), policy.pop("dynamic_offload", None), component)
        route = with_route(route, policy.pop("route", None))
        return with_group(route, **policy)

    def preset_value(self, name: str, default: str = "", environ: Mapping[str, str] | None = None) -> str:
        """The text of a DDO_... variable: as it is set, else as the preset's numbers say, else `default`."""
        variables = self.variables if environ is None else environ
        if variables.get(name, "").strip():
            return variables[name].strip()
        moment = name.removeprefix("DDO_PURGE_WINDOWS_STANDBY_").lower()
        if moment in STANDBY_PHASES and name.startswith("DDO_PURGE_"):
            return "1" if moment in self.standby_phases else default
        numbers = {
            "DDO_PRESET": self.effective_preset,
            "DDO_PIN_CPU_MEMORY": str(int(self.effective_pin_cpu_memory)),
            "DDO_PIN_CPU_WORKERS": str(self.offload.read_threads),
            "DDO_SMALL_TENSOR_THRESHOLD_KB": str(self.offload.resident_below // 1024),
        }
        return numbers.get(name, default)

    def preset_bool(self, name: str, default: str = "0", environ: Mapping[str, str] | None = None) -> bool:
        return flag(self.preset_value(name, default, environ), name)

    def as_metrics(self) -> dict[str, Any]:
        """Plain values for a report, under DDO's prefix."""
        settings = vars(self.offload) | {"execution_device": str(self.offload.execution_device)}
        return {
            "dynamic_offload_requested_preset": self.requested_preset,
            "dynamic_offload_effective_preset": self.effective_preset,
            "dynamic_offload_execution_mode": self.execution_mode,
            "dynamic_offload_effective_pin_cpu_memory": self.effective_pin_cpu_memory,
            "dynamic_offload_component_policies": {name: dict(each) for name, each in self.component_policies.items()},
            **{f"dynamic_offload_{name}": value for name, value in settings.items()},
        }


def load_dynamic_offload_settings_from_env(
    *,
    execution_device: str | torch.device = DEFAULT_DEVICE,
    offload_device: str | torch.device = "cpu",
    target_module_classes: tuple[type[torch.nn.Module], ...] = (torch.nn.Linear, torch.nn.Embedding),
    skip_modules_pattern: tuple[str, ...] = (),
    always_resident_modules_pattern: tuple[str, ...] | None = None,
    running_on_wsl: bool | None = None,
    environ: Mapping[str, str] | None = None,
    default_preset: str = "",
    component_policies: Mapping[str, Mapping[str, Any]] | None = None,
) -> DynamicOffloadSettings:
    """Settings of the preset that DDO_PRESET names (else `default_preset`, else "auto"), with what other variables say.

    environ: read instead of the process's environment. running_on_wsl: instead of asking. Patterns and classes have no
    effect, which is logged. Raises InputError for a preset or a value that can't be used, ValueError for a route.
    """
    pieces = {
        "target_module_classes": None if set(target_module_classes) <= _DDO_CLASSES else target_module_classes,
        "skip_modules_pattern": skip_modules_pattern,
        "always_resident_modules_pattern": always_resident_modules_pattern,
    }
    variables = {name: text for name, text in (os.environ if environ is None else environ).items() if _ours(name)}
    return make_settings(
        preset=variables.get("DDO_PRESET", "").strip() or default_preset,
        variables=variables,
        said={name: value for name, value in pieces.items() if value},
        execution_device=execution_device,
        offload_device=offload_device,
        running_on_wsl=running_on_wsl,
        component_policies=component_policies or {},
    )


_DDO_CLASSES = {torch.nn.Linear, torch.nn.Embedding}


def _ours(name: str) -> bool:
    return name.startswith("DDO_")


def make_settings(
    *,
    preset: str,
    variables: Mapping[str, str],
    said: Mapping[str, Any],
    execution_device: str | torch.device,
    offload_device: str | torch.device,
    running_on_wsl: bool | None,
    component_policies: Mapping[str, Mapping[str, Any]],
) -> DynamicOffloadSettings:
    """The view of a preset with variables over it and `said`, options as a caller gave them, over both."""
    wsl = Machine().is_wsl() if running_on_wsl is None else running_on_wsl
    requested = preset.strip() or AUTO
    chosen = resolve_preset(requested, on_wsl=wsl)
    _log_idle(variables)
    given = fields_in(variables) | dict(said)
    no_pin_on_wsl = flag(variables.get("DDO_DISABLE_PIN_ON_WSL", "1"), "DDO_DISABLE_PIN_ON_WSL")
    device = "auto" if execution_device is DEFAULT_DEVICE else execution_device
    offload = replace(
        chosen.settings(), execution_device=str(device), offload_device=str(offload_device), **changes_of(given)
    )
    if wsl and no_pin_on_wsl and offload.pinned_memory != 0:
        log.info("Nothing is pinned under WSL; DDO_DISABLE_PIN_ON_WSL=0 allows it.")
        offload = replace(offload, pinned_memory=0)
    check_settings(offload)
    route = route_of_preset(chosen)
    if str(given.get("execution_mode", "")).strip().lower() == "plan" and route.name == ENGINE:
        route = replace(route, name=WHOLE)
    return DynamicOffloadSettings(
        requested_preset=requested,
        effective_preset=chosen.name,
        offload=offload,
        config=DynamicOffloadConfig(**given),
        route=route,
        component_policies=dict(component_policies),
        variables=dict(variables),
        standby_phases=_standby_phases(chosen.standby_phases, variables),
        running_on_wsl=wsl,
        disable_pin_on_wsl=no_pin_on_wsl,
    )


_OF_COMPONENTS = re.compile(rf"DDO_(RUNNER_)?[A-Z0-9_]+_({'|'.join(ROUTE_VARIABLES)})")
_OTHERS = {
    "DDO_PRESET",
    "DDO_DISABLE_PIN_ON_WSL",
    "DDO_PROFILE_DIR",
    *RENAMED,
    *(option.variable for option in OPTIONS),
    *(f"DDO_PURGE_WINDOWS_STANDBY_{phase.upper()}" for phase in STANDBY_PHASES),
}


def _log_idle(variables: Mapping[str, str]) -> None:
    """Says which of the variables that are set do nothing."""
    for name in variables:
        if name in IDLE_VARIABLES:
            no_effect(name, IDLE_VARIABLES[name])
        elif name not in _OTHERS and not _OF_COMPONENTS.fullmatch(name):
            log.warning("%s isn't a variable that is known here; `phase-offload presets` lists them.", name)


def _standby_phases(preset: tuple[str, ...], variables: Mapping[str, str]) -> frozenset[str]:
    phases = set(preset)
    for phase in STANDBY_PHASES:
        name = f"DDO_PURGE_WINDOWS_STANDBY_{phase.upper()}"
        if variables.get(name, "").strip():
            (phases.add if flag(variables[name], name) else phases.discard)(phase)
    return frozenset(phases)


def as_settings(
    settings: DynamicOffloadSettings | OffloadSettings | None,
    *,
    config: DynamicOffloadConfig | None,
    preset: str,
    execution_device: str | torch.device,
    offload_device: str | torch.device,
    running_on_wsl: bool | None,
    environ: Mapping[str, str] | None,
    use_environment: bool,
    overrides: Mapping[str, Any],
) -> DynamicOffloadSettings:
    """The view that the arguments of a function that attaches stand for.

    With `settings` neither the environment nor the preset is asked, which is logged of a preset that is said; options
    and devices that are said still win. Raises TypeError for an unknown option, InputError for one that can't be used.
    """
    said = dict(config.given if config is not None else {}) | dict(overrides)
    named = said.pop("execution_device", DEFAULT_DEVICE)
    device = named if execution_device is DEFAULT_DEVICE else execution_device
    offload_device = said.pop("offload_device", offload_device)
    if settings is None:
        found = (os.environ if environ is None else environ) if use_environment else {}
        variables = {name: text for name, text in found.items() if _ours(name)}
        return make_settings(
            preset=variables.get("DDO_PRESET", "").strip() or preset,
            variables=variables,
            said=said,
            execution_device=device,
            offload_device=offload_device,
            running_on_wsl=running_on_wsl,
            component_policies={},
        )
    view = settings if isinstance(settings, DynamicOffloadSettings) else DynamicOffloadSettings(offload=settings)
    if preset not in (AUTO, view.requested_preset, view.effective_preset, ""):
        no_effect(f"preset={preset}", "settings were given, which say everything that a preset does")
    if environ is not None:
        no_effect("environ", "settings were given, and the environment is read for those")
    changes = changes_of(said) | ({} if device is DEFAULT_DEVICE else {"execution_device": str(device)})
    if str(offload_device) != "cpu":
        changes["offload_device"] = str(offload_device)
    if running_on_wsl is not None:
        view = replace(view, running_on_wsl=running_on_wsl)
    offload = replace(view.offload, **changes)
    check_settings(offload)
    is_plan = str(said.get("execution_mode", "")).lower() == "plan" and view.route.name == ENGINE
    route = replace(view.route, name=WHOLE) if is_plan else view.route
    return replace(view, offload=offload, route=route, config=DynamicOffloadConfig(**{**view.config.given, **said}))
