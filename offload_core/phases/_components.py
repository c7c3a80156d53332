"""A pipeline's components: cold by default, loaded from their files on first use, cold again at release."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..checkpoint import read_header
from ..devices import RandomState
from ..library_dtypes import parameter_dtypes, request_dtype
from ..model_source import ComponentSource, component_class
from ..quantised import check_device, import_format, method_of
from ..stored_weight import StoredWeight, read_stored
from ..streaming import Managed, OffloadScope, PartSize, StreamPlan, part_sizes
from ._cold import cold_like, forget_method_caches, make_cold, real_tensors, scrub_attributes
from ._ports import Gate, Port, RecordingPort, attach_gate, watch_parts
from ._stored import bind_stored, promise_stored
from ._weight_storage import packed_weights

SMALL_STATE_BYTES = 2**20
# Weights that pipelines read themselves, of components that may be cold then: they are read from the file whatever
# their size. Source: diffusers 0.42, AceStepPipeline.
_READ_BY_PIPELINES = {"AceStepConditionEncoder": ("null_condition_emb", "silence_latent")}

# diffusers, transformers and accelerate patch torch for the whole process while they build a model without weights.
_BUILDING = threading.RLock()


@dataclass
class Usage:
    """What loading cost so far in a phase, in bytes and seconds."""

    load_s: float = 0.0
    weight_bytes: int = 0


class Memory(Protocol):
    """What a component needs of its phase: memory under a budget, and to be told of progress and interrupts."""

    device: torch.device
    usage: Usage

    def poll(self, arrived: int) -> None: ...

    def scope(self) -> OffloadScope: ...

    def planned(self, name: str) -> StreamPlan | None:
        """Where the weights of a component were planned to lie, if they were."""

    def won_t_arrive(self, nbytes: int) -> None:
        """These bytes of a component aren't loaded before it runs; they are streamed."""


