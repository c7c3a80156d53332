"""LoHa and LoKr: a change of a layer's weight, kept as a product of small factors that is no pair of matrices.

LoHa (FedPara, https://arxiv.org/abs/2108.06098, proposition 2) is the elementwise product of two matrices of low rank;
LoKr (KronA, https://arxiv.org/abs/2212.10650, section 4) a Kronecker product, each side of which may be of low rank.
Names, the Tucker form of convolutions and the scale are those of LyCORIS (https://arxiv.org/abs/2309.14859, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
FACTORS = (*_LOHA, *_LOKR)
# What is added to a layer whole, by the endings of names: of LyCORIS' "full" kind, and of its kind for norms.
_WHOLE = {"diff": "weight", "w_norm": "weight", "diff_b": "bias", "b_norm": "bias"}

Shapes = Mapping[str, tuple[int, ...]]


def factors_by_layer(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of the names of a file: for each layer that has factors, its full names by what they are, with its `alpha` and
    `dora_scale` if there are any."""
    found: dict[str, dict[str, str]] = {}
    beside: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, factor = name.rpartition(".")
        if factor in FACTORS:
            found.setdefault(layer, {})[factor] = name
        elif factor in ("alpha", "dora_scale"):
            beside.setdefault(layer, {})[factor] = name
    return {layer: factors | beside.get(layer, {}) for layer, factors in found.items()}


def whole_by_layer(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of the names of a file: for each layer that something whole is added to, the full names by what they are added
    to ("weight" or "bias")."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, ending = name.rpartition(".")
        if layer and ending in _WHOLE:
            found.setdefault(layer, {})[_WHOLE[ending]] = name
    return found


def kind_of(factors: Iterable[str]) -> str:
    """LoHa or LoKr, by the names of the factors of a layer."""
    return "LoHa" if any(factor in _LOHA for factor in factors) else "LoKr"


def missing_factors(factors: Iterable[str]) -> list[str]:
    """Which factors a layer would need beside those that it has."""
    has = set(factors)
    if kind_of(has) == "LoHa":
        wanted = set(_LOHA[:4])
        if has & {"hada_t1", "hada_t2"}:
            wanted |= {"hada_t1", "hada_t2"}
    else:
        wanted = {"lokr_t2", "lokr_w2_a"} if "lokr_t2" in has else set()
        for side in ("lokr_w1", "lokr_w2"):
            if side not in has:
                wanted |= {f"{side}_a", f"{side}_b"} if has & {f"{side}_a", f"{side}_b"} else {side}
    return sorted(wanted - has)


def changed_shape(shapes: Shapes) -> tuple[int, int]:
    """(out, in) of the weight that complete factors change, a convolution's kernel counted in `in`.

    Raises ValueError for factors that can't be multiplied.
    """
    if kind_of(shapes) == "LoHa":
        first, second = (_product(shapes, f"hada_w{i}", f"hada_t{i}") for i in (1, 2))
        if first != second:
            raise ValueError(f"the two products of a LoHa have the shapes {first} and {second}")
        return first
    left, right = _product(shapes, "lokr_w1", ""), _product(shapes, "lokr_w2", "lokr_t2")
    return left[0] * right[0], left[1] * right[1]


def _product(shapes: Shapes, side: str, core: str) -> tuple[int, int]:
    """(out, in) of a side: whole, a product of two, or a product of two and a core."""
    if side in shapes:
        whole = shapes[side]
        if len(whole) < 2:
            raise ValueError(f"{side} is no matrix")
        return whole[0], math.prod(whole[1:])
    a, b = shapes[f"{side}_a"], shapes[f"{side}_b"]
    if len(a) != 2 or len(b) != 2:
        raise ValueError(f"{side}_a or {side}_b is no matrix")
    if core in shapes:
        t = shapes[core]
        if len(t) < 3 or t[:2] != (a[0], b[0]):
            raise ValueError(f"{core} has the shape {t} beside ranks {a[0]} and {b[0]}")
        return a[1], b[1] * math.prod(t[2:])
    if a[1] != b[0]:
        raise ValueError(f"{side}_a has rank {a[1]} and {side}_b has rank {b[0]}")
    return a[0], b[1]


def scale_of(shapes: Shapes, alpha: float | None) -> float:
    """alpha / rank; 1 without an alpha, and for a LoKr of two whole matrices, which has no rank."""
    if kind_of(shapes) == "LoHa":
        rank = shapes["hada_w1_b"][0]
    else:
        ranks = [shapes[b][0] for b in ("lokr_w2_b", "lokr_w1_b") if b.removesuffix("_b") not in shapes]
        if not ranks:
            return 1.0
        rank = ranks[0]
    return 1.0 if alpha is None else alpha / rank


def difference(factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The change of the weight before it is scaled: float32, (out, in * kernel).

    Factors of half precision are multiplied in float32: a product of small numbers would vanish in float16.
    """
    real = {name: factor.float() for name, factor in factors.items()}
    if kind_of(real) == "LoHa":
        return _multiplied(real, "hada_w1", "hada_t1") * _multiplied(real, "hada_w2", "hada_t2")
    return torch.kron(_multiplied(real, "lokr_w1", ""), _multiplied(real, "lokr_w2", "lokr_t2"))


def _multiplied(factors: Mapping[str, torch.Tensor], side: str, core: str) -> torch.Tensor:
    if side in factors:
        return factors[side].flatten(1)
    a, b = factors[f"{side}_a"], factors[f"{side}_b"]
    if core in factors:  # the core is (rank, rank, *kernel), a is (rank, out) and b is (rank, in)
        return torch.einsum("ij...,ip,jr->pr...", factors[core], a, b).flatten(1)
    return a @ b
