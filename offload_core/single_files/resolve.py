"""A model made of files, resolved: which file is which part, where each weight lies, and what goes with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import DTYPES, Header, show
from ..errors import ModelError
from ..file_reader import FileRange
from ..library_classes import library_class
from ..model_source import ComponentSource, ModelSource, component_class
from ..stored_weight import StoredWeight, read_stored
from .encoder_classes import as_held
from .layouts import LAYOUTS
from .recognise import FoundPart, another_model, find_parts, open_file, what_else
from .rules import convert
from .split_files import SplitFiles
from .template import Template, TemplatePart, folder_template, known_templates
from .tokenizers import find_tokenizer, tokenizer_options

_ROLES = {
    "denoiser": ("denoiser",),
    "denoiser_2": ("denoiser",),
    "encoders": ("encoder", "other"),
    "vae": ("vae",),
    "checkpoint": ("denoiser", "encoder", "vae", "other"),
}
_GIVE = {"denoiser": "denoiser", "encoder": "encoder", "vae": "vae", "other": "encoder"}  # what every way in calls it
_SECOND = "transformer_2"
_WITHOUT = ("Scheduler", "Tokenizer", "Processor", "FeatureExtractor", "Guidance")  # classes that have no weights

_SD2_TEXT, _SD2_BASE_STEPS = "cond_stage_model.model.", 875_000

_Given = list[tuple[str, Path, Header]]
_Parts = list[tuple[str, FoundPart]]  # what the file was given as, and the part


def resolve_files(files: SplitFiles) -> ModelSource:
    """The model that these files are, from their headers alone. Nothing is read but headers and small configs.

    Raises ModelError, one sentence with what to do: a file that is damaged or of another kind, parts that don't belong
    together, a part or a tokenizer that is missing.
    """
    given = [(name, *open_file(path)) for name, path in files.named]
    if not given:
        raise ModelError("No file was given. Give a checkpoint, or a denoiser with its encoders and VAE.")
    parts = _find(given)
    templates = [folder_template(str(files.configs))] if files.configs else known_templates(files.family)
    template = _choose(templates, parts, given)
    chosen = _assign(template, parts)
    _refuse_unused(template, chosen, parts, given)
    components: dict[str, ComponentSource] = {}
    notes: list[str] = []
    for name, part in template.parts.items():
        if name in chosen:
            components[name] = component_of(as_held(part, chosen[name]), chosen[name], notes)
        else:
            components[name] = _without_weights(template, part, files, given)
    _refuse_blind(template, components)
    library_class("diffusers", template.pipeline, f"The model {show(template.title)}")
    for component in components.values():
        component_class(component)
    return ModelSource(
        root=given[-1][1] if files.checkpoint else given[0][1],
        pipeline_class=template.pipeline,
        components=components,
        options=template.options,
        fingerprint=_fingerprint(template, components, given),
        defaults=template.defaults,
        notes=(f"Recognised as {template.title}.", *notes),
        stamps=tuple((str(path), header.file_bytes, header.mtime_ns) for _, path, header in given),
    )


# ------------------------------------------------------------------------------------------ which part is what


def _find(given: _Given) -> _Parts:
    """The parts that the files are there for. A file in which there is none is an error that says what it is."""
    parts: _Parts = []
    for name, path, header in given:
        if other := another_model(header):
            raise ModelError(f"{show(path.name)} {other}")
        found = [(name, part) for part in find_parts(path, header) if part.layout.role in _ROLES[name]]
        if not found:
            others = find_parts(path, header)
            if others:
                what = " and ".join(sorted({part.layout.title for part in others}))
                raise ModelError(f"{show(path.name)}, given as {name}, holds {what}. Give it as what it is.")
            raise ModelError(f"{show(path.name)} {what_else(header)}")
        parts += found
    return parts


def _choose(templates: list[Template], parts: _Parts, given: _Given) -> Template:
    """The template whose denoiser is among the parts; of several, the first of those that most parts fit.

    Releases of one model may differ only in their VAE. If there is none, an error says how near it came.
    """
    misses: list[str] = []
    fitting: list[Template] = []
    for template in templates:
        wanted = [part for part in template.parts.values() if any(_is_denoiser(found, part) for _, found in parts)]
        misfits = [found.misfit(part.config) for part in wanted[:1] for _, found in parts if _is_denoiser(found, part)]
        if None in misfits:
            fitting.append(template)
        misses += [f"it isn't {template.title}, because {misfit}" for misfit in misfits[:1]]
    if fitting:
        return max(fitting, key=lambda known: sum(_is_there(known, part, parts) for part in known.parts.values()))
    if misses:
        files = show(next(found.path.name for _, found in parts if found.layout.role == "denoiser"))
        what = f"{files} is near to what is known, but {'; '.join(dict.fromkeys(misses[:3]))}"
        raise ModelError(f"{what}. Give a diffusers folder with its configs (configs).")
    files = " and ".join(show(path.name) for _, path, _ in given)
    held = " and ".join(dict.fromkeys(found.layout.title for _, found in parts))
    whose = templates[0].title if len(templates) == 1 else "a known model"
    raise ModelError(f"{files} holds {held}, but no denoiser of {whose}. Give one with it, as denoiser.")


def _is_there(template: Template, part: TemplatePart, parts: _Parts) -> bool:
    return any(found.misfit(part.config) is None for found in _of_its_kind(template, part, parts))


def _of_its_kind(template: Template, part: TemplatePart, parts: _Parts) -> list[FoundPart]:
    """The parts that a component might be made of; of two denoisers each takes what was given for it."""
    found = [(given, found) for given, found in parts if part.class_name in found.layout.classes]
    if _SECOND in template.parts and part.class_name == template.parts[_SECOND].class_name:
        found = [(given, part_) for given, part_ in found if (given == "denoiser_2") == (part.name == _SECOND)]
    return [part_ for _, part_ in found]


def _is_denoiser(found: FoundPart, part: TemplatePart) -> bool:
    return found.layout.role == "denoiser" and part.class_name in found.layout.classes


def _assign(template: Template, parts: _Parts) -> dict[str, FoundPart]:
    """The part that each component with weights is made of. Parts given by themselves go before the checkpoint's."""
    chosen: dict[str, FoundPart] = {}
    for name, part in template.parts.items():
        if not _has_weights(part):
            continue
        fitting = _of_its_kind(template, part, parts)
        fits = [found for found in fitting if found.misfit(part.config) is None]
        if fits:
            chosen[name] = fits[0]
            continue
        what = f"{template.title} needs {_described(part)}"
        if not fitting:
            hint = f" {template.looks_like}" if name == _SECOND and template.looks_like else ""
            raise ModelError(f"{what}, which none of the files holds. Give it, too, as {_how_to_give(part)}.{hint}")
        found = fitting[0]
        raise ModelError(
            f"{what}, and what {show(found.path.name)} holds is another: {found.misfit(part.config)}. "
            f"Give the right file as {_how_to_give(part)}."
        )
    return chosen


