"""Components of a model folder that are stored quantised: which formats load, what they need, and their packed sizes.

A folder says so in its config (`quantization_config`), and the library that wrote it makes the layers again. What is
checked here is what would otherwise fail late or not at all: a package that isn't installed, a format that its own
library can't read back, a scale that isn't in the files. Only configs and headers are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .checkpoint import TensorEntry, read_header, show
from .errors import DeviceError, ModelError

if TYPE_CHECKING:
    import torch

    from .model_source import ComponentSource

# Of the largest quantised weight, per element, while it is unpacked for a product: two float32 tensors between the
# packed bytes and the result, and a result of at most four bytes.
UNPACKING_BYTES = 12


@dataclass(frozen=True)
class Format:
    """package: what must be importable. install: what pip calls it. streams: whether its weights can be streamed; else
    its layers stay on the device for the phase. accelerator: libraries whose loader wants one. refused: why it can't be
    used at all."""

    package: str
    install: str
    streams: bool = True
    accelerator: frozenset[str] = frozenset()
    refused: str = ""


# By `quant_method`. diffusers 0.42 (`quantizers/`), transformers 5.24 (`quantizers/`), sdnq 0.2.8.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "torchao": Format("torchao", "torchao"),
        "bitsandbytes": Format("bitsandbytes", "bitsandbytes", streams=False, accelerator=frozenset({"diffusers"})),
        "sdnq": Format("sdnq", "sdnq"),
        "quanto": Format(
            "optimum.quanto",
            "optimum-quanto",
            refused="which diffusers and transformers write or name but can't read back: its weights would stay empty",
        ),
    }
)


def method_of(component: ComponentSource) -> str | None:
    """The `quant_method` in a component's config; None if its weights are plain."""
    found = (component.config or {}).get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return "bitsandbytes"  # as its early versions wrote it
    return str(method)


def check_quantised(component: ComponentSource) -> None:
    """Raises ModelError if a component is stored in a format that can't be used here: one that has no rule, that its
    library can't read, whose package isn't installed, or whose files lack a tensor that a quantised weight needs."""
    method = method_of(component)
    if method is None or not component.has_weights:
        return
    who = f"The component {show(component.name)} is quantised by {show(method)}"
    form = FORMATS.get(method)
    if form is None:
        raise ModelError(f"{who}, for which there is no rule here. {_use_another()}")
    if form.refused:
        raise ModelError(f"{who}, {form.refused}. {_use_another()}")
    if not _is_installed(form.package):
        raise ModelError(f"{who}, and {form.package} isn't installed. Run `pip install {form.install}`.")
    lacking = _lacking(method, component)
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ModelError(f"{who}, but its files lack {show(lacking[0])}{more}. Download the model again.")


def check_device(component: ComponentSource, device: torch.device) -> None:
    """Raises DeviceError if the loader of a quantised component doesn't load it for this device."""
    method = method_of(component)
    if method is not None and device.type == "cpu" and component.library in FORMATS[method].accelerator:
        raise DeviceError(
            f"The component {show(component.name)} is quantised by {show(method)}, which {component.library} loads "
            "only where there is an accelerator. Run it on one, or use a model in another format."
        )


def import_format(component: ComponentSource) -> None:
    """Imports the package of a quantised component: some tell the loaders of their format only then.

    Raises ModelError where SDNQ unpacks by compiled functions: a compiler can't look into a streamed weight, and bits
    must not depend on the budget.
    """
    method = method_of(component)
    if method is None:
        return
    importlib.import_module(FORMATS[method].package)
    if method == "sdnq" and getattr(importlib.import_module("sdnq.common"), "use_torch_compile", False):
        raise ModelError(
            f"The component {show(component.name)} is quantised by sdnq, which unpacks its weights by compiled "
            "functions here, and these can't take streamed weights. Set SDNQ_USE_TORCH_COMPILE=0 before you start."
        )


def packed_sizes(component: ComponentSource, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """For each weight of these names (of the module as it would be without quantisation) that is quantised in the
    files: the bytes that the tensors it is stored as take when they are loaded, by their names. From headers alone."""
    known = set(names)
    widens = method_of(component) == "sdnq" and component.library == "diffusers"
    tensors = _tensors(component)[0]
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, entry in tensors.items():
        weight = _weight_of(name, known)
        if weight is not None:
            # There scales, zero points and SVD factors are loaded in float32, measured with sdnq 0.2.8.
            wider = widens and weight != name and entry.dtype in ("BF16", "F16") and not name.endswith(".bias")
            found[weight][name] = entry.nbytes * (2 if wider else 1)
    return {weight: parts for weight, parts in found.items() if set(parts) != {weight}}


def _weight_of(name: str, known: set[str]) -> str | None:
    """The weight that a tensor of a file belongs to: itself, or the weight of the layer that it lies in."""
    if name in known:
        return name
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        for weight in (path, f"{path}.weight"):
            if weight in known:
                return weight
    return None


def _use_another() -> str:
    return f"Use a model in one of these: {', '.join(name for name, form in FORMATS.items() if not form.refused)}."


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False


def _tensors(component: ComponentSource) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for file in component.weight_files:
        header = read_header(file)
        tensors.update(header.tensors)
        metadata.update(header.metadata)
    return tensors, metadata


def _lacking(method: str, component: ComponentSource) -> list[str]:
    """The tensors that quantised weights in the files need and that aren't there."""
    tensors, metadata = _tensors(component)
    needed: list[str] = []
    if method == "torchao":
        needed = _needed_by_torchao(tensors, metadata)
    for name, entry in tensors.items() if method != "torchao" else ():
        layer, _, key = name.rpartition(".")
        if key != "weight" or entry.dtype not in ("I8", "U8", "I16", "I32", "F8_E4M3", "F8_E5M2"):
            continue
        if method == "sdnq":
            needed.append(f"{layer}.scale")
            needed += [f"{layer}.{b}" for a, b in _TOGETHER if f"{layer}.{a}" in tensors]
        elif entry.dtype == "I8":
            needed.append(f"{layer}.SCB")
        else:
            needed += [f"{name}.absmax", f"{name}.quant_map"]
            if not any(f"{name}.quant_state.bitsandbytes__{kind}" in tensors for kind in ("nf4", "fp4")):
                needed.append(f"{name}.quant_state")
            if f"{name}.nested_absmax" in tensors:
                needed.append(f"{name}.nested_quant_map")
    return [name for name in needed if name not in tensors]


_TOGETHER = (("svd_up", "svd_down"), ("svd_down", "svd_up"))


def _needed_by_torchao(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> list[str]:
    """What torchao notes for each of its weights: the tensors that it is made of (`safetensors_utils` of torchao)."""
    needed = []
    for name, text in metadata.items():
        described = _json(text)
        layer, _, key = name.rpartition(".")
        start = f"{layer}." if layer else ""
        needed += [f"{start}_{key}_{part}" for part in described.get("_tensor_data_names", ())]
    described_parts = set(needed)
    for name in tensors:
        if name.endswith("_weight_qdata") and name not in described_parts:
            needed.append(name.removesuffix("_weight_qdata") + "weight in its metadata")
    return needed


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
