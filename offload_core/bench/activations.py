"""Peaks of activations: what a trace foretells of each call of a component, and what is counted in a plain run of the
pipeline on real tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .foresight_cases import Case, Foretold, Poll, failure
from .live_bytes import LiveBytes

# The methods beside forward that the pipelines of these families call.
METHODS = ("encode", "decode", "generate", "get_text_features", "get_image_features")
# (family, component) -> why a real run does what no phase does: such rows are shown and are in no share.
LEFT_OUT = {
    ("ltx2", "audio_vae"): "the sound isn't decoded in phases yet",
    ("ltx2", "vocoder"): "the sound isn't decoded in phases yet",
}
# (family, component) -> why a foretold peak isn't the counted one. None is known to differ.
KNOWN_MISSES: dict[tuple[str, str], str] = {}

Call = tuple[str, str]  # component and entry point, "" for the component itself


@dataclass(frozen=True)
class ActivationRow:
    """The most that activations take in any call of one entry point of a component, in bytes above what was there.

    status: "ok", "failed" (one of the two figures couldn't be had; `reason` says why) or "left out".
    """

    family: str
    size: str
    component: str
    entry: str
    predicted_bytes: int | None
    measured_bytes: int | None
    status: str = "ok"
    reason: str = ""

    @property
    def equal(self) -> bool:
        return self.status == "ok" and self.predicted_bytes == self.measured_bytes

    @property
    def ratio(self) -> float | None:
        """Predicted to measured; None where there is nothing to compare."""
        if self.status != "ok" or self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else float(self.equal)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.equal, "ratio": self.ratio}


def activation_rows(case: Case, poll: Poll, foretold: Foretold | Exception) -> list[ActivationRow]:
    """A row for each entry point of a component that was foretold or ran. foretold: an error if nothing could be."""
    predicted: dict[Call, int] = {}
    problem = ""
    if isinstance(foretold, Exception):
        problem = failure(foretold)
    else:
        for call in foretold.calls:
            key = call.component, call.name
            predicted[key] = max(predicted.get(key, 0), call.trace.peak_bytes)
    try:
        measured = counted_peaks(case, poll)
    except Exception as error:
        measured, problem = {}, problem or failure(error)
    keys = dict.fromkeys([*predicted, *measured]) or {("", ""): None}
    return [_row(case, key, predicted.get(key), measured.get(key), problem) for key in keys]


def _row(case: Case, key: Call, predicted: int | None, measured: int | None, problem: str) -> ActivationRow:
    where = (case.family, str(case.size), *key, predicted, measured)
    if predicted is not None and measured is not None:
        missed = predicted != measured
        return ActivationRow(*where, reason=explained(case.family, key[0]) if missed else "")
    left_out = LEFT_OUT.get((case.family, key[0]))
    if left_out and predicted is None and not problem:
        return ActivationRow(*where, "left out", left_out)
    one_sided = "it ran and wasn't foretold" if predicted is None else "it was foretold and never ran"
    return ActivationRow(*where, "failed", problem or one_sided)


def explained(family: str, component: str) -> str:
    """Why a peak was missed, or that nobody knows."""
    return KNOWN_MISSES.get((family, component), "unexplained")


def counted_peaks(case: Case, poll: Poll) -> dict[Call, int]:
    """Peaks of activations in a plain run of the pipeline, counted by `LiveBytes`; the most of each entry point.

    The pipeline is loaded for this run: some components keep tables that their first call makes. Calls of a component
    by itself or by another one belong to the outer call.
    """
    from ..tiny_models import load_tiny

    pipeline = load_tiny(case.folder, dtype=torch.float32)
    count = LiveBytes()
    peaks: dict[Call, int] = {}
    with ExitStack() as watched, torch.no_grad():
        watch = _Watch(count, peaks, poll)
        for name, module in pipeline.components.items():
            if isinstance(module, nn.Module):
                watched.callback(watch.put_on(name, module))
        watched.enter_context(count)
        pipeline(**case.call, output_type="pt", generator=torch.Generator("cpu").manual_seed(5))
    return peaks


class _Watch:
    """Notes the peak of each outermost call of a component."""

    def __init__(self, count: LiveBytes, peaks: dict[Call, int], poll: Poll) -> None:
        self._count, self._peaks, self._poll = count, peaks, poll
        self._depth = self._before = 0

    def put_on(self, component: str, module: nn.Module) -> Callable[[], None]:
        """Watches forwards by hooks and methods by wrappers of the instance; returns what takes them off again."""
        methods = list(self._methods(component, module))
        entered = module.register_forward_pre_hook(lambda *_: self._enter())
        left = module.register_forward_hook(lambda *_: self._leave((component, "")), always_call=True)
        module.__dict__.update(methods)

        def take_off() -> None:
            entered.remove()
            left.remove()
            for name, _ in methods:
                del module.__dict__[name]

        return take_off

    def _methods(self, component: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for name in METHODS:
            method = getattr(module, name, None)
            if method is not None:
                yield name, self._wrapped((component, name), method)

    def _wrapped(self, key: Call, method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return method(*args, **kwargs)
            finally:
                self._leave(key)

        return run

    def _enter(self) -> None:
        self._poll()
        if not self._depth:
            self._before = self._count.restart()
        self._depth += 1

    def _leave(self, key: Call) -> None:
        self._depth -= 1
        if not self._depth:
            self._peaks[key] = max(self._peaks.get(key, 0), self._count.peak_bytes - self._before)
