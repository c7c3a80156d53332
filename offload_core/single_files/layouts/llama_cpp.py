"""Text encoders under the names that llama.cpp gives them, as GGUF files have them.

Source: the table of names in the `gguf` package (gguf/tensor_mapping.py). A GGUF file of Qwen2.5-VL has no eyes: they
are in a file of their own, for which llama.cpp has other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout import PartLayout, Shapes, Sizes
from ..rules import Rule, drop, rename

QWEN_EYES = "model.visual."  # what such a file lacks, by the library's names

_T5_ATTENTION = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_o": "o", "attn_rel_b": "relative_attention_bias"}
_T5_FEED_FORWARD = {"ffn_gate": "wi_0", "ffn_up": "wi_1", "ffn_down": "wo"}
_QWEN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _t5(_: Shapes) -> Iterator[Rule]:
    here, there = "enc.blk.{n}", "encoder.block.{n}.layer"
    yield rename("token_embd.weight", "shared.weight")
    yield rename("enc.output_norm.weight", "encoder.final_layer_norm.weight")
    yield rename(f"{here}.attn_norm.weight", f"{there}.0.layer_norm.weight")
    yield rename(f"{here}.ffn_norm.weight", f"{there}.1.layer_norm.weight")
    for name, known in _T5_ATTENTION.items():
        yield rename(f"{here}.{name}.weight", f"{there}.0.SelfAttention.{known}.weight")
    for name, known in _T5_FEED_FORWARD.items():
        yield rename(f"{here}.{name}.weight", f"{there}.1.DenseReluDense.{known}.weight")
    yield drop("dec.{rest}")
    yield drop("output.weight")


def _qwen(_: Shapes) -> Iterator[Rule]:
    yield rename("token_embd.weight", "model.embed_tokens.weight")
    yield rename("output_norm.weight", "model.norm.weight")
    yield rename("output.weight", "lm_head.weight")
    for name, known in _QWEN_LAYER.items():
        yield rename(f"blk.{{n}}.{name}.{{p}}", f"model.layers.{{n}}.{known}.{{p}}")


def _t5_sizes(config: Mapping[str, Any]) -> Sizes:
    width, layers = config["d_model"], config["num_layers"]
    return {
        f"enc.blk.{layers - 1}.ffn_up.weight": (config["d_ff"], width),
        f"enc.blk.{layers}.ffn_up.weight": None,
    }


def _qwen_sizes(config: Mapping[str, Any]) -> Sizes:
    text = config.get("text_config") or config
    width, layers = text["hidden_size"], text["num_hidden_layers"]
    return {
        "token_embd.weight": (text["vocab_size"], width),
        f"blk.{layers - 1}.ffn_up.weight": (text["intermediate_size"], width),
        f"blk.{layers}.ffn_up.weight": None,
    }


_RELATIVE = "enc.blk.1.attn_rel_b.weight"  # umT5 has one in each layer, T5 in the first only

LAYOUTS = (
    PartLayout(
        name="t5, llama.cpp's",
        title="a T5 text encoder",
        role="encoder",
        classes=("T5EncoderModel",),
        prefixes=("",),
        needs=("enc.blk.0.attn_q.weight", "enc.blk.0.ffn_gate.weight"),
        lacks=(_RELATIVE,),
        rules=_t5,
        sizes=_t5_sizes,
    ),
    PartLayout(
        name="umt5, llama.cpp's",
        title="an umT5 text encoder",
        role="encoder",
        classes=("UMT5EncoderModel",),
        prefixes=("",),
        needs=("enc.blk.0.attn_q.weight", "token_embd.weight", _RELATIVE),
        rules=_t5,
        sizes=_t5_sizes,
    ),
    PartLayout(
        name="qwen3, llama.cpp's",
        title="a Qwen3 text encoder",
        role="encoder",
        classes=("Qwen3Model", "Qwen3ForCausalLM"),
        prefixes=("",),
        needs=("token_embd.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate.weight"),
        lacks=("blk.0.post_attention_norm.weight",),  # Gemma 3
        rules=_qwen,
        sizes=_qwen_sizes,
        unlike=("qwen3vl",),
    ),
    PartLayout(
        name="qwen2.5-vl, llama.cpp's",
        title="a Qwen2.5-VL text encoder without its eyes",
        role="encoder",
        classes=("Qwen2_5_VLForConditionalGeneration",),
        prefixes=("",),
        needs=("token_embd.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.weight"),
        rules=_qwen,
        sizes=_qwen_sizes,
        absent=(QWEN_EYES,),
        unlike=("qwen2",),  # Qwen2.5, the chat model
    ),
)
