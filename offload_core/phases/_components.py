"""A pipeline's components: cold by default, loaded from their files on first use, cold again at release."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._report_table import human_bytes
from ..checkpoint import read_header
from ..devices import total_bytes
from ..errors import InsufficientMemoryError
from ..model_source import ComponentSource, component_class
from ._cold import ColdWeight, forget_method_caches, make_cold, real_tensors, scrub_attributes
from ._ports import Gate, Port, RecordingPort, attach_gate, watch_parts

SMALL_STATE_BYTES = 2**20

# diffusers, transformers and accelerate patch torch for the whole process while they build a model without weights.
_BUILDING = threading.RLock()


@dataclass
class Usage:
    """What loading cost so far in a phase, in bytes and seconds."""

    load_s: float = 0.0
    weight_bytes: int = 0
    bytes_read: int = 0


class Component:
    """One module of the pipeline: its real class and config, and its weights only between `load` and `release`."""

    def __init__(
        self,
        source: ComponentSource,
        dtype: torch.dtype,
        device: torch.device,
        usage: Usage,
        poll: Callable[[int], None],
    ) -> None:
        self.source, self.dtype, self.device, self.usage, self.poll = source, dtype, device, usage, poll
        self.module = _skeleton(source, dtype, device)
        self.loaded = False
        self.skip: tuple[str, ...] = ()
        self.recast: torch.dtype | None = None
        self.before_load: Callable[[], None] | None = None
        self.after_load: Callable[[nn.Module], None] | None = None
        self._cold_state: dict[str, Any] = {}
        self.gate: Gate

    def use(self, port: Port, *, owned: bool) -> None:
        """Puts `port` before the component. An owned component is loaded when the port first runs it."""
        load = weakref.WeakMethod(self.load)
        self.gate = Gate(port, (lambda: (bound := load()) and bound()) if owned else None)
        attach_gate(self.module, self.gate)

    def load(self) -> None:
        """Brings the weights in, from the file, in the phase's dtype, onto its device; nothing if they are here."""
        if self.loaded:
            return
        started = time.perf_counter()
        if self.before_load is not None:
            self.before_load()
        self._check_room()
        with torch.inference_mode(False), torch.no_grad():
            real = _from_files(self.source, self.dtype)
            try:
                _leave_out(real, self.skip, self.source.name, self.device, self.recast)
                _move(real, self.device, self.recast, self.poll)
                if isinstance(self.gate.port, RecordingPort):
                    watch_parts(real, self.gate)
                _poll_each_block(real, self.poll)
            except BaseException:
                make_cold(real, self.source.name, self.device, buffers=True)
                raise
        self._cold_state = dict(self.module.__dict__)
        self.loaded = True
        self.module.__dict__.update(real.__dict__)
        if self.after_load is not None:
            self.after_load(self.module)
        self.usage.load_s += time.perf_counter() - started
        self.usage.weight_bytes += _weight_bytes(self.module)
        self.usage.bytes_read += self.source.weight_bytes - self._bytes_left_out()

    def release(self) -> list[tuple[weakref.ref[Any], int]]:
        """Takes the weights away from whoever holds the module; returns its storages, to see that they are gone."""
        if not self.loaded:
            return []
        held = [(weakref.ref(storage), storage.nbytes()) for storage in _storages(self.module)]
        make_cold(self.module, self.source.name, self.device, buffers=True)
        scrub_attributes(self.module)
        forget_method_caches(self.module)
        self.module.__dict__.clear()
        self.module.__dict__.update(self._cold_state)
        self._cold_state = {}
        self.loaded = False
        return held

    def empty(self) -> None:
        """Takes the small state of a cold component, too: libraries tie modules into cycles that outlive a phase."""
        make_cold(self.module, self.source.name, self.device, buffers=True)

    @property
    def run_bytes(self) -> int:
        """Bytes of all weights in the dtype they run in, whatever the file's."""
        stored = getattr(torch, self.source.dtype or "float32").itemsize
        return self.source.weight_bytes * (self.recast or self.dtype).itemsize // stored

    def _bytes_left_out(self) -> int:
        starts = tuple(f"{part}." for part in self.skip)
        headers = [read_header(file) for file in self.source.weight_files] if starts else []
        return sum(t.nbytes for header in headers for name, t in header.tensors.items() if name.startswith(starts))

    def _check_room(self) -> None:
        there = total_bytes(self.device)
        if there is not None and self.run_bytes > there:
            raise InsufficientMemoryError(
                f"{self.source.name} has {human_bytes(self.run_bytes)} of weights and {self.device} has "
                f"{human_bytes(there)} of memory. Use a smaller or quantised model, or device=cpu."
            )


