"""Traces kept on disk, so that a job like one before is foreseen in a moment.

A trace is found by everything that it depends on: the model's configs and headers, the arguments of the call, the
versions of the libraries whose code was traced, and this package's own code. It holds names and numbers only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .plan import ComponentJob, PhaseJob
from .small_files import read_json, write_json
from .streaming import PartSize, WeightSize
from .trace import Stretch, Trace, TracedWeight

if TYPE_CHECKING:
    from .phases import Embeds, Handle, Images, PhaseTrace
    from .phases._control import Picture
    from .phases._plain import Plain

log = logging.getLogger(__name__)

LIBRARIES = ("torch", "diffusers", "transformers")
MOST_FILES = 300  # the ones used last are kept


class TraceStore:
    """Ways of phases, kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ways(self, asked: Any, make: Callable[[], Iterable[PhaseTrace]]) -> Iterator[PhaseTrace]:
        """The ways that `make` gives for what `asked` says (plain values that decide them), kept ones first. `make` is
        called when one is wanted that isn't kept."""
        file = self.folder / f"{_key(asked)}.json"
        kept, whole = self._read(file)
        yield from kept
        if whole:
            return
        for number, way in enumerate(make()):
            if number >= len(kept):
                kept.append(way)
                self._write(file, kept, whole=False)
                yield way
        self._write(file, kept, whole=True)

    def _read(self, file: Path) -> tuple[list[PhaseTrace], bool]:
        data = read_json(file)
        if not data:
            return [], False
        try:
            found = [_way(item) for item in data["ways"]]
        except (KeyError, TypeError, ValueError, IndexError):
            log.warning("%s isn't a usable trace; it is made again.", file.name)
            return [], False
        with contextlib.suppress(OSError):
            os.utime(file)
        return found, bool(data["whole"])

    def _write(self, file: Path, ways: list[PhaseTrace], *, whole: bool) -> None:
        write_json(file, {"whole": whole, "ways": [_data(way) for way in ways]})
        with contextlib.suppress(OSError):
            for old in sorted(self.folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)[MOST_FILES:]:
                old.unlink()


def asked_of(handle: Handle) -> list[Any]:
    """What of a model decides its traces."""
    loras = [[lora.fingerprint, lora.scale] for lora in handle.loras]
    storage = [handle.weight_storage] if handle.weight_storage != "as stored" else []
    beside: list[Any] = [[one.name, one.fingerprint] for one in handle.companions]
    if handle.ip_adapter is not None:
        beside.append(["ip_adapter", handle.ip_adapter.fingerprint, _size(handle.ip_adapter.picture)])
    if handle.control is not None:
        control = handle.control
        beside.append([control.fingerprint, _size(control.picture), control.start, control.end, control.mode])
    own = [handle.fingerprint, handle.pipeline, handle.dtype, handle.settings.vae_tiling, loras]
    return [*own, *storage, *([beside] if beside else [])]


def _size(picture: Picture | None) -> list[int] | None:
    return None if picture is None else [picture.width, picture.height]


def asked_values(call: dict[str, Any]) -> Any:
    """What of a call's arguments decides its traces: pictures and tensors by their layout, all else by value."""
    return {name: _asked(value) for name, value in call.items()}


def asked_embeds(embeds: Embeds) -> Any:
    """What of embeds decides the trace of a denoise: the layout of what was encoded, not its values or its words."""
    records = sorted((name.partition(":")[0], asked_plain(plain)) for name, plain in embeds.records.items())
    arguments = [item for item in embeds.call.structure["dict"] if "prompt" not in item[0]]
    return [records, asked_plain(replace(embeds.call, structure=arguments))]


def asked_images(images: Images | None) -> Any:
    """What of encoded pictures decides the trace of a denoise: which pipeline takes them, their sizes, and the layout
    of what was encoded."""
    if images is None:
        return None
    from .phases._plain import from_plain

    records = sorted((name.partition(":")[0], asked_plain(plain)) for name, plain in images.records.items())
    return [images.pipeline, records, asked_values(from_plain(images.call, torch.device("cpu")))]


