"""Where a model is: a diffusers folder, resolved, checked and fingerprinted from configs and headers alone.

No weight is read, no code of the folder is run, and nothing outside it is opened (see `ModelFolder` for links).
diffusers and transformers are imported only to look a class up.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .block_classes import blocks_class, stages
from .checkpoint import DTYPES, Header, show
from .errors import ModelError
from .library_classes import TRUST_ADVICE, is_allowed_library, library_class
from .model_folder import MAX_TEXT_BYTES, ModelFolder, plain_parts
from .model_list import choose_model, list_models, near_names, no_models_sentence
from .quantised import check_quantised
from .weight_files import ALL_BASE_NAMES, BASE_NAMES, WeightFiles, find_weight_files, has_weight_files

__all__ = [
    "ComponentSource",
    "ModelSource",
    "choose_model",
    "component_class",
    "list_models",
    "no_models_sentence",
    "pipeline_class",
    "resolve_components",
    "resolve_model",
    "resolve_part",
]

if TYPE_CHECKING:
    from .single_files import SplitFiles
    from .stored_weight import StoredWeight

DEFAULTS_FILE = "phase_offload.json"
INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
WEIGHT_SUFFIXES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")

# Classes that have no weights of their own; everything else with a config.json is a model.
_WEIGHTLESS = re.compile(r".*(Scheduler|Tokenizer(Fast|sBackend)?|Processor(Fast|Pil)?|FeatureExtractor|Guidance)")
_CONFIG_NAMES = (
    "config.json",
    "scheduler_config.json",
    "guider_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
# Files besides weights that change what a component does: configs, vocabularies, templates.
CONTENT_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe"}
# diffusers loads these names as whatever class the component's config.json gives.
_OPEN_CLASSES = {"AutoModel", "Transformer2DModel", "ModelMixin"}

_AGAIN = "Download the model again."


@dataclass(frozen=True)
class ComponentSource:
    """One entry of model_index.json.

    config: its config.json, else its scheduler, processor or tokenizer config, None without any. weight_files: in order
    of name, none for tokenizers, schedulers and processors. weight_bytes, tensors: sums over them. dtype: torch's name
    of the dtype that holds most bytes. variant: what `from_pretrained(variant=...)` needs, e.g. "fp16". stage: in a
    model made of blocks, where they list it ("before", "denoise" or "after", see `block_classes.stages`). stored: how
    each weight is made from the files, by its name, where they aren't this component's own. described: the config is a
    description of this project; with a tokenizer, options for its loader. absent: beginnings of the names of weights
    that its files don't have, and that only some uses of it need. runs_in: torch's name of the dtype that it runs in
    where the handle's is "auto"; None for that of its files.
    """

    name: str
    library: str
    class_name: str
    directory: Path
    config: dict[str, Any] | None = field(default=None, repr=False)
    weight_files: tuple[Path, ...] = field(default=(), repr=False)
    weight_bytes: int = 0
    dtype: str | None = None
    tensors: int = 0
    variant: str | None = None
    stage: str | None = None
    stored: Mapping[str, StoredWeight] | None = field(default=None, repr=False)
    described: bool = False
    absent: tuple[str, ...] = ()
    runs_in: str | None = None

    @property
    def has_weights(self) -> bool:
        return bool(self.weight_files or self.weight_bytes)  # a described model has sizes and no files


@dataclass(frozen=True)
class ModelSource:
    """A checked model folder.

    components: by name, in the order of model_index.json, without those that are null. options: its other entries, e.g.
    boundary_ratio. fingerprint: sha256 hex over names, sizes, times, headers of weights and content of configs.
    defaults: phase_offload.json. notes: sentences worth telling, e.g. that a variant was left aside. blocks: the class
    of the blocks that a model of Modular Diffusers is made of, None for others. elsewhere: (name, place) of components
    that its index looks for in other places, and that aren't in the folder.
    """

    root: Path
    pipeline_class: str
    components: dict[str, ComponentSource] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    fingerprint: str
    defaults: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    stamps: tuple[tuple[str, int, int], ...] = field(default=(), repr=False)  # (path below root, bytes, mtime_ns)
    blocks: str | None = None
    elsewhere: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __hash__(self) -> int:
        return hash((self.root, self.fingerprint))

    @property
    def weight_bytes(self) -> int:
        return sum(component.weight_bytes for component in self.components.values())

    def check_unchanged(self) -> None:
        """Raises ModelError if a weight or config file is gone or isn't the one that was checked (size, mtime_ns)."""
        for name, size, mtime_ns in self.stamps:
            try:
                status = (self.root / name).stat()
            except OSError:
                raise ModelError(f"{name} is gone since the model was loaded. Load the model again.") from None
            if (status.st_size, status.st_mtime_ns) != (size, mtime_ns):
                detail = f" ({size:,} bytes then, {status.st_size:,} now)" if status.st_size != size else ""
                raise ModelError(f"{name} has changed since the model was loaded{detail}. Load the model again.")


