"""What a LoRA file is, by its header: its dialect, the family it seems to be for, whether its parts belong together.

No weight is read but alphas, which are single numbers. What the names mean is the work of diffusers' converters; here a
file is only told apart from what no converter could use, so that every route says the same sentence before it loads.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Header, read_header, show
from .errors import ModelError
from .lycoris import changed_shape, factors_by_layer, kind_of, missing_factors, whole_by_layer


@dataclass(frozen=True)
class LoraHeader:
    """dialect: how its weights are named. family: which models it seems to be for, empty if the names don't say.

    layers: how many layers it changes. encodes: whether it changes text encoders. factored: how many of the layers are
    changed by a LoHa or LoKr and not by a pair of matrices; whole: how many have a weight or bias that a whole
    difference is added to.
    """

    dialect: str
    family: str
    layers: int
    encodes: bool
    factored: int = 0
    whole: int = 0


# How the two matrices of a layer end in each spelling: (down, up, dialect). `down` is (rank, in, ...), `up` is
# (out, rank, ...): LoRA, https://arxiv.org/abs/2106.09685, section 4.1, calls them A and B.
_PAIRS: tuple[tuple[str, str, str], ...] = (
    (".lora_A.weight", ".lora_B.weight", "PEFT"),
    (".lora_A.default.weight", ".lora_B.default.weight", "PEFT"),
    (".lora_down.weight", ".lora_up.weight", "Kohya"),
    (".lora.down.weight", ".lora.up.weight", "older diffusers"),
    ("_lora.down.weight", "_lora.up.weight", "older diffusers"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", "older diffusers"),
)

# Weights of LyCORIS (https://github.com/KohakuBlueleaf/LyCORIS) and kin that phases can't apply: (ending, what).
_OTHER_KINDS: tuple[tuple[str, str], ...] = (
    (".oft_blocks", "OFT"),
    (".oft_diag", "OFT"),
    (".set_weight", "replaced weights"),
)

_FLUX = "FLUX, Chroma or HunyuanVideo"  # these have the same names of blocks
# What a name holds, with "." written as "_", and whose it is. The first row that is found decides; more special first.
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("individual_token_refiner", "HunyuanVideo"),
    ("context_embedder_token_refiner", "HunyuanVideo"),
    ("double_stream_modulation_img", "FLUX.2"),
    ("joint_blocks_", "Stable Diffusion 3"),
    ("noise_refiner_", "Z-Image or Lumina 2"),
    ("_img_mlp_net_", "Qwen-Image"),
    ("_txt_mlp_net_", "Qwen-Image"),
    ("single_transformer_blocks_", _FLUX),
    ("single_blocks_", _FLUX),
    ("double_blocks_", _FLUX),
    ("_cross_attn_", "Wan"),
)
# Width of the text that a UNet's cross attention takes in: `cross_attention_dim` in the configs of these models.
_UNETS = {768: "Stable Diffusion 1.5", 1024: "Stable Diffusion 2", 2048: "SDXL"}
_TEXT_TO_UNET = re.compile(r"(down|up|input|output)_blocks_.*attn2_to_[kv]")


def read_lora_header(file: Path) -> LoraHeader:
    """What the file is. Raises ModelError for one that isn't a sound safetensors file, holds no LoRA, is of a kind that
    can't be applied, lacks the partner of a weight, or has partners of different ranks or an alpha that is no number.
    """
    header = read_header(file)
    pairs: dict[str, tuple[str, str]] = {}  # down: (up, dialect)
    for down_end, up_end, dialect in _PAIRS:
        for name in header.tensors:
            if name.endswith(down_end):
                pairs[name] = (name.removesuffix(down_end) + up_end, dialect)
            elif name.endswith(up_end):
                pairs[name.removesuffix(up_end) + down_end] = (name, dialect)
    factors = factors_by_layer(header.tensors)
    whole = whole_by_layer(header.tensors)
    if not pairs and not factors and not whole:
        _check_kind(file, header)
    for down, (up, _) in pairs.items():
        _check_pair(file, header, down, up)
    for layer, names in factors.items():
        _check_factors(file, header, layer, names)
    for names in whole.values():
        _check_whole(file, header, names)
    _check_alphas(file, header)
    dialects = Counter(dialect for _, dialect in pairs.values()) + Counter(map(kind_of, factors.values()))
    dialect = dialects.most_common(1)[0][0] if dialects else "whole differences" if whole else "unknown"
    if dialect not in ("unknown", "LoHa", "LoKr", "whole differences") and any(
        name.startswith("diffusion_model.") for name in header.tensors
    ):
        dialect = "ComfyUI"
    encodes = any(name.startswith(("text_encoder", "lora_te")) for name in header.tensors)
    widths = {down: header.tensors[down].shape[1] for down in pairs} | _widths(header, factors)
    family = _family(widths | _whole_widths(header, whole))
    paired = {_layer_of(down) for down in pairs}
    layers = len(pairs) + len(factors.keys() - paired) + len(whole.keys() - paired - factors.keys())
    return LoraHeader(dialect, family, layers, encodes, len(factors), len(whole))


def is_other_kind(name: str) -> bool:
    """Whether a weight is of a kind that phases can't apply."""
    return name.endswith(tuple(ending for ending, _ in _OTHER_KINDS))