class Component:
    """One module of the pipeline: its real class and config, and its weights only between `load` and `release`."""

    def __init__(
        self, source: ComponentSource, dtype: torch.dtype, memory: Memory, weight_storage: str = "as stored"
    ) -> None:
        self.source, self.dtype, self.memory = source, dtype, memory
        self.quantised = method_of(source) is not None
        self.module = _skeleton(source, dtype, memory.device)
        self.dtypes = parameter_dtypes(self.module, source.library, names_of(self.module), dtype)
        self.stored = bind_stored(self.module, source) if source.stored is not None else None
        _take_weights(self.module, source, dtype, memory.device, self.stored)
        storage = "as stored" if self.quantised else weight_storage
        self.packed = packed_weights(self.module, source, self.stored, storage, self.dtypes)
        self.managed: Managed | None = None
        self.skip: tuple[str, ...] = ()
        self.recast: torch.dtype | None = None
        self.before_load: Callable[[], None] | None = None
        self.after_load: Callable[[nn.Module], None] | None = None
        self.added_bytes = 0  # of the weights that `after_load` adds
        self._cold_state: dict[str, Any] = {}
        self.gate: Gate

    @property
    def loaded(self) -> bool:
        return self.managed is not None

    def use(self, port: Port, *, owned: bool) -> None:
        """Puts `port` before the component. An owned component is loaded when the port first runs it."""
        load = weakref.WeakMethod(self.load)
        self.gate = Gate(port, (lambda: (bound := load()) and bound()) if owned else None)
        attach_gate(self.module, self.gate)

    def load(self) -> None:
        """Makes the component usable, within the phase's budgets: weights that stay are read and cast now, the others
        when they are needed. Nothing if it is loaded already.

        Raises BudgetError, with the smallest budget that works, ModelError for files that changed.
        """
        if self.loaded:
            return
        check_device(self.source, self.memory.device)
        started, random = time.perf_counter(), RandomState(self.memory.device)
        if self.before_load is not None:
            self.before_load()
        with torch.inference_mode(False), torch.no_grad():
            real = from_files(self.source, self.dtype) if self.stored is None else self._promised(self.stored)
            _leave_out(real, self.skip, self.source.name, self.memory.device)
            if isinstance(self.gate.port, RecordingPort):
                watch_parts(real, self.gate)
            _poll_each_block(real, self.memory.poll)
            self._take_over(real)
        random.restore()  # constructors draw the weights that files then replace
        self.memory.usage.load_s += time.perf_counter() - started
        if self.managed is not None:
            self.memory.usage.weight_bytes += self.managed.weight_bytes

    def _promised(self, stored: Mapping[str, StoredWeight]) -> nn.Module:
        """The module as its loader would make it of these weights, which come when it is attached."""
        module = _skeleton(self.source, _loading_dtype(self.source, self.dtype), self.memory.device)
        promise_stored(module, stored, self.source.name, self.memory.device)
        return module

    def _wanted(self) -> dict[str, StoredWeight] | None:
        """How weights are made, without those of parts that are left out."""
        if self.stored is None:
            return None
        left_out = tuple(f"{part}." for part in self.skip)
        return {name: stored for name, stored in self.stored.items() if not name.startswith(left_out)}

    def _take_over(self, real: nn.Module) -> None:
        self._cold_state = dict(self.module.__dict__)
        self.module.__dict__.update(real.__dict__)
        try:
            self.managed = self.memory.scope().attach(
                self.module,
                name=self.source.name,
                files=self.source.weight_files if self.stored is None else (),  # those are promised, none is mapped
                dtype_of=self._casts,
                restore=False,
                plain_if_whole=True,
                keep_grad=True,  # see from_files
                planned=self.memory.planned(self.source.name),
                added_bytes=self.added_bytes,
                stored=self._wanted(),
                pack=self.packed.on_the_way_in,
            )
            if self.after_load is not None:
                self.after_load(self.module)
                self.managed.book_new(self.module)
        except BaseException:
            self._give_back()
            raise
        self.memory.won_t_arrive(self.run_bytes - self.managed.loaded_bytes)

    def _casts(self, name: str, stored: torch.dtype) -> tuple[torch.dtype, ...]:
        """As the loader casts, and then as the pipeline did to the component (an SDXL VAE in float16 is upcast)."""
        if self.quantised:  # an 8-bit weight may have the name that a plain one had
            return (stored,)
        dtype = self.dtypes.get(name, stored)
        return (dtype, self.recast) if self.recast is not None else (dtype,)

    def release(self) -> list[tuple[weakref.ref[Any], int]]:
        """Takes the weights away from whoever holds the module; returns its storages, to see that they are gone."""
        if not self.loaded:
            return []
        held = [(weakref.ref(storage), storage.nbytes()) for storage in _storages(self.module)]
        return held + self._give_back()

    def _give_back(self) -> list[tuple[weakref.ref[Any], int]]:
        managed, self.managed = self.managed, None
        held = managed.release(restore=False) if managed is not None else []
        make_cold(self.module, self.source.name, self.memory.device, buffers=True)
        scrub_attributes(self.module)
        forget_method_caches(self.module)
        self.module.__dict__.clear()
        self.module.__dict__.update(self._cold_state)
        self._cold_state = {}
        return held

    def empty(self) -> None:
        """Takes the small state of a cold component, too: libraries tie modules into cycles that outlive a phase."""
        make_cold(self.module, self.source.name, self.memory.device, buffers=True)

    def part_sizes(self) -> list[PartSize]:
        """Its tensors as a plan sees them, in the form in which they are held."""
        return part_sizes(self.module, self.packed.nbytes)

    @property
    def run_bytes(self) -> int:
        """Bytes of all weights in the form they are held in, whatever the file's. Quantised ones are held as stored."""
        if self.quantised:
            return self.source.weight_bytes
        if self.packed:
            return sum(size.nbytes for size in self.part_sizes())
        stored = getattr(torch, self.source.dtype or "float32").itemsize
        return self.source.weight_bytes * (self.recast or self.dtype).itemsize // stored