def _has_weights(part: TemplatePart) -> bool:
    """Whether a class has weights that files can hold: a layout is known for it."""
    return any(part.class_name in layout.classes for layout in LAYOUTS)


def _described(part: TemplatePart) -> str:
    """A component in words that people use for it."""
    config = part.config.get("text_config") or part.config
    width = config.get("hidden_size") or config.get("d_model")
    names = {
        ("CLIPTextModel", 768): "CLIP-L",
        ("CLIPTextModelWithProjection", 768): "CLIP-L",
        ("CLIPTextModelWithProjection", 1280): "CLIP-G",
        ("T5EncoderModel", 4096): "T5-XXL",
        ("UMT5EncoderModel", 4096): "umT5-XXL",
        ("Qwen3Model", 2560): "Qwen3-4B",
        ("Qwen3ForCausalLM", 2560): "Qwen3-4B",
        ("Qwen3ForCausalLM", 4096): "Qwen3-8B",
        ("Gemma3ForConditionalGeneration", 3840): "Gemma 3 12B",
        ("Gemma2Model", 2304): "Gemma 2 2B",
    }
    found = names.get((part.class_name, width)) if isinstance(width, int) else None
    return f"{found} ({part.name})" if found else f"a {part.class_name} ({part.name})"


def _how_to_give(part: TemplatePart) -> str:
    role = next(layout.role for layout in LAYOUTS if part.class_name in layout.classes)
    return "denoiser_2" if part.name == _SECOND else _GIVE[role]