def resolve_model(model: str | os.PathLike[str] | SplitFiles) -> ModelSource:
    """Reads and checks a model without reading a weight: a diffusers folder, the Hub id of one that is in the Hub's
    cache, a single file, or several files. Nothing is downloaded.

    A folder with a model_index.json is a pipeline, also if it has a modular_model_index.json; one with only the latter
    is made of blocks. Raises ModelError, one sentence with what to do, for a folder that is missing, incomplete,
    damaged, ambiguous, or that wants pickle, code, or a file outside itself; for files see
    `single_files.resolve_files`.
    """
    if not isinstance(model, str | os.PathLike) or _is_weight_file(model):
        from .single_files import as_files, resolve_files

        return resolve_files(as_files(model))
    folder = ModelFolder(_existing_folder(model))
    record = _Record(folder)
    if os.path.lexists(folder.root / INDEX):
        source = _read_pipeline(folder, record)
    else:
        source = _read_blocks(folder, record)
    for component in source.components.values():
        component_class(component)
        check_quantised(component)
    if not source.components:
        index = INDEX if source.blocks is None else MODULAR_INDEX
        raise folder.error(folder.root / index, "names no component", _AGAIN)
    defaults_path = folder.root / DEFAULTS_FILE
    defaults = {}
    if os.path.lexists(defaults_path):
        defaults = folder.read_json(defaults_path, encoding="utf-8-sig")
        record.add_content(defaults_path)
    return replace(
        source,
        fingerprint=record.digest(),
        defaults=defaults,
        notes=tuple(record.notes),
        stamps=tuple(record.stamps),
    )


def resolve_components(model: str | os.PathLike[str]) -> dict[str, ComponentSource]:
    """The checked components of a model folder by name, also of one for Modular Diffusers (modular_model_index.json).

    Such an index may look elsewhere for a component. One that has no folder here is left out. Raises ModelError as
    `resolve_model` does.
    """
    if not os.path.lexists(Path(model).expanduser() / MODULAR_INDEX):
        return resolve_model(model).components
    folder = ModelFolder(Path(model).expanduser())
    components, _ = _read_listed(folder, folder.read_json(folder.root / MODULAR_INDEX), _Record(folder))
    for component in components.values():
        component_class(component)
    return components


def resolve_part(directory: str | os.PathLike[str], name: str, library: str) -> tuple[ComponentSource, str]:
    """A component in a folder of its own (a ControlNet), called `name`, and the fingerprint of its files.

    library: "diffusers" or "transformers"; its config.json says which class. Raises ModelError as `resolve_model` does.
    """
    place = Path(directory).expanduser().absolute()
    if not (place / "config.json").is_file():
        raise ModelError(f"There is no {name} in {show(place.name)}: it has no config.json. Give its folder.")
    folder = ModelFolder(place.parent)
    config = folder.read_json(place / "config.json")
    named = config.get("_class_name") if library == "diffusers" else (config.get("architectures") or [None])[0]
    if not isinstance(named, str):
        raise folder.error(place / "config.json", f"doesn't say which class of {library} it is for", _AGAIN)
    record = _Record(folder)
    part = replace(_read_component(folder, place / "config.json", place.name, [library, named], record), name=name)
    component_class(part)
    if not part.has_weights:
        raise folder.error(place, "holds no weights", _AGAIN)
    return part, record.digest()


def _read_pipeline(folder: ModelFolder, record: _Record) -> ModelSource:
    """What model_index.json names."""
    index_path = folder.root / INDEX
    index = folder.read_json(index_path)
    class_name = index.get("_class_name")
    _check_pipeline(folder, index_path, class_name, index.get("_diffusers_version"), "DiffusionPipeline")
    components: dict[str, ComponentSource] = {}
    options: dict[str, Any] = {}
    record.add_content(index_path)
    for name, value in index.items():
        if name.startswith("_"):
            continue
        if not _is_component(value):
            options[name] = value
        elif value[0] is not None:
            components[name] = _read_component(folder, index_path, name, value, record)
    return ModelSource(folder.root, str(class_name), components, options, "")


