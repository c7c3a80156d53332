"""Schedulers by name: another one in the place of a model's own, where diffusers says that the two are of one kind.

A name is a class of diffusers, and after a space a way to space its steps or to draw noise, if it isn't the class's
own: "DPMSolverMultistepScheduler karras".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .errors import InputError

_SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_SDE = {"algorithm_type": "sde-dpmsolver++"}

# Arguments of each variant. A spacing excludes the two others, which the model's own configuration may ask for.
_VARIANTS: dict[str, Mapping[str, Any]] = {
    "karras": {name: name == "use_karras_sigmas" for name in _SPACINGS},
    "exponential": {name: name == "use_exponential_sigmas" for name in _SPACINGS},
    "beta": {name: name == "use_beta_sigmas" for name in _SPACINGS},
    "sde": _SDE,
    "sde karras": {**_SDE, **{name: name == "use_karras_sigmas" for name in _SPACINGS}},
}
_SPACED = ("karras", "exponential", "beta")

# Classes and those of the variants that are worth a name. Not here, though diffusers takes them for compatible:
# DPMSolverSDEScheduler (its noise isn't drawn from the seed's generator), EDMEulerScheduler (for its own kind of model)
_CLASSES: dict[str, tuple[str, ...]] = {
    "DDIMScheduler": (),
    "DDPMScheduler": (),
    "DEISMultistepScheduler": ("karras",),
    "DPMSolverMultistepScheduler": (*_SPACED, "sde", "sde karras"),
    "DPMSolverSinglestepScheduler": ("karras",),
    "EulerAncestralDiscreteScheduler": (),
    "EulerDiscreteScheduler": _SPACED,
    "FlowMatchEulerDiscreteScheduler": _SPACED,
    "HeunDiscreteScheduler": ("karras",),
    "KDPM2AncestralDiscreteScheduler": ("karras",),
    "KDPM2DiscreteScheduler": ("karras",),
    "LMSDiscreteScheduler": ("karras",),
    "PNDMScheduler": (),
    "UniPCMultistepScheduler": _SPACED,
}

#: Every name, whatever the model.
SCHEDULERS: tuple[str, ...] = tuple(
    f"{cls} {variant}".rstrip() for cls, variants in _CLASSES.items() for variant in ("", *variants)
)


def scheduler_like(own: Any, name: str) -> Any:
    """The scheduler of a name, with the configuration of a model's `own` one: what `from_config` makes of it.

    Raises InputError, with the names that fit, for one that doesn't: diffusers' `compatibles` say what does, and a
    model of the flow kind takes only those that know flow. Also for one that needs a package that isn't installed.
    """
    if name not in fitting_schedulers(own):
        fitting = fitting_schedulers(own)
        choice = f"choose one of {', '.join(fitting)}" if fitting else "leave it out"
        wrong = "doesn't fit this model" if name in SCHEDULERS else "isn't one of the schedulers here"
        raise InputError(f"{name!r} {wrong}; the model's own is {type(own).__name__}: {choice}.")
    import diffusers

    cls, _, variant = name.partition(" ")
    try:
        return getattr(diffusers, cls).from_config(own.config, **_VARIANTS.get(variant, {}))
    except ImportError as error:
        needed = str(error).strip().splitlines()[0]
        raise InputError(f"The scheduler {name!r} needs a package that isn't installed: {needed}") from None


def fitting_schedulers(own: Any) -> tuple[str, ...]:
    """Names that may take the place of a model's `own` scheduler."""
    kin = {cls.__name__: cls for cls in own.compatibles}
    is_flow = bool(own.config.get("use_flow_sigmas")) or own.config.get("prediction_type") == "flow_prediction"
    return tuple(name for name in SCHEDULERS if _fits(kin.get(name.partition(" ")[0]), name, is_flow))


def _fits(cls: Any, name: str, is_flow: bool) -> bool:
    """Whether a name of a class among the model's kin fits. A spacing of other sigmas would take that of flow away."""
    if cls is None or not is_flow:
        return cls is not None
    return " " not in name and "use_flow_sigmas" in inspect.signature(cls.__init__).parameters