def asked_plain(plain: Plain) -> list[Any]:
    """Recorded values by their layout; whole numbers (masks, lengths, files of pictures) also by value."""
    random = set(_generators(plain.structure))
    return [plain.structure, [_asked(tensor) for place, tensor in enumerate(plain.tensors) if place not in random]]


def _generators(node: Any) -> Iterator[int]:
    """Places of the states of random generators, which decide nothing."""
    for name, item in node.items() if isinstance(node, dict) else ():
        if name == "generator":
            yield item
        else:
            yield from _generators(item)
    for item in node if isinstance(node, list) else ():
        yield from _generators(item)


def _asked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        whole = not (value.is_floating_point() or value.is_complex())
        values = hashlib.sha256(value.cpu().contiguous().numpy().tobytes()).hexdigest() if whole else None
        return [str(value.dtype), list(value.shape), list(value.stride()), values]
    if hasattr(value, "getbands"):
        return ["picture", value.mode, list(value.size)]
    if isinstance(value, list | tuple):
        return [_asked(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _asked(item) for name, item in value.items()}
    return value


def _key(asked: Any) -> str:
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    text = json.dumps([asked, versions, _own_code()], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.cache
def _own_code() -> str:
    """A mark of the code that makes traces and jobs."""
    root, mark = Path(__file__).parent, hashlib.sha256()
    alone = [root / f"{name}.py" for name in ("packing", "trace", "trace_blocks", "trace_store")]
    for file in sorted((*alone, *root.glob("[kps]*/*.py"))):
        mark.update(file.read_bytes())
    return mark.hexdigest()


def _data(way: PhaseTrace) -> dict[str, Any]:
    traces = list({id(trace): trace for job in way.job.components for trace, _ in job.calls}.values())
    traces += [call.trace for call in way.calls if all(call.trace is not trace for trace in traces)]
    places = {id(trace): place for place, trace in enumerate(traces)}
    job = {field.name: getattr(way.job, field.name) for field in dataclasses.fields(PhaseJob)}
    del job["correction"]  # what runs taught is kept elsewhere
    return {
        "job": job | {"components": [_component_data(component, places) for component in way.job.components]},
        "calls": [[call.component, call.name, call.times, places[id(call.trace)]] for call in way.calls],
        "traces": [_trace_data(trace) for trace in traces],
    }


def _component_data(job: ComponentJob, places: dict[int, int]) -> dict[str, Any]:
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(ComponentJob)}
    parts = [
        {**dataclasses.asdict(part), "sizes": [dataclasses.astuple(size) for size in part.sizes]} for part in job.parts
    ]
    return fields | {"parts": parts, "calls": [[places[id(trace)], times] for trace, times in job.calls]}


def _trace_data(trace: Trace) -> dict[str, Any]:
    return {
        "weights": [dataclasses.astuple(weight) for weight in trace.weights],
        "stretches": [dataclasses.astuple(stretch) for stretch in trace.stretches],
        "output_bytes": trace.output_bytes,
        "assumed": trace.assumed,
    }


def _way(data: dict[str, Any]) -> PhaseTrace:
    from .phases import PhaseTrace, TracedCall

    traces = [_trace(item) for item in data["traces"]]
    components = tuple(_component(item, traces) for item in data["job"]["components"])
    calls = tuple(TracedCall(name, entry, times, traces[place]) for name, entry, times, place in data["calls"])
    assumed = tuple(data["job"]["assumed"])
    return PhaseTrace(PhaseJob(**(data["job"] | {"components": components, "assumed": assumed})), calls)


def _component(data: dict[str, Any], traces: list[Trace]) -> ComponentJob:
    parts = tuple(
        PartSize(**(part | {"sizes": tuple(WeightSize(*size) for size in part["sizes"])})) for part in data["parts"]
    )
    calls = tuple((traces[place], times) for place, times in data["calls"])
    return ComponentJob(**(data | {"parts": parts, "calls": calls}))


def _trace(data: dict[str, Any]) -> Trace:
    weights = tuple(TracedWeight(*weight) for weight in data["weights"])
    stretches = tuple(Stretch(tuple(used), *numbers) for used, *numbers in data["stretches"])
    return Trace(weights, stretches, data["output_bytes"], data["assumed"])
