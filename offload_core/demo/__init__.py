"""A tiny, really trained FLUX model that draws coloured shapes: something to run every phase on without a download.

``model/`` is a plain diffusers folder; ``phase_offload.json`` in it holds the call defaults that suit the model.
``scenes`` makes captions and pictures, ``judge`` reads pictures back, ``train`` makes the weights from nothing.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
