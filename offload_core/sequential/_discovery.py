"""Which components a pipeline has and what each is for, told by what it can do and not by its attribute's name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from torch import nn

from ..errors import InputError

log = logging.getLogger(__name__)

Kind = Literal["dit", "encoder", "vae", "auxiliary"]

_DECLARED: tuple[tuple[str, Kind], ...] = (
    ("_dit_modules", "dit"),
    ("_encoder_modules", "encoder"),
    ("_vae_modules", "vae"),
    ("_resident_modules", "auxiliary"),
    ("_auxiliary_modules", "auxiliary"),
)
# Components that aren't what their arguments say. They run before the loop (LTX-2's connectors, Shap-E's and SANA's
# projections), after the VAE, or beside the DiT in each step.
_BY_NAME: dict[str, Kind] = {
    "connectors": "encoder",
    "projection_model": "encoder",
    "image_embedder": "encoder",
    "qformer": "encoder",
    "vocoder": "vae",
    "safety_checker": "auxiliary",
}
# What vLLM-Omni's own discovery goes by; asked last.
_THEIR_NAMES: dict[str, Kind] = {
    **dict.fromkeys(("transformer", "transformer_2", "dit", "sr_dit", "language_model", "unet", "model"), "dit"),
    **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "mllm"), "encoder"),
    **dict.fromkeys(("vae", "audio_vae"), "vae"),
}
_STEP_ARGUMENTS = {"timestep", "timesteps", "sigma", "sigmas"}
_PROMPT_ARGUMENTS = {"input_ids", "pixel_values", "input_features", "inputs_embeds"}


@dataclass(frozen=True)
class PipelineModules:
    """A pipeline's components by what they are for, each once, with their names.

    resident_modules: what the pipeline declares as such. auxiliaries: what runs beside a DiT in each step (ControlNets)
    or at the end, and everything that wasn't recognised; they come when they are used and have nobody leave.
    """

    dits: list[nn.Module] = field(default_factory=list)
    dit_names: list[str] = field(default_factory=list)
    encoders: list[nn.Module] = field(default_factory=list)
    encoder_names: list[str] = field(default_factory=list)
    vaes: list[nn.Module] = field(default_factory=list)
    vae_names: list[str] = field(default_factory=list)
    auxiliaries: list[nn.Module] = field(default_factory=list)
    auxiliary_names: list[str] = field(default_factory=list)
    resident_modules: list[nn.Module] = field(default_factory=list)
    resident_names: list[str] = field(default_factory=list)
    unrecognised_names: list[str] = field(default_factory=list)

    def named(self) -> dict[str, nn.Module]:
        """All of them by name."""
        names = (*self.dit_names, *self.encoder_names, *self.vae_names, *self.resident_names, *self.auxiliary_names)
        modules = (*self.dits, *self.encoders, *self.vaes, *self.resident_modules, *self.auxiliaries)
        return dict(zip(names, modules, strict=True))


class ModuleDiscovery:
    """Finds a pipeline's components."""

    @staticmethod
    def discover(pipeline: Any) -> PipelineModules:
        """The components of a diffusers pipeline, of a module that has them as children, or of any object that has them
        as attributes.

        A pipeline may say itself what is what, by the lists of dotted names that vLLM-Omni asks for: `_dit_modules`,
        `_encoder_modules`, `_vae_modules`, `_resident_modules`, `_auxiliary_modules`. What it doesn't name, and all of
        a pipeline that has no such lists, is told by structure (`kind_of`). What isn't recognised is named in a
        warning.
        """
        found = PipelineModules()
        lists: dict[str, tuple[list[nn.Module], list[str]]] = {
            "dit": (found.dits, found.dit_names),
            "encoder": (found.encoders, found.encoder_names),
            "vae": (found.vaes, found.vae_names),
            "resident": (found.resident_modules, found.resident_names),
            "auxiliary": (found.auxiliaries, found.auxiliary_names),
        }
        seen: set[int] = set()

        def note(kind: str, name: str, module: nn.Module) -> None:
            if id(module) not in seen:
                seen.update(id(part) for part in module.modules())
                lists[kind][0].append(module)
                lists[kind][1].append(name)

        for attribute, kind in _DECLARED:
            for name, module in _declared(pipeline, attribute):
                note("resident" if attribute == "_resident_modules" else kind, name, module)
        for name, module in _components(pipeline):
            if id(module) in seen or seen & {id(part) for part in module.modules()}:
                continue
            recognised = kind_of(name, module)
            if recognised is None:
                found.unrecognised_names.append(f"{name} ({type(module).__name__})")
            note(recognised or "auxiliary", name, module)
        if found.unrecognised_names:
            log.warning(
                "%s has components that weren't recognised as DiT, encoder or VAE: %s. They come to the device when "
                "they are used, and nothing leaves it for them. A pipeline can say what they are by _dit_modules, "
                "_encoder_modules and _vae_modules.",
                type(pipeline).__name__,
                ", ".join(found.unrecognised_names),
            )
        return found


def require_dits(found: PipelineModules, pipeline: Any) -> None:
    """Raises InputError, which names the components there are, if none of them is a DiT."""
    if not found.dits:
        there = ", ".join(f"{name} ({type(module).__name__})" for name, module in found.named().items())
        raise InputError(
            f"{type(pipeline).__name__} has no DiT that could be recognised among its components: "
            f"{there or 'there are none'}. Name it in a list _dit_modules of the pipeline."
        )


def kind_of(name: str, module: nn.Module) -> Kind | None:
    """What a component is for: a VAE can decode, a DiT is asked with a timestep, an encoder with tokens or pixels.

    ControlNets are asked with a timestep, too, but run beside the DiT: they are auxiliary. None if nothing tells.
    """
    kind = type(module)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if callable(getattr(kind, "decode", None)):
        return "vae"
    if "controlnet" in kind.__name__.lower() or "adapter" in kind.__name__.lower():
        return "auxiliary"
    arguments = set(inspect.signature(kind.forward).parameters)
    if arguments & _STEP_ARGUMENTS:
        return "dit"
    if arguments & _PROMPT_ARGUMENTS or _comes_from(kind, "transformers"):
        return "encoder"
    return _THEIR_NAMES.get(name)


def _comes_from(kind: type, library: str) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in kind.__mro__)


def _declared(pipeline: Any, attribute: str) -> Iterator[tuple[str, nn.Module]]:
    names: Iterable[str] = getattr(pipeline, attribute, None) or ()
    for name in names:
        try:
            module = attrgetter(name)(pipeline)
        except AttributeError:
            module = None
        if isinstance(module, nn.Module):
            yield name, module
        else:
            log.warning(
                "%s names %r in %s, which is no module of it (%s); it is left out.",
                type(pipeline).__name__,
                name,
                attribute,
                type(module).__name__,
            )


def _components(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    found: Any = getattr(pipeline, "components", None)
    if not isinstance(found, dict):
        found = dict(pipeline.named_children()) if isinstance(pipeline, nn.Module) else vars(pipeline)
    for name, module in found.items():
        has_weights = isinstance(module, nn.Module) and any(True for _ in (*module.parameters(), *module.buffers()))
        if has_weights:
            yield name, module
