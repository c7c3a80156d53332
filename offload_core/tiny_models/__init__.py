"""Tiny random-weight models of the families the project serves, made here in a moment each and without a download.

``save_tiny(name, directory)`` writes a plain diffusers folder; ``one_shot(path, dtype=..., seed=..., **call)`` runs it
whole, which is the reference every staged run must equal; ``FAMILIES`` says how to call each one, ``REQUIRED`` names
the ones every test of the engine should cover, and ``VARIANTS`` are picture-conditioned calls over the same folders.
"""

from .family import Family
from .pictures import mask, picture
from .running import as_pipeline, load_tiny, one_shot, run_all, run_whole, save_tiny
from .table import FAMILIES, REQUIRED
from .variants import VARIANTS, Variant

__all__ = [
    "FAMILIES",
    "REQUIRED",
    "VARIANTS",
    "Family",
    "Variant",
    "as_pipeline",
    "load_tiny",
    "mask",
    "one_shot",
    "picture",
    "run_all",
    "run_whole",
    "save_tiny",
]
