"""Embeddings, pictures and latents: what one phase hands to the next, in memory and on disk."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, RecordError
from ._clips import given_pictures
from ._layout import Layout
from ._plain import Plain, from_plain, raw_bytes, to_plain
from ._waveforms import KINDS, Ending

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Embeds:
    """What the encoders answered, found by what they were asked. CPU tensors only.

    pipeline: class it was made with. encoders: fingerprint of the encoders that made it; other weights are refused.
    call: the arguments of the encode call (prompt, negative prompt, text length, ...), used by denoise as defaults.
    records: answers by content of the question. notes: sentences worth knowing (a prompt that was cut).
    """

    pipeline: str
    encoders: str = field(repr=False)
    call: Plain = field(repr=False)
    records: dict[str, Plain] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.call.nbytes + sum(record.nbytes for record in self.records.values())

    def _comfy_cache_tensors(self) -> list[torch.Tensor]:
        """What this holds in RAM, for ComfyUI's cache of results, which asks by this name."""
        return [tensor for plain in (self.call, *self.records.values()) for tensor in plain.tensors]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a safetensors file, whole or not at all. Returns its path."""
        return _write_answers(path, "embeds", self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Embeds:
        """Raises RecordError, naming the field, for a file that isn't whole or isn't embeddings."""
        return cls(**_read_answers(path, "embeds"))


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures for a pipeline to start from or to look at, and what its VAE made of them. CPU tensors only.

    pipeline: the class that takes them. encoders: fingerprint of the VAE (and picture encoder) that saw them. call: the
    arguments they are (image or video, mask_image, height, width, ...), used by denoise as defaults. records: answers
    by content of the question. notes: sentences worth knowing.
    """

    pipeline: str
    encoders: str = field(repr=False)
    call: Plain = field(repr=False)
    records: dict[str, Plain] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def pictures(self) -> list[Any]:
        """The pictures, or the frames of a clip, as PIL images, in order."""
        call = from_plain(self.call, torch.device("cpu"))
        last = [call["last_image"]] if "last_image" in call else []
        return [*given_pictures(call), *last]

    @property
    def starts(self) -> int:
        """How many of the pictures are a start of their own: Denoise makes so many for each prompt, or a multiple."""
        given = dict(self.call.structure["dict"])
        return int(given.get("num_images_per_prompt", 1))

    @property
    def nbytes(self) -> int:
        return self.call.nbytes + sum(record.nbytes for record in self.records.values())

    def _comfy_cache_tensors(self) -> list[torch.Tensor]:
        """What this holds in RAM, for ComfyUI's cache of results, which asks by this name."""
        return [tensor for plain in (self.call, *self.records.values()) for tensor in plain.tensors]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a safetensors file with the pictures and what was made of them, whole or not at all. Returns its
        path."""
        return _write_answers(path, "images", self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Images:
        """Raises RecordError, naming the field, for a file that isn't whole or doesn't hold encoded pictures."""
        images = cls(**_read_answers(path, "images"))
        if not any(name in ("image", "video") for name, _ in images.call.structure.get("dict", [])):
            raise RecordError(f"The field call of {Path(path).name} holds no picture. Save it again.")
        return images


@dataclass(frozen=True, eq=False)
class Sound:
    """What the model's audio VAE was asked to decode. component, vae, decode: as in `Latents`. ending: of a model that
    makes nothing else, what its pipeline does afterwards."""

    component: str
    vae: str = field(repr=False)
    decode: Plain = field(repr=False)
    ending: Ending | None = None


@dataclass(frozen=True, eq=False)
class Latents:
    """What decode needs: exactly the arguments the pipeline passed to its VAE. CPU tensors only.

    pipeline: class that made them (or will decode them). vae: fingerprint of the VAE's config. component: which VAE.
    dtype: the VAE's dtype at that moment ("float32" for an SDXL VAE that must be upcast). decode: the arguments of
    `vae.decode`. layout: how `samples` relates to them. height, width: size in pixels that was asked for, if it was.
    rest: of a model made of blocks, the block that asked the VAE, and what it and those after it read. frame_rate: of a
    video, in frames per second, where the model says. sound: of a model that makes some; one that makes nothing else
    has asked its audio VAE alone, and `decode` is of that.
    """

    pipeline: str
    vae: str = field(repr=False)
    component: str = field(repr=False)
    dtype: str = field(repr=False)
    decode: Plain = field(repr=False)
    layout: Layout = field(repr=False)
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    rest: Plain | None = field(default=None, repr=False)
    frame_rate: float | None = None
    sound: Sound | None = field(default=None, repr=False)

    @property
    def only_sound(self) -> bool:
        """Whether there is no picture in them: `decode_sound` decodes them, and `decode` doesn't."""
        return self.sound is not None and self.sound.ending is not None

    @property
    def samples(self) -> torch.Tensor:
        """float32 latents as ComfyUI's LATENT holds them: unscaled VAE output, (B, C, h, w), (B, C, T, h, w), or
        (B, C, T) of sound."""
        return self.layout.to_samples(self._latents())

    def is_stale(self, samples: torch.Tensor) -> bool:
        """Whether `samples` differ from what this record decodes, so that the record no longer speaks for them."""
        mine = self.samples
        return mine.shape != samples.shape or raw_bytes(mine) != raw_bytes(samples.to(torch.float32))

    def with_samples(self, samples: torch.Tensor) -> Latents:
        """Latents that decode `samples` in place of what was recorded."""
        mine = self._latents()
        self.layout.check(samples, self.samples.shape)
        tensors = list(self.decode.tensors)
        tensors[self._index()] = self.layout.to_latents(samples).to(mine.dtype).contiguous().clone()
        decode = Plain(self.decode.structure, tuple(tensors))
        sound = replace(self.sound, decode=decode) if self.sound is not None and self.only_sound else self.sound
        return replace(self, decode=decode, sound=sound, seed=None, height=None, width=None)

    def _comfy_cache_tensors(self) -> list[torch.Tensor]:
        """What this holds in RAM, for ComfyUI's cache of results, which asks by this name."""
        return [*self.decode.tensors, *self.layout.statistics]

    def _latents(self) -> torch.Tensor:
        return self.decode.tensors[self._index()]

    def _index(self) -> int:
        args, kwargs = self.decode.structure["list"]
        first = args["list"][0] if args["list"] else dict(kwargs["dict"]).get("z")
        if not isinstance(first, dict) or "tensor" not in first:
            raise RecordError("The latents' record has no tensor in its field decode. Run Denoise again.")
        return int(first["tensor"])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a safetensors file, whole or not at all. Returns its path."""
        meta = {
            name: getattr(self, name) for name in ("pipeline", "vae", "component", "dtype", "seed", "height", "width")
        }
        meta |= {"layout": self.layout.kind, "frame_rate": self.frame_rate}
        plains = {"decode": self.decode, "layout": Plain(None, self.layout.statistics)}
        if self.rest is not None:
            plains["rest"] = self.rest
        if self.sound is not None:
            meta["sound"] = [self.sound.component, self.sound.vae]
            if not self.only_sound:
                plains["sound"] = self.sound.decode
            if self.sound.ending is not None:
                meta["ending"] = asdict(self.sound.ending)
        return write_plains(path, "latents", meta, plains)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Latents:
        """Raises RecordError, naming the field, for a file that isn't whole or isn't latents."""
        meta, plains = read_plains(path, "latents")
        text = {name: _need(meta, name, str, path) for name in ("pipeline", "vae", "component", "dtype")}
        numbers = {name: _need(meta, name, int | None, path) for name in ("seed", "height", "width")}
        layout = Layout(_need(meta, "layout", str, path), _need(plains, "layout", Plain, path).tensors)
        decode = _need(plains, "decode", Plain, path)
        sound = None
        if "sound" in plains or "sound" in meta:
            names = _need(meta, "sound", list, path)
            if len(names) != 2:
                raise RecordError(f"The field sound of {Path(path).name} names no audio VAE. Make the file again.")
            sound = Sound(str(names[0]), str(names[1]), plains.get("sound", decode), _ending(meta, path))
        rate = meta.get("frame_rate")  # files of before lack it
        rest = plains.get("rest")
        latents = cls(**text, decode=decode, layout=layout, **numbers, rest=rest, frame_rate=rate, sound=sound)
        latents._index()
        return latents


def _ending(meta: dict[str, Any], path: str | os.PathLike[str]) -> Ending | None:
    if "ending" not in meta:
        return None
    fields = _need(meta, "ending", dict, path)
    try:
        ending = Ending(**fields)
        known = ending.kind in KINDS and all(
            sample is None or isinstance(sample, int) for sample in (ending.start_sample, ending.end_sample)
        )
    except TypeError:
        known = False
    if not known:
        raise RecordError(f"The field ending of {Path(path).name} isn't one of this version. Make the file again.")
    return ending


def _write_answers(path: str | os.PathLike[str], kind: str, made: Embeds | Images) -> Path:
    meta = {"pipeline": made.pipeline, "encoders": made.encoders, "notes": list(made.notes)}
    return write_plains(path, kind, meta, {"call": made.call, **{f"record:{k}": v for k, v in made.records.items()}})


def _read_answers(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The fields of `Embeds` or `Images` that `_write_answers` wrote."""
    meta, plains = read_plains(path, kind)
    return {
        "pipeline": _need(meta, "pipeline", str, path),
        "encoders": _need(meta, "encoders", str, path),
        "call": _need(plains, "call", Plain, path),
        "records": {k.removeprefix("record:"): v for k, v in plains.items() if k.startswith("record:")},
        "notes": tuple(_need(meta, "notes", list, path)),
    }