def _refuse_unused(template: Template, chosen: Mapping[str, FoundPart], parts: _Parts, given: _Given) -> None:
    """A file that was given for a part and isn't used would be a silent mistake."""
    used = {part.path for part in chosen.values()}
    for name, path, _ in given:
        if path not in used:
            held = " and ".join(dict.fromkeys(part.layout.title for as_what, part in parts if part.path == path))
            raise ModelError(
                f"{show(path.name)}, given as {name}, holds {held} that {template.title} has no use for. Leave it out."
            )


def _refuse_blind(template: Template, components: Mapping[str, ComponentSource]) -> None:
    """A model that shows pictures to its encoder can't do with a file that lacks the encoder's eyes."""
    shown = any("Processor" in part.class_name for part in components.values())
    for part in components.values():
        if part.absent and shown:
            raise ModelError(
                f"{show(part.weight_files[0].name)} holds the text part of {template.title}'s {part.name} only, and "
                "this model shows it pictures. Give the .safetensors file of the whole encoder, as encoder."
            )


# ------------------------------------------------------------------------------------------------ components


def component_of(part: TemplatePart, found: FoundPart, notes: list[str]) -> ComponentSource:
    packed = found.quantised()
    if packed:
        raise ModelError(
            f"{show(found.path.name)} holds {found.layout.title} as {packed}, which can't be unpacked. "
            "Use the bfloat16, float16 or fp8 file of the model, or a GGUF of another type."
        )
    converted = convert(found.path, found.header, found.prefix, found.layout.rules(found.shapes))
    stored = _completed(part, converted.stored)
    if converted.unknown:
        names = ", ".join(map(show, converted.unknown[:3]))
        more = f" and {len(converted.unknown) - 3} more" if len(converted.unknown) > 3 else ""
        notes.append(f"{show(found.path.name)} has tensors that {part.name} doesn't need: {names}{more}.")
    held: Counter[str] = Counter()
    for weight in stored.values():
        held[weight.dtype] += weight.nbytes
    return ComponentSource(
        name=part.name,
        library=part.library,
        class_name=part.class_name,
        directory=part.directory or found.path.parent,
        config=dict(part.config),
        weight_files=(found.path,),
        weight_bytes=held.total(),
        dtype=held.most_common(1)[0][0],
        tensors=len(stored),
        stored=stored,
        described=part.directory is None,
        absent=found.layout.absent,
    )


