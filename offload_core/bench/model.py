"""Makes a transformer of a given size with random bfloat16 weights, shard by shard, and the inputs of one step.

The folder is an ordinary diffusers component folder: ``config.json``, sharded safetensors, an index. A mark beside
them says what was made; a folder whose mark matches is used again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    import torch

MARK = "bench-model.json"
RECIPE = 2  # raise it when the same ModelSpec makes other bytes
SHARD_BYTES = 256 << 20
STEM = "diffusion_pytorch_model"

#: Architecture -> diffusers class.
CLASSES = {"flux": "FluxTransformer2DModel", "wan": "WanTransformer3DModel"}


@dataclass(frozen=True)
class ModelSpec:
    """A model to make: its diffusers class by short name, and the constructor's arguments."""

    family: str
    config: dict[str, Any]


def flux_like(size_bytes: int) -> ModelSpec:
    """A FLUX transformer of about `size_bytes` in bfloat16: the largest width that leaves it six blocks or more.

    Double to single blocks are about 1 to 2.7, so that each half has about the same bytes, as in FLUX.1.
    """
    for heads in (24, 12, 6, 4, 2):
        base, double, single = _flux_parts(heads)
        group = double + 2.67 * single
        doubles = round((size_bytes - base) / group)
        if doubles >= (4 if heads > 2 else 1) or heads == 2:
            return ModelSpec("flux", _flux_config(heads, max(1, doubles), max(1, round(2.67 * doubles))))
    raise AssertionError("the last width is always taken")


def _flux_parts(heads: int) -> tuple[int, int, int]:
    base = _count_bytes(ModelSpec("flux", _flux_config(heads, 0, 0)))
    double = _count_bytes(ModelSpec("flux", _flux_config(heads, 1, 0))) - base
    single = _count_bytes(ModelSpec("flux", _flux_config(heads, 0, 1))) - base
    return base, double, single


def _flux_config(heads: int, doubles: int, singles: int) -> dict[str, Any]:
    return {
        "num_layers": doubles,
        "num_single_layers": singles,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": 4096 if heads == 24 else 128 * heads,
        "pooled_projection_dim": min(768, 128 * heads),
        "in_channels": 64,
        "guidance_embeds": True,
    }


#: FLUX.1-dev's own shape: 11.9 billion parameters, 22.2 GiB.
FLUX_12B = ModelSpec("flux", _flux_config(24, 19, 38))
#: Wan 2.1 T2V 14B's own shape: 26.6 GiB.
WAN_14B = ModelSpec("wan", {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824})


def model_class(family: str) -> Any:
    """The diffusers class of a family."""
    import diffusers

    return getattr(diffusers, CLASSES[family])


def _on_meta(spec: ModelSpec) -> torch.nn.Module:
    import torch

    with torch.device("meta"):
        return model_class(spec.family)(**spec.config)


def _count_bytes(spec: ModelSpec) -> int:
    return 2 * sum(parameter.numel() for parameter in _on_meta(spec).parameters())


# ------------------------------------------------------------------------------------------------ on disk


def make_model(spec: ModelSpec, folder: Path, on_shard: Callable[[int, int], None] | None = None) -> Path:
    """The folder with the model in it, made unless it's there already. `on_shard` gets shards done and in all.

    Holds at most one shard in memory. Raises InputError for a folder that holds something else.
    """
    if mark_matches(spec, folder):
        return folder
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise InputError(f"The folder {folder} isn't empty and holds no benchmark model: give another --model-dir.")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{STEM}*"):
        old.unlink()
    (folder / MARK).write_text(json.dumps({"state": "unfinished"}))
    _write_shards(spec, folder, on_shard)
    (folder / "config.json").write_text(json.dumps({"_class_name": CLASSES[spec.family], **spec.config}, indent=2))
    (folder / MARK).write_text(json.dumps(_mark(spec, folder)))
    return folder


def mark_matches(spec: ModelSpec, folder: Path) -> bool:
    """Whether the folder holds exactly this model, by its mark and the sizes and headers of its files."""
    try:
        return json.loads((folder / MARK).read_text()) == _mark(spec, folder)
    except (OSError, ValueError):
        return False


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a component folder, in order."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Bytes of all weight files, headers included."""
    return sum(file.stat().st_size for file in weight_files(folder))


def drop_from_page_cache(folder: Path) -> None:
    """Makes the next read of the weight files a cold one, where the system lets us ask for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in weight_files(folder):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())  # dirty pages can't be dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _mark(spec: ModelSpec, folder: Path) -> dict[str, Any]:
    headers = hashlib.sha256()
    for file in weight_files(folder):
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            headers.update(stream.read(size))
        headers.update(f"{file.name} {file.stat().st_size}".encode())
    return {"recipe": RECIPE, "spec": asdict(spec), "files": headers.hexdigest()}


def _write_shards(spec: ModelSpec, folder: Path, on_shard: Callable[[int, int], None] | None) -> None:
    import torch
    from safetensors.torch import save_file

    shapes = {name: value.shape for name, value in _on_meta(spec).state_dict().items()}
    shards = list(_split(shapes))
    where: dict[str, str] = {}
    random = torch.Generator().manual_seed(0)
    for number, names in enumerate(shards, 1):
        file = f"{STEM}-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: _values(name, shapes[name], random) for name in names}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
        if on_shard is not None:
            on_shard(number, len(shards))
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _split(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        if names and held + 2 * shape.numel() > SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += 2 * shape.numel()
    yield names


def _values(name: str, shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """Values that keep activations finite: small normal matrices, scales of norms at one, no biases."""
    import torch

    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16)
    return values.normal_(0.0, 0.5 * shape[1:].numel() ** -0.5, generator=random)


# ------------------------------------------------------------------------------------------------- inputs


def step_inputs(family: str, config: Any, device: str, image_tokens: int, text_tokens: int) -> dict[str, Any]:
    """The keyword arguments of one forward, the same in every process. `config` is the model's own."""
    import torch

    random = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, torch.bfloat16)

    if family == "wan":
        side = max(2, 2 * round((image_tokens / 4) ** 0.5))  # four latent frames
        return {
            "hidden_states": noise(1, config["in_channels"], 4, 2 * side, 2 * side),
            "timestep": torch.tensor([500], device=device),
            "encoder_hidden_states": noise(1, text_tokens, config["text_dim"]),
            "return_dict": False,
        }
    positions = torch.zeros(image_tokens, 3)
    side = max(1, round(image_tokens**0.5))
    positions[:, 1] = torch.arange(image_tokens) // side
    positions[:, 2] = torch.arange(image_tokens) % side
    return {
        "hidden_states": noise(1, image_tokens, config["in_channels"]),
        "encoder_hidden_states": noise(1, text_tokens, config["joint_attention_dim"]),
        "pooled_projections": noise(1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16, device=device),
        "guidance": torch.tensor([3.5], dtype=torch.bfloat16, device=device),
        "img_ids": positions.to(device, torch.bfloat16),
        "txt_ids": torch.zeros(text_tokens, 3, dtype=torch.bfloat16, device=device),
        "return_dict": False,
    }
