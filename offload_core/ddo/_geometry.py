"""The latent grid of a pipeline that was built without its VAE.

Such a pipeline guesses: most constructors take a scale factor of 8 where there is no VAE to ask, and the latents have
another shape, or are scaled otherwise, than the model's. Nothing says so. The VAE's config is enough to know it, so the
pipeline gets a stand-in that has the config and no weights.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import resolve_device, resolve_dtype
from ..errors import InputError, OffloadError
from ..model_source import ModelSource, resolve_model
from ..streaming import offload_of

log = logging.getLogger(__name__)


def config_only(
    model: str | os.PathLike[str],
    component: str = "vae",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> nn.Module:
    """A component of a model folder without its weights: class, config, statistics, dtype and device.

    For a pipeline that needs to know about a component and doesn't run it: `Pipeline.from_pretrained(folder,
    vae=config_only(folder, "vae"), ...)`. Running it raises ColdWeightError. Raises ModelError for the folder,
    InputError for a component that it doesn't have.
    """
    source = resolve_model(model)
    if component not in source.components or not source.components[component].has_weights:
        raise InputError(f"The model {source.root.name} has no component {component!r} with weights.")
    return _stand_in(source, component, resolve_device(device), resolve_dtype(dtype))


def _stand_in(source: ModelSource, name: str, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    from ..phases import stand_in

    part = source.components[name]
    return stand_in(part, dtype or getattr(torch, part.dtype or "float32"), device)


def give_geometry(module: nn.Module, device: torch.device) -> list[str]:
    """Gives stand-ins of missing VAEs to every pipeline that holds `module`. Returns what their guesses became, as
    text; nothing where they guessed right."""
    found: list[str] = []
    if not hasattr(module, "config"):  # every component of a pipeline has one
        return found
    for pipeline in _pipelines_of(module):
        missing = [name for name in _parameters(pipeline) if "vae" in name and _is_missing(pipeline, name)]
        source = _source_of(pipeline, module) if missing else None
        if not missing:
            continue
        known = [name for name in missing if source is not None and name in source.components]
        if source is None or not known:
            log.warning(
                "%s was built without %s and its model folder isn't known here: it guesses the size of latents. Build "
                "it with %s=config_only(folder).",
                type(pipeline).__name__,
                missing[0],
                missing[0],
            )
            continue
        dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
        try:
            found += _rebuild(pipeline, {name: _stand_in(source, name, device, dtype) for name in known})
        except Exception as error:  # of a constructor that isn't ours; offload itself doesn't depend on it
            log.warning("%s keeps its guess of the size of latents: %s", type(pipeline).__name__, str(error))
    return found


def watch_geometry(module: nn.Module) -> None:
    """Does the same at the first forward, for pipelines that are built around a module after it was attached.

    By then the latents are made: if the guess was wrong, that call raises InputError, and the next one is right.
    """
    offload = offload_of(module)
    assert offload is not None
    if not hasattr(module, "config"):
        return
    device = offload._managed.scope.device

    def check(module: nn.Module, _: Any) -> None:
        handle.remove()
        changed = give_geometry(module, device)
        if changed:
            raise InputError(
                f"The pipeline was built without its VAE and guessed wrong ({'; '.join(changed)}). It knows now: call "
                "it again, or build it with vae=config_only(folder)."
            )

    handle = module.register_forward_pre_hook(check)
    offload._managed.at_release.append(handle.remove)


def _pipelines_of(module: nn.Module) -> Iterator[Any]:
    """Every pipeline that holds `module`. diffusers keeps no list of them, so the collector of garbage is asked."""
    diffusers = sys.modules.get("diffusers")
    if diffusers is None:
        return
    DiffusionPipeline = diffusers.DiffusionPipeline  # noqa: N806
    for holder in gc.get_referrers(module):
        if isinstance(holder, DiffusionPipeline):
            yield holder
        elif isinstance(holder, dict):
            yield from (
                owner
                for owner in gc.get_referrers(holder)
                if isinstance(owner, DiffusionPipeline) and vars(owner) is holder
            )


def _parameters(pipeline: Any) -> list[str]:
    return [name for name in inspect.signature(type(pipeline).__init__).parameters if name != "self"]


def _is_missing(pipeline: Any, name: str) -> bool:
    return hasattr(pipeline, name) and getattr(pipeline, name) is None


def _source_of(pipeline: Any, module: nn.Module) -> ModelSource | None:
    """The model folder that a pipeline, or else the module in it, was loaded from. Nothing is downloaded."""
    for config in (getattr(pipeline, "config", None), getattr(module, "config", None)):
        name = str(getattr(config, "_name_or_path", None) or "")
        for folder in _folders(name) if name else ():
            if (folder / "model_index.json").is_file():
                try:
                    return resolve_model(folder)
                except OffloadError as error:
                    log.debug("%s can't be asked for its VAE: %s", folder, str(error))
    return None


def _folders(name: str) -> Iterator[Path]:
    """Where a model of that name or path may be: there, above (a component's folder), or in the hub's cache."""
    yield from (Path(name), Path(name).parent)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        import huggingface_hub

        with contextlib.suppress(OSError, ValueError):  # as the hub says that it isn't there
            yield Path(huggingface_hub.snapshot_download(name, local_files_only=True))


def _rebuild(pipeline: Any, stand_ins: dict[str, nn.Module]) -> list[str]:
    """Runs the pipeline's own constructor again, now with the stand-ins, and takes over what it made.

    On a new object: constructors don't expect to find components that are registered already.
    """
    before, name = _guesses(pipeline), getattr(pipeline.config, "_name_or_path", None)
    names = _parameters(pipeline)
    parts = {key: getattr(pipeline, key, None) for key in names if key in pipeline.components}
    options = {key: pipeline.config[key] for key in names if key not in parts and key in pipeline.config}
    vars(pipeline).update(vars(type(pipeline)(**parts | options | stand_ins)))
    if name is not None:
        pipeline.register_to_config(_name_or_path=name)
    after = _guesses(pipeline)
    changed = [f"{key} {before[key]}, it is {after[key]}" for key in before if before[key] != after.get(key)]
    log.info("%s got a stand-in for %s. %s", type(pipeline).__name__, ", ".join(stand_ins), "; ".join(changed))
    return changed


def _guesses(pipeline: Any) -> dict[str, Any]:
    """The numbers that the constructor derives: scale factors, patch sizes, defaults."""
    return {name: value for name, value in vars(pipeline).items() if isinstance(value, int | float | tuple)}