def _completed(part: TemplatePart, stored: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """With the projection that files of CLIP-L leave out where it changes nothing."""
    name = "text_projection.weight"
    width = part.config.get("hidden_size")
    if part.class_name != "CLIPTextModelWithProjection" or name in stored or not isinstance(width, int):
        return stored
    if part.config.get("projection_dim") != width:
        return stored
    dtype = next(iter(stored.values())).dtype
    return {**stored, name: StoredWeight(dtype, (width, width), (), "identity")}


def _without_weights(template: Template, part: TemplatePart, files: SplitFiles, given: _Given) -> ComponentSource:
    """A scheduler, tokenizer or processor. Raises ModelError for a part of which no layout is known."""
    if not any(word in part.class_name for word in _WITHOUT):
        raise ModelError(
            f"{template.title} has a part that isn't known as a file: {part.name}, a {show(part.class_name)}. "
            "Use the model's diffusers folder."
        )
    described = part.directory is None and part.class_name.endswith("ImageProcessor")
    if not described and _has_files(part.class_name):
        own = part.directory is not None and part.directory.is_dir() and any(part.directory.iterdir())
        if own and part.directory is not None:
            return ComponentSource(part.name, part.library, part.class_name, part.directory)
        encoder = template.parts.get(part.name.replace("tokenizer", "text_encoder"))
        encoder_class = encoder.class_name if encoder is not None else ""
        place = find_tokenizer(part.name, part.class_name, encoder_class, files.tokenizer_folders, template.title)
        options = {**part.config, **tokenizer_options(place, encoder_class)}
        return ComponentSource(part.name, part.library, part.class_name, place, options, described=True)
    if part.directory is not None:
        if template.folder is not None and not part.directory.is_dir():
            raise template.folder.error(part.directory, "is missing", "Give a folder that has it.")
        return ComponentSource(part.name, part.library, part.class_name, part.directory, dict(part.config))
    config = dict(part.config)
    if part.class_name.endswith("Scheduler"):
        config |= _prediction(given)
    return ComponentSource(part.name, part.library, part.class_name, given[0][1].parent, config, described=True)


def _prediction(given: _Given) -> dict[str, Any]:
    """What fine-tunes say about their noise by an empty tensor in the file, and Stable Diffusion 2 by its age."""
    names = {name for _, _, header in given for name in ("v_pred", "ztsnr") if name in header.tensors}
    config: dict[str, Any] = {"prediction_type": "v_prediction"} if "v_pred" in names else {}
    if not config and any(_is_sd2_base(path, header) for _, path, header in given):
        config = {"prediction_type": "epsilon"}
    return config | ({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if "ztsnr" in names else {})


def _is_sd2_base(path: Path, header: Header) -> bool:
    """Whether a checkpoint of Stable Diffusion 2 says that it is as old as 2.0 base, the way diffusers asks
    (`_legacy_load_scheduler` in loaders/single_file_utils.py). The number is the one thing that is read of its data."""
    step = header.tensors.get("global_step")
    if step is None or math.prod(step.shape) != 1 or not any(name.startswith(_SD2_TEXT) for name in header.tensors):
        return False
    dtype = DTYPES.get(step.dtype, (0, None))[1]
    place = FileRange(path, header.data_start + step.begin, step.nbytes)
    return dtype is not None and int(read_stored(StoredWeight(dtype, step.shape, (place,)))) == _SD2_BASE_STEPS


def _fingerprint(template: Template, components: Mapping[str, ComponentSource], given: _Given) -> str:
    lines: list[Any] = [
        (name, path.name, header.file_bytes, header.mtime_ns, header.header_sha256) for name, path, header in given
    ]
    lines += [(part.name, part.class_name, part.config) for part in components.values()]
    lines += [template.pipeline, template.options]
    for part in components.values():
        if not part.has_weights:
            lines += [(part.name, file.name, _digest(file)) for file in _small_files(part.directory, part)]
    return hashlib.sha256(json.dumps(lines, sort_keys=True, default=list).encode()).hexdigest()


def _small_files(directory: Path, part: ComponentSource) -> list[Path]:
    """The files of a tokenizer or scheduler that has a folder of its own."""
    if part.described and (part.class_name.endswith("ImageProcessor") or not _has_files(part.class_name)):
        return []
    kinds = (".json", ".txt", ".model", ".jinja")
    return sorted(path for path in directory.iterdir() if path.suffix in kinds and path.is_file())


def _has_files(class_name: str) -> bool:
    return "Tokenizer" in class_name or "Processor" in class_name


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def as_files(model: Any) -> SplitFiles:
    """A path of a single file, or files already named."""
    return model if isinstance(model, SplitFiles) else replace(SplitFiles(), checkpoint=str(model))
