"""Models that aren't diffusers folders: one checkpoint, or denoiser, encoders and VAE in files of their own."""

from .resolve import as_files, resolve_files
from .split_files import SplitFiles

__all__ = ["SplitFiles", "as_files", "resolve_files"]
