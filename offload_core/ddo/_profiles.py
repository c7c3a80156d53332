"""Capacity profiles: what a module needed on a device, learnt from runs and kept as JSON.

A profile is found by what determines it: the content of the weights, the shapes of the inputs, the device and its size.
A name plays no part, so one that is used again for something else can't bring another module's figures.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import read_header
from ..devices import HostPeak, peak_bytes, reset_peak, total_bytes
from ..errors import InputError
from ..settings import OffloadSettings
from ..streaming import Offload
from ..streaming._masters import FileMaster, HostMaster
from ._settings import DynamicOffloadSettings

log = logging.getLogger(__name__)

DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION = 1
_KEPT_OBSERVATIONS = 20
_MARGIN = 1.1  # of the largest activations seen

Context = Mapping[str, Any]
Profile = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- the store


def normalize_dynamic_offload_profile_context(context: Context) -> dict[str, Any]:
    """The context as JSON holds it, by name. Raises InputError for a value that isn't a JSON value."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(context), sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"A profile's context holds plain JSON values only: {error}.") from None
    return plain


def dynamic_offload_profile_key(context: Context) -> str:
    """24 hex digits that stand for a context: a sha256 over it as sorted JSON."""
    text = json.dumps(normalize_dynamic_offload_profile_context(context), sort_keys=True)
    return hashlib.sha256(f"{DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION} {text}".encode()).hexdigest()[:24]


