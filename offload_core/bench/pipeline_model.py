"""A whole FLUX-like pipeline of a given size with random bfloat16 weights: text encoders, transformer, VAE.

An ordinary diffusers folder, around the tokenizers of the demo model. A mark beside its index says what was made; a
folder whose mark matches is used again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .model import flux_like

MARK = "bench-pipeline.json"
RECIPE = 1  # raise it when the same spec makes other bytes

#: Of the pipeline's bytes; what is left is for CLIP and the VAE.
TRANSFORMER_SHARE, T5_SHARE = 0.6, 0.3
VAE_WIDTHS, SMALL_VAE_WIDTHS = (128, 256, 512, 512), (32, 32, 64, 64)  # FLUX's own, and for less than 2 GiB in all


@dataclass(frozen=True)
class PipelineSpec:
    """The constructors' arguments that differ from the demo model's."""

    transformer: dict[str, Any] = field(repr=False)
    t5: dict[str, Any]
    clip: dict[str, Any]
    vae_widths: tuple[int, ...]


def flux_pipeline(size_bytes: int) -> PipelineSpec:
    """A pipeline of about `size_bytes` in bfloat16, of which the transformer has 60 % and T5 30 %."""
    transformer = flux_like(int(TRANSFORMER_SHARE * size_bytes)).config
    wide, pooled = transformer["joint_attention_dim"], transformer["pooled_projection_dim"]
    layer_bytes = 2 * (4 * wide * wide + 3 * wide * 2 * wide)
    t5 = {"d_model": wide, "d_ff": 2 * wide, "d_kv": 64, "num_heads": wide // 64}
    t5["num_layers"] = max(2, round(T5_SHARE * size_bytes / layer_bytes))
    clip = {"hidden_size": pooled, "intermediate_size": 4 * pooled, "num_attention_heads": pooled // 64}
    widths = VAE_WIDTHS if size_bytes >= 2 << 30 else SMALL_VAE_WIDTHS
    return PipelineSpec(transformer, t5, clip | {"num_hidden_layers": 2 if pooled < 768 else 12}, widths)


def make_pipeline(spec: PipelineSpec, folder: Path) -> Path:
    """The folder with the pipeline in it, made unless it's there already. Holds the whole of it in memory meanwhile.

    Raises InputError for a folder that holds something else.
    """
    mark = json.dumps({"recipe": RECIPE, "spec": asdict(spec)})
    marked = folder / MARK
    if marked.exists() and marked.read_text() == mark:
        return folder
    if folder.exists() and any(folder.iterdir()) and not marked.exists():
        raise InputError(f"The folder {folder} isn't empty and holds no benchmark model: give another --model-dir.")
    folder.mkdir(parents=True, exist_ok=True)
    marked.write_text(json.dumps({"state": "unfinished"}))
    _build(spec).save_pretrained(folder)
    marked.write_text(mark)
    return folder


def _build(spec: PipelineSpec) -> Any:
    import torch
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from ..demo import MODEL

    demo = FluxPipeline.from_pretrained(MODEL)
    before, random = torch.get_default_dtype(), torch.get_rng_state()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return FluxPipeline(
            scheduler=demo.scheduler,
            tokenizer=demo.tokenizer,
            tokenizer_2=demo.tokenizer_2,
            text_encoder=CLIPTextModel(CLIPTextConfig(**demo.text_encoder.config.to_dict() | spec.clip)),
            text_encoder_2=T5EncoderModel(T5Config(**demo.text_encoder_2.config.to_dict() | spec.t5)),
            transformer=FluxTransformer2DModel(**spec.transformer),
            vae=AutoencoderKL(
                block_out_channels=spec.vae_widths,
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=2,
                latent_channels=16,
                scaling_factor=0.3611,  # FLUX.1's own
                shift_factor=0.1159,
            ),
        )
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(random)
