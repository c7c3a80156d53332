"""What a pipeline misses that was built without its VAE or image encoder.

It guesses the latent grid: most constructors take a scale factor of 8 where there is no VAE to ask, and the latents
have another shape, or are scaled otherwise, than the model's. Nothing says so. And it can't encode a picture to start
from. So it gets a stand-in with the class and the config, whose weights come when it is called (`_guests`). Blocks of
Modular Diffusers list what they run; those that don't list the VAE get a stand-in without weights.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._modular_configs import give_configs
from ..devices import resolve_device, resolve_dtype
from ..errors import InputError, OffloadError
from ..model_source import MODULAR_INDEX, ComponentSource, resolve_components
from ..streaming import offload_of
from ._guests import PipelineHost

if TYPE_CHECKING:
    from ..phases import Guest

log = logging.getLogger(__name__)


def config_only(
    model: str | os.PathLike[str],
    component: str = "vae",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> nn.Module:
    """A component of a model folder without its weights: class, config, statistics, dtype and device.

    For a pipeline that needs to know about a component while it is built: `Pipeline.from_pretrained(folder,
    vae=config_only(folder, "vae"), ...)`. Once another component of that pipeline is attached (`enable_offload`), its
    weights come from the folder for each call of it; before that, a call raises ColdWeightError. Raises ModelError for
    the folder, InputError for a component that it doesn't have.
    """
    parts = resolve_components(model)
    if component not in parts or not parts[component].has_weights:
        raise InputError(f"The model {Path(model).name} has no component {component!r} with weights.")
    return _guest(parts[component], resolve_device(device), resolve_dtype(dtype)).module


def _guest(part: ComponentSource, device: torch.device, dtype: torch.dtype | None) -> Guest:
    from ..phases import Guest

    return Guest(part, dtype or getattr(torch, part.dtype or "float32"), device)


def give_missing(module: nn.Module, host: PipelineHost) -> list[str]:
    """Gives stand-ins of missing VAEs and image encoders to every pipeline that holds `module`, and those that have no
    host yet `host`. Returns what the guesses of pipelines became, as text; nothing where they guessed right."""
    found: list[str] = []
    if not hasattr(module, "config"):  # every component of a pipeline has one
        return found
    device = host.device
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
    for pipeline in _pipelines_of(module):
        if _is_modular(pipeline):
            found += _give_block(pipeline, module, device, dtype)
            continue
        found += _give_guests(pipeline, module, device, dtype)
        _introduce(pipeline, host)
    return found


def _give_guests(pipeline: Any, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> list[str]:
    missing = [name for name in _parameters(pipeline) if _may_be_guest(name) and _is_missing(pipeline, name)]
    parts = _parts_of(pipeline, module) if missing else {}
    known = [name for name in missing if name in parts and parts[name].has_weights]
    vae = next((name for name in missing if "vae" in name), None)
    if vae is not None and not any("vae" in name for name in known):
        log.warning(
            "%s was built without %s and its model folder isn't known here: it guesses the size of latents, and can't "
            "encode a picture. Build it with %s=config_only(folder), or with the component itself.",
            type(pipeline).__name__,
            vae,
            vae,
        )
    if not known:
        return []
    try:
        return _rebuild(pipeline, {name: _guest(parts[name], device, dtype).module for name in known})
    except Exception as error:  # of a constructor that isn't ours; offload itself doesn't depend on it
        log.warning("%s keeps its guess of the size of latents: %s", type(pipeline).__name__, str(error))
        return []


def _may_be_guest(name: str) -> bool:
    """Components that pipelines run in the middle of their call. Without a text encoder they take embeddings."""
    return "vae" in name or name == "image_encoder"


def _introduce(pipeline: Any, host: PipelineHost) -> None:
    """Gives guests of a pipeline a host, unless they have one: modules that were attached first keep them."""
    from ..phases import guest_of

    for component in pipeline.components.values():
        guest = guest_of(component)
        if guest is not None and not (isinstance(guest.host, PipelineHost) and guest.host.is_there):
            guest.host = host


def _give_block(pipeline: Any, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> list[str]:
    """The same for a block of Modular Diffusers that doesn't list a VAE."""
    if any("vae" in name and part is not None for name, part in vars(pipeline).items()):
        return []
    listed = any("vae" in name for name in pipeline._component_specs)
    parts = {} if listed else _parts_of(pipeline, module)  # one that is listed is the caller's to load
    makes_latents = any(output.name == "latents" for output in pipeline._blocks.intermediate_outputs)
    if makes_latents and not listed and not parts:
        log.warning("A block without its VAE guesses the size of latents. Set pipeline.vae = config_only(folder).")
    try:
        changed = give_configs(pipeline, parts, device, dtype=dtype, only="vae")
    except Exception as error:  # offload itself doesn't depend on it
        log.warning("%s keeps its guess of the size of latents: %s", type(pipeline).__name__, str(error))
        return []
    if changed:
        log.info("%s got a stand-in for its VAE. %s", type(pipeline).__name__, "; ".join(changed))
    return changed


