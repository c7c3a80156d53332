"""Saved embeds and latents: where their files are, how they are named, and how they come back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload_core.errors import InputError

from .image_files import next_number, output_target

if TYPE_CHECKING:
    from .state import Host

EMBEDS_ENDING, LATENTS_ENDING = ".embeds.safetensors", ".latents.safetensors"
OUTPUT_MARK = " [output]"  # as the host writes it behind the name of a file that isn't in the input folder


class Record(Protocol):
    def save(self, path: Path) -> Path: ...


def record_places(host: Host) -> Sequence[tuple[str, Path]]:
    """Where saved records are looked for, and what is put behind their names: the input folder, then the output
    folder."""
    return [
        *(("", folder) for folder in host.folders("input")),
        *((OUTPUT_MARK, folder) for folder in host.folders("output")),
    ]


def save_record(host: Host, record: Record, prefix: str, ending: str, size: tuple[int, int] = (0, 0)) -> str:
    """Writes `PREFIX_00001_` with the ending into the output folder, counting on from what is there. Returns the name
    that a Load node knows it by. size: width and height, for %width% and %height% in the prefix.

    Raises InputError for a prefix that leads out of the folder.
    """
    folders = host.folders("output")
    if not folders:
        raise InputError("There is no output folder to save into: give one.")
    target, stem, subfolder = output_target(folders[0], prefix, width=size[0], height=size[1])
    name = f"{stem}_{next_number(target, stem):05}_{ending}"
    record.save(target / name)
    return (f"{subfolder}/{name}" if subfolder else name) + OUTPUT_MARK
