"""ComfyUI's own text encoders beside those of transformers, on the same tiny weights. Prints the largest differences.

Run by test_conditioning.py with the Python of a checkout, in the checkout's folder. The way in which ComfyUI calls its
encoders for a family (which layer, norm, mask, pooled output) is what comfy/text_encoders has for it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.path.insert(0, ".")
sys.argv = [sys.argv[0], "--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.sd1_clip  # noqa: E402
import comfy.text_encoders.t5  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

WORDS, VOCABULARY, START, END = [5, 6, 7, 8], 49408, 49406, 49407  # the vocabulary is fixed in ComfyUI
CLIP = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "hidden_act": "gelu",
    "projection_dim": 32,
    "bos_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1}
T5_THERE = {**T5, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True}


def there(weights: dict[str, torch.Tensor], tokens: list[int], config: dict[str, Any], **how: Any) -> tuple[Any, ...]:
    """What a SDClipModel of ComfyUI with these weights gives for the tokens."""
    encoder = comfy.sd1_clip.SDClipModel(textmodel_json_config=config, dtype=torch.float32, **how)
    encoder.transformer.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return encoder.encode_token_weights([[(token, 1.0) for token in tokens]])


def clip_weights(model: Any) -> dict[str, torch.Tensor]:
    """In the checkpoints' own names, which newer transformers leave out of a bare text model."""
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": value
        for name, value in model.state_dict().items()
    }


def clip(found: dict[str, float]) -> None:
    torch.manual_seed(1)
    here = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**CLIP)).eval()
    tokens = [START, *WORDS, END] + [END] * (77 - 2 - len(WORDS))
    with torch.no_grad():
        answer = here(torch.tensor([tokens]), output_hidden_states=True)
    special = {"start": START, "end": END, "pad": END}
    last, _ = there(clip_weights(here), tokens, CLIP, special_tokens=special)
    found["SD 1.5"] = difference(last, answer.last_hidden_state)
    how: dict[str, Any] = {"layer": "hidden", "layer_idx": -2, "layer_norm_hidden_state": False}
    hidden, pooled = there(clip_weights(here), tokens, CLIP, special_tokens=special, **how)
    found["SDXL"] = difference(hidden, answer.hidden_states[-2])
    found["SDXL, pooled"] = difference(pooled, answer.text_embeds)


def t5(found: dict[str, float]) -> None:
    torch.manual_seed(2)
    how: dict[str, Any] = {"special_tokens": {"end": 1, "pad": 0}, "model_class": comfy.text_encoders.t5.T5}
    tokens = [*WORDS, 1] + [0] * 7
    here = transformers.T5EncoderModel(transformers.T5Config(**T5)).eval()
    with torch.no_grad():
        answer = here(torch.tensor([tokens])).last_hidden_state
    states, *_ = there(here.state_dict(), tokens, {**T5_THERE, "model_type": "t5"}, **how)
    found["FLUX.1"] = difference(states, answer)

    here = transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)).eval()
    mask = torch.tensor([[1] * (len(WORDS) + 1) + [0] * 7])
    with torch.no_grad():
        answer = here(torch.tensor([tokens]), mask).last_hidden_state * mask[..., None]
    how |= {"enable_attention_masks": True, "zero_out_masked": True}
    states, *_ = there(here.state_dict(), tokens, {**T5_THERE, "model_type": "umt5"}, **how)
    found["Wan"] = difference(states, answer)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, as a part of the largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


found: dict[str, float] = {}
clip(found)
t5(found)
print(json.dumps(found))