def watch_missing(module: nn.Module, host: PipelineHost) -> None:
    """Does the same at the first forward, for pipelines that are built around a module after it was attached.

    By then the latents are made: if the guess was wrong, that call raises InputError, and the next one is right.
    """
    offload = offload_of(module)
    assert offload is not None
    if not hasattr(module, "config"):
        return

    def check(module: nn.Module, _: Any) -> None:
        handle.remove()
        changed = give_missing(module, host)
        if changed:
            raise InputError(
                f"The pipeline was built without its VAE and guessed wrong ({'; '.join(changed)}). It knows now: call "
                "it again, or build it with vae=config_only(folder)."
            )

    handle = module.register_forward_pre_hook(check)
    offload._managed.at_release.append(handle.remove)


def _pipelines_of(module: nn.Module) -> Iterator[Any]:
    """Every pipeline that holds `module`. diffusers keeps no list of them, so the collector of garbage is asked."""
    kinds = tuple(filter(None, map(_loaded, ("DiffusionPipeline", "ModularPipeline"))))
    for holder in gc.get_referrers(module):
        if isinstance(holder, kinds):
            yield holder
        elif isinstance(holder, dict):
            yield from (
                owner for owner in gc.get_referrers(holder) if isinstance(owner, kinds) and vars(owner) is holder
            )


def _is_modular(pipeline: Any) -> bool:
    kind = _loaded("ModularPipeline")
    return kind is not None and isinstance(pipeline, kind)


_HOMES = {"DiffusionPipeline": "pipelines.pipeline_utils", "ModularPipeline": "modular_pipelines.modular_pipeline"}


def _loaded(name: str) -> Any:
    """A base class of diffusers; None if its module isn't loaded, as then there is no pipeline of that kind."""
    return getattr(sys.modules.get(f"diffusers.{_HOMES[name]}"), name, None)


def _parameters(pipeline: Any) -> list[str]:
    return [name for name in inspect.signature(type(pipeline).__init__).parameters if name != "self"]


def _is_missing(pipeline: Any, name: str) -> bool:
    return hasattr(pipeline, name) and getattr(pipeline, name) is None


def _parts_of(pipeline: Any, module: nn.Module) -> Mapping[str, ComponentSource]:
    """The components of the model folder that a pipeline, or else the module in it, was loaded from; none where it
    isn't known. Nothing is downloaded."""
    configs = (getattr(pipeline, "config", None), getattr(module, "config", None))
    names = [getattr(pipeline, "_pretrained_model_name_or_path", None)]
    names += [getattr(config, "_name_or_path", None) for config in configs]
    for name in map(str, filter(None, names)):
        for folder in _folders(name):
            if any((folder / index).is_file() for index in ("model_index.json", MODULAR_INDEX)):
                try:
                    return resolve_components(folder)
                except OffloadError as error:
                    log.debug("%s can't be asked for its VAE: %s", folder, str(error))
    return {}


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
