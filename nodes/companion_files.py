"""The files that a model is loaded with beside its own: ControlNets, IP-Adapters, and their image encoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .file_list import FileList

if TYPE_CHECKING:
    from .state import Host

OWN_ENCODER = "model's own"  # a choice of no file


class CompanionFiles:
    """Their lists, from the folders that hosts keep them in. A kind of folder that a host lacks is an empty one."""

    def __init__(self, host: Host) -> None:
        def places(kind: str) -> Callable[[], Sequence[tuple[str, Path]]]:
            return lambda: [("", folder) for folder in host.folders(kind)]

        self.controlnets = FileList("ControlNet", (".safetensors", ".sft"), places("controlnet"))
        self.ip_adapters = FileList("IP-Adapter", ".safetensors", places("ipadapter"))
        self._encoders = FileList("image encoder", (".safetensors", ".sft"), places("clip_vision"))

    def choices(self) -> dict[str, Callable[[], list[str]]]:
        """The lists that a person chooses from, by the names that schemas call them by."""
        return {
            "controlnets": self.controlnets.names,
            "ip_adapters": self.ip_adapters.names,
            "image_encoders": lambda: [OWN_ENCODER, *self._encoders.names_or_none()[1:]],
        }

    def encoder(self, name: str) -> Path | None:
        """The file of an image encoder, None for the model's own. Raises InputError for a name not in the list."""
        return None if name == OWN_ENCODER else self._encoders.file(name)


def content(*files: Path | None) -> str:
    """Changes with the content of these files, and with a config that lies beside one."""
    from offload_core.checkpoint import content_mark

    marks = [content_mark(file) for file in files if file is not None]
    configs = [file.parent / "config.json" for file in files if file is not None]
    return " ".join([*marks, *(str(config.stat().st_mtime_ns) for config in configs if config.is_file())])
