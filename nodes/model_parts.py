"""The files that a model can be put together from, by the kinds of folders that hosts keep them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .file_list import NONE, FileList
from .model_list import CHECKPOINTS

if TYPE_CHECKING:
    from offload_core.single_files import SplitFiles

    from .state import Host


ENDINGS = (".safetensors", ".sft", ".gguf")  # GGUF files are listed here though ComfyUI's own lists leave them out
CLIP_VISION = "clip_vision/"  # what names of encoders that see a picture begin with


class ModelPartFiles:
    """Lists of denoisers, text encoders and VAEs. A checkpoint may serve as a denoiser, its other parts with it."""

    def __init__(self, host: Host) -> None:
        def places(*kinds: tuple[str, str]) -> Callable[[], Sequence[tuple[str, Path]]]:
            def found() -> list[tuple[str, Path]]:
                # A pack for GGUF names folders a second time, under kinds of its own.
                return list(dict.fromkeys((mark, folder) for mark, kind in kinds for folder in host.folders(kind)))

            return found

        self._denoisers = FileList(
            "denoiser",
            ENDINGS,
            places(("", "diffusion_models"), ("", "unet_gguf"), (CHECKPOINTS, "checkpoints")),
            mark_first=True,
        )
        self._encoders = FileList(
            "text encoder",
            ENDINGS,
            places(("", "text_encoders"), ("", "clip_gguf"), (CLIP_VISION, "clip_vision")),
            mark_first=True,
        )
        self._vaes = FileList("VAE", ENDINGS, places(("", "vae")))

    def choices(self) -> dict[str, Callable[[], list[str]]]:
        """The lists that a person chooses from, by the names that schemas call them by."""
        return {
            "denoisers": self._denoisers.names,
            "denoisers_or_none": self._denoisers.names_or_none,
            "encoders_or_none": self._encoders.names_or_none,
            "vaes_or_none": self._vaes.names_or_none,
            "families": families,
        }

    def chosen(self, denoiser: str, denoiser_2: str, encoders: Sequence[str], vae: str, **more: Any) -> SplitFiles:
        """The files of these names, "none" among them; `more` as SplitFiles has it.

        Raises InputError for a name that isn't in its list.
        """
        from offload_core.single_files import SplitFiles

        first, is_checkpoint = self._denoisers.file(denoiser), denoiser.startswith(CHECKPOINTS)
        return SplitFiles(
            checkpoint=first if is_checkpoint else None,
            denoiser=None if is_checkpoint else first,
            denoiser_2=_file(self._denoisers, denoiser_2),
            encoders=tuple(str(file) for name in encoders if (file := _file(self._encoders, name))),
            vae=_file(self._vaes, vae),
            **more,
        )


def families() -> list[str]:
    """What files can be loaded as."""
    from offload_core.single_files.template import FAMILIES

    return ["auto", *FAMILIES]


def _file(files: FileList, name: str) -> Path | None:
    return None if name == NONE else files.file(name)
