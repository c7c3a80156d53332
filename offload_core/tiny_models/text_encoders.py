"""Tiny text encoders, built with the classes and special token ids that the real folders name."""

from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral3Model,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from .weights import with_weights

CLIP_VOCABULARY = 514
LETTER_VOCABULARY = 98


def clip_text(name: str, width: int = 32, *, projected: bool = False, act: str = "quick_gelu", layers: int = 2) -> Any:
    """Return a CLIP text encoder of two or more layers, with a projection of the same width if asked."""
    config = CLIPTextConfig(
        vocab_size=CLIP_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 2,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=77,
        hidden_act=act,
        bos_token_id=CLIP_VOCABULARY - 2,
        eos_token_id=CLIP_VOCABULARY - 1,
        pad_token_id=1,
    )
    model = CLIPTextModelWithProjection if projected else CLIPTextModel
    return with_weights(model(config), name)


def t5_encoder(name: str, width: int = 32, vocabulary: int = LETTER_VOCABULARY) -> T5EncoderModel:
    """Return a T5 v1.1 encoder (gated GELU, tied embedding) of two layers."""
    return with_weights(T5EncoderModel(T5Config(**_t5_sizes(width) | {"vocab_size": vocabulary})), name)


def umt5_encoder(name: str, width: int = 32) -> UMT5EncoderModel:
    """Return a umT5 encoder: T5 with a position table in each layer."""
    return with_weights(UMT5EncoderModel(UMT5Config(**_t5_sizes(width))), name)


def qwen3(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 2, width: int = 32) -> Qwen3ForCausalLM:
    """Return a Qwen3 language model with tied output embedding, as the 4B one has."""
    return with_weights(Qwen3ForCausalLM(_qwen3_config(tokenizer, layers, width)), name)


def qwen3_model(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 2, width: int = 32) -> Qwen3Model:
    """Return the same without its output head, as the embedding models of Qwen3 are."""
    return with_weights(Qwen3Model(_qwen3_config(tokenizer, layers, width)), name)


def _qwen3_config(tokenizer: PreTrainedTokenizerBase, layers: int, width: int) -> Qwen3Config:
    return Qwen3Config(
        **_decoder_sizes(tokenizer, layers, width),
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )


def qwen25_vl(
    name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 2, width: int = 32
) -> Qwen2_5_VLForConditionalGeneration:
    """Return a Qwen2.5-VL model: a language half of the given size and a two-block vision half."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            **_decoder_sizes(tokenizer, layers, width),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            "eos_token_id": ids("<|im_end|>"),
            "bos_token_id": ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return with_weights(Qwen2_5_VLForConditionalGeneration(config), name)


def qwen25_vl_text(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 4) -> Qwen2_5_VLTextModel:
    """Return the language half of a Qwen2.5-VL model alone."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2_5_VLTextConfig(**_decoder_sizes(tokenizer, layers, 32), **ids, rope_parameters=rope)
    return with_weights(Qwen2_5_VLTextModel(config), name)


def qwen3_vl(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 4) -> Qwen3VLModel:
    """Return a Qwen3-VL model without its output head; the vision half has two blocks."""
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 5e6}
    config = Qwen3VLConfig(
        text_config=_decoder_sizes(tokenizer, layers, 32) | {"head_dim": 16, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return with_weights(Qwen3VLModel(config), name)


def gemma2(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 3) -> Gemma2Model:
    """Return a Gemma 2 model without its output head."""
    config = Gemma2Config(**_decoder_sizes(tokenizer, layers, 32), head_dim=16, query_pre_attn_scalar=16)
    return with_weights(Gemma2Model(config), name)


def gemma3(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 2) -> Gemma3ForConditionalGeneration:
    """Return a Gemma 3 model with a two-layer SigLIP tower."""
    config = Gemma3Config(
        text_config=_decoder_sizes(tokenizer, layers, 32)
        | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
    )
    return with_weights(Gemma3ForConditionalGeneration(config), name)


def llama(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 4) -> LlamaModel:
    """Return a Llama model without its output head."""
    return with_weights(LlamaModel(LlamaConfig(**_decoder_sizes(tokenizer, layers, 32))), name)


def llama_with_head(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 4) -> LlamaForCausalLM:
    """Return a Llama model with its output head."""
    return with_weights(LlamaForCausalLM(LlamaConfig(**_decoder_sizes(tokenizer, layers, 32))), name)


def mistral3(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 3) -> Mistral3ForConditionalGeneration:
    """Return a Mistral 3 model with its output head; the vision half has two layers."""
    return with_weights(Mistral3ForConditionalGeneration(_mistral3_config(tokenizer, layers)), name)


def mistral3_model(name: str, tokenizer: PreTrainedTokenizerBase, *, layers: int = 3) -> Mistral3Model:
    """Return the same without its output head."""
    return with_weights(Mistral3Model(_mistral3_config(tokenizer, layers)), name)


def _mistral3_config(tokenizer: PreTrainedTokenizerBase, layers: int) -> Mistral3Config:
    return Mistral3Config(
        text_config={"model_type": "mistral", "head_dim": 16, **_decoder_sizes(tokenizer, layers, 32)},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 32,
            "patch_size": 8,
        },
    )


def _t5_sizes(width: int) -> dict:
    return {
        "vocab_size": LETTER_VOCABULARY,
        "d_model": width,
        "d_kv": 16,
        "d_ff": width * 2,
        "num_layers": 2,
        "num_heads": 2,
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 64,
        "feed_forward_proj": "gated-gelu",
    }


def _decoder_sizes(tokenizer: PreTrainedTokenizerBase, layers: int, width: int) -> dict:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": width * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    }