def _skeleton(source: ComponentSource, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The component without its weights: every attribute and buffer of the real class, parameters cold.

    Buffers are real (a pipeline reads a VAE's statistics without loading the VAE); those that a file holds are read
    from it, large ones are cold.
    """
    from accelerate import init_empty_weights

    cls = component_class(source)
    rng = torch.get_rng_state()
    try:
        with _BUILDING, torch.inference_mode(False), init_empty_weights(include_buffers=False), without_progress_bars():
            module = _from_config(cls, source)
    finally:
        torch.set_rng_state(rng)
    module.eval()
    make_cold(module, source.name, device, dtype, buffers=False)
    _read_small_buffers(module, source, dtype, device)
    return module


def _from_config(cls: Any, source: ComponentSource) -> nn.Module:
    if source.library == "transformers" or not hasattr(cls, "from_config"):
        return cls(cls.config_class.from_pretrained(str(source.directory), local_files_only=True))
    return cls.from_config(cls.load_config(str(source.directory), local_files_only=True))


def _read_small_buffers(module: nn.Module, source: ComponentSource, dtype: torch.dtype, device: torch.device) -> None:
    from safetensors import safe_open

    where = {name: file for file in source.weight_files for name in read_header(file).tensors}
    for name, buffer in list(module.named_buffers()):
        if name in where and buffer.nbytes <= SMALL_STATE_BYTES:
            with safe_open(where[name], framework="pt") as file:
                buffer = file.get_tensor(name)
            buffer = buffer.to(dtype) if buffer.dtype.is_floating_point else buffer.clone()
        owner, _, key = name.rpartition(".")
        small = buffer.nbytes <= SMALL_STATE_BYTES
        cold = ColdWeight.like(buffer, f"{source.name}.{name}", device)
        module.get_submodule(owner)._buffers[key] = buffer.to(device) if small else cold


def _from_files(source: ComponentSource, dtype: torch.dtype) -> nn.Module:
    """The library's own loader: in the file's dtype this maps the file and copies nothing.

    `requires_grad` stays as the library sets it: torch's matmul folds a batch into one product only for weights that
    require grad, and in float16 the two forms differ in their last bits.
    """
    cls: Any = component_class(source)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    if source.variant:
        options["variant"] = source.variant
    with _BUILDING, without_progress_bars():
        module: nn.Module = cls.from_pretrained(str(source.directory), **options)
    return module.eval()


def _leave_out(
    module: nn.Module, parts: tuple[str, ...], name: str, device: torch.device, dtype: torch.dtype | None
) -> None:
    for part in parts:
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            make_cold(child, f"{name}.{part}", device, dtype, buffers=True)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype | None, poll: Callable[[int], None]) -> None:
    """Moves (and casts, if asked) each parameter and buffer once, so that ties survive; polls at each."""
    moved: dict[int, Any] = {}
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _on_device(tensor, device, dtype)
                    poll(tensor.nbytes)
                held[key] = moved[id(tensor)]


def _on_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, ColdWeight) or (tensor.device == device and tensor.dtype == dtype):
        return tensor
    there = tensor.detach().to(device, dtype)
    return nn.Parameter(there, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _poll_each_block(module: nn.Module, poll: Callable[[int], None]) -> None:
    """An interrupt point before every repeated block, so that a cancel never waits for a whole forward."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block in part:
                block.register_forward_pre_hook(lambda *_: poll(0))


def _weight_bytes(module: nn.Module) -> int:
    unique = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t.nbytes for t in real_tensors(module)}
    return sum(unique.values())


def _storages(module: nn.Module) -> list[torch.UntypedStorage]:
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in real_tensors(module)}.values())


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps the loaders' own progress bars off the terminal and restores the setting."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    were_on = [lib for lib in (diffusers_logging, transformers_logging) if lib.is_progress_bar_enabled()]
    for lib in were_on:
        lib.disable_progress_bar()
    try:
        yield
    finally:
        for lib in were_on:
            lib.enable_progress_bar()