def get_dynamic_offload_profile_dir(profile_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of profiles: as given, DDO_PROFILE_DIR, or `profiles` in this project's cache folder."""
    from ..rates import cache_folder

    given = profile_dir or os.environ.get("DDO_PROFILE_DIR", "").strip()
    return Path(given) if given else cache_folder() / "profiles"


def dynamic_offload_profile_path(context: Context, profile_dir: str | os.PathLike[str] | None = None) -> Path:
    return get_dynamic_offload_profile_dir(profile_dir) / f"{dynamic_offload_profile_key(context)}.json"


def load_dynamic_offload_profile(context: Context, profile_dir: str | os.PathLike[str] | None = None) -> Profile | None:
    """The profile of a context, None if there is none, if it can't be read, or if it is of another context."""
    try:
        profile = json.loads(dynamic_offload_profile_path(context, profile_dir).read_text("utf-8"))
        same = profile["context"] == normalize_dynamic_offload_profile_context(context)
        return profile if same and profile["schema_version"] == DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_dynamic_offload_profile(
    context: Context,
    observation: Mapping[str, Any],
    profile_dir: str | os.PathLike[str] | None = None,
    recommendation: Mapping[str, Any] | None = None,
) -> Path:
    """Adds an observation to the profile of a context and returns its file, which is replaced whole.

    The last 20 observations are kept; of each number the largest seen. Raises InputError for values that aren't JSON.
    """
    path = dynamic_offload_profile_path(context, profile_dir)
    seen = normalize_dynamic_offload_profile_context(observation)
    profile = load_dynamic_offload_profile(context, profile_dir) or {"observations": [], "largest": {}}
    largest = profile["largest"]
    for name, value in seen.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            largest[name] = max(largest.get(name, value), value)
    profile |= {
        "schema_version": DYNAMIC_OFFLOAD_PROFILE_SCHEMA_VERSION,
        "context": normalize_dynamic_offload_profile_context(context),
        "observations": [*profile["observations"], seen][-_KEPT_OBSERVATIONS:],
    }
    if recommendation is not None:
        profile["recommendation"] = normalize_dynamic_offload_profile_context(recommendation)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(profile, file, indent=2)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


def get_dynamic_offload_profile_capacity(profile: Mapping[str, Any], metric: str) -> dict[str, float] | None:
    """The largest value of a number that was seen, None if there is none."""
    value = profile.get("largest", {}).get(metric)
    return None if value is None else {"largest": float(value)}


def get_dynamic_offload_profile_recommendation(profile: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings that the profile recommends, None if it recommends none."""
    found = profile.get("recommendation")
    return dict(found) if found else None


class DynamicOffloadProfileSession:
    """Profiles of one job: `execution_context` is everything about it, `capacity_context` what its needs depend on."""

    def __init__(
        self,
        execution_context: Context,
        capacity_context: Context,
        profile_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.execution_context, self.capacity_context = dict(execution_context), dict(capacity_context)
        self.profile_dir = profile_dir
        self.execution_profile = load_dynamic_offload_profile(execution_context, profile_dir)
        self.capacity_profile = load_dynamic_offload_profile(capacity_context, profile_dir)

    def apply_settings(
        self, settings: OffloadSettings, *, allow_recommendation: bool = True
    ) -> tuple[OffloadSettings, dict[str, Any] | None]:
        """The settings with what the profile recommends, as far as they leave it to us, and the recommendation."""
        profile = self.capacity_profile if allow_recommendation else None
        found = get_dynamic_offload_profile_recommendation(profile or {})
        if not found:
            return settings, None
        changes = {name: value for name, value in found.items() if getattr(settings, name, None) == "auto"}
        return replace(settings, **changes), found

    @staticmethod
    def recommend_resident_budget(total_vram_gb: float, peak_vram_gb: float, headroom_gb: float) -> float:
        """GiB that weights may still take: what is left of the device beside a peak and a headroom."""
        return max(0.0, round(total_vram_gb - peak_vram_gb - headroom_gb, 4))

    def record_success(
        self, observation: Mapping[str, Any], recommendation: Mapping[str, Any] | None = None
    ) -> tuple[Path, Path]:
        """Adds a run to both profiles; returns their files."""
        return (
            record_dynamic_offload_profile(self.execution_context, observation, self.profile_dir),
            record_dynamic_offload_profile(self.capacity_context, observation, self.profile_dir, recommendation),
        )


# ------------------------------------------------------------------------------------------------ of a module


def content_of(offload: Offload) -> str:
    """A sha256 over names, shapes, dtypes and masters of a module's weights: for those in a file its header, size and
    time; for those in RAM their first bytes."""

    @functools.cache
    def file_of(path: Path) -> bytes:
        header = read_header(path)
        return f"{header.header_sha256} {header.file_bytes} {header.mtime_ns}".encode()

    found = hashlib.sha256()
    managed = offload._managed
    for entry in sorted(managed.entries, key=lambda entry: entry.names):
        found.update(repr((entry.names, tuple(entry.layout.shape), str(entry.layout.dtype))).encode())
        master = entry.master
        if isinstance(master, FileMaster):
            found.update(file_of(master.where.path))
        elif isinstance(master, HostMaster):
            head = master.tensor.detach().reshape(-1)[:256].contiguous().view(torch.uint8)
            found.update(bytes(head.tolist()))
    return found.hexdigest()


def shapes_in(values: Any) -> Any:
    """Shapes and dtypes of all tensors in nested arguments, as plain JSON."""
    if isinstance(values, torch.Tensor):
        return [*values.shape, str(values.dtype)]
    if isinstance(values, Mapping):
        return {str(name): shapes_in(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [shapes_in(value) for value in values]
    return type(values).__name__


class ProfileRun:
    """A `with` block around a run of a module under offload. If it ends well, its peaks are kept.

    After the block `context` says what the profile is found by, `observation` what was seen, `path` where it is kept.
    A block in which the module didn't run, or one that raised, keeps nothing.
    """

    def __init__(self, module: nn.Module, settings: DynamicOffloadSettings, offload: Offload | None) -> None:
        if offload is None:
            raise InputError("A profile is learnt of modules that go through this engine; this one goes another way.")
        self.module, self.settings, self._offload = module, settings, offload
        self.context: dict[str, Any] = {}
        self.observation: dict[str, Any] = {}
        self.path: Path | None = None
        self._shapes: Any = None

    def __enter__(self) -> ProfileRun:
        self.device = self._offload._managed.scope.device
        reset_peak(self.device)
        self._host, self._before = HostPeak(), self._offload.report()
        self._handle = self.module.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._shapes = [shapes_in(args), shapes_in(kwargs)]

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._handle.remove()
        if kind is not None or self._shapes is None:
            return
        report = self._offload.report()
        weights = report.peak_bytes - report.by_kind.get("activations", 0)
        peak = peak_bytes(self.device)
        self.context = {
            "content": content_of(self._offload),
            "inputs": self._shapes,
            "device": str(self.device),
            "device_bytes": total_bytes(self.device) or 0,
            "torch": torch.__version__,
        }
        self.observation = {
            "device_peak_bytes": peak,
            "host_peak_bytes": self._host.sample(),
            "reserved_peak_bytes": report.peak_bytes,
            "activation_bytes": max(peak - weights, 0),
            "streamed_bytes": report.streamed_bytes - self._before.streamed_bytes,
            "stall_s": report.stall_s - self._before.stall_s,
        }
        recommendation = {"activation_memory": int(self.observation["activation_bytes"] * _MARGIN)} if peak else None
        folder = self.settings.variables.get("DDO_PROFILE_DIR", "").strip() or None
        self.path = record_dynamic_offload_profile(self.context, self.observation, folder, recommendation)
