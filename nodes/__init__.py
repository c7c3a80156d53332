"""The ComfyUI side: node bodies, their schemas, the V3 adapter, and a small graph runner that needs no ComfyUI.

Imported as `phase_offload_nodes` (ComfyUI has a module called `nodes`). `host.py` is the only module that imports
ComfyUI; everything else runs without it.
"""

from offload_core import __version__

__all__ = ["__version__"]