def _skeleton(source: ComponentSource, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The component as its loader makes it for `dtype`, with real buffers and no memory for parameters.

    Some constructors make tensors in torch's default dtype, which the loaders set for the time they build.
    """
    from accelerate import init_empty_weights

    cls = component_class(source)
    rng, default = torch.get_rng_state(), torch.get_default_dtype()
    with _BUILDING:
        try:
            torch.set_default_dtype(dtype)
            with torch.inference_mode(False), init_empty_weights(include_buffers=False), without_progress_bars():
                module = _from_config(cls, source, dtype)
            tie: Any = getattr(module, "tie_weights", None)
            if tie is not None:
                tie()  # parameters without memory were put in one by one, each for itself
        finally:
            torch.set_default_dtype(default)
            torch.set_rng_state(rng)
    return module.eval()


def stand_in(source: ComponentSource, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A component that has its class, its config and its small buffers, and weights that raise ColdWeightError."""
    module = _skeleton(source, dtype, device)
    _take_weights(module, source, dtype, device, bind_stored(module, source) if source.stored is not None else None)
    return module


def _take_weights(
    skeleton: nn.Module,
    source: ComponentSource,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[str, StoredWeight] | None,
) -> None:
    """Makes a skeleton's parameters cold ones and its small buffers those of the files."""
    make_cold(skeleton, source.name, device, dtype, buffers=False)
    _read_small_state(skeleton, source, dtype, device, stored)


def _from_config(cls: Any, source: ComponentSource, dtype: torch.dtype) -> nn.Module:
    if source.library == "transformers" or not hasattr(cls, "from_config"):
        from transformers.initialization import no_init_weights

        if source.described:
            config = cls.config_class.from_dict(dict(source.config or {}))
        else:
            config = cls.config_class.from_pretrained(str(source.directory), local_files_only=True)
        request_dtype(config, dtype)
        with no_init_weights():  # parameters without memory are drawn all the same, through Python
            return cls(config)
    if source.described:
        return cls.from_config(dict(source.config or {}))
    return cls.from_config(cls.load_config(str(source.directory), local_files_only=True))


def names_of(module: nn.Module) -> list[str]:
    """Names of all parameters and buffers, shared ones under each name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))]


def _read_small_state(
    module: nn.Module,
    source: ComponentSource,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[str, StoredWeight] | None,
) -> None:
    """Buffers are real: a pipeline reads a VAE's statistics without loading the VAE. Those that a file holds are read
    from it, large ones are cold unless the pipeline reads them. So are the few parameters that it reads."""
    read = _reader(source, dtype, stored)
    wanted = _READ_BY_PIPELINES.get(source.class_name, ())
    for name, buffer in list(module.named_buffers()):
        owner, _, key = name.rpartition(".")
        if buffer.nbytes <= SMALL_STATE_BYTES or name in wanted:
            found = read(name, buffer.shape)
            value = (buffer if found is None else found).to(device)
        else:
            value = cold_like(buffer, f"{source.name}.{name}", device)
        module.get_submodule(owner)._buffers[key] = value
    for name, parameter in list(module.named_parameters()):
        found = read(name, parameter.shape) if name in wanted else None
        if found is not None:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = nn.Parameter(found.to(device), requires_grad=False)


def _reader(
    source: ComponentSource, dtype: torch.dtype, stored: Mapping[str, StoredWeight] | None
) -> Callable[[str, torch.Size], torch.Tensor | None]:
    """Gives a tensor of the component's files by its name, in `dtype` if it is of numbers; None if they have none."""
    from safetensors import safe_open

    files = source.weight_files if stored is None else ()
    where = {name: file for file in files for name in read_header(file).tensors}

    def read(name: str, shape: torch.Size) -> torch.Tensor | None:
        if stored is not None:
            found = read_stored(stored[name]).view(shape) if name in stored else None
        elif name in where:
            with safe_open(where[name], framework="pt") as file:
                found = file.get_tensor(name)
        else:
            found = None
        if found is None:
            return None
        return found.to(dtype) if found.dtype.is_floating_point else found.clone()

    return read


def from_files(source: ComponentSource, dtype: torch.dtype) -> nn.Module:
    """The library's own loader, in the file's dtype where it can be: then it maps the file and copies nothing.

    `requires_grad` stays as the library sets it: torch's matmul folds a batch into one product only for weights that
    require grad, and in float16 the two forms differ in their last bits.
    """
    cls: Any = component_class(source)
    import_format(source)
    options: dict[str, Any] = {
        "dtype": _loading_dtype(source, dtype),
        "use_safetensors": True,
        "local_files_only": True,
    }
    if source.variant:
        options["variant"] = source.variant
    with _BUILDING, without_progress_bars():
        module: nn.Module = cls.from_pretrained(str(source.directory), **options)
    return module.eval()


def _loading_dtype(source: ComponentSource, dtype: torch.dtype) -> torch.dtype:
    """What a component is loaded in: its file's own dtype where it can be. That of a quantised one is of its codes."""
    if method_of(source) is not None:
        return dtype
    stored: torch.dtype = getattr(torch, source.dtype or "float32")
    if not stored.is_floating_point or (stored.itemsize < 2 and source.library != "diffusers"):
        return dtype  # transformers builds under the dtype, and torch has no 8-bit default dtype
    return stored


def _leave_out(module: nn.Module, parts: tuple[str, ...], name: str, device: torch.device) -> None:
    for part in parts:
        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            make_cold(child, f"{name}.{part}", device, buffers=True)


def _poll_each_block(module: nn.Module, poll: Callable[[int], None]) -> None:
    """An interrupt point before every repeated block, so that a cancel never waits for a whole forward."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block in part.children():  # a list may hold None (Mochi's norms)
                block.register_forward_pre_hook(lambda *_: poll(0))


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
