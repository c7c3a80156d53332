"""A pipeline of Modular Diffusers with the face of a classic one, so that phases run it as they run any other.

Its `__call__` takes what its blocks take, and `guidance_scale` for the scale of its guider, which blocks keep in a
component. It walks the blocks itself: then progress and previews come from their loops, a stop isn't logged as a
failure of each block that it leaves, and what the last blocks read is known when the VAE is first asked for a picture.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..block_classes import LOOP_BLOCK
from ..errors import ModelError, RecordError
from ..library_classes import library_class
from ..model_source import ModelSource, pipeline_class
from ._plain import Plain, from_plain, to_plain

if TYPE_CHECKING:
    from diffusers import ModularPipelineBlocks
    from diffusers.modular_pipelines import PipelineState

    from ._pipeline import StepCounter

# What blocks call their pictures.
PICTURES = ("images", "videos")


class _BlocksMembers:
    """Mixed in before the pipeline's class."""

    _blocks: Any
    _entered: tuple[str, dict[str, Any]] = ("", {})
    _at_step_end: Callable[..., Any] | None = None

    def _run(self, call: dict[str, Any]) -> PipelineState:
        """Runs all blocks."""
        from diffusers.modular_pipelines import PipelineState

        self._at_step_end = call.pop("callback_on_step_end", None)
        self._set_guidance(call)
        self._check_components(call)
        state = PipelineState()
        for taken in self._blocks.inputs:
            if taken.name is not None:
                state.set(taken.name, call.get(taken.name, taken.default), taken.kwargs_type)
        return self._run_from(next(iter(self._blocks.sub_blocks)), state)

    @property
    def in_loop(self) -> bool:
        """Whether the denoise block runs now."""
        return self._entered[0] == LOOP_BLOCK

    @property
    def packs_latents(self) -> bool:
        """Whether the denoiser takes 2 x 2 latents as one, so that sizes have to be multiples of two of them."""
        denoiser, vae = getattr(self, "transformer", None), getattr(self, "vae", None)
        if denoiser is None or vae is None:
            return False
        channels = vae.config.get("latent_channels") or vae.config.get("z_dim") or 0
        return bool(channels) and denoiser.config.get("in_channels") == 4 * channels

    def left_to_do(self) -> Plain | None:
        """The block that runs now, and what it and those after it read; None before and in the denoise block."""
        block, values = self._entered
        names = list(self._blocks.sub_blocks)
        if block not in names or names.index(block) <= names.index(LOOP_BLOCK):
            return None
        read = {taken.name for name in names[names.index(block) :] for taken in self._blocks.sub_blocks[name].inputs}
        kept = {name: values[name] for name in values if name in read and values[name] is not None}
        return to_plain({"block": block, "values": kept}, "what the denoise block left")

    def finish(self, left: Plain, device: torch.device, output_type: str) -> Any:
        """Runs the blocks that `left_to_do` named. Returns their pictures; ends early if the VAE's port says so."""
        from diffusers.modular_pipelines import PipelineState

        from ._ports import PhaseDone

        todo = from_plain(left, device)
        state = PipelineState({**todo["values"], "output_type": output_type})
        if todo["block"] not in self._blocks.sub_blocks:
            raise RecordError(f"The latents' field rest names the block {todo['block']!r}, which this model lacks.")
        with contextlib.suppress(PhaseDone):  # what comes after the pictures isn't made (sound)
            self._run_from(todo["block"], state)
        return next((state.values[name] for name in PICTURES if state.values.get(name) is not None), None)

    def _run_from(self, first: str, state: PipelineState) -> PipelineState:
        names = list(self._blocks.sub_blocks)
        try:
            for name in names[names.index(first) :]:
                self._entered = (name, {key: _as_it_is(value) for key, value in state.values.items()})
                self._run_block(self._blocks.sub_blocks[name], state)
        finally:
            self._at_step_end = None
        return state

    def _run_block(self, block: ModularPipelineBlocks, state: PipelineState) -> None:
        from diffusers import ConditionalPipelineBlocks, SequentialPipelineBlocks

        if _is_stock(block, ConditionalPipelineBlocks, "__call__"):
            chosen = block.select_block(**{name: state.get(name) for name in block.block_trigger_inputs if name})
            chosen = block.default_block_name if chosen is None else chosen
            if chosen is not None:
                self._run_block(block.sub_blocks[chosen], state)
        elif _is_stock(block, SequentialPipelineBlocks, "__call__"):
            for part in block.sub_blocks.values():
                self._run_block(part, state)
        else:
            block(self, state)

    def _listen(self, counter: Callable[..., StepCounter]) -> None:
        """Makes every loop say its steps."""
        from diffusers import LoopSequentialPipelineBlocks

        for block in walk(self._blocks):
            if isinstance(block, LoopSequentialPipelineBlocks):
                block.progress_bar = counter
                if _is_stock(block, LoopSequentialPipelineBlocks, "loop_step"):
                    block.loop_step = functools.partial(self._loop_step, block)

    def _loop_step(self, loop: Any, components: Any, state: Any, **place: Any) -> tuple[Any, Any]:
        for block in loop.sub_blocks.values():
            components, state = block(components, state, **place)
        latents = getattr(state, "latents", None)
        if self._at_step_end is not None and "i" in place and isinstance(latents, torch.Tensor):
            self._at_step_end(self, place["i"], place.get("t"), {"latents": latents})
        return components, state

    def _set_guidance(self, call: dict[str, Any]) -> None:
        """A second guider follows the first one unless it is told its own scale, as a classic call has it."""
        first = call.get("guidance_scale")
        for name in scaled_guiders(self._blocks):
            asked = call.pop(argument_of(name), None)
            scale = asked if asked is not None else first if name.startswith("guider") else None
            if scale is not None and getattr(self, name, None) is not None:
                getattr(self, name).guidance_scale = scale  # it is this phase's own

    def _check_components(self, call: dict[str, Any]) -> None:
        """Raises ModelError if a block that this call runs needs a component that lies elsewhere."""
        elsewhere: dict[str, str] = vars(self)["_elsewhere"]
        if not elsewhere:
            return
        blocks = self._blocks.get_execution_blocks(**{name: value for name, value in call.items() if value is not None})
        for name in blocks.component_names:
            if name in elsewhere and getattr(self, name, None) is None:
                raise ModelError(
                    f"{type(self).__name__} needs the component {name} for this call. The model looks for it in "
                    f"{elsewhere[name]}: put it into the folder {name} of the model."
                )