def _read_blocks(folder: ModelFolder, record: _Record) -> ModelSource:
    """What modular_model_index.json names, and where its blocks list it."""
    index_path, code_path = folder.root / MODULAR_INDEX, folder.root / "modular_config.json"
    index = folder.read_json(index_path)
    class_name = index.get("_class_name")
    _check_pipeline(folder, index_path, class_name, index.get("_diffusers_version"), "ModularPipeline")
    if os.path.lexists(code_path):
        _refuse_code(folder, code_path, folder.read_json(code_path))
    who = f"The model {show(folder.name)}"
    blocks: Any = blocks_class(str(class_name), index.get("_blocks_class_name"), who)
    record.add_content(index_path)
    components, elsewhere = _read_listed(folder, index, record)
    listed = stages(blocks())
    components = {name: replace(part, stage=listed[name]) for name, part in components.items() if name in listed}
    options = {name: value for name, value in index.items() if not name.startswith("_") and not _is_listed(value)}
    missing = tuple((name, place) for name, place in elsewhere.items() if name in listed)
    return ModelSource(folder.root, str(class_name), components, options, "", blocks=blocks.__name__, elsewhere=missing)


def _read_listed(
    folder: ModelFolder, index: dict[str, Any], record: _Record
) -> tuple[dict[str, ComponentSource], dict[str, str]]:
    """The components of modular_model_index.json that have a folder here, and where those are looked for that have
    none."""
    index_path = folder.root / MODULAR_INDEX
    components: dict[str, ComponentSource] = {}
    elsewhere: dict[str, str] = {}
    for name, value in index.items():
        if not _is_listed(value):
            continue
        spec = value[2]
        place, hint = spec.get("subfolder") or name, spec["type_hint"]
        if hint[0] is not None and not is_allowed_library(hint[0]):
            raise folder.error(index_path, f"takes the class of {show(name)} from {show(hint[0])}", TRUST_ADVICE)
        kind = hint if value[1] is None else value[:2]  # what it was, before what its block asks for
        if plain_parts(str(place)) != [place]:
            what = f"names the folder {show(place)} of {show(name)}, which is no plain folder name"
            raise folder.error(index_path, what, "Get the model from a source that you trust.")
        if (folder.root / place).is_dir():
            components[name] = replace(_read_component(folder, index_path, place, kind, record), name=name)
        elif source := spec.get("pretrained_model_name_or_path") or spec.get("repo"):
            elsewhere[name] = str(source)
    return components, elsewhere


def component_class(component: ComponentSource) -> type:
    """The class of a component, from the installed libraries only. Raises ModelError if they have none."""
    return library_class(component.library, component.class_name, f"The component {show(component.name)}")


def pipeline_class(source: ModelSource) -> type:
    """The pipeline class of a model, from the installed diffusers only. Raises ModelError if it has none."""
    return library_class("diffusers", source.pipeline_class, "The model")


class _Record:
    """Collects what the fingerprint, `check_unchanged` and the notes need, while the files are read."""

    def __init__(self, folder: ModelFolder):
        self.folder = folder
        self.stamps: list[tuple[str, int, int]] = []
        self.notes: list[str] = []
        self._lines: list[tuple[str, int, int, str]] = []

    def add_content(self, path: Path) -> None:
        status = path.stat()
        content = hashlib.sha256(self.folder.read_bytes(path)).hexdigest() if status.st_size <= MAX_TEXT_BYTES else ""
        self._add(path, status.st_size, status.st_mtime_ns, content)

    def add_header(self, path: Path, header: Header) -> None:
        self._add(path, header.file_bytes, header.mtime_ns, header.header_sha256)

    def _add(self, path: Path, size: int, mtime_ns: int, content: str) -> None:
        name = self.folder.relative(path)
        self.stamps.append((name, size, mtime_ns))
        self._lines.append((name, size, mtime_ns, content))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self._lines)).encode()).hexdigest()


def _is_weight_file(model: str | os.PathLike[str]) -> bool:
    """Whether a path means a file of weights: by its name, or a file without a suffix (a blob of the Hub's cache)."""
    path = os.path.expanduser(os.fspath(model))
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        return False
    return suffix in WEIGHT_SUFFIXES or (not suffix and os.path.isfile(path))


