"""What sees a picture for a denoiser: CLIP's vision model, of which Wan 2.1 uses ViT-H.

Sources: the names in the published files, which are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep


def _rules(_: Shapes) -> Iterator[Rule]:
    yield drop("vision_model.embeddings.position_ids")
    yield keep("vision_model.{rest}")
    yield keep("visual_projection.weight")
    yield drop("text_model.{rest}")
    yield drop("text_projection.weight")
    yield drop("logit_scale")


def _sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers, patch = config["hidden_size"], config["num_hidden_layers"], config["patch_size"]
    return {
        "vision_model.embeddings.patch_embedding.weight": (width, 3, patch, patch),
        f"vision_model.encoder.layers.{layers - 1}.mlp.fc1.weight": (config["intermediate_size"], width),
        f"vision_model.encoder.layers.{layers}.mlp.fc1.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="clip vision",
        title="a CLIP vision encoder",
        role="other",
        classes=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
        prefixes=("",),
        needs=(
            "vision_model.embeddings.class_embedding",
            "vision_model.encoder.layers.0.mlp.fc1.weight",
            "vision_model.pre_layrnorm.weight",
        ),
        rules=_rules,
        sizes=_sizes,
    ),
)
