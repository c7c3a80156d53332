"""What `bench foresight` asks about: families, sizes, tiny models of them, and all that is foretold of one case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError
from ..session import SilentObserver
from ..settings import OffloadSettings

if TYPE_CHECKING:
    from ..phases import PhaseTrace, TracedCall
    from ..plan import Correction, Plan, Rates

Poll = Callable[[], None]

#: Tiny weights stream, too; and a host budget that never decides.
SETTINGS = OffloadSettings(execution_device="cpu", host_memory="2GiB", resident_below=1024)
ROOMY_BYTES = 1 << 30


@dataclass(frozen=True)
class Size:
    """Of a picture or a video, in pixels and frames."""

    height: int
    width: int
    frames: int | None = None

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames else "")

    @property
    def arguments(self) -> dict[str, int]:
        """Of a pipeline's call."""
        frames = {"num_frames": self.frames} if self.frames else {}
        return {"height": self.height, "width": self.width, **frames}


_PICTURE = (Size(48, 64), Size(112, 80), Size(192, 256))
_PICTURE_BY_32 = (Size(64, 96), Size(128, 96), Size(192, 256))
_VIDEO = (Size(48, 64, 5), Size(112, 80, 9), Size(128, 160, 13))
_VIDEO_BY_32 = (Size(64, 96, 5), Size(128, 96, 9), Size(160, 128, 17))
_VIDEO_OF_9 = (Size(48, 64, 9), Size(112, 80, 9), Size(96, 128, 17))

#: Family -> sizes that its pipeline takes, the smallest first.
FAMILIES: dict[str, tuple[Size, ...]] = {
    "sd15": _PICTURE,
    "sdxl": _PICTURE,
    "sd3": _PICTURE,
    "flux": _PICTURE,
    "flux2_klein": _PICTURE,
    "chroma": _PICTURE,
    "qwen_image": _PICTURE,
    "z_image": _PICTURE,
    "sana": _PICTURE_BY_32,
    "lumina2": _PICTURE,
    "wan22_a14b": _VIDEO,
    "wan22_5b": _VIDEO_BY_32,
    "ltx": _VIDEO_BY_32,
    "ltx2": _VIDEO_BY_32,
    "cogvideox": _VIDEO_OF_9,
    "hunyuan_video": _VIDEO,
    "hunyuan_video15": _VIDEO,
}


@dataclass(frozen=True)
class Case:
    """One job. folder: of the model. more: arguments of the pipeline's call that aren't the family's usual ones."""

    family: str
    size: Size
    folder: Path
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the pipeline's call; guided."""
        from ..tiny_models import FAMILIES as CALLS

        return {**CALLS[self.family].guided_call, **self.size.arguments, **dict(self.more)}

    def __str__(self) -> str:
        return f"{self.family} {self.size}"


class AnyCase(Protocol):
    """What is asked for. folder: of the model. call: the arguments of its pipeline's call."""

    @property
    def folder(self) -> Path: ...

    @property
    def call(self) -> dict[str, Any]: ...


def chosen(names: Sequence[str] | None) -> dict[str, tuple[Size, ...]]:
    """The families of these names with their sizes, all without names. Raises InputError for one that isn't known."""
    unknown = [name for name in names or () if name not in FAMILIES]
    if unknown:
        raise InputError(f"There is no family {unknown[0]!r} here; the families are {', '.join(FAMILIES)}.")
    return {name: FAMILIES[name] for name in names or FAMILIES}


def tiny_folder(family: str, home: Path) -> Path:
    """A tiny model of a family in a folder of `home`, made if it isn't there."""
    from ..tiny_models import save_tiny

    folder = home / family
    return folder if folder.is_dir() else save_tiny(family, folder)


class Foretold:
    """What is foretold of a case: traced once, planned for any budget."""

    def __init__(self, case: AnyCase, poll: Poll, *, tiles: bool = False) -> None:
        """tiles: whether plans may decode in tiles, which is traced then, too. Raises what `phases.foresee` raises."""
        from ..phases import foresee, load
        from ..session import Session

        call = case.call
        prompt, negative = call.pop("prompt"), call.pop("negative_prompt", None)
        handle = load(case.folder, device="cpu", dtype="float32")
        phases = foresee(handle, prompt, negative, session=Session(Polled(poll)), **call)
        self.ways: list[tuple[PhaseTrace, ...]] = [tuple(itertools.islice(way, None if tiles else 1)) for way in phases]

    @property
    def calls(self) -> list[TracedCall]:
        """Every traced call of a component, with a VAE that decodes whole."""
        return [call for ways in self.ways for call in ways[0].calls]

    def plan(self, budget: int, rates: Rates, taught: Correction | None = None) -> Plan:
        """The plan for `budget` bytes of device memory. taught: what an earlier run said of denoising."""
        import torch

        from ..foresight import limits_here
        from ..plan import plan_job

        limits = limits_here(replace(SETTINGS, device_memory=budget), torch.device("cpu"))
        jobs = [[way.job for way in ways] for ways in self.ways]
        if taught is not None:
            jobs[1] = [replace(job, correction=taught) for job in jobs[1]]
        return plan_job(jobs, limits, rates)


class Polled(SilentObserver):
    """An observer that shows nothing and lets a Ctrl-C through, even one that a library swallowed."""

    def __init__(self, poll: Poll) -> None:
        self.check_interrupt = poll  # type: ignore[method-assign]


def failure(error: Exception) -> str:
    """An error in a row: its class and first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
