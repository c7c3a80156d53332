"""The ComfyUI side: node bodies, their schemas, the V3 adapter, and a small graph runner that needs no ComfyUI.

Imported as `phase_offload_nodes` (ComfyUI has a module called `nodes`). `host.py`, `comfy_memory.py` and `comfy_v3.py`
import ComfyUI, when they are asked for something; everything else runs without it.
"""

from offload_core import __version__

__all__ = ["__version__"]
