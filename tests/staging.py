"""What tests of phases share: tiny models made once a session, the one-shot reference, and a staged run."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import offload_core as po
from offload_core.tiny_models import FAMILIES, save_tiny
from offload_core.tiny_models.running import align

# The families that the phases promise; the others of the table are run once each, too.
PROMISED = (
    "sd15",
    "sdxl",
    "sd3",
    "flux",
    "flux2_klein",
    "z_image",
    "qwen_image",
    "chroma",
    "wan22_a14b",
    "wan22_5b",
)
# Of these the default tests run every case: a UNet, a transformer of two streams, an encoder that is a language model,
# and two experts. The slow ones run them all.
OFTEN = ("sd15", "flux", "flux2_klein", "wan22_a14b")
OTHERS = tuple(name for name in FAMILIES if name not in PROMISED)
FROM_A_PICTURE = ("image", "height", "width", "num_frames")
# Families whose Encode needs more than the texts: the picture and its size, or no rounding to sizes of a table.
ENCODE_NEEDS = {
    "wan22_i2v_a14b": FROM_A_PICTURE,
    "wan21_i2v": FROM_A_PICTURE,
    "wan_vace": ("reference_images", "height", "width", "num_frames"),
    "ltx_condition": FROM_A_PICTURE,
    "cogvideox_i2v": FROM_A_PICTURE,
    "ace_step": ("lyrics", "audio_duration"),
    "pixart_sigma": ("height", "width", "use_resolution_binning", "clean_caption"),
}


def often(names: tuple[str, ...], chosen: tuple[str, ...] = OFTEN) -> list[Any]:
    """`names` as parameters of a test, of which only those `chosen` are run by default."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def tiny_model(name: str) -> Path:
    """The tiny model of a family, made once and never written to."""
    return save_tiny(name, Path(mkdtemp(prefix=f"tiny-{name}-")))


def words(name: str) -> dict[str, Any]:
    """The texts of a family's call: what Encode is given; everything else is left to its defaults."""
    call = FAMILIES[name].guided_call
    asked = {key: call[key] for key in ("prompt", "negative_prompt") if key in call}
    return asked | {key: call[key] for key in ENCODE_NEEDS.get(name, ()) if key in call}


def job(name: str, *, guided: bool, images: int = 1) -> dict[str, Any]:
    """What Denoise is given: size, steps, guidance and number of pictures, unlike the pipeline's defaults."""
    family = FAMILIES[name]
    call = dict(family.guided_call if guided else family.call)
    for key in ("prompt", "negative_prompt", "max_sequence_length"):
        call.pop(key, None)
    if images > 1 and family.count_argument:
        call[family.count_argument] = images
    return call


def one_shot(
    path: Path,
    *,
    dtype: torch.dtype,
    seed: int,
    cls: type[DiffusionPipeline] = DiffusionPipeline,
    **call: Any,
) -> tuple[torch.Tensor, dict[str, int]]:
    """The plain pipeline, whole: its pictures, and how often each component ran."""
    pipeline = cls.from_pretrained(path, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    ran: dict[str, int] = {}
    for name, component in pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            align(component)
            component.register_forward_pre_hook(lambda *_, name=name: ran.update({name: ran.get(name, 0) + 1}))
    output_type = call.pop("output_type", "pt")
    result = pipeline(**call, output_type=output_type, generator=torch.Generator("cpu").manual_seed(seed))[0]
    return torch.as_tensor(result).float(), ran


def staged(
    path: Path, texts: dict[str, Any], call: dict[str, Any], *, dtype: Any, seed: int, **load: Any
) -> tuple[torch.Tensor, po.Session]:
    """The same in three phases: pictures or sounds, and the session with its report."""
    session = po.Session()
    handle = po.load(path, device="cpu", dtype=dtype, **load)
    embeds = po.encode(handle, **texts, session=session)
    latents = po.denoise(handle, embeds, seed=seed, session=session, **call)
    if latents.only_sound:
        sound = po.decode_sound(handle, latents, session=session)
        assert sound is not None
        return sound[0], session
    pictures = po.decode(handle, latents, "pt", session=session)
    return torch.as_tensor(pictures).float(), session
