"""What the nodes that save and load embeds and latents have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_core.errors import OffloadError

from ..schema import Input, Output

if TYPE_CHECKING:
    from ..file_list import FileList

FILE = Output("file", "STRING", "The name of the file that was written, as the Load node knows it.")


def prefix_input(default: str) -> Input:
    return Input(
        "filename_prefix",
        "STRING",
        "How the file's name begins, below ComfyUI's output folder; a / makes a subfolder.",
        default=default,
    )


def file_input(options: str) -> Input:
    return Input(
        "file",
        "COMBO",
        "A file in ComfyUI's input folder, or in the output folder if [output] stands behind it.",
        options=options,
    )


def file_fingerprint(files: FileList, name: Any) -> str:
    """Changes when the file is written again. A file that can't be used has its error as the fingerprint."""
    try:
        found = files.file(str(name)).stat()
        return f"{found.st_mtime_ns} {found.st_size}"
    except OffloadError as error:
        return f"unusable: {error}"