def _existing_folder(model: str | os.PathLike[str]) -> Path:
    """The folder that holds an index, or an error that says what is there instead."""
    text = os.fspath(model)
    if not text.strip() or "\0" in text:
        raise ModelError(f"{show(text)} names no model folder. Give the path of a diffusers model folder.")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            if any(os.path.lexists(path / index) for index in (INDEX, MODULAR_INDEX)):
                return path
            raise ModelError(_not_a_model(path))
        if path.exists():
            what = "is neither a folder nor a file of weights"
            advice = "Give the folder that holds model_index.json, or a .safetensors file."
            raise ModelError(f"{show(text, 250)} {what}. {advice}")
        snapshot = cached_snapshot(text)
        if snapshot is not None:
            return snapshot
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    except RuntimeError:
        raise ModelError(f"{show(text, 250)} names a home folder that isn't there. Give the full path.") from None
    except OSError as error:
        what = f"{show(text, 250)} can't be read ({error.strerror})"
        raise ModelError(f"{what}. Check the path and its permissions.") from None
    near = near_names(path.name, siblings)
    if near:
        raise ModelError(f"There is no model folder {show(text, 250)}. Did you mean {near}?")
    advice = "Check the path."
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        advice = f"If it is a Hub id: fetch it first, with `phase-offload models add {text}` or Download Model."
    raise ModelError(f"There is no model folder {show(text, 250)}. {advice}")


