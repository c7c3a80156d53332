"""Well-known models and machines, described in files beside this one: configs and sizes, published figures, no weights.

With them a plan can be made for a model that isn't here, on a machine that isn't this one.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..model_source import ComponentSource, ModelSource

_CONFIG_NAMES = {"Scheduler": "scheduler_config.json", "Guidance": "guider_config.json"}


@dataclass(frozen=True)
class KnownModel:
    """A published model. dtype: torch's name of what its weights are published in. defaults: what its authors
    recommend, as arguments of its pipeline's call. sources: where the facts are from."""

    name: str
    title: str
    pipeline: str
    dtype: str
    aliases: tuple[str, ...]
    defaults: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    components: dict[str, dict[str, Any]] = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class KnownMachine:
    """A graphics card by its published figures. device_bytes: of its memory. flops: of its matrix units at their peak,
    per second, by dtype. link_bytes_per_s: of its PCIe slot, one way, at its peak."""

    name: str
    title: str
    aliases: tuple[str, ...]
    device_bytes: int
    memory_bytes_per_s: float
    flops: dict[str, float]
    link_bytes_per_s: float
    sources: tuple[str, ...] = field(repr=False)


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """All described models by name."""
    files = sorted((resources.files(__package__) / "models").iterdir(), key=lambda file: file.name)
    found = [json.loads(file.read_text("utf-8")) for file in files if file.name.endswith(".json")]
    whole = {data["name"]: data for data in found if "like" not in data}
    described = {data["name"]: whole.get(data["name"]) or _varied(whole[data["like"]], data) for data in found}
    return {name: _model(data) for name, data in described.items()}


@functools.cache
def known_machines() -> dict[str, KnownMachine]:
    """All described machines by name."""
    data = json.loads((resources.files(__package__) / "hardware.json").read_text("utf-8"))
    return {machine["name"]: _machine(machine) for machine in data["machines"]}


def known_model(name: str) -> KnownModel | None:
    """The model of that name or alias; None if there is none."""
    return _named(name, known_models())


def known_machine(name: str) -> KnownMachine:
    """The machine of that name or alias. Raises InputError, with the names that are near, if there is none."""
    machine = _named(name, known_machines())
    if machine is None:
        near = difflib.get_close_matches(name.lower(), known_machines(), n=3, cutoff=0.4) or sorted(known_machines())
        raise InputError(f"No machine {name!r} is known. Choose one of: {', '.join(near)}.")
    return machine


def _named(name: str, among: dict[str, Any]) -> Any:
    wanted = name.strip().lower()
    return next((item for item in among.values() if wanted in (item.name, *map(str.lower, item.aliases))), None)


def _varied(base: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """A description that says only how a model differs from the one that it is like: what it lacks is null."""
    components = dict(base["components"])
    for name, part in variant.get("components", {}).items():
        before = components.get(name, {})
        if part is not None and part.get("class", before.get("class")) == before.get("class"):
            sizes = {key: value for key, value in before.items() if key != "published"}
            part = {**sizes, **part, "config": {**before.get("config", {}), **part.get("config", {})}}
        components[name] = part
    defaults = {**base["defaults"], **variant.get("defaults", {})}
    return {
        **base,
        **variant,
        "defaults": {name: value for name, value in defaults.items() if value is not None},
        "components": {name: part for name, part in components.items() if part is not None},
    }


def _model(data: dict[str, Any]) -> KnownModel:
    return KnownModel(
        data["name"],
        data["title"],
        data["pipeline"],
        data["dtype"],
        tuple(data["aliases"]),
        data["defaults"],
        data.get("pipeline_config") or {},
        data["components"],
        tuple(data["sources"]),
    )


def _machine(data: dict[str, Any]) -> KnownMachine:
    return KnownMachine(
        data["name"],
        data["title"],
        tuple(data["aliases"]),
        data["device_bytes"],
        data["memory_bytes_per_s"],
        data["flops"],
        data["link"]["bytes_per_s"],
        tuple(data["sources"]),
    )


@contextlib.contextmanager
def described_source(model: KnownModel) -> Iterator[ModelSource]:
    """The model as if its folder were here, without weight files: enough to build and trace it, not to run it.

    Its tokenizers are stand-ins of a letter or byte a token. Raises InputError for a part that none stands in for.
    """
    with tempfile.TemporaryDirectory(prefix="phase-offload-") as folder:
        root = Path(folder)
        components = {name: _component(root / name, name, part, model) for name, part in model.components.items()}
        options = {name: value for name, value in model.options.items() if value is not None}
        content = json.dumps([model.pipeline, model.dtype, model.options, model.components], sort_keys=True)
        fingerprint = f"described {hashlib.sha256(content.encode()).hexdigest()}"
        yield ModelSource(root, model.pipeline, components, options, fingerprint=fingerprint)


def _component(folder: Path, name: str, part: dict[str, Any], model: KnownModel) -> ComponentSource:
    folder.mkdir()
    library, class_name, config = part["library"], part["class"], part.get("config") or {}
    source = ComponentSource(name, library, class_name, folder, config)
    if "parameters" not in part:
        if "Tokenizer" in class_name or "Processor" in class_name or "FeatureExtractor" in class_name:
            stand_in = _stand_in(class_name, name, model, config)
            stand_in.save_pretrained(folder)
            source = replace(source, class_name=type(stand_in).__name__)
        else:
            file = next((file for word, file in _CONFIG_NAMES.items() if word in class_name), "config.json")
            (folder / file).write_text(json.dumps({"_class_name": class_name, **config}), "utf-8")
        return source
    import torch

    (folder / "config.json").write_text(json.dumps({"_class_name": class_name, **config}), "utf-8")
    dtype = part.get("dtype") or model.dtype
    count = part["parameters"] + part.get("stored_buffer_elements", 0)
    return ComponentSource(
        name, library, class_name, folder, config, weight_bytes=count * getattr(torch, dtype).itemsize, dtype=dtype
    )


def _stand_in(class_name: str, name: str, model: KnownModel, config: dict[str, Any]) -> Any:
    from . import _tokenizers

    if class_name == "CLIPImageProcessor":
        from transformers import CLIPImageProcessor

        return CLIPImageProcessor()
    if class_name == "PixtralProcessor":
        return _tokenizers.mistral_tokenizer()
    if class_name == "CLIPTokenizer":
        return _tokenizers.clip_tokenizer()
    kinds = {
        "T5": _tokenizers.t5_tokenizer,
        "ByT5": _tokenizers.byt5_tokenizer,
        "Qwen2": _tokenizers.qwen_tokenizer,
        "Gemma": _tokenizers.gemma_tokenizer,
        "Llama": _tokenizers.llama_tokenizer,
        "PreTrained": _tokenizers.llama_tokenizer,  # Llama 3's
    }
    kind = kinds.get(class_name.partition("Tokenizer")[0])
    if kind is None:
        raise InputError(f"{model.title} can't be planned without its folder: nothing stands in for its {name}.")
    tokenizer = kind()
    length = config.get("model_max_length")
    if isinstance(length, int) and length < 10**6:
        tokenizer.model_max_length = length
    return tokenizer
