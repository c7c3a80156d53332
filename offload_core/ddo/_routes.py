"""Which way a component goes: through this engine, through diffusers' group offload, or whole to the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..presets import ENGINE, GROUP, WHOLE, Preset
from ._options import flag, number

log = logging.getLogger(__name__)

# DDO's names for its routes, and for what runs inside them; those of the last group have no code of their own here.
ROUTES = {
    **dict.fromkeys((ENGINE, "dynamic", "ddo"), ENGINE),
    **dict.fromkeys((GROUP, "diffusers", "diffusers_group", "group", "group_offload"), GROUP),
    **dict.fromkeys((WHOLE, "off", "standard", "cuda"), WHOLE),
    **dict.fromkeys(("linear_convolution", "sdnq", "sdnq_runtime", "vmm", "vmm_runtime", "vmm_fast_runtime"), ENGINE),
}
_NOT_HERE = {
    "linear_convolution": "convolutions are streamed like every weight",
    "sdnq": "SDNQ's tensors are streamed like every weight",
    "vmm": "there is no native allocator",
}


@dataclass(frozen=True)
class Route:
    """name: one of the three. group: arguments of diffusers' `apply_group_offloading`, for that route."""

    name: str = ENGINE
    offload_type: str = "leaf_level"
    use_stream: bool = True
    record_stream: bool = False
    low_cpu_mem_usage: bool | None = None
    num_blocks_per_group: int = 1


def route_of_preset(preset: Preset) -> Route:
    return Route(preset.route, **preset.group)


def with_route(route: Route, name: str | None) -> Route:
    """`route` with another name, in any of DDO's spellings; "auto" and None leave it. Raises ValueError."""
    key = str(name or "auto").strip().lower()
    if key == "auto":
        return route
    if key not in ROUTES:
        raise ValueError(f"Invalid offload route {name!r}. Valid values: auto, {', '.join(ROUTES)}.")
    for old, reason in _NOT_HERE.items():
        if key.startswith(old):
            log.info("The route %s was accepted and goes through the one engine: %s.", key, reason)
    return replace(route, name=ROUTES[key])


def with_switches(route: Route, group_offload: Any, dynamic_offload: Any, where: str) -> Route:
    """`route` as two switches change it; group offload is asked first, as in DDO. None leaves it as it is."""
    group = None if group_offload is None else flag(group_offload, f"{where}group_offload")
    dynamic = None if dynamic_offload is None else flag(dynamic_offload, f"{where}dynamic_offload")
    if group:
        return replace(route, name=GROUP)
    if dynamic:
        return replace(route, name=ENGINE)
    if (group is False and route.name == GROUP) or (dynamic is False and route.name == ENGINE):
        return replace(route, name=WHOLE)
    return route


def with_group(route: Route, **arguments: Any) -> Route:
    """`route` with those arguments of group offload that aren't None."""
    return replace(route, **{name: value for name, value in arguments.items() if value is not None})


def route_in(environ: Mapping[str, str], component: str, route: Route) -> Route:
    """`route` as variables of this component change it, `DDO_TRANSFORMER_ROUTE` and so on.

    The older names, DDO_RUNNER_..., are asked where the newer ones are not set. Raises InputError or ValueError.
    """

    def ask(name: str) -> str | None:
        for prefix in ("DDO_", "DDO_RUNNER_"):
            text = environ.get(f"{prefix}{component.upper()}_{name}", "").strip()
            if text:
                return text
        return None

    def switch(name: str) -> bool | None:
        text = ask(name)
        return None if text is None else flag(text, f"DDO_{component.upper()}_{name}")

    blocks = ask("NUM_BLOCKS_PER_GROUP")
    route = with_switches(route, ask("GROUP_OFFLOAD"), ask("DYNAMIC_OFFLOAD"), f"DDO_{component.upper()}: ")
    route = with_route(route, ask("ROUTE"))
    return with_group(
        route,
        offload_type=ask("OFFLOAD_TYPE"),
        use_stream=switch("OFFLOAD_STREAM"),
        record_stream=switch("OFFLOAD_RECORD_STREAM"),
        low_cpu_mem_usage=switch("OFFLOAD_LOW_CPU_MEM_USAGE"),
        num_blocks_per_group=None if blocks is None else int(number(blocks, "DDO_..._NUM_BLOCKS_PER_GROUP")),
    )


ROUTE_VARIABLES = {
    "ROUTE": f"auto, {ENGINE}, {GROUP}, {WHOLE}, and DDO's other spellings",
    "GROUP_OFFLOAD": "1: diffusers' group offload",
    "DYNAMIC_OFFLOAD": "1: this engine, 0: not this engine",
    "OFFLOAD_TYPE": "of group offload: leaf_level or block_level",
    "OFFLOAD_STREAM": "of group offload",
    "OFFLOAD_RECORD_STREAM": "of group offload",
    "OFFLOAD_LOW_CPU_MEM_USAGE": "of group offload",
    "NUM_BLOCKS_PER_GROUP": "of group offload of blocks",
}
