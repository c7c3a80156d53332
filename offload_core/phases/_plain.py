"""Plain data: what a pipeline passes between its parts, as JSON plus CPU tensors that alias nothing.

Calls and results of components cross the border between phases in this form. It can be hashed (to find a record by
what was asked), kept in memory, pickled, and saved. What it can't express is refused by name, never approximated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import RecordError


@dataclass(frozen=True, eq=False)
class Plain:
    """A value as a JSON-able `structure` and the `tensors` it refers to by index (dense, on the CPU)."""

    structure: Any
    tensors: tuple[torch.Tensor, ...] = ()

    def key(self) -> str:
        """A hash of content: equal values give equal keys on any device and in any process."""
        digest = hashlib.sha256(json.dumps(self.structure, sort_keys=True).encode())
        for tensor in self.tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def to_plain(value: Any, where: str) -> Plain:
    """The plain form of `value`. Raises RecordError naming `where` for a value that isn't data."""
    tensors: list[torch.Tensor] = []
    return Plain(_pack(value, tensors, where), tuple(tensors))


def from_plain(plain: Plain, device: torch.device) -> Any:
    """The value again, its tensors fresh copies on `device`."""
    return _unpack(plain.structure, plain.tensors, device)


def _keep(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    with torch.inference_mode(False), torch.no_grad():
        tensors.append(tensor.detach().to("cpu", copy=True))  # keeps channels-last: kernels choose by strides
    return len(tensors) - 1


def _pack(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    from PIL import Image

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": _keep(value, tensors)}
    if isinstance(value, TrackedSequence):
        return {"sequence": [_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(value.kept())]}
    if isinstance(value, TrackedOutput):
        fields = value.kept()
        return {"output": [[name, _pack(item, tensors, f"{where}.{name}")] for name, item in fields.items()]}
    if value is PRUNED:
        return {"pruned": True}
    if isinstance(value, list):
        return {"list": [_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": [[name, _pack(item, tensors, f"{where}.{name}")] for name, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "execution"}
    if isinstance(value, torch.Generator):
        return {"generator": _keep(value.get_state(), tensors)}
    if isinstance(value, Image.Image):
        return {"image": _keep(_as_png(value, where), tensors)}
    if isinstance(value, np.ndarray):
        return {"array": _keep(torch.from_numpy(np.ascontiguousarray(value)), tensors)}
    if isinstance(value, np.generic):
        return _pack(value.item(), tensors, where)
    if type(value).__name__ == "DiagonalGaussianDistribution":
        return {"gaussian": _keep(value.parameters, tensors), "deterministic": bool(value.deterministic)}
    raise RecordError(
        f"{where} is a {type(value).__name__}, which can't be kept between phases. Pass it to the phase that uses it."
    )


def _unpack(node: Any, tensors: tuple[torch.Tensor, ...], device: torch.device) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content), *extra) = node.items()
    if kind == "tensor":
        return tensors[content].to(device, copy=True)
    if kind == "list":
        return [_unpack(item, tensors, device) for item in content]
    if kind == "tuple":
        return tuple(_unpack(item, tensors, device) for item in content)
    if kind == "dict":
        return {name: _unpack(item, tensors, device) for name, item in content}
    if kind == "sequence":
        return TrackedSequence([_unpack(item, tensors, device) for item in content])
    if kind == "output":
        return TrackedOutput({name: _unpack(item, tensors, device) for name, item in content})
    if kind == "pruned":
        return PRUNED
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return device
    if kind == "generator":
        generator = torch.Generator("cpu")
        generator.set_state(tensors[content].clone())
        return generator
    if kind == "image":
        from PIL import Image

        image = Image.open(io.BytesIO(tensors[content].numpy().tobytes()))
        image.load()
        return image
    if kind == "array":
        return tensors[content].numpy().copy()
    if kind == "gaussian":
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return DiagonalGaussianDistribution(tensors[content].to(device, copy=True), dict(extra)["deterministic"])
    raise RecordError(f"The record holds a value of an unknown kind {kind!r}. Make it again with this version.")


def _as_png(image: Any, where: str) -> torch.Tensor:
    """A picture as the bytes of a PNG, which keeps palettes and bit depths."""
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except OSError:
        raise RecordError(f"{where} is a picture of mode {image.mode}; convert it to RGB.") from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


class _Pruned:
    """Stands where a component returned something that nobody looked at, so it wasn't kept."""

    def __repr__(self) -> str:
        return "PRUNED"


PRUNED = _Pruned()


class RecordMissing(BaseException):
    """Ends the pipeline's call when it asks for an encoding that no record holds. Not an Exception: no handler may
    swallow it. `component` is None if the record is there but the part asked for wasn't kept."""

    def __init__(self, component: str | None = None) -> None:
        super().__init__(component)
        self.component = component


def _present(value: Any) -> Any:
    if value is PRUNED:
        raise RecordMissing
    return value


class TrackedSequence(tuple):
    """A tuple of an encoder's results (hidden states) that notes which items are used, so that only those are kept.

    Read as a whole (as C code does), it counts as used whole.
    """

    _used: set[int]

    def __new__(cls, items: Any) -> TrackedSequence:
        self = super().__new__(cls, items)
        self._used = set()
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        self._used.add(range(len(self))[index])
        return _present(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def kept(self) -> list[Any]:
        items = [tuple.__getitem__(self, i) for i in range(len(self))]
        return [item if not self._used or i in self._used else PRUNED for i, item in enumerate(items)]


class TrackedOutput:
    """Behaves like a model output (attributes, string and integer keys) and notes which fields are used.

    A language model used as an encoder also returns logits and caches that no pipeline reads; keeping only what was
    read makes records as small as the embeddings themselves.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._used: set[str] = set()

    @classmethod
    def of(cls, output: Any) -> TrackedOutput:
        return cls({field.name: _track(getattr(output, field.name)) for field in dataclasses.fields(output)})

    def kept(self) -> dict[str, Any]:
        return {name: value if value is None or name in self._used else PRUNED for name, value in self._fields.items()}

    def _read(self, name: str) -> Any:
        self._used.add(name)
        return _present(self._fields[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(f"The encoder's output has no {name}")
        return self._read(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._read(key)
        names = self.keys()
        if isinstance(key, slice):
            return tuple(self._read(name) for name in names[key])
        return self._read(names[key])

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        return [name for name, value in self._fields.items() if value is not None]

    def to_tuple(self) -> tuple[Any, ...]:
        return self[:]


def _track(value: Any) -> Any:
    return TrackedSequence(value) if isinstance(value, tuple | list) else value


def tracked(output: Any) -> Any:
    """What a recording encoder hands to the pipeline: the same values, noting what is used of them."""
    from diffusers.utils import BaseOutput
    from transformers.utils import ModelOutput

    if isinstance(output, ModelOutput | BaseOutput):
        return TrackedOutput.of(output)
    return _track(output)
