"""Ports: what happens when the pipeline calls one of its components.

The pipeline's own `__call__` runs in every phase; its components are of their real classes, and each has a port that
decides what an outside call does: record it, replay it, run it, capture it, or end the phase. A port sees calls of the
component itself, of its public methods (`encode`, `decode`, `generate`, ...) and of its parts
(`text_encoder.text_model.final_layer_norm`), and never the component's calls to itself.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..devices import RandomState, is_out_of_memory
from ..errors import ColdWeightError
from ..streaming import is_cold
from ._answers import Answers
from ._cold import make_cold
from ._plain import Plain, RecordMissing, from_plain, to_plain, tracked

# Methods, other than forward, by which pipelines use a component's weights (scan of diffusers 0.42 pipelines).
ENTRY_POINTS = (
    "encode",
    "decode",
    "tiled_decode",
    "tiled_encode",
    "generate",
    "get_text_features",
    "get_image_features",
    "quantize",
    "post_process_latents",
)


class PhaseDone(BaseException):
    """Ends the pipeline's call when the phase has what it came for. Not an Exception: no handler may swallow it."""


class Port(Protocol):
    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An outside call. `name` is the method or part, "" for the component itself; `run` does what it would do."""


class Records:
    """Encodings by what was asked: component, entry point and the content of its arguments; never by order.

    answers: where else an answer may come from.
    """

    def __init__(self, plain: dict[str, Plain] | None = None, answers: Answers | None = None) -> None:
        self.plain = dict(plain or {})
        self.live: dict[str, tuple[Any, str]] = {}
        self.answers = answers
        self.drawn: set[str] = set()  # answers for which random numbers were drawn

    @staticmethod
    def key(component: str, name: str, args: Any, kwargs: Any) -> str:
        asked = to_plain([list(args), kwargs], f"an argument of {component}")
        return f"{component}.{name}:{asked.key()}"

    def start(self, plain: dict[str, Plain], answers: Answers | None = None) -> None:
        """Begins anew, for another run of the same ports."""
        self.plain, self.answers = dict(plain), answers
        self.live.clear()
        self.drawn.clear()

    def find(self, component: str, key: str) -> Plain | None:
        """The answer to a question that was asked before, here or elsewhere."""
        if key not in self.plain and self.answers is not None:
            answer = self.answers.get(component, key)
            if answer is not None:
                self.plain[key] = answer
        return self.plain.get(key)

    def settle(self) -> dict[str, Plain]:
        """Turns the results of this phase into plain data, keeping only what the pipeline used of them."""
        for key, (result, where) in self.live.items():
            self.plain[key] = to_plain(result, where)
        self.live.clear()
        return self.plain


class RecordingPort:
    """Runs an encoder and records what it was asked and what it answered. The same question is computed once."""

    def __init__(self, component: str, records: Records, device: torch.device) -> None:
        self.component, self.records, self.device = component, records, device
        self.tokens = 0

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.tokens = max(self.tokens, _token_count(args, kwargs))
        key = Records.key(self.component, name, args, kwargs)
        if key in self.records.live:
            return self.records.live[key][0]
        known = self.records.find(self.component, key)
        if known is not None:
            return from_plain(known, self.device)
        before = RandomState(self.device)
        result = tracked(run(*args, **kwargs))
        if before.changed() or any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.records.drawn.add(key)
        self.records.live[key] = (result, f"the result of {self.component}{'.' + name if name else ''}")
        return result


def _token_count(args: Any, kwargs: Any) -> int:
    """Length of the token ids an encoder was given, 0 if it wasn't given any."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids.shape[-1] if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.dtype == torch.int64 else 0


class ReplayPort:
    """Answers for an encoder that isn't loaded."""

    def __init__(self, component: str, records: Records, device: torch.device) -> None:
        self.component, self.records, self.device = component, records, device

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        record = self.records.plain.get(Records.key(self.component, name, args, kwargs))
        if record is None:
            raise RecordMissing(self.component)
        return from_plain(record, self.device)


class RunPort:
    """Runs the real component."""

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)


class StopPort:
    """Stands for a component whose first use means that the phase before it is over."""

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise PhaseDone


class CapturePort:
    """Stands for a VAE during denoise: answers `encode` from records, keeps what `decode` was asked, ends the phase.

    runs: whether the pipeline is where the VAE takes part in the denoising, so that it is run for what no record has.
    waits_for: another VAE that the pipeline decodes with (sound beside the picture). Whichever is asked first answers
    with an empty picture, and the last one ends the phase.
    """

    def __init__(self, component: str, records: Records, device: torch.device) -> None:
        self.component = component
        self.waits_for: CapturePort | None = None
        self.replay = ReplayPort(component, records, device)
        self.runs: Callable[[], bool] = bool  # never
        self.captured: Plain | None = None
        self.dtype: torch.dtype | None = None

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name == "decode" and not self.runs():
            self.captured = to_plain([list(args), kwargs], f"an argument of {self.component}.decode")
            self.dtype = getattr(module, "dtype", None)
            if self.waits_for is None or self.waits_for.captured is not None:
                raise PhaseDone
            return (torch.zeros(1, 3, 1, 8, 8),)  # thrown away; pipelines ask with return_dict=False
        try:
            return self.replay.call(module, name, run, args, kwargs)
        except RecordMissing:
            if not self.runs():
                raise
        return run(*args, **kwargs)


