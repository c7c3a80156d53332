"""The rows of `phase-offload families`: every family in every task, each with a model that is made for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .foresight_cases import tiny_folder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from ..tiny_models import Family, Variant


@dataclass(frozen=True)
class FamilyCase:
    """One row. family: its key in the tables of `tiny_models`; title: the name that people know it by. pipeline: the
    class that does the task, None for the folder's own. arguments: of its call."""

    family: str
    title: str
    task: str
    pipeline: type[DiffusionPipeline] | None
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.title}, {self.task}"

    def made(self, home: Path) -> AskedCase:
        """The row with its model, which is made in the folder `home` if it isn't there."""
        from ..tiny_models import as_pipeline

        folder = tiny_folder(self.family, home)
        if self.pipeline is not None:
            copy = home / f"{self.family}-{self.pipeline.__name__}"
            folder = copy if copy.is_dir() else as_pipeline(folder, self.pipeline, copy)
        return AskedCase(self, folder)


@dataclass(frozen=True)
class AskedCase:
    """A row whose model is there."""

    case: FamilyCase
    folder: Path

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the pipeline's call."""
        return dict(self.case.arguments)


def family_cases(names: Sequence[str] | None = None) -> list[FamilyCase]:
    """The rows of the families of these names, of all without names, in the order of the page.

    Raises InputError for a name that isn't one.
    """
    from ..tiny_models import FAMILIES, VARIANTS
    from ..tiny_models.roster import ORDER

    listed = [name for name in [*ORDER, *(name for name in FAMILIES if name not in ORDER)] if FAMILIES[name].title]
    unknown = [name for name in names or () if name not in listed]
    if unknown:
        raise InputError(f"There is no family {unknown[0]!r} here; the families are {', '.join(listed)}.")
    return [case for name in listed if not names or name in names for case in _rows(FAMILIES[name], VARIANTS.values())]


def _rows(family: Family, variants: Iterable[Variant]) -> list[FamilyCase]:
    """Its own task first, with guidance; then the tasks that other calls of its folder do, each once."""
    rows = {family.own_task: FamilyCase(family.name, family.title, family.own_task, None, family.guided_call)}
    for variant in variants:
        if variant.family == family.name and variant.task not in rows:
            case = FamilyCase(family.name, family.title, variant.task, variant.pipeline_class, variant.call)
            rows[variant.task] = case
    return list(rows.values())
