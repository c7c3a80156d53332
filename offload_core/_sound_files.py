"""Sounds as files: WAV of 24 bits, which every player reads, by Python's own `wave`."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ._picture_files import SOUND_FORMATS, Writer, check_writable, numbered
from .errors import InputError

if TYPE_CHECKING:
    import torch

_BYTES = 3  # of a sample
_LOUDEST = 2**23 - 1


def check_sound_file(path: Path) -> None:
    """Raises InputError unless `path` can be written and has the extension of a sound."""
    if path.suffix.lower() not in SOUND_FORMATS:
        what = f"of type '{path.suffix}'" if path.suffix else "without an extension"
        raise InputError(f"Can't write a sound {what} ({path}); use {' or '.join(SOUND_FORMATS)}.")
    check_writable(path)


def sound_writers(path: Path, waveform: torch.Tensor, rate: int) -> list[tuple[Path, Writer]]:
    """One file for each sound, to be written by `write_files`.

    waveform: float32 (B, channels, samples) from -1 to 1; what is louder is cut off there. rate: samples a second.
    """
    sounds = waveform.cpu().numpy()
    return [(name, _wav(sound, rate)) for name, sound in zip(numbered(path, len(sounds)), sounds, strict=True)]


def _wav(sound: np.ndarray, rate: int) -> Writer:
    def write(file: BinaryIO) -> None:
        with wave.open(file, "wb") as out:
            out.setnchannels(len(sound))
            out.setsampwidth(_BYTES)
            out.setframerate(rate)
            out.writeframes(_in_24_bits(sound))

    return write


def _in_24_bits(sound: np.ndarray) -> bytes:
    """(channels, samples) -> the three lower bytes of each sample, lowest first, channel after channel."""
    numbers = np.rint(np.clip(sound.T.astype(np.float64), -1, 1) * _LOUDEST).astype("<i4")
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 4)[:, :_BYTES].tobytes()
