"""What the pack's page asks its server: functions from the data of a request to JSON, in one table.

They know no web server. A host calls them on a thread that may wait: a first answer can take a second. No route takes
or gives a path of the file system.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from offload_core import __version__
from offload_core.errors import InputError, OffloadError
from offload_core.presets import PRESETS

from .defaults import PRESET_NAMES, with_values
from .state import PackState

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a request is answered with: an HTTP status, and the JSON object of the body."""

    status: int
    body: Json


@dataclass(frozen=True)
class Route:
    """One address. respond: from the pack's state and the data of the request (a GET's query, a POST's body)."""

    method: Literal["GET", "POST"]
    path: str
    respond: Callable[[PackState, Mapping[str, Any]], Json]


def answer(route: Route, state: PackState, data: object) -> Answer:
    """What the route says to the data. A wrong request is 400, with one sentence under "error"."""
    if not isinstance(data, Mapping):
        return Answer(400, {"error": f"{route.path} takes a JSON object, not {type(data).__name__}."})
    try:
        return Answer(200, route.respond(state, data))
    except OffloadError as error:
        return Answer(400, {"error": str(error)})


def show_state(state: PackState, _: Mapping[str, Any]) -> Json:
    """The machine, what is set, and the run that is going on."""
    return {
        "version": __version__,
        "machine": state.machine.read(),
        "warm_bytes": warm_bytes(state),
        "defaults": asdict(state.defaults),
        "presets": {name: PRESETS[name].when for name in PRESET_NAMES},
        "running": state.history.running(),
    }


def show_history(state: PackState, _: Mapping[str, Any]) -> Json:
    """The last runs, the newest first."""
    return {"runs": state.history.to_list()}


def show_report(state: PackState, data: Mapping[str, Any]) -> Json:
    """A run as plain text for a bug report: `run` is its id, by default the last one."""
    run_id = data.get("run")
    if run_id is not None and not isinstance(run_id, str):
        raise InputError(f"run is {run_id!r}; use the id of a run.")
    report = state.history.report(run_id)
    if report is None and run_id is not None:
        raise InputError(f"There is no run {run_id!r} among the last ones.")
    lines = [*about_lines(state), "", report.table() if report else "No phase has run."]
    return {"text": "\n".join(lines)}


def change_settings(state: PackState, data: Mapping[str, Any]) -> Json:
    """Other defaults, by name. All of them or, if one can't be used, none."""
    state.defaults = with_values(state.defaults, data)
    return {"defaults": asdict(state.defaults)}


def ask_for_purge(state: PackState, _: Mapping[str, Any]) -> Json:
    """Has the host unload its models and caches between prompts, and drops host copies of weights now."""
    dropped = state.warm.release() if state.warm is not None else 0
    state.host.free_between_prompts()
    return {"warm_bytes": dropped}


def warm_bytes(state: PackState) -> int:
    """Bytes of weights that are kept in RAM between prompts."""
    return state.warm.held_bytes if state.warm is not None else 0


def about_lines(state: PackState) -> list[str]:
    """Versions, machine and defaults, for a bug report."""
    from offload_core._report_table import human_bytes

    machine = state.machine.read()
    places = [("RAM", machine["host"]), ("device", machine["device"])]
    memory = [
        f"{place}: {human_bytes(at['free'])} free of {human_bytes(at['total'])} ({at['source']})"
        for place, at in places
        if at is not None
    ]
    device = machine["device"]["title"] if machine["device"] else "the CPU"
    defaults = ", ".join(f"{name}={value}" for name, value in asdict(state.defaults).items())
    return [
        f"Phase Offload {__version__}, torch {machine['torch']}, Python {platform.python_version()}, "
        f"{platform.system()}{' (WSL)' if machine['wsl'] else ''}, computes on {device}",
        *memory,
        f"defaults: {defaults}",
    ]


ROUTES = (
    Route("GET", "/phase_offload/state", show_state),
    Route("GET", "/phase_offload/history", show_history),
    Route("GET", "/phase_offload/report", show_report),
    Route("POST", "/phase_offload/settings", change_settings),
    Route("POST", "/phase_offload/purge", ask_for_purge),
)