class EncodeOnlyPort:
    """A VAE during encode: `encode` runs and is recorded; asking for a picture means the phase is over."""

    def __init__(self, component: str, records: Records, device: torch.device) -> None:
        self.recording = RecordingPort(component, records, device)

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name == "decode":
            raise PhaseDone
        return self.recording.call(module, name, run, args, kwargs)


class HeadPort:
    """A component before the loop during encode: what it answers is needed to come to the end, and may be known. It
    isn't one of the embeddings: Denoise asks it again."""

    def __init__(self, component: str, records: Records, device: torch.device) -> None:
        self.recording = RecordingPort(component, records, device)

    def call(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self.recording.call(module, name, run, args, kwargs)


class Gate:
    """Sits between a component and its port: tells outside calls from inner ones, loads on first use, counts.

    It must not hold the component (a cycle would keep weights alive until the garbage collector runs).
    """

    def __init__(self, port: Port, before_run: Callable[[], None] | None = None) -> None:
        self.port = port
        self.before_run = before_run
        self.after_oom: Callable[[], bool] | None = None
        self.depth = 0
        self.forwards = 0
        self.seconds = 0.0  # in calls from outside, loading left out

    def enter(self, module: nn.Module, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.depth:
            return run(*args, **kwargs)
        started = time.perf_counter()
        try:
            return self.port.call(module, name, functools.partial(self._run, run), args, kwargs)
        finally:
            self.seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """A scope whose calls belong to one from outside that was counted already."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.before_run is not None:
            started = time.perf_counter()
            self.before_run()
            self.seconds -= time.perf_counter() - started
        self.forwards += 1
        self.depth += 1
        try:
            return self._run_or_retry(run, args, kwargs)
        finally:
            self.depth -= 1

    def _run_or_retry(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Tries once more after the device ran out of memory, if `after_oom` made room: the same call, not the step."""
        try:
            return run(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if self.after_oom is None or not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the activations of the failed forward
            error.__traceback__ = None
            if not self.after_oom():
                raise
        return run(*args, **kwargs)


class _Gated:
    """Mixed in before a component's class: sends calls from outside through the gate."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(super().__call__)  # type: ignore[misc]
        return self._gate.enter(self, "", run, args, kwargs)  # type: ignore[attr-defined]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Honours a change of dtype of a component that isn't loaded; never loads or moves one."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        first = next(self.parameters(), None)  # type: ignore[attr-defined]
        if first is not None and is_cold(first):
            if dtype is not None:
                make_cold(self, type(self).__name__, first.device, dtype, buffers=False)  # type: ignore[arg-type]
            return self
        if device is not None and first is not None and device != first.device:
            raise ColdWeightError(
                f"{type(self).__name__} belongs to a phase and can't be moved to {device}. Choose the device when "
                "loading the model."
            )
        return super().to(*args, **kwargs)  # type: ignore[misc]


class _GatedPart:
    """Mixed in before the class of a cold component's part."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(self._run_loaded, super().__call__)  # type: ignore[misc]
        return self._gate.enter(self, self._path, run, args, kwargs)  # type: ignore[attr-defined]

    def _run_loaded(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Loading gives the component other parts. A pipeline that took this one before (Ideogram 4 calls the layers of
        its text encoder one by one) means the one that is in its place now, unless that one was put around it (LoRA).
        """
        part = self._component().get_submodule(self._path)  # type: ignore[attr-defined]
        if any(each is self for each in part.modules()):
            return run(*args, **kwargs)
        return part(*args, **kwargs)


def _entry(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._gate.enter(self, name, getattr(super(_gated_owner(self), self), name), args, kwargs)

    method.__name__ = name
    return method


def _gated_owner(module: Any) -> type:
    return next(cls for cls in type(module).__mro__ if "_is_gated" in vars(cls))


@functools.cache
def _gated_class(cls: type, mixin: type) -> type:
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_is_gated": True}
    if mixin is _Gated:
        members |= {name: _entry(name) for name in ENTRY_POINTS if hasattr(cls, name)}
    return type(cls.__name__, (mixin, cls), members)


def attach_gate(module: nn.Module, gate: Gate) -> None:
    """Puts `gate` before a cold component and each of its parts that has none yet. A part that was made like another
    one (LoRA) has the class already."""
    for path, part in module.named_modules():
        if "_gate" in vars(part):
            continue
        part.__dict__["_gate"] = gate
        part.__dict__["_path"] = path
        part.__dict__["_component"] = weakref.ref(module)
        mixin: Any = _GatedPart if path else _Gated
        if not hasattr(type(part), "_is_gated"):
            part.__class__ = _gated_class(type(part), mixin)  # type: ignore[arg-type]


def watch_parts(module: nn.Module, gate: Gate) -> None:
    """Lets a recording gate see calls that the pipeline makes to parts of a loaded component."""
    for path, part in module.named_modules():
        if path:
            part.register_forward_pre_hook(functools.partial(_part_entered, gate), with_kwargs=True)
            part.register_forward_hook(functools.partial(_part_left, gate, path), with_kwargs=True, always_call=True)


def _part_entered(gate: Gate, module: nn.Module, args: Any, kwargs: Any) -> None:
    gate.depth += 1


def _part_left(gate: Gate, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    gate.depth -= 1
    if gate.depth == 0:
        return gate.port.call(module, path, lambda *_, **__: output, args, kwargs)
    return None