def _need(fields: dict[str, Any], name: str, kind: Any, path: str | os.PathLike[str]) -> Any:
    if name not in fields or not isinstance(fields[name], kind):
        raise RecordError(f"{Path(path).name} lacks the field {name}, or it isn't what it should be. Save it again.")
    return fields[name]


def write_plains(path: str | os.PathLike[str], kind: str, meta: dict[str, Any], plains: dict[str, Plain]) -> Path:
    """Writes values as a safetensors file of that kind, whole or not at all."""
    from safetensors.torch import save

    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"The {kind} can't be saved: there is no folder {target.parent}.")
    tensors = {f"{name}/{i}": t for name, plain in plains.items() for i, t in enumerate(plain.tensors)}
    structures = {name: [plain.structure, [t.stride() for t in plain.tensors]] for name, plain in plains.items()}
    metadata = {"format": f"phase-offload-{kind}-{FORMAT}", "meta": json.dumps(meta), "values": json.dumps(structures)}
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read_plains(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Plain]]:
    """What `write_plains` wrote. Raises RecordError for a file that isn't whole or is of another kind."""
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    if not source.is_file():
        raise InputError(f"There is no file {source.name} to read {kind} from.")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != f"phase-offload-{kind}-{FORMAT}":
                found = metadata.get("format", "no format")
                raise RecordError(f"{source.name} doesn't hold {kind} of this version (its field format says {found}).")
            structures = json.loads(metadata["values"])
            plains = {}
            for name, (structure, strides) in structures.items():
                tensors = [_strided(file.get_tensor(f"{name}/{i}"), stride) for i, stride in enumerate(strides)]
                plains[name] = Plain(structure, tuple(tensors))
                from_plain(plains[name], torch.device("cpu"))  # else a phase would find out that it can't be
            return dict(json.loads(metadata["meta"])), plains
    except (
        SafetensorError,
        KeyError,
        IndexError,
        AttributeError,
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
    ) as error:
        raise RecordError(f"{source.name} is damaged and can't be read as {kind} ({error}). Save it again.") from None


def _strided(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A copy laid out as it was: safetensors stores tensors contiguous, and kernels choose by strides."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if tensor.numel() and (min(strides, default=1) < 0 or reach != tensor.numel()):
        raise ValueError("strides that don't fit their tensor")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def plain_call(kwargs: dict[str, Any]) -> Plain:
    return to_plain(kwargs, "an argument of encode")
