"""The demo model before training: FLUX.1's own classes in miniature, and tokenizers for the caption grammar.

Pictures are 64x64; the VAE is 8x with 8 latent channels, so a latent is ``(8, 8, 8)``, packed by the pipeline into 16
tokens of 32 numbers beside ``TEXT_TOKENS`` T5 tokens.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from offload_core.demo.scenes import COLOURS, PIXELS, SHAPES

#: Padded length of a caption for both text encoders; the longest caption has 14 tokens.
TEXT_TOKENS = 16
LATENT_CHANNELS = 8

_WORDS = ("a", "an", "small", "large", *COLOURS, *SHAPES) + tuple(
    "in on at the left right top bottom centre center background".split()
)
_CHARACTERS = string.ascii_lowercase + string.digits + ".,!?-'"


@dataclass(frozen=True)
class Parts:
    """The trainable components of the pipeline, and its tokenizers."""

    vae: AutoencoderKL
    transformer: FluxTransformer2DModel
    clip: CLIPTextModel
    t5: T5EncoderModel
    clip_tokenizer: CLIPTokenizer
    t5_tokenizer: T5TokenizerFast

    def pipeline(self) -> FluxPipeline:
        """These components (not copies) as a ``FluxPipeline``."""
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
            vae=self.vae,
            text_encoder=self.clip,
            tokenizer=self.clip_tokenizer,
            text_encoder_2=self.t5,
            tokenizer_2=self.t5_tokenizer,
            transformer=self.transformer,
        )


def build(seed: int) -> Parts:
    """Fresh components with random weights from ``seed``."""
    torch.manual_seed(seed)
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=PIXELS,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    _start_as_identity(transformer)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TEXT_TOKENS,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer),
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )
    return Parts(vae, transformer, clip, t5, clip_tokenizer, t5_tokenizer)


def make_t5_tokenizer() -> T5TokenizerFast:
    """One piece a word of the grammar (the articles with a capital too), single characters for the rest."""
    words = [f"\u2581{word}" for word in (*_WORDS, "A", "An")]
    characters = list(string.ascii_uppercase + _CHARACTERS)
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary = special + [(w, -1.0) for w in words] + [(c, -10.0) for c in characters]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=TEXT_TOKENS)


def make_clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair merges made so that each word of the grammar is one token."""
    ends = [f"{c}</w>" for c in _CHARACTERS]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        # New merges rank below the old ones, so they cannot change how earlier words come out.
        pieces = _merge([*word[:-1], f"{word[-1]}</w>"], merges)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
    tokens = [*_CHARACTERS, *ends, *("".join(pair) for pair in merges), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_TOKENS)


def tokenize(parts: Parts, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """CLIP and T5 ids, each int64 ``(n, TEXT_TOKENS)``, padded as ``FluxPipeline`` does."""

    def ids(tokenizer: CLIPTokenizer | T5TokenizerFast) -> torch.Tensor:
        batch = tokenizer(captions, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt")
        return batch.input_ids

    return ids(parts.clip_tokenizer), ids(parts.t5_tokenizer)


def _start_as_identity(transformer: FluxTransformer2DModel) -> None:
    """Zero the modulation and the output layer: blocks begin as the identity and the flow as zero."""
    for name, module in transformer.named_modules():
        modulation = name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear"))
        if isinstance(module, nn.Linear) and (modulation or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def _merge(pieces: list[str], merges: Iterable[tuple[str, str]]) -> list[str]:
    """Byte-pair encoding of one word: apply each merge in rank order wherever it fits."""
    for left, right in merges:
        i = 0
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == (left, right):
                pieces[i : i + 2] = [left + right]
            i += 1
    return pieces
