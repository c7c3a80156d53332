"""The transformers of Z-Image, Qwen-Image and Wan.

Sources: the names in the published files, which are those of https://github.com/Tongyi-MAI/Z-Image (q, k and v fused in
ComfyUI's files), https://github.com/Wan-Video/Wan2.2 (wan/modules/model.py), and diffusers' classes; Qwen-Image's are
diffusers' own everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep, rename, split


def _z_image(_: Shapes) -> Iterator[Rule]:
    for part in ("layers", "noise_refiner", "context_refiner"):
        here = f"{part}.{{n}}.attention"
        yield split(f"{here}.qkv.{{p}}", *(f"{here}.to_{x}.{{p}}" for x in "qkv"))
        yield rename(f"{here}.out.{{p}}", f"{here}.to_out.0.{{p}}")
        for x in "qk":
            yield rename(f"{here}.{x}_norm.weight", f"{here}.norm_{x}.weight")
    yield rename("x_embedder.{rest}", "all_x_embedder.2-1.{rest}")
    yield rename("final_layer.{rest}", "all_final_layer.2-1.{rest}")
    yield drop("norm_final.weight")
    yield keep("{rest}")


def _z_image_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["dim"], config["n_layers"]
    return {
        "cap_embedder.1.weight": (width, config["cap_feat_dim"]),
        f"layers.{layers - 1}.attention.qkv.weight": (3 * width, width),
        f"layers.{layers}.attention.qkv.weight": None,
    }


def _qwen_image_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    return {
        "img_in.weight": (width, config["in_channels"]),
        "txt_in.weight": (width, config["joint_attention_dim"]),
        f"transformer_blocks.{layers - 1}.attn.to_out.0.weight": (width, width),
        f"transformer_blocks.{layers}.attn.to_out.0.weight": None,
    }


def wan_rules(_: Shapes) -> Iterator[Rule]:
    """Of Wan's transformer, with and without what sees a picture."""
    embed = "condition_embedder"
    for old, new in (("time_embedding", "time_embedder"), ("text_embedding", "text_embedder")):
        for place, number in ((0, 1), (2, 2)):
            yield rename(f"{old}.{place}.{{p}}", f"{embed}.{new}.linear_{number}.{{p}}")
    yield rename("time_projection.1.{p}", f"{embed}.time_proj.{{p}}")
    image = {"proj.0": "norm1", "proj.1": "ff.net.0.proj", "proj.3": "ff.net.2", "proj.4": "norm2"}
    for old, new in image.items():
        yield rename(f"img_emb.{old}.{{p}}", f"{embed}.image_embedder.{new}.{{p}}")
    yield rename("img_emb.emb_pos", f"{embed}.image_embedder.pos_embed")
    for old, new in (("self_attn", "attn1"), ("cross_attn", "attn2")):
        here, there = f"blocks.{{n}}.{old}", f"blocks.{{n}}.{new}"
        for x in "qkv":
            yield rename(f"{here}.{x}.{{p}}", f"{there}.to_{x}.{{p}}")
        for x in "kv":
            yield rename(f"{here}.{x}_img.{{p}}", f"{there}.add_{x}_proj.{{p}}")
        yield rename(f"{here}.o.{{p}}", f"{there}.to_out.0.{{p}}")
        yield rename(f"{here}.norm_k_img.weight", f"{there}.norm_added_k.weight")
        yield from (rename(f"{here}.norm_{x}.weight", f"{there}.norm_{x}.weight") for x in "qk")
    yield rename("blocks.{n}.ffn.0.{p}", "blocks.{n}.ffn.net.0.proj.{p}")
    yield rename("blocks.{n}.ffn.2.{p}", "blocks.{n}.ffn.net.2.{p}")
    yield rename("blocks.{n}.norm3.{p}", "blocks.{n}.norm2.{p}")
    yield rename("blocks.{n}.modulation", "blocks.{n}.scale_shift_table")
    yield rename("head.modulation", "scale_shift_table")
    yield rename("head.head.{p}", "proj_out.{p}")
    yield keep("patch_embedding.{p}")


def wan_sizes(config: Mapping[str, Any]) -> Sizes:
    """Of Wan's transformer; what it has for a picture only if its config says so."""
    width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    image, places = config.get("image_dim"), config.get("pos_embed_seq_len")
    return {
        "patch_embedding.weight": (width, config["in_channels"], *config["patch_size"]),
        "blocks.0.ffn.0.weight": (config["ffn_dim"], width),
        f"blocks.{layers - 1}.self_attn.o.weight": (width, width),
        f"blocks.{layers}.self_attn.o.weight": None,
        "img_emb.proj.1.weight": (image, image) if image else None,
        "img_emb.emb_pos": (1, places, image) if image and places else None,
    }


LAYOUTS = (
    PartLayout(
        name="z-image",
        title="a Z-Image transformer",
        role="denoiser",
        classes=("ZImageTransformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("layers.0.attention.qkv.weight", "noise_refiner.0.attention.qkv.weight", "cap_pad_token"),
        rules=_z_image,
        sizes=_z_image_sizes,
    ),
    PartLayout(
        name="qwen-image",
        title="a Qwen-Image transformer",
        role="denoiser",
        classes=("QwenImageTransformer2DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=(
            "transformer_blocks.0.img_mod.1.weight",
            "transformer_blocks.0.attn.add_q_proj.weight",
            "txt_norm.weight",
        ),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_qwen_image_sizes,
    ),
    PartLayout(
        name="wan",
        title="a Wan transformer",
        role="denoiser",
        classes=("WanTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("blocks.0.self_attn.norm_q.weight", "head.modulation", "patch_embedding.weight"),
        rules=wan_rules,
        sizes=wan_sizes,
        lacks=("vace_blocks.0.after_proj.weight", "face_adapter.fuser_blocks.0.k_norm.weight"),
    ),
)
