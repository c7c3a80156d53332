"""LTX-Video 0.9 and LTX-2: the transformers, what LTX-2 puts between its text encoder and its transformer, its sound.

Sources: the names in the published files, as diffusers reads them (scripts/convert_ltx_to_diffusers.py and
convert_ltx2_to_diffusers.py of https://github.com/huggingface/diffusers) and as ComfyUI does (comfy/ldm/lightricks).
LTX-2's checkpoint has its connectors beside the transformer's own weights, and their projection at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..layout import DENOISER_PREFIXES, PartLayout, Shapes, Sizes
from ..rules import Rule, drop, keep, rename

_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_TABLES = {
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
}
_CROSS = {
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
_CONNECTORS = {"video_embeddings_connector": "video_connector", "audio_embeddings_connector": "audio_connector"}
_PROJECTION = "text_embedding_projection.aggregate_embed.weight"


def _transformer(_: Shapes) -> Iterator[Rule]:
    for connector in _CONNECTORS:  # a part of its own in diffusers
        yield drop(f"{connector}.{{rest}}")
    for stream in ("", "audio_"):
        yield rename(f"{stream}patchify_proj.{{p}}", f"{stream}proj_in.{{p}}")
        yield rename(f"{stream}adaln_single.{{rest}}", f"{stream}time_embed.{{rest}}")
    for old, new in _CROSS.items():
        yield rename(f"{old}.{{rest}}", f"{new}.{{rest}}")
    for attention in _ATTENTIONS:
        here = f"transformer_blocks.{{n}}.{attention}"
        yield from (rename(f"{here}.{x}_norm.weight", f"{here}.norm_{x}.weight") for x in "qk")
    for old, new in _TABLES.items():
        yield rename(f"transformer_blocks.{{n}}.{old}", f"transformer_blocks.{{n}}.{new}")
    yield keep("{rest}")


def _transformer_sizes(proj_in: str) -> Callable[[Mapping[str, Any]], Sizes]:
    def sizes(config: Mapping[str, Any]) -> Sizes:
        width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
        return {
            f"{proj_in}.weight": (width, config["in_channels"]),
            "caption_projection.linear_1.weight": (width, config["caption_channels"]),
            f"transformer_blocks.{layers - 1}.attn2.to_k.weight": (width, config["cross_attention_dim"]),
            f"transformer_blocks.{layers}.attn2.to_k.weight": None,
        }

    return sizes


def _connectors(inner: str) -> Callable[[Shapes], Iterator[Rule]]:
    """Of a file in which the connectors' names begin with `inner`, whatever else it holds."""

    def rules(_: Shapes) -> Iterator[Rule]:
        for old, new in _CONNECTORS.items():
            here, there = f"{inner}{old}", f"{new}"
            block, target = f"{here}.transformer_1d_blocks.{{n}}", f"{there}.transformer_blocks.{{n}}"
            yield from (rename(f"{block}.attn1.{x}_norm.weight", f"{target}.attn1.norm_{x}.weight") for x in "qk")
            yield rename(f"{block}.{{rest}}", f"{target}.{{rest}}")
            yield rename(f"{here}.learnable_registers", f"{there}.learnable_registers")
        yield rename(_PROJECTION, "text_proj_in.weight")
        yield drop("{rest}")

    return rules


def _connector_sizes(inner: str) -> Callable[[Mapping[str, Any]], Sizes]:
    def sizes(config: Mapping[str, Any]) -> Sizes:
        width, layers = config["caption_channels"], config["video_connector_num_layers"]
        block = f"{inner}video_embeddings_connector.transformer_1d_blocks"
        return {
            _PROJECTION: (width, width * config["text_proj_in_factor"]),
            f"{block}.{layers - 1}.ff.net.2.weight": (width, 4 * width),
            f"{block}.{layers}.ff.net.2.weight": None,
        }

    return sizes


def _connector_layout(inner: str) -> PartLayout:
    return PartLayout(
        name=f"ltx-2 connectors, below {inner!r}",
        title="LTX-2's text connectors",
        role="other",
        classes=("LTX2TextConnectors",),
        prefixes=("",),
        needs=(f"{inner}video_embeddings_connector.learnable_registers", _PROJECTION),
        rules=_connectors(inner),
        sizes=_connector_sizes(inner),
    )


