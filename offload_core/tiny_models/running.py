"""Save a tiny pipeline as a plain diffusers folder, and run such a folder in one go."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from .table import FAMILIES


def save_tiny(name: str, directory: Path | str, dtype: torch.dtype = torch.float32) -> Path:
    """Write the tiny pipeline of a family to ``directory`` as safetensors of ``dtype`` and return the folder's path."""
    pipeline = FAMILIES[name].build()
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            torch.nn.Module.to(component, dtype=dtype)  # the library's own .to() warns about layers it casts at loading
    with _no_progress_bars():
        pipeline.save_pretrained(directory)
    return Path(directory)


def as_pipeline(folder: Path | str, pipeline_class: type[DiffusionPipeline], copy: Path | str) -> Path:
    """Write a copy of a folder that is of another pipeline class over the same components; return its path."""
    shutil.copytree(folder, copy)
    index = Path(copy) / "model_index.json"
    names = json.loads(index.read_text("utf-8")) | {"_class_name": pipeline_class.__name__}
    index.write_text(json.dumps(names, indent=2), "utf-8")
    return Path(copy)


def load_tiny(
    path: Path | str,
    *,
    dtype: torch.dtype,
    pipeline_class: type[DiffusionPipeline] = DiffusionPipeline,
    aligned: bool = True,
) -> DiffusionPipeline:
    """Return the pipeline in a folder, whole and on the CPU, with its progress bar off.

    ``pipeline_class`` picks another pipeline over the same folder, such as image to image.
    """
    with _no_progress_bars():
        pipeline = pipeline_class.from_pretrained(path, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values() if aligned else ():
        if isinstance(component, torch.nn.Module):
            align(component)
    return pipeline


def align(module: torch.nn.Module) -> None:
    """Moves weights out of their mapped file: float32 products at batch 1 end in other bits at unaligned addresses."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def run_whole(pipeline: DiffusionPipeline, *, seed: int, **kwargs: Any) -> torch.Tensor:
    """Run a loaded pipeline as its authors wrote it; kwargs go to its own call.

    Returns float32 pictures (B, C, H, W) or videos (B, F, C, H, W) in 0 … 1, or sounds (B, channels, samples) of about
    -1 … 1.
    """
    return run_all(pipeline, seed=seed, **kwargs)[0]


def run_all(pipeline: DiffusionPipeline, *, seed: int, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The same, with the sound as a second tensor (B, channels, samples) where the pipeline makes one, too."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with _no_progress_bars():
        result = pipeline(**{"output_type": "pt", **kwargs}, generator=generator)
    sound = getattr(result, "audio", None)
    return tuple(_tensor(part) for part in (result[0], sound) if part is not None)


def _tensor(result: Any) -> torch.Tensor:
    """What a pipeline gives, as one float32 tensor; it may be a list of one tensor for each prompt."""
    is_list = isinstance(result, list) and isinstance(result[0], torch.Tensor)
    return (torch.cat(result) if is_list else torch.as_tensor(result)).float()


def one_shot(
    path: Path | str,
    *,
    dtype: torch.dtype,
    seed: int,
    pipeline_class: type[DiffusionPipeline] = DiffusionPipeline,
    **kwargs: Any,
) -> torch.Tensor:
    """Load the pipeline in a folder and run it once, with nothing staged: ``load_tiny``, then ``run_whole``."""
    return run_whole(load_tiny(path, dtype=dtype, pipeline_class=pipeline_class), seed=seed, **kwargs)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence both libraries' loading bars, and put them back as they were."""
    shown = [module for module in (diffusers_logging, transformers_logging) if module.is_progress_bar_enabled()]
    for module in shown:
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module in shown:
            module.enable_progress_bar()
