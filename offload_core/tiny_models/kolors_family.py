"""Builder of a tiny Kolors pipeline: the UNet of SDXL, and a ChatGLM text encoder whose code is in diffusers."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
import torch
from diffusers import EulerDiscreteScheduler, KolorsPipeline, UNet2DConditionModel
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, RMSNorm

from . import autoencoders
from .image_families import STABLE_DIFFUSION_NOISE, unet_sizes
from .weights import denoiser, with_weights

TEXT_WIDTH = 32
LETTERS = "".join(map(chr, range(33, 127)))


def kolors() -> KolorsPipeline:
    """Return a Kolors pipeline."""
    tokenizer = _tokenizer()
    unet = UNet2DConditionModel(
        **unet_sizes(),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        encoder_hid_dim=TEXT_WIDTH,
        encoder_hid_dim_type="text_proj",
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * 8,
    )
    return KolorsPipeline(
        vae=autoencoders.autoencoder_kl("kolors.vae", scaling_factor=0.13025, force_upcast=False),
        text_encoder=_chat_glm("kolors.text_encoder", tokenizer.vocab_size),
        tokenizer=tokenizer,
        unet=denoiser(unet, "kolors.unet"),
        scheduler=EulerDiscreteScheduler(**STABLE_DIFFUSION_NOISE, timestep_spacing="leading"),
        force_zeros_for_empty_prompt=False,
    )


def _chat_glm(name: str, vocabulary: int) -> ChatGLMModel:
    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        ffn_hidden_size=64,
        kv_channels=16,
        num_attention_heads=2,
        seq_length=256,
        multi_query_attention=True,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = ChatGLMModel(config, empty_init=False)
    for layer in model.modules():
        if isinstance(layer, RMSNorm):
            torch.nn.init.ones_(layer.weight)  # its class leaves it as the memory was
    return with_weights(model, name)


def _tokenizer() -> ChatGLMTokenizer:
    """A tokenizer of letters. It reads its vocabulary again from the file when it is saved, so it keeps that folder."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([LETTERS, " ".join(LETTERS)]),
        model_writer=model,
        model_type="char",
        vocab_size=len(LETTERS) + 4,
        hard_vocab_limit=False,
        character_coverage=1.0,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    folder = TemporaryDirectory(prefix="phase-offload-tokenizer-")
    file = Path(folder.name) / "tokenizer.model"
    file.write_bytes(model.getvalue())
    tokenizer = ChatGLMTokenizer(str(file))
    tokenizer.folder = folder
    return tokenizer
