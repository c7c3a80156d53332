"""The same job in one shot and in three phases: peak memory, seconds, and whether the pictures are the same bits.

    python benchmarks/phases.py [--json FILE] [--model-dir DIR]

Makes a FLUX-like model with random weights once (2.1 GiB in bfloat16: a T5 encoder, a transformer, a VAE), then
runs each way in a fresh process. On the CPU the files are mapped, so the peak resident set counts the pages of all
weights that were used and not yet given back. With an accelerator it also reports the peak of its memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("one shot", "three phases")
CALL: dict[str, Any] = {"height": 256, "width": 256, "num_inference_steps": 4, "max_sequence_length": 64}
PROMPT = "a red circle"


def make_model(folder: Path) -> Path:
    """A FLUX-like diffusers folder around the demo model's tokenizers, with random bfloat16 weights."""
    import torch
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    demo = FluxPipeline.from_pretrained(Path(__file__).parents[1] / "offload_core" / "demo" / "model")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    clip = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    t5 = {"d_model": 1536, "d_ff": 4096, "num_layers": 12, "num_heads": 24, "d_kv": 64}
    blocks = {"num_layers": 4, "num_single_layers": 8, "num_attention_heads": 12, "attention_head_dim": 128}
    FluxPipeline(
        scheduler=demo.scheduler,
        tokenizer=demo.tokenizer,
        tokenizer_2=demo.tokenizer_2,
        text_encoder=CLIPTextModel(CLIPTextConfig(**demo.text_encoder.config.to_dict() | clip)),
        text_encoder_2=T5EncoderModel(T5Config(**demo.text_encoder_2.config.to_dict() | t5)),
        transformer=FluxTransformer2DModel(
            in_channels=64, joint_attention_dim=1536, pooled_projection_dim=768, guidance_embeds=True, **blocks
        ),
        vae=AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=16,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        ),
    ).save_pretrained(folder)
    return folder


def one_shot(folder: str) -> Any:
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    if torch.accelerator.is_available():
        pipeline.to(torch.accelerator.current_accelerator())
    return pipeline(PROMPT, generator=torch.Generator("cpu").manual_seed(0), output_type="pt", **CALL)[0]


def three_phases(folder: str) -> Any:
    import offload_core

    handle = offload_core.load(folder)
    embeds = offload_core.encode(handle, PROMPT, max_sequence_length=CALL["max_sequence_length"])
    latents = offload_core.denoise(handle, embeds, seed=0, **CALL)
    return offload_core.decode(handle, latents, "pt")


def measure(way: str, folder: str) -> dict[str, Any]:
    """One row, measured in this process."""
    import psutil
    import torch

    from offload_core.devices import HostPeak, peak_bytes, resolve_device

    run = {"one shot": one_shot, "three phases": three_phases}[way]
    baseline, peak, started = psutil.Process().memory_info().rss, HostPeak(), time.perf_counter()
    picture = run(folder)
    seconds = time.perf_counter() - started
    return {
        "way": way,
        "seconds": seconds,
        "host_peak_bytes": peak.sample() - baseline,
        "device_peak_bytes": peak_bytes(resolve_device("auto")),
        "device": str(resolve_device("auto")),
        "torch": torch.__version__,
        "picture": hashlib.sha256(picture.cpu().float().numpy().tobytes()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows and a summary here")
    parser.add_argument("--model-dir", type=Path, help="keep the made model here, and use it again")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, str(args.model_dir))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model_dir or Path(scratch) / "model"
        if not (folder / "model_index.json").exists():
            make_model(folder)
        weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        rows = [_in_fresh_process(way, folder) for way in WAYS]
    whole, phased = rows
    device_peak = whole["device_peak_bytes"]
    summary = {
        "weights_bytes": weights,
        "same_picture": whole["picture"] == phased["picture"],
        "host_peak_ratio": phased["host_peak_bytes"] / whole["host_peak_bytes"],
        "device_peak_ratio": phased["device_peak_bytes"] / device_peak if device_peak else None,
        "seconds_ratio": phased["seconds"] / whole["seconds"],
    }
    for row in rows:
        device = f", {row['device_peak_bytes'] / 2**20:.0f} MiB on {row['device']}" if row["device_peak_bytes"] else ""
        print(f"{row['way']:13} {row['seconds']:6.1f} s, {row['host_peak_bytes'] / 2**20:6.0f} MiB of RAM{device}")
    print(json.dumps(summary, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "summary": summary}, indent=2))


def _in_fresh_process(way: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", way, "--model-dir", str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    main()
