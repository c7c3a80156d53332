"""Text encoders that can also see, in files that hold only what they need for texts."""

from __future__ import annotations

from dataclasses import replace

from .layouts.gemma import sees
from .recognise import FoundPart
from .template import TemplatePart


def as_held(part: TemplatePart, found: FoundPart) -> TemplatePart:
    """The component as the file holds it: Gemma 3 without its eyes is the language model that it has inside.

    For a text both compute the same, bit for bit (`tests/test_video_files.py`).
    """
    if part.class_name != "Gemma3ForConditionalGeneration" or sees(found.shapes):
        return part
    config = part.config.get("text_config") or part.config
    return replace(part, class_name="Gemma3ForCausalLM", config=config, directory=None)
