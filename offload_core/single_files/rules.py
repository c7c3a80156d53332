"""From the names in a file to the names in a library: a table of rules per layout, applied to a header.

A rule says what a tensor of the file becomes: one weight under another name, several weights that are its rows in
order, or one whose halves change places. Nothing is read: the result says where each weight's bytes lie.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..checkpoint import DTYPES, Header, TensorEntry, short_path, show
from ..errors import ModelError
from ..file_reader import FileRange
from ..packing import Packing
from ..stored_weight import StoredWeight
from .packed_entries import PackedEntries

_FIELDS = {"n": r"\d+", "m": r"\d+", "p": "weight|bias", "rest": ".+"}
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """What the tensors called `source` become. {n} and {m} stand for numbers, {p} for weight or bias, {rest} for
    anything; the targets repeat them.

    how: "rows", dealt to the targets in order, `shares` of them each; "swapped", the second half before the first;
    "transposed"; "dropped", not needed (and no target).
    """

    source: str
    targets: tuple[str, ...]
    shares: tuple[int, ...] = (1,)
    how: Literal["rows", "swapped", "transposed", "dropped"] = "rows"


def rename(source: str, target: str) -> Rule:
    """The same tensor under another name."""
    return Rule(source, (target,))


def keep(source: str) -> Rule:
    """The same tensor under the same name."""
    return Rule(source, (source,))


def split(source: str, *targets: str, shares: tuple[int, ...] = ()) -> Rule:
    """A fused tensor: its rows, in equal parts or in these shares, are those of the targets."""
    return Rule(source, targets, shares or (1,) * len(targets))


def swap(source: str, target: str) -> Rule:
    """A tensor of two halves that diffusers has the other way round: (shift, scale) there, (scale, shift) here."""
    return Rule(source, (target,), how="swapped")


def transpose(source: str, target: str) -> Rule:
    """A matrix that is multiplied from the other side."""
    return Rule(source, (target,), how="transposed")


def drop(source: str) -> Rule:
    """A tensor that the library doesn't need."""
    return Rule(source, (), how="dropped")


@dataclass(frozen=True)
class Converted:
    """stored: by the library's name. unknown: names in the file that no rule is for."""

    stored: dict[str, StoredWeight]
    unknown: tuple[str, ...]


def convert(path: Path, header: Header, prefix: str, rules: Iterable[Rule]) -> Converted:
    """Where the weights of the part below `prefix` lie in a file. The first rule that fits a name counts.

    Raises ModelError for a tensor that can't be dealt as its rule says.
    """
    by_start: dict[str, list[tuple[re.Pattern[str], Rule]]] = defaultdict(list)
    for rule in rules:
        start = rule.source.split(".")[0]
        by_start["" if "{" in start else start].append((_pattern(rule.source), rule))
    stored: dict[str, StoredWeight] = {}
    unknown: list[str] = []
    packed = PackedEntries(path, header, prefix)
    for full_name, entry in header.tensors.items():
        if not full_name.startswith(prefix) or full_name in packed.beside:
            continue
        name = full_name.removeprefix(prefix)
        for pattern, rule in (*by_start.get(name.split(".")[0], ()), *by_start.get("", ())):
            match = pattern.fullmatch(name)
            if match:
                for target, weight in _apply(rule, full_name, entry, path, header.data_start, packed):
                    stored[fill_in(target, match.groupdict())] = weight
                break
        else:
            unknown.append(full_name)
    return Converted(stored, tuple(unknown))


def fill_in(template: str, fields: Mapping[str, str]) -> str:
    """A template with its fields replaced."""
    return _FIELD.sub(lambda match: fields[match[1]], template) if "{" in template else template


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = _FIELD.split(template)
    text = [re.escape(part) if index % 2 == 0 else f"(?P<{part}>{_FIELDS[part]})" for index, part in enumerate(parts)]
    return re.compile("".join(text))


def _apply(
    rule: Rule, name: str, entry: TensorEntry, path: Path, data_start: int, packed: PackedEntries
) -> Iterable[tuple[str, StoredWeight]]:
    if rule.how == "dropped":
        return
    if name not in packed:
        dtype = DTYPES.get(entry.dtype, (0, None))[1]
        if dtype is None:
            what = f"{show(name)} of {short_path(path)} is of the dtype {entry.dtype}"
            raise ModelError(f"{what}, which torch doesn't have.")
        yield from _dealt(rule, name, entry, path, data_start, dtype)
        return
    if rule.how == "transposed":
        raise ModelError(
            f"{show(name)} of {short_path(path)} is packed and lies the wrong way round. Use another file."
        )
    scale = packed.scale_of(name)
    scales = _scales(rule, *scale, path, data_start) if scale is not None else {}
    for target, weight in _dealt(rule, name, entry, path, data_start, packed.dtype):
        yield target, replace(weight, packing=Packing(packed.kind_of(name), scales.get(target)))


def _scales(rule: Rule, name: str, entry: TensorEntry, path: Path, data_start: int) -> dict[str, StoredWeight]:
    """The scale of each weight that a rule makes: dealt like the rows it is for, or the same for all."""
    dtype = DTYPES[entry.dtype][1] or ""
    if math.prod(entry.shape) > 1:
        return dict(_dealt(rule, name, entry, path, data_start, dtype))
    one = StoredWeight(dtype, entry.shape, (FileRange(path, data_start + entry.begin, entry.nbytes),))
    return dict.fromkeys(rule.targets, one)


def _dealt(
    rule: Rule, name: str, entry: TensorEntry, path: Path, data_start: int, dtype: str
) -> Iterable[tuple[str, StoredWeight]]:
    begin, shape = data_start + entry.begin, entry.shape
    if rule.how == "transposed":
        if len(shape) != 2:
            raise _bad_shape(name, path, shape, "isn't a matrix")
        piece = FileRange(path, begin, entry.nbytes)
        yield rule.targets[0], StoredWeight(dtype, (shape[1], shape[0]), (piece,), "transposed")
        return
    shares = (1, 1) if rule.how == "swapped" else rule.shares
    if shares == (1,):
        yield rule.targets[0], StoredWeight(dtype, shape, (FileRange(path, begin, entry.nbytes),))
        return
    if not shape or shape[0] % sum(shares):
        raise _bad_shape(name, path, shape, f"can't be dealt in {sum(shares)} equal parts")
    row_bytes, rows = entry.nbytes // max(shape[0], 1), shape[0] // sum(shares)
    pieces, position = [], begin
    for share in shares:
        pieces.append(FileRange(path, position, share * rows * row_bytes))
        position += share * rows * row_bytes
    if rule.how == "swapped":
        yield rule.targets[0], StoredWeight(dtype, shape, (pieces[1], pieces[0]))
        return
    for target, share, piece in zip(rule.targets, shares, pieces, strict=True):
        yield target, StoredWeight(dtype, (share * rows, *shape[1:]), (piece,))


def _bad_shape(name: str, path: Path, shape: tuple[int, ...], what: str) -> ModelError:
    return ModelError(
        f"{show(name)} of {short_path(path)} has the shape {list(shape)}, which {what}. Download it again."
    )
