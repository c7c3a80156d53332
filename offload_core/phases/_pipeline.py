"""The pipeline of a phase: the model's own class, with its own code, around the phase's components."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import InputError
from ..model_source import ComponentSource, ModelSource, component_class, pipeline_class
from ._blocks import blocks_pipeline_class, start_blocks_pipeline
from ._waveforms import SECONDS_ARGUMENTS, check_seconds


class _PhaseMembers:
    """Mixed in before the pipeline's class: the device is the phase's, progress goes to its observer."""

    _phase_device: torch.device
    _phase_step: Callable[[int, int], None]

    @property
    def _execution_device(self) -> torch.device:
        return self._phase_device

    @property
    def device(self) -> torch.device:
        return self._phase_device

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> StepCounter:
        return StepCounter(self._phase_step, iterable, total)

    def maybe_free_model_hooks(self) -> None:
        """The phase releases, not the pipeline."""


class StepCounter:
    """Stands in for the tqdm bar that pipelines drive."""

    def __init__(
        self, step: Callable[[int, int], None], iterable: Iterable[Any] | None = None, total: int | None = None
    ) -> None:
        self.step, self.iterable, self.n = step, iterable, 0
        self.total = total if total is not None else len(list(iterable or ()))

    def update(self, n: int = 1) -> None:
        self.n += n
        self.step(self.n, self.total)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable or ():
            yield item
            self.update()

    def __enter__(self) -> StepCounter:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def set_postfix(self, *_: Any, **__: Any) -> None:
        pass

    set_description = set_postfix
    close = set_postfix


def call_class(source: ModelSource) -> type:
    """The class whose `__call__` a phase runs. Raises ModelError if the installed diffusers has none."""
    return pipeline_class(source) if source.blocks is None else blocks_pipeline_class(source)


@functools.cache
def _phase_class(cls: type) -> type:
    return type(cls.__name__, (_PhaseMembers, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def build_pipeline(
    source: ModelSource,
    modules: dict[str, torch.nn.Module],
    device: torch.device,
    step: Callable[[int, int], None],
) -> Any:
    """The pipeline around `modules`; schedulers, tokenizers and processors are loaded here, fresh for this phase."""
    cls: Any = call_class(source)
    phase_class: Any = _phase_class(cls)
    pipeline = phase_class.__new__(phase_class)
    pipeline.__dict__["_phase_device"] = device
    pipeline.__dict__["_phase_step"] = step
    parts: dict[str, Any] = {
        name: modules[name] if name in modules else _load_part(part) for name, part in source.components.items()
    }
    if source.blocks is not None:
        start_blocks_pipeline(pipeline, source, functools.partial(StepCounter, step))
        for name, part in parts.items():
            setattr(pipeline, name, part)
        return pipeline
    accepted = inspect.signature(cls.__init__).parameters
    parts = {name: part for name, part in parts.items() if name in accepted}  # a sibling may do without one
    absent = {name: None for name, p in accepted.items() if p.default is inspect.Parameter.empty and name != "self"}
    options = {name: value for name, value in source.options.items() if name in accepted}
    pipeline.__init__(**absent | options | parts)
    return pipeline


def _load_part(part: ComponentSource) -> Any:
    cls: Any = component_class(part)
    options = dict(part.config or {}) if part.described else {}
    if options and hasattr(cls, "from_config"):
        return cls.from_config(options)
    if part.described and part.class_name.endswith("ImageProcessor"):  # numbers alone, no file
        return cls(**options)
    return cls.from_pretrained(str(part.directory), local_files_only=True, **options)


def call_parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """The keyword arguments that the pipeline's `__call__` takes."""
    parameters = dict(inspect.signature(cls.__call__).parameters)
    parameters.pop("self")
    return {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}


RESERVED = ("generator", "output_type", "return_dict", "callback_on_step_end", "latents", "callback", "callback_steps")


# Arguments whose effect comes after the VAE, or splits its work, where the phases don't run the pipeline's own code.
UNSUPPORTED = ("padding_mask_crop", "vae_batch_size", "decode_chunk_size")
# Sounds to start from or to sound like: their encodings aren't kept from phase to phase yet.
UNSUPPORTED_SOUNDS = ("initial_audio_waveforms", "src_audio", "reference_audio", "audio_codes")


def check_call(cls: Any, kwargs: dict[str, Any]) -> None:
    """Raises InputError for an argument that the pipeline doesn't take or that the phases set themselves."""
    import difflib

    known = call_parameters(cls)
    for name in kwargs:
        if name in RESERVED:
            raise InputError(f"{name} is set by the phases themselves; leave it out.")
        if name in (*UNSUPPORTED, *UNSUPPORTED_SOUNDS) and kwargs[name] is not None:
            raise InputError(f"{name} isn't supported in phases yet; leave it out.")
        if name in SECONDS_ARGUMENTS and kwargs[name] is not None:
            check_seconds(name, kwargs[name])
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise InputError(f"{cls.__name__} takes no argument {name!r}.{hint}")
