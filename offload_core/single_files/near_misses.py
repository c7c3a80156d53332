"""Files that look like a model that is known here and aren't one: what they are, told by a few names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint import TensorEntry


@dataclass(frozen=True)
class NearMiss:
    """what: ends a sentence that begins with the file. inside: texts of which each is in some name."""

    what: str
    advice: str
    inside: tuple[str, ...]

    def fits(self, tensors: Mapping[str, TensorEntry]) -> bool:
        return all(any(text in name for name in tensors) for text in self.inside)


_AS_LORA = "Give it as a LoRA of a model instead."
_AS_CONTROLNET = "Load a model, and give this to it as its ControlNet."
_FOLDER = "Use the model's diffusers folder."

NEAR_MISSES = (
    NearMiss("is a LoRA, not a model", _AS_LORA, ("lora_A.",)),
    NearMiss("is a LoRA, not a model", _AS_LORA, ("lora_down.",)),
    NearMiss("is a LoRA, not a model", _AS_LORA, ("lora.down.",)),
    NearMiss("is a LoRA in llama.cpp's form, not a model", "Use the LoRA's safetensors file.", (".lora_a",)),
    NearMiss("is a LoHa or LoKr adapter, not a model", _AS_LORA, ("hada_w1",)),
    NearMiss("is a LoHa or LoKr adapter, not a model", _AS_LORA, ("lokr_w",)),
    NearMiss("is a ControlNet, which is no model of its own", _AS_CONTROLNET, ("control_model.",)),
    NearMiss("is a ControlNet, which is no model of its own", _AS_CONTROLNET, ("controlnet_",)),
    NearMiss("is a ControlNet, which is no model of its own", _AS_CONTROLNET, ("input_hint_block.",)),
    NearMiss("is a textual inversion, not a model", "It can't be used here yet.", ("emb_params",)),
    NearMiss("is a vision encoder, which no model known here needs as a file", _FOLDER, ("vision_model.",)),
    NearMiss(
        "holds the eyes of a text encoder alone (mmproj), which no model known here takes as a file",
        "Give the file of the encoder's text part instead.",
        ("v.blk.0.", "mm."),
    ),
    NearMiss("is a Stable Cascade model, which isn't known here", _FOLDER, ("clip_txt_mapper.",)),
    NearMiss(
        "is another HunyuanVideo model, which isn't known here as a file", _FOLDER, ("individual_token_refiner.",)
    ),
    NearMiss(
        "is Gemma as GGUF, whose norms lie there in another form",
        "Use its .safetensors file.",
        ("blk.0.post_ffw_norm.",),
    ),
)

# Checkpoints that hold parts which are known here beside one that isn't.
OTHER_MODELS = (
    NearMiss("is Stable Diffusion 2 for depth, which isn't known here as a file", _FOLDER, ("depth_model.",)),
    NearMiss("is Stable unCLIP, which isn't known here as a file", _FOLDER, ("noise_augmentor.",)),
)
