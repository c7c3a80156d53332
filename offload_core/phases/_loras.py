"""LoRA files, applied to the components of a phase right after they are loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_header
from ..errors import InputError, ModelError

if TYPE_CHECKING:
    from ._scope import Phase


@dataclass(frozen=True)
class Lora:
    """A LoRA file, its strength (1.0 is as trained) and a fingerprint of the file."""

    path: str = field(repr=False)
    scale: float
    fingerprint: str = field(repr=False)

    def file(self) -> Path:
        """The file, unless it changed since the handle was made (ModelError)."""
        if _fingerprint(Path(self.path)) != self.fingerprint:
            raise ModelError(f"The LoRA {Path(self.path).name} changed since the model was loaded. Load both again.")
        return Path(self.path)


def as_loras(loras: Sequence[Any]) -> tuple[Lora, ...]:
    """LoRAs from paths or (path, scale) pairs. Raises ModelError for a file that isn't a LoRA in safetensors."""
    return tuple(_as_lora(item) for item in loras)


def _as_lora(item: Any) -> Lora:
    path, scale = item if isinstance(item, tuple) else (item, 1.0)
    if not isinstance(path, str | os.PathLike) or not isinstance(scale, int | float):
        raise InputError(f"A LoRA is a path or a (path, scale) pair, not {item!r}.")
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"There is no LoRA file {file.name} in {file.parent.name or '.'}.")
    if file.suffix != ".safetensors":
        raise ModelError(f"The LoRA {file.name} isn't a safetensors file; pickled weights aren't loaded. Convert it.")
    names = read_header(file).tensors
    if not any("lora" in name.lower() for name in names):
        raise ModelError(f"{file.name} holds no LoRA weights (none of its {len(names)} tensors is named like one).")
    return Lora(str(file.resolve()), float(scale), _fingerprint(file))


def _fingerprint(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        return "gone"
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def plan_loras(phase: Phase, owned: set[str]) -> None:
    """Arranges that each owned component that a LoRA names gets it when it is loaded."""
    loras = phase.handle.loras
    if not loras:
        return
    cls = type(phase.pipeline)
    if not hasattr(cls, "lora_state_dict"):
        raise InputError(f"{cls.__name__} can't load LoRAs. Load the model without them.")
    weights: list[tuple[int, Lora, dict[str, Any]]] = []
    for index, lora in enumerate(loras):
        file = lora.file()
        state = cls.lora_state_dict(str(file.parent), weight_name=file.name, local_files_only=True)
        weights.append((index, lora, state[0] if isinstance(state, tuple) else state))
    for name in owned & phase.components.keys():
        mine = [(i, lora, part) for i, lora, state in weights if (part := _for_component(state, name))]
        if mine:
            phase.components[name].after_load = lambda module, mine=mine, name=name: _apply(module, name, mine)
    named = [lora for _, lora, state in weights if not any(_for_component(state, name) for name in phase.components)]
    if named:
        raise ModelError(
            f"The LoRA {Path(named[0].path).name} is for another kind of model: none of its weights belongs to a "
            f"component of {cls.__name__} ({', '.join(phase.components)})."
        )


def _for_component(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith(f"{name}.")}


def _apply(module: Any, name: str, loras: list[tuple[int, Lora, dict[str, Any]]]) -> None:
    if not hasattr(module, "load_lora_adapter"):
        raise InputError(f"The LoRA has weights for {name}, and {type(module).__name__} can't take them.")
    adapters = []
    for index, lora, state in loras:
        adapters.append((f"phase_offload_{index}", lora.scale))
        module.load_lora_adapter(state, prefix=name, adapter_name=adapters[-1][0])
    module.set_adapters([adapter for adapter, _ in adapters], [scale for _, scale in adapters])