def cached_snapshot(text: str, revision: str | None = None) -> Path | None:
    """The folder of a Hub id in the Hub's cache on this machine; None if it isn't an id or isn't there."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(text, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return folder if os.path.lexists(folder / "model_index.json") else None


def _not_a_model(path: Path) -> str:
    """What a folder without model_index.json is instead, and what to do."""
    names = sorted(entry.name for entry in path.iterdir())
    start = f"{show(path.name)} is no diffusers model folder: it has no model_index.json"
    inner = list_models([path])
    if not names:
        return f"{show(path.name)} is an empty folder. Put a diffusers model there, or give another folder."
    if inner:
        shown = " or ".join(show(name) for name in list(inner)[:3])
        return f"{start}, but holds models. Give one of them: {shown}."
    if has_weight_files(names) and "config.json" in names:
        return f"{start} and looks like one component of a model. Give its parent folder."
    single = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    if single:
        return f"{start}, only single files such as {show(single[0])}. Give the file itself."
    shown = ", ".join(show(name) for name in names[:3])
    return f"{start} (it holds {shown}). Give the folder that model_index.json lies in."


def _check_pipeline(folder: ModelFolder, index_path: Path, class_name: Any, saved_by: Any, base: str) -> None:
    if isinstance(class_name, list):
        raise folder.error(index_path, f"asks for a pipeline class of its own, {show(class_name)}", TRUST_ADVICE)
    if not isinstance(class_name, str) or not class_name:
        raise folder.error(index_path, "doesn't name a pipeline class (_class_name)", _AGAIN)
    version = f", saved by diffusers {saved_by[:20]}," if isinstance(saved_by, str) else ""
    found = library_class("diffusers", class_name, f"The model {show(folder.name)}{version}")
    if not issubclass(found, library_class("diffusers", base, "The engine")):
        raise folder.error(index_path, f"names {show(class_name)} as its pipeline, which is no pipeline", _AGAIN)


def _is_listed(value: Any) -> bool:
    """Whether an entry of modular_model_index.json is a component."""
    spec = value[2] if isinstance(value, list) and len(value) == 3 and _is_component(value[:2]) else None
    return isinstance(spec, dict) and _is_component(spec.get("type_hint"))


def _is_component(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(item is None or isinstance(item, str) for item in value)


def _read_component(
    folder: ModelFolder, index_path: Path, name: str, value: list[str | None], record: _Record
) -> ComponentSource:
    library, class_name = value
    if not library or not class_name:
        raise folder.error(index_path, f"gives {show(name)} the incomplete class {show(value)}", _AGAIN)
    if plain_parts(name) != [name]:
        what = f"names the component {show(name)}, which is no plain folder name"
        raise folder.error(index_path, what, "Get the model from a source that you trust.")
    if not is_allowed_library(library):
        raise folder.error(index_path, f"takes the class of {show(name)} from {show(library)}", TRUST_ADVICE)
    directory = folder.child(folder.root, name, index_path)
    if not directory.is_dir():
        raise folder.error(index_path, f"names the component {show(name)}, but its folder is missing", _AGAIN)
    files = folder.files(directory)
    if not files:
        raise folder.error(directory, "is an empty folder", _AGAIN)
    if f"{library}.py" in files:  # diffusers would import it in place of the library
        raise folder.error(files[f"{library}.py"], f"would take the place of {library}", TRUST_ADVICE)
    if "adapter_config.json" in files:  # transformers would load its base model, from wherever it says
        advice = "Merge the adapter into its base model, or pass it as a LoRA."
        raise folder.error(files["adapter_config.json"], "makes this component an adapter of another model", advice)
    configs = {file: folder.read_json(path) for file, path in files.items() if file.endswith("config.json")}
    for file, config in configs.items():
        _refuse_code(folder, files[file], config)
    weights = _find_weights(folder, directory, library, class_name, files, configs)
    for path in files.values():
        if path.suffix in CONTENT_SUFFIXES:
            _refuse_pointer(folder, path)
            record.add_content(path)
    main_config = configs[min(configs, key=_config_rank)] if configs else None
    if weights is None:
        return ComponentSource(name, library, class_name, directory, main_config)
    record.notes.extend(weights.notes)
    held: Counter[str] = Counter()
    for path, header in weights.headers.items():
        record.add_header(path, header)
        for entry in header.tensors.values():
            held[entry.dtype] += entry.nbytes
    if not held:
        raise folder.error(min(weights.headers), "holds no tensor at all", _AGAIN)
    return ComponentSource(
        name=name,
        library=library,
        class_name=class_name,
        directory=directory,
        config=main_config,
        weight_files=tuple(sorted(weights.headers)),
        weight_bytes=held.total(),
        dtype=DTYPES[held.most_common(1)[0][0]][1],
        tensors=sum(len(header.tensors) for header in weights.headers.values()),
        variant=weights.variant,
    )


def _find_weights(
    folder: ModelFolder,
    directory: Path,
    library: str,
    class_name: str,
    files: dict[str, Path],
    configs: dict[str, dict[str, Any]],
) -> WeightFiles | None:
    """A component's weights, None if it is of a kind that has none. Also checks that its config is there."""
    weightless = _WEIGHTLESS.fullmatch(class_name) is not None
    if class_name.endswith("Scheduler"):
        if "scheduler_config.json" not in configs:
            raise folder.error(directory, "has no scheduler_config.json", _AGAIN)
        return None
    if "config.json" not in configs:
        if weightless or (configs and not has_weight_files(files)):
            return None
        raise folder.error(directory, "has no config.json", _AGAIN)
    if weightless and not has_weight_files(files):
        return None
    config_class = configs["config.json"].get("_class_name")
    if library == "diffusers" and isinstance(config_class, str) and class_name not in {config_class, *_OPEN_CLASSES}:
        what = f"is for the class {show(config_class)}, but model_index.json names {show(class_name)}"
        raise folder.error(files["config.json"], what, "Use the config and weights that belong to this component.")
    return find_weight_files(folder, directory, BASE_NAMES.get(library, ALL_BASE_NAMES))


def _refuse_code(folder: ModelFolder, path: Path, config: dict[str, Any]) -> None:
    """Configs that would make a loader fetch code or other files than the ones checked here."""
    for key, value in _walk(config):
        if key == "auto_map" and value:
            raise folder.error(path, "asks for code of its own (auto_map)", TRUST_ADVICE)
        if key.endswith("attn_implementation") and "/" in str(value):
            raise folder.error(path, f"asks for an attention kernel from the Hub ({show(value)})", TRUST_ADVICE)
        if key == "transformers_weights" and value:
            what = f"names a weight file of its own (transformers_weights: {show(value)})"
            raise folder.error(path, what, "Rename the file to model.safetensors and remove this entry.")


def _walk(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value of a JSON object, at any depth."""
    pending: list[Any] = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _config_rank(name: str) -> int:
    return _CONFIG_NAMES.index(name) if name in _CONFIG_NAMES else len(_CONFIG_NAMES)


def _refuse_pointer(folder: ModelFolder, path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(64)
    if not start and path.suffix in (".json", ".model"):
        raise folder.error(path, "is empty (0 bytes)", _AGAIN)
    if start.startswith(b"version https://git-lfs"):
        raise folder.error(path, "is a Git-LFS pointer, not the file itself", "Run `git lfs pull` or download it.")
