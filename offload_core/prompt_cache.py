"""Answers of encoders, kept for the next run that asks the same: in memory, and in a folder if one is given.

An answer is kept under the encoder that gave it (content of its files, dtype, kind of device, LoRAs) and the bits of
what it was asked; `phases/_answers.py` makes these names. They are hashes, so no word of a prompt is kept, neither in
memory nor on disk. The files hold tensors and JSON only. What is damaged, too large or no file of ours is left alone,
with a line in the log, and the encoder is asked again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import OffloadError

if TYPE_CHECKING:
    from .phases._plain import Plain

log = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
DISK_BYTES = 1 << 30
_KIND = "answer"
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}")


class PromptCache:
    """Answers by name, the ones used last: up to `memory_bytes` in RAM, up to `disk_bytes` in each folder. Safe to use
    from several threads. What comes out and what was put in share no memory with what is kept."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Plain] = OrderedDict()  # the longest unused first

    @property
    def held_bytes(self) -> int:
        """Bytes of RAM that the answers take."""
        with self._lock:
            return self._held()

    def knows(self, encoder: str, folder: str | None = None) -> bool:
        """Whether any answer of an encoder is kept, by the first half of its names."""
        with self._lock:
            if any(name.startswith(f"{encoder}-") for name in self._kept):
                return True
        return folder is not None and next(Path(folder).glob(f"{encoder}-*.safetensors"), None) is not None

    def get(self, name: str, folder: str | None = None) -> Plain | None:
        """A copy of the answer of that name, None if it isn't kept."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                self._kept.move_to_end(name)
        if kept is None and folder is not None:
            kept = self._read(_file(folder, name))
            if kept is not None:
                self._keep(name, kept)
        return kept and _copy(kept)

    def put(self, name: str, answer: Plain, folder: str | None = None) -> None:
        """Keeps a copy of an answer. That it can't be kept on disk is a line in the log."""
        self._keep(name, _copy(answer))
        if folder is not None:
            self._write(_file(folder, name), answer)

    def release(self, nbytes: int | None = None) -> int:
        """Forgets answers in memory, the longest unused first, until `nbytes` are free; all of them by default. Files
        stay. Returns the bytes."""
        with self._lock:
            return self._drop(nbytes)

    # --- memory ----------------------------------------------------------------------------------------------------

    def _held(self) -> int:
        return sum(answer.nbytes for answer in self._kept.values())

    def _keep(self, name: str, answer: Plain) -> None:
        with self._lock:
            self._kept[name] = answer
            self._kept.move_to_end(name)
            over = self._held() - self.memory_bytes
            if over > 0:
                self._drop(over)

    def _drop(self, nbytes: int | None) -> int:
        freed = 0
        while self._kept and (nbytes is None or freed < nbytes):
            freed += self._kept.popitem(last=False)[1].nbytes
        return freed

    # --- disk --------------------------------------------------------------------------------------------------------

    def _read(self, file: Path) -> Plain | None:
        import torch

        from .phases._plain import from_plain
        from .phases._records import read_plains

        try:
            if file.is_symlink() or not file.is_file():
                return None
            if file.stat().st_size > self.memory_bytes:
                raise OffloadError(f"it is larger than {self.memory_bytes} bytes")
            meta, plains = read_plains(file, _KIND)
            answer = plains["answer"]
            if meta.get("name") != file.stem or meta.get("content") != answer.key():
                raise OffloadError("its content isn't what was written")
            from_plain(answer, torch.device("cpu"))  # whether a value can be made of it
        except Exception as error:  # whatever such a file makes libraries raise: the encoder is asked instead
            log.warning("%s isn't used: %s", file.name, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return answer

    def _write(self, file: Path, answer: Plain) -> None:
        from .phases._records import write_plains

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                file.unlink()
            write_plains(file, _KIND, {"name": file.stem, "content": answer.key()}, {"answer": answer})
            self._shrink(file.parent)
        except (OSError, OffloadError) as error:
            log.warning("An encoder's answer can't be kept in %s: %s", file.parent.name, error)

    def _shrink(self, folder: Path) -> None:
        """Deletes our files that were used the longest ago, until the folder keeps its bound. Other files stay."""
        found = []
        for file in folder.glob("*.safetensors"):
            if _NAME.fullmatch(file.stem) and not file.is_symlink():
                with contextlib.suppress(OSError):
                    status = file.stat()
                    found.append((status.st_mtime_ns, status.st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self.disk_bytes:
                return
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size


def _file(folder: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} isn't the name of an answer")
    return Path(folder) / f"{name}.safetensors"


def _copy(answer: Plain) -> Plain:
    """The same answer in memory of its own, with its strides: kernels choose by them."""
    import torch  # here: the command line has a session before it needs torch

    with torch.inference_mode(False), torch.no_grad():
        return replace(answer, tensors=tuple(tensor.detach().clone() for tensor in answer.tensors))
