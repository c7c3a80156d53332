"""Text encoders: CLIP-L and CLIP-G, T5 and umT5.

Sources: the names in the published files. CLIP-G comes under transformers' names and under those of
https://github.com/mlfoundations/open_clip (src/open_clip/transformer.py), as in SDXL's checkpoint, where q, k and v are
fused and the projection is multiplied from the other side. Stable Diffusion 2 reads OpenCLIP's ViT-H one layer before
the end (`layer: "penultimate"` in its configs), so a diffusers folder lacks the last one; its checkpoints have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import PartLayout, Shapes, Sizes, count
from ..rules import Rule, drop, keep, rename, split, transpose

CLIP_CLASSES = ("CLIPTextModel", "CLIPTextModelWithProjection")
_CLIP_PREFIXES = (
    "text_encoders.clip_l.transformer.",
    "text_encoders.clip_g.transformer.",
    "cond_stage_model.transformer.",
    "conditioner.embedders.0.transformer.",
    "",
)
_T5_PREFIXES = ("text_encoders.t5xxl.transformer.", "")


def _clip(_: Shapes) -> Iterator[Rule]:
    yield drop("text_model.embeddings.position_ids")
    yield keep("text_model.{rest}")
    yield keep("text_projection.weight")
    yield drop("vision_model.{rest}")
    yield drop("visual_projection.{rest}")
    yield drop("logit_scale")


def _flat_clip(_: Shapes) -> Iterator[Rule]:
    yield drop("embeddings.position_ids")
    for part in ("embeddings", "encoder", "final_layer_norm"):
        yield rename(f"{part}.{{rest}}", f"text_model.{part}.{{rest}}")


def _open_clip(_: Shapes) -> Iterator[Rule]:
    here, there = "transformer.resblocks.{n}", "text_model.encoder.layers.{n}"
    yield rename("token_embedding.weight", "text_model.embeddings.token_embedding.weight")
    yield rename("positional_embedding", "text_model.embeddings.position_embedding.weight")
    yield split(f"{here}.attn.in_proj_{{p}}", *(f"{there}.self_attn.{x}_proj.{{p}}" for x in "qkv"))
    yield rename(f"{here}.attn.out_proj.{{p}}", f"{there}.self_attn.out_proj.{{p}}")
    for number in (1, 2):
        yield rename(f"{here}.ln_{number}.{{p}}", f"{there}.layer_norm{number}.{{p}}")
    yield rename(f"{here}.mlp.c_fc.{{p}}", f"{there}.mlp.fc1.{{p}}")
    yield rename(f"{here}.mlp.c_proj.{{p}}", f"{there}.mlp.fc2.{{p}}")
    yield rename("ln_final.{p}", "text_model.final_layer_norm.{p}")
    yield transpose("text_projection", "text_projection.weight")
    yield drop("logit_scale")


def _open_clip_but_the_last(shapes: Shapes) -> Iterator[Rule]:
    yield drop(f"transformer.resblocks.{count(shapes, 'transformer.resblocks.') - 1}.{{rest}}")
    yield drop("text_projection")
    yield from _open_clip(shapes)


def _clip_sizes(prefix: str) -> Any:
    def sizes(config: Mapping[str, Any]) -> Sizes:
        width, layers = config["hidden_size"], config["num_hidden_layers"]
        return {
            f"{prefix}embeddings.token_embedding.weight": (config["vocab_size"], width),
            f"{prefix}encoder.layers.{layers - 1}.mlp.fc1.weight": (config["intermediate_size"], width),
            f"{prefix}encoder.layers.{layers}.mlp.fc1.weight": None,
        }

    return sizes


def _open_clip_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    return {
        "token_embedding.weight": (config["vocab_size"], width),
        f"transformer.resblocks.{layers - 1}.mlp.c_fc.weight": (config["intermediate_size"], width),
        f"transformer.resblocks.{layers}.mlp.c_fc.weight": None,
    }


def _one_layer_more_sizes(config: Mapping[str, Any]) -> Sizes:
    return _open_clip_sizes({**config, "num_hidden_layers": config["num_hidden_layers"] + 1})


def _t5(_: Shapes) -> Iterator[Rule]:
    yield drop("logit_scale")
    yield drop("spiece_model")
    yield drop("decoder.{rest}")
    yield drop("lm_head.{rest}")
    yield keep("{rest}")


def _umt5_sizes(config: Mapping[str, Any]) -> Sizes:
    return {**_t5_sizes(config), "shared.weight": (config["vocab_size"], config["d_model"])}


def _t5_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["d_model"], config["num_layers"]
    return {
        f"encoder.block.{layers - 1}.layer.1.DenseReluDense.wi_1.weight": (config["d_ff"], width),
        f"encoder.block.{layers}.layer.1.DenseReluDense.wi_1.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="clip",
        title="a CLIP text encoder",
        role="encoder",
        classes=CLIP_CLASSES,
        prefixes=_CLIP_PREFIXES,
        needs=("text_model.embeddings.token_embedding.weight", "text_model.final_layer_norm.weight"),
        rules=_clip,
        sizes=_clip_sizes("text_model."),
    ),
    PartLayout(
        name="clip, flattened",
        title="a CLIP text encoder",
        role="encoder",
        classes=CLIP_CLASSES,
        prefixes=_CLIP_PREFIXES,
        needs=(
            "embeddings.token_embedding.weight",
            "final_layer_norm.weight",
            "encoder.layers.0.self_attn.q_proj.weight",
        ),
        rules=_flat_clip,
        sizes=_clip_sizes(""),
    ),
    PartLayout(
        name="open_clip",
        title="an OpenCLIP text encoder",
        role="encoder",
        classes=CLIP_CLASSES,
        prefixes=("conditioner.embedders.1.model.", "cond_stage_model.model.", "conditioner.embedders.0.model.", ""),
        needs=("token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight", "ln_final.weight"),
        rules=_open_clip,
        sizes=_open_clip_sizes,
    ),
    PartLayout(
        name="open_clip, read before its last layer",
        title="an OpenCLIP text encoder",
        role="encoder",
        classes=("CLIPTextModel",),
        prefixes=("cond_stage_model.model.", ""),
        needs=("token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight", "ln_final.weight"),
        rules=_open_clip_but_the_last,
        sizes=_one_layer_more_sizes,
    ),
    PartLayout(
        name="t5",
        title="a T5 text encoder",
        role="encoder",
        classes=("T5EncoderModel",),
        prefixes=_T5_PREFIXES,
        needs=("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.0.layer.1.DenseReluDense.wi_1.weight"),
        lacks=("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",),  # umT5 has one in each
        rules=_t5,
        sizes=_t5_sizes,
    ),
    PartLayout(
        name="umt5",
        title="an umT5 text encoder",
        role="encoder",
        classes=("UMT5EncoderModel",),
        prefixes=("text_encoders.umt5xxl.transformer.", "text_encoders.pile_t5xl.transformer.", ""),
        needs=(
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight",
            "shared.weight",
        ),
        rules=_t5,
        sizes=_umt5_sizes,
    ),
)