def rank_axis(name: str) -> int | None:
    """Along which axis of a weight its rank lies; None if it isn't half of a pair."""
    for down_end, up_end, _ in _PAIRS:
        if name.endswith((down_end, up_end)):
            return 0 if name.endswith(down_end) else 1
    return None


def _layer_of(down: str) -> str:
    """The layer of a pair, by the name of its first half."""
    return next(down.removesuffix(end) for end, _, _ in _PAIRS if down.endswith(end))


def _check_kind(file: Path, header: Header) -> None:
    """A file without any pair of a known spelling: refused, unless its names say LoRA and a converter may know it."""
    kinds = {kind: None for ending, kind in _OTHER_KINDS if any(name.endswith(ending) for name in header.tensors)}
    if kinds:
        raise ModelError(
            f"The LoRA {file.name} holds {' and '.join(kinds)}, which phases don't apply. Use it converted to an "
            "ordinary LoRA (pairs of lora_down and lora_up)."
        )
    if not any("lora" in name.lower() for name in header.tensors):
        raise ModelError(
            f"{file.name} holds no LoRA weights (none of its {len(header.tensors)} tensors is named like one)."
        )


def _check_pair(file: Path, header: Header, down: str, up: str) -> None:
    for name, partner in ((down, up), (up, down)):
        if name not in header.tensors:
            raise ModelError(
                f"The LoRA {file.name} has {show(partner)} without its partner {show(name)}: it was cut or saved in "
                "part. Download it again."
            )
    a, b = header.tensors[down].shape, header.tensors[up].shape
    if len(a) < 2 or len(b) < 2:
        raise ModelError(f"The LoRA {file.name} is damaged: {show(down)} or its partner is no matrix.")
    grouped = len(b) > 2 and b[1] and a[0] % b[1] == 0  # a convolution in groups has a part of the rank in each
    if a[0] != b[1] and not grouped:
        raise ModelError(
            f"The LoRA {file.name} is damaged: {show(down)} has rank {a[0]} and {show(up)} has rank {b[1]}. "
            "Download it again."
        )


def _check_factors(file: Path, header: Header, layer: str, names: dict[str, str]) -> None:
    """LoHa or LoKr of a layer: all of its factors, of sizes that can be multiplied."""
    factors = names.keys() - {"alpha", "dora_scale"}
    if missing := missing_factors(factors):
        raise ModelError(
            f"The LoRA {file.name} has {show(names[min(factors)])} without {show(f'{layer}.{missing[0]}')}: it was cut "
            "or saved in part. Download it again."
        )
    if "dora_scale" in names:
        raise ModelError(
            f"The LoRA {file.name} holds {kind_of(factors)} with DoRA ({show(names['dora_scale'])}), which phases "
            "don't apply. Use one without DoRA."
        )
    try:
        changed_shape({what: header.tensors[names[what]].shape for what in factors})
    except ValueError as error:
        raise ModelError(f"The LoRA {file.name} is damaged at {show(layer)}: {error}. Download it again.") from error


def _check_whole(file: Path, header: Header, names: dict[str, str]) -> None:
    """A difference that is no tensor of numbers to add, such as an empty marker."""
    for name in names.values():
        entry = header.tensors[name]
        if not entry.shape or 0 in entry.shape:
            raise ModelError(f"The LoRA {file.name} is damaged: {show(name)} has the shape {list(entry.shape)}.")


def _check_alphas(file: Path, header: Header) -> None:
    """A NaN would spread to every weight of its layer, and the picture would be black."""
    from safetensors import safe_open

    alphas = [name for name, entry in header.tensors.items() if name.endswith(".alpha") and math.prod(entry.shape) == 1]
    if not alphas:
        return
    with safe_open(file, framework="pt") as weights:
        for name in alphas:
            value = float(weights.get_tensor(name))
            if not math.isfinite(value):
                raise ModelError(
                    f"The LoRA {file.name} is damaged: {show(name)} is {value}, not a number. Download it again."
                )


def _widths(header: Header, factors: dict[str, dict[str, str]]) -> dict[str, int]:
    """How many inputs each layer of LoHa or LoKr has."""
    shapes = {
        layer: {what: header.tensors[name].shape for what, name in names.items()} for layer, names in factors.items()
    }
    return {layer: changed_shape(of)[1] for layer, of in shapes.items()}


def _whole_widths(header: Header, whole: dict[str, dict[str, str]]) -> dict[str, int]:
    """How many inputs each layer has whose weight is changed whole; 1 where only a bias or a norm is."""
    shapes = {layer: header.tensors[next(iter(names.values()))].shape for layer, names in whole.items()}
    return {layer: shape[1] if len(shape) > 1 else 1 for layer, shape in shapes.items()}


def _family(widths_by_name: dict[str, int]) -> str:
    widths = {
        width for name, width in widths_by_name.items() if _TEXT_TO_UNET.search(name.replace(".", "_"))
    } & _UNETS.keys()
    if widths:
        return _UNETS[widths.pop()]
    names = [name.replace(".", "_") for name in widths_by_name]
    for mark, family in _FAMILIES:
        if any(mark in name for name in names):
            return family
    return ""