def blocks_pipeline_class(source: ModelSource) -> type:
    """The class of a model that is made of blocks, with the arguments of their call."""
    scales = tuple(_scale_of(source, name) for name in scaled_guiders(_blocks_of(source)))
    return _class_with_call(pipeline_class(source), source.blocks or "", scales)


def start_blocks_pipeline(pipeline: Any, source: ModelSource, counter: Callable[..., StepCounter]) -> None:
    """Makes `pipeline`, an instance without state, one of the source's blocks that has no components yet."""
    config = {"_blocks_class_name": source.blocks, **source.options}
    blocks = copy.deepcopy(_blocks_of(source))  # diffusers keeps some blocks in the class, for all of its instances
    pipeline.__init__(blocks=blocks, modular_config_dict=config)
    pipeline.__dict__["_elsewhere"] = dict(source.elsewhere)
    pipeline._listen(counter)


def blocks_make_video(source: ModelSource) -> bool:
    """Whether the blocks of this model end with a video."""
    return "videos" in _blocks_of(source).output_names


def walk(block: ModularPipelineBlocks) -> Iterator[ModularPipelineBlocks]:
    """A block and all blocks in it."""
    yield block
    for part in (block.sub_blocks or {}).values():
        yield from walk(part)


def scaled_guiders(blocks: ModularPipelineBlocks) -> list[str]:
    """The guiders that have a scale, unless the blocks take an argument of that name for something else."""
    from diffusers.guiders import BaseGuidance

    taken = set(blocks.input_names)
    guiders = (spec for spec in blocks.expected_components if _is_class(spec.type_hint, BaseGuidance))
    scaled = (spec.name for spec in guiders if "guidance_scale" in inspect.signature(spec.type_hint).parameters)
    return [name for name in dict.fromkeys(scaled) if argument_of(name) not in taken]


def argument_of(guider: str) -> str:
    """guider -> guidance_scale, guider_2 -> guidance_scale_2, as classic pipelines call them."""
    return guider.replace("guider", "guidance_scale")


def _scale_of(source: ModelSource, guider: str) -> tuple[str, float | None]:
    """The argument of a guider and its default: of the model's own guider, else of the blocks."""
    if guider != "guider":
        return argument_of(guider), None  # its own, or the first one's if that is given
    config = source.components[guider].config if guider in source.components else None
    spec = next(spec for spec in _blocks_of(source).expected_components if spec.name == guider)
    usual = inspect.signature(spec.type_hint).parameters["guidance_scale"].default
    return argument_of(guider), {**(spec.config or {}), **(config or {})}.get("guidance_scale", usual)


def _blocks_of(source: ModelSource) -> Any:
    blocks: Any = library_class("diffusers", source.blocks or "", "The model")
    return blocks()


@functools.cache
def _class_with_call(cls: type, blocks: str, scales: tuple[tuple[str, float | None], ...]) -> type:
    made: Any = library_class("diffusers", blocks, "The model")
    defaults = {taken.name: taken.default for taken in made().inputs if taken.name is not None}
    defaults |= {**dict(scales), "generator": None, "callback_on_step_end": None}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default) for name, default in defaults.items()]

    def call(self: Any, **kwargs: Any) -> Any:
        return self._run(kwargs)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature([this, *parameters])  # type: ignore[attr-defined]
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__call__": call}
    return type(cls.__name__, (_BlocksMembers, cls), members)


def _as_it_is(value: Any) -> Any:
    """A value that what runs now doesn't change: only the noise that is drawn does."""
    return value.clone_state() if isinstance(value, torch.Generator) else value


def _is_stock(block: Any, base: Any, method: str) -> bool:
    """Whether a block does this as its base class does."""
    return isinstance(block, base) and getattr(type(block), method) is getattr(base, method)


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
