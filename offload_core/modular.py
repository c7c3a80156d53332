"""Blocks of Modular Diffusers, each run with only its components, under one budget.

    modular_blocks("models/flux")  # {"text_encoder": ("text_encoder", "text_encoder_2"), ..., "decode": ("vae",)}
    with open_block("models/flux", "text_encoder") as pipe:
        state = pipe(prompt="a red circle")
    with open_block("models/flux", "denoise") as pipe:
        state = pipe(state=state, num_inference_steps=20)
    with open_block("models/flux", "decode") as pipe:
        images = pipe(state=state, output="images")

A family has its phases from its blocks, so nothing here knows one by name. A block asks for sizes of components that it
doesn't run: most of all the scale factor of the VAE, which it takes for 8 where there is none, and nothing says so.
Hence a block is given the configs of all the others (`_modular_configs.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ._modular_configs import give_configs
from .devices import resolve_device
from .errors import InputError, ModelError
from .model_source import ComponentSource, resolve_components
from .settings import OffloadSettings

if TYPE_CHECKING:
    from diffusers import ModularPipeline, ModularPipelineBlocks


def modular_blocks(model: str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """The blocks of a model folder in the order they run, each with the names of the components it loads weights of.

    The folder may have a model_index.json or a modular_model_index.json. No weight is read. Raises ModelError for the
    folder, and for a family that diffusers has no blocks for.
    """
    sources = resolve_components(model)
    blocks = _whole(model).blocks.sub_blocks
    return {name: tuple(_with_weights(block, sources)) for name, block in blocks.items()}


@contextmanager
def open_block(
    model: str | os.PathLike[str],
    block: str,
    *,
    settings: OffloadSettings | None = None,
    components: Mapping[str, Any] | None = None,
) -> Iterator[ModularPipeline]:
    """A pipeline of one block, with its weights under the budgets of `settings`, in the dtype of their files.

    block: one of `modular_blocks`. components: what to use in place of the model's own, by name: a guider, a scheduler,
    a module that isn't in the folder. Guiders come with the block's default scale; the text block and the denoise block
    have one each, and both must be given the same. The pipeline is diffusers' own and is called as ever. When the scope
    ends, by any exit, its components are gone from it, and memory is given back.

    Raises InputError for a block or a component that isn't there, ModelError for the folder, and what `enable_offload`
    raises.
    """
    from .ddo import enable_pipeline_offload

    settings, given = settings or OffloadSettings(), dict(components or {})
    sources, whole = resolve_components(model), _whole(model)
    blocks = whole.blocks.sub_blocks
    if block not in blocks:
        raise InputError(f"There is no block {block!r} in {type(whole).__name__}; it has {', '.join(blocks)}.")
    pipe = type(whole)(blocks=blocks[block], pretrained_model_name_or_path=os.fspath(model), local_files_only=True)
    unknown = [name for name in given if name not in pipe._component_specs]
    if unknown:
        raise InputError(
            f"The block {block} has no component {unknown[0]!r}; it has {', '.join(pipe._component_specs)}."
        )
    device, results = resolve_device(settings.execution_device), {}
    try:
        for name in pipe._component_specs:
            if name in given:
                setattr(pipe, name, given[name])
            elif getattr(pipe, name, None) is None:
                _load(pipe, name, sources)
        results = enable_pipeline_offload(pipe, settings=settings)
        give_configs(pipe, sources, device)
        yield pipe
    finally:
        for name in list(pipe._component_specs):
            setattr(pipe, name, None)
        for result in results.values():
            result.release()


def _whole(model: str | os.PathLike[str]) -> ModularPipeline:
    """The pipeline of all blocks, without components."""
    from diffusers import ModularPipeline

    try:
        return ModularPipeline.from_pretrained(os.fspath(model), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"diffusers has no blocks for the model {os.fspath(model)} ({_first_line(error)}).") from error


def _with_weights(block: ModularPipelineBlocks, sources: Mapping[str, ComponentSource]) -> Iterator[str]:
    for spec in block.expected_components:
        if spec.name in sources and sources[spec.name].has_weights:
            yield spec.name


def _load(pipe: ModularPipeline, name: str, sources: Mapping[str, ComponentSource]) -> None:
    """A component from the folder. One that the folder doesn't have stays None: blocks list what only some calls need,
    such as a controlnet."""
    from .phases import from_files

    if name not in sources:
        return
    source, spec = sources[name], pipe.get_component_spec(name)
    if source.has_weights:
        component: Any = from_files(source, getattr(torch, source.dtype or "float32"))
    else:
        try:
            component = spec.load(pretrained_model_name_or_path=str(source.directory), subfolder="")
        except (OSError, ValueError) as error:
            raise ModelError(f"The component {name} can't be loaded ({_first_line(error)}).") from error
    setattr(pipe, name, component)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
