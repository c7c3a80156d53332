"""The blocks that a model of Modular Diffusers is made of, and where they list its components.

diffusers names the parts of a family alike: what comes before `denoise` encodes, what comes after it decodes. That and
the lists of components are all that is known here; no family is known by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint import show
from .errors import ModelError
from .library_classes import TRUST_ADVICE, library_class

if TYPE_CHECKING:
    from diffusers import ModularPipelineBlocks

LOOP_BLOCK = "denoise"


def blocks_class(pipeline: str, name: str | None, who: str) -> type:
    """The class of the blocks called `name`, the default of the class `pipeline` without a name. `who` needs it and
    begins the sentence of a ModelError.

    As diffusers does, a name of a base class (blocks that somebody put together) stands for the default, too.
    """
    default: str | None = getattr(library_class("diffusers", pipeline, who), "default_blocks_name", None)
    found: Any = library_class("diffusers", name, who) if name else None
    if found is None or not getattr(found, "block_classes", None):
        if default is None:
            raise ModelError(f"{who} is made of blocks of its own ({show(name or pipeline)}). {TRUST_ADVICE}")
        found = library_class("diffusers", default, who)
    names = list(found().sub_blocks)
    if LOOP_BLOCK not in names:
        have = ", ".join(names)
        raise ModelError(
            f"{who} has the blocks {have} and none called {LOOP_BLOCK}, so it has no phases. Run its blocks with "
            "offload_core.open_block."
        )
    after = names[names.index(LOOP_BLOCK) + 1 :]
    blocks: dict[str, Any] = dict(found().sub_blocks)
    listed = [spec for name in after for spec in blocks[name].expected_components]
    if not any(hasattr(spec.type_hint, "decode") for spec in listed if hasattr(spec.type_hint, "forward")):
        raise ModelError(
            f"{who} has no VAE after its {LOOP_BLOCK} block, so it has no latents to hand on from phase to phase. Run "
            "its blocks with offload_core.open_block."
        )
    return found


def stages(blocks: ModularPipelineBlocks) -> dict[str, str]:
    """Where each component is listed: "denoise" by that block, else "before" it or "after" it."""
    names = list(blocks.sub_blocks)
    loop = names.index(LOOP_BLOCK)
    found: dict[str, str] = {}
    for place in [loop, *(at for at in range(len(names)) if at != loop)]:
        stage = "denoise" if place == loop else "before" if place < loop else "after"
        for spec in blocks.sub_blocks[names[place]].expected_components:
            found.setdefault(spec.name, stage)
    return found
