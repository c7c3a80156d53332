"""Pictures, videos and reports as files: names checked before a run, nothing half-written after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

#: File extension -> the format's name in Pillow.
PICTURE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
#: A video as one animated file; with an extension of a plain picture it becomes one file per frame.
VIDEO_FORMATS = {".gif": "GIF", ".webp": "WEBP"}
#: Of models that make sound alone (`_sound_files.py`).
SOUND_FORMATS = (".wav",)
FRAMES_PER_SECOND = 16

Writer = Callable[[BinaryIO], None]


def check_picture_file(path: Path, *, video: bool | None = None) -> None:
    """Raises InputError unless `path` can be written and its extension is known (`video=None`: of any kind, or of a
    sound)."""
    suffix = path.suffix.lower()
    allowed = {} if video else dict(PICTURE_FORMATS)
    if video is not False:
        allowed |= VIDEO_FORMATS | {".png": "PNG"}
    if video is None:
        allowed |= dict.fromkeys(SOUND_FORMATS, "")
    if suffix not in allowed:
        what = f"of type '{path.suffix}'" if path.suffix else "without an extension"
        kind = "video" if video else "picture"
        raise InputError(f"Can't write a {kind} {what} ({path}); use one of {', '.join(sorted(allowed))}.")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises InputError if a file can't be written at `path`. Leaves nothing behind."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"The folder {folder} doesn't exist; make it first or choose another place for {path.name}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file in it.")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{path} may not be overwritten; choose another name.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"Can't write into the folder {folder} ({reason}); choose another place.") from None


def read_picture(path: Path) -> Image:
    """The picture of a file. Raises InputError for one that isn't there or isn't a picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            opened.load()
            return opened.copy()
    except FileNotFoundError:
        raise InputError(f"There is no picture {path}.") from None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} can't be read as a picture ({error}).") from None


def numbered(path: Path, count: int) -> list[Path]:
    """`path` itself for one file; for more `name-0.png`, `name-1.png`, ... with as many digits as needed."""
    if count == 1:
        return [path]
    digits = len(str(count - 1))
    return [path.with_name(f"{path.stem}-{i:0{digits}d}{path.suffix}") for i in range(count)]


def picture_writers(path: Path, images: Sequence[Image]) -> list[tuple[Path, Writer]]:
    """One file for each picture, to be written by `write_files`."""
    return [(name, _still(image, name)) for name, image in zip(numbered(path, len(images)), images, strict=True)]


def video_writers(path: Path, videos: Sequence[Sequence[Image]]) -> list[tuple[Path, Writer]]:
    """One animated file for each video, or one file for each frame if the extension is that of a plain picture."""
    writers: list[tuple[Path, Writer]] = []
    for name, frames in zip(numbered(path, len(videos)), videos, strict=True):
        if name.suffix.lower() in VIDEO_FORMATS:
            writers.append((name, _animation(frames, name)))
        else:
            writers += picture_writers(name, frames)
    return writers


def text_writer(text: str) -> Writer:
    return bytes_writer(text.encode())


def bytes_writer(data: bytes) -> Writer:
    return lambda file: _write_bytes(file, data)


def write_files(files: Sequence[tuple[Path, Writer]]) -> list[Path]:
    """Writes every file under another name first and renames them when all are complete. Returns their paths.

    If anything fails, or Ctrl-C is pressed, no new file is left and an old file of the same name is as it was.
    """
    complete: list[tuple[Path, Path]] = []
    partial: list[Path] = []
    try:
        for path, write in files:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
            partial.append(Path(name))
            with os.fdopen(handle, "wb") as file:
                write(file)
            _give_usual_mode(Path(name))
            complete.append((Path(name), path))
        for temporary, path in complete:
            temporary.replace(path)
    finally:
        for temporary in partial:
            temporary.unlink(missing_ok=True)
    return [path for path, _ in files]


def _give_usual_mode(path: Path) -> None:
    """`mkstemp` makes files that only their owner may read; give what `open` would have given."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _still(image: Image, path: Path) -> Writer:
    form = PICTURE_FORMATS[path.suffix.lower()]
    options = {"quality": 95} if form != "PNG" else {}
    return lambda file: image.convert("RGB").save(file, format=form, **options)


def _animation(frames: Sequence[Image], path: Path) -> Writer:
    form = VIDEO_FORMATS[path.suffix.lower()]

    def write(file: BinaryIO) -> None:
        first, *rest = (frame.convert("RGB") for frame in frames)
        first.save(
            file, format=form, save_all=True, append_images=rest, duration=round(1000 / FRAMES_PER_SECOND), loop=0
        )

    return write


def _write_bytes(file: BinaryIO, data: bytes) -> None:
    file.write(data)