def _audio_vae(_: Shapes) -> Iterator[Rule]:
    yield rename("per_channel_statistics.mean-of-means", "latents_mean")
    yield rename("per_channel_statistics.std-of-means", "latents_std")
    yield drop("per_channel_statistics.{rest}")
    yield keep("encoder.{rest}")
    yield keep("decoder.{rest}")


def _audio_sizes(config: Mapping[str, Any]) -> Sizes:
    width, latent = config["base_channels"], config["latent_channels"]
    return {
        "encoder.conv_in.conv.weight": (width, config["in_channels"], 3, 3),
        "decoder.conv_in.conv.weight": (width * config["ch_mult"][-1], latent, 3, 3),
        f"decoder.up.{len(config['ch_mult'])}.block.0.conv1.conv.weight": None,
    }


def _vocoder(_: Shapes) -> Iterator[Rule]:
    for old, new in (
        ("ups", "upsamplers"),
        ("resblocks", "resnets"),
        ("conv_pre", "conv_in"),
        ("conv_post", "conv_out"),
    ):
        yield rename(f"{old}.{{rest}}", f"{new}.{{rest}}")


def _vocoder_sizes(config: Mapping[str, Any]) -> Sizes:
    ups = config["upsample_kernel_sizes"]
    return {
        "conv_pre.weight": (config["hidden_channels"], config["in_channels"], 7),
        "ups.0.weight": (config["hidden_channels"], config["hidden_channels"] // 2, ups[0]),
        f"ups.{len(ups)}.weight": None,
    }


LAYOUTS = (
    PartLayout(
        name="ltx-2",
        title="an LTX-2 transformer",
        role="denoiser",
        classes=("LTX2VideoTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("patchify_proj.weight", "av_ca_a2v_gate_adaln_single.linear.weight"),
        rules=_transformer,
        sizes=_transformer_sizes("patchify_proj"),
    ),
    PartLayout(
        name="ltx-2, as diffusers saves it",
        title="an LTX-2 transformer",
        role="denoiser",
        classes=("LTX2VideoTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("proj_in.weight", "av_cross_attn_video_a2v_gate.linear.weight"),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_transformer_sizes("proj_in"),
    ),
    PartLayout(
        name="ltx",
        title="an LTX-Video transformer",
        role="denoiser",
        classes=("LTXVideoTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("patchify_proj.weight", "adaln_single.linear.weight", "transformer_blocks.0.attn1.q_norm.weight"),
        rules=_transformer,
        sizes=_transformer_sizes("patchify_proj"),
        lacks=("audio_patchify_proj.weight",),
    ),
    PartLayout(
        name="ltx, as diffusers saves it",
        title="an LTX-Video transformer",
        role="denoiser",
        classes=("LTXVideoTransformer3DModel",),
        prefixes=DENOISER_PREFIXES,
        needs=("proj_in.weight", "time_embed.linear.weight", "transformer_blocks.0.attn1.norm_q.weight"),
        rules=lambda shapes: (keep("{rest}"),),
        sizes=_transformer_sizes("proj_in"),
        lacks=("audio_proj_in.weight",),
    ),
    *(_connector_layout(inner) for inner in DENOISER_PREFIXES),
    PartLayout(
        name="ltx-2 sound vae",
        title="LTX-2's VAE for sound",
        role="other",
        classes=("AutoencoderKLLTX2Audio",),
        prefixes=("audio_vae.", ""),
        needs=(
            "per_channel_statistics.std-of-means",
            "encoder.down.0.block.0.conv1.conv.weight",
            "decoder.mid.block_1.conv1.conv.weight",
        ),
        rules=_audio_vae,
        sizes=_audio_sizes,
    ),
    PartLayout(
        name="ltx-2 vocoder",
        title="LTX-2's vocoder",
        role="other",
        classes=("LTX2Vocoder",),
        prefixes=("vocoder.", ""),
        needs=("conv_pre.weight", "ups.0.weight", "resblocks.0.convs1.0.weight", "conv_post.weight"),
        rules=_vocoder,
        sizes=_vocoder_sizes,
    ),
)
