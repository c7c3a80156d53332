"""Classes that a model folder may name: those of the installed diffusers and transformers, and nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from .checkpoint import show
from .errors import ModelError

TRUST_ADVICE = "Code that comes with a model is not run here. Choose a model that needs only the installed libraries."

# Old names that models in use still carry (diffusers.utils.deprecation_utils).
_RENAMED = {("transformers", "CLIPFeatureExtractor"): "CLIPImageProcessor"}


def is_allowed_library(library: str) -> bool:
    """diffusers, transformers, or the name of a pipeline package of diffusers, such as stable_diffusion.

    Imports nothing: the package is looked for on disk.
    """
    if library in ("diffusers", "transformers"):
        return True
    spec = importlib.util.find_spec("diffusers")
    if spec is None or not re.fullmatch(r"[a-z][a-z0-9_]*", library):
        return False
    places = spec.submodule_search_locations or ()
    return any((Path(place) / "pipelines" / library / "__init__.py").is_file() for place in places)


def library_class(library: str, class_name: str, who: str) -> type:
    """The class of that name, which has a `from_pretrained`. `who` needs it and begins the sentence of a ModelError."""
    if not is_allowed_library(library):
        raise ModelError(f"{who} takes its class from {show(library)}. {TRUST_ADVICE}")
    package = "transformers" if library == "transformers" else "diffusers"
    module_name = library if library == package else f"diffusers.pipelines.{library}"
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, _RENAMED.get((library, class_name), class_name), None)
    except (ImportError, RuntimeError) as error:  # diffusers and transformers import lazily and wrap what fails
        reason = (str(error).splitlines() or ["no reason given"])[0][:200]
        what = f"{who} needs {show(class_name)} of {package}, which can't be imported ({reason})"
        raise ModelError(f"{what}. Install or repair {package} and what it needs.") from error
    if isinstance(found, type) and hasattr(found, "_backends"):  # the libraries' stand-in for a class they can't offer
        needs = ", ".join(found._backends)
        raise ModelError(f"{who} needs {show(class_name)}, which needs these packages: {needs}. Install them.")
    if isinstance(found, type) and found.__module__.split(".")[0] == package and hasattr(found, "from_pretrained"):
        return found
    version = importlib.metadata.version(package)
    raise ModelError(
        f"{who} needs the class {show(class_name)}, which the installed {package} {version} doesn't have. "
        f"A newer {package} may have it; code that comes with a model is not run here."
    )
