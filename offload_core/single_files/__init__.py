"""Models that aren't diffusers folders: one checkpoint, or denoiser, encoders and VAE in files of their own."""

from .listing import ListedFile, ModelFiles, list_model_files
from .resolve import as_files, resolve_files
from .split_files import SplitFiles

__all__ = ["ListedFile", "ModelFiles", "SplitFiles", "as_files", "list_model_files", "resolve_files"]
