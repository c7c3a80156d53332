"""Stable Diffusion 2.1 as a checkpoint file: diffusers' own pictures of it, and what a file can't tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

import offload_core as po
from offload_core.checkpoint import read_header
from offload_core.errors import ModelError
from offload_core.known import _tokenizers, known_model
from offload_core.single_files import SplitFiles, resolve_files
from offload_core.single_files.layouts import LAYOUTS
from offload_core.single_files.recognise import find_parts
from offload_core.single_files.rules import convert
from offload_core.stored_weight import read_stored
from offload_core.tiny_models.running import align
from original_layout import Weights, checkpoint_parts, write_file
from staging import job, staged, tiny_model, words

TEXT, LAYER = "cond_stage_model.model.", "transformer.resblocks."
READ_BEFORE_THE_END = "open_clip, read before its last layer"
TIGHT = po.OffloadSettings(device_memory="300kB", resident_below=0, activation_memory=0)


def published_parts() -> dict[str, Weights]:
    """The tiny model as published: its text encoder has a layer more than is read, and a projection that isn't."""
    parts = checkpoint_parts("sd21")
    encoder = parts[TEXT]
    generator = torch.Generator().manual_seed(0)
    last = {name: tensor for name, tensor in encoder.items() if name.startswith(f"{LAYER}2.")}
    for name, tensor in last.items():
        encoder[name.replace(f"{LAYER}2.", f"{LAYER}3.")] = torch.randn(tensor.shape, generator=generator)
    width = encoder["token_embedding.weight"].shape[1]
    encoder |= {"text_projection": torch.randn(width, width, generator=generator), "logit_scale": torch.ones(())}
    return parts


def test_the_last_layer_and_the_projection_of_the_text_encoder_are_left_out(tmp_path: Path) -> None:
    """What is left is what diffusers' converter makes, but for what the class has no place for."""
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    encoder, file = published_parts()[TEXT], tmp_path / "encoder.safetensors"
    write_file(file, {TEXT: encoder})
    header = read_header(file)
    (part,) = [part for part in find_parts(file, header) if part.layout.name == READ_BEFORE_THE_END]
    found = convert(file, header, TEXT, part.layout.rules(part.shapes))
    theirs = convert_open_clip_checkpoint(None, dict(encoder), prefix="")
    expected = {name for name in theirs if ".layers.3." not in name and name != "text_projection.weight"}
    assert found.stored.keys() == expected and not found.unknown
    assert all(torch.equal(read_stored(found.stored[name]), theirs[name]) for name in expected)
    config = json.loads((tiny_model("sd21") / "text_encoder" / "config.json").read_text())
    assert part.misfit(config) is None
    assert part.misfit(config | {"num_hidden_layers": 4}) is not None


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TIGHT, None], ids=["streamed", "resident"])
def test_a_checkpoint_gives_the_picture_that_diffusers_makes_of_the_file(settings: Any, tmp_path: Path) -> None:
    folder, file = tiny_model("sd21"), tmp_path / "model.safetensors"
    write_file(file, published_parts())
    theirs: Any = StableDiffusionPipeline.from_single_file(
        str(file), config=str(folder), local_files_only=True, safety_checker=None
    )
    theirs.set_progress_bar_config(disable=True)
    for component in (theirs.unet, theirs.text_encoder, theirs.vae):
        align(component)
    call = words("sd21") | job("sd21", guided=True)
    expected = theirs(**call, output_type="pt", generator=torch.Generator().manual_seed(3))[0]
    files = SplitFiles(checkpoint=file, configs=folder)
    found, session = staged(files, words("sd21"), job("sd21", guided=True), dtype="auto", seed=3, settings=settings)
    assert torch.equal(found, torch.as_tensor(expected).float())
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)
    assert (session.report.phases[1].streamed_bytes > 0) is (settings is not None)


def told(file: Path, *more: str, **numbers: int) -> Path:
    """A file with the few tensors of the published checkpoint by which it is told, and no data. more: names beside
    them. numbers: whole numbers beside them, with their data."""
    model = known_model("sd2.1")
    assert model is not None
    shapes = dict.fromkeys(more, (1,))
    for name, prefix, layout_name in (
        ("unet", "model.diffusion_model.", "unet"),
        ("vae", "first_stage_model.", "kl"),
        ("text_encoder", TEXT, READ_BEFORE_THE_END),
    ):
        (layout,) = [layout for layout in LAYOUTS if layout.name == layout_name]
        sizes = layout.sizes(model.components[name]["config"])
        named = dict.fromkeys(layout.needs, (3,)) | {key: shape for key, shape in sizes.items() if shape}
        shapes |= {prefix + key: shape for key, shape in named.items()}
    header: dict[str, Any] = {}
    position = 0
    for kind, entries in (("F16", shapes), ("I64", dict.fromkeys(numbers, ()))):
        for key, shape in entries.items():
            end = position + torch.Size(shape).numel() * (2 if kind == "F16" else 8)
            header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, end]}
            position = end
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + position - 8 * len(numbers))
        out.seek(0, 2)
        out.writelines(number.to_bytes(8, "little") for number in numbers.values())
    return file


def test_a_file_without_a_word_is_2_1_and_predicts_velocity(tmp_path: Path) -> None:
    """Nothing in it tells 2.1 from 2.1 base but a step that some files have, as diffusers asks; the other may be asked
    for."""
    _tokenizers.clip_tokenizer().save_pretrained(tmp_path / "sd1_tokenizer")
    file = tmp_path / "model.safetensors"

    def scheduler(family: str = "auto") -> tuple[str, str, int]:
        source = resolve_files(SplitFiles(checkpoint=file, family=family, tokenizers=tmp_path))
        part = source.components["scheduler"]
        return part.class_name, (part.config or {})["prediction_type"], source.defaults["width"]

    told(file)
    assert scheduler() == ("DDIMScheduler", "v_prediction", 768)
    assert scheduler("sd2.1-base") == ("PNDMScheduler", "epsilon", 512)
    told(file, global_step=110_000)
    assert scheduler()[1] == "v_prediction"
    told(file, global_step=875_000)
    assert scheduler()[1] == "epsilon"
    told(file, "v_pred", global_step=875_000)
    assert scheduler()[1] == "v_prediction"


def test_a_checkpoint_with_a_depth_estimator_is_called_what_it_is(tmp_path: Path) -> None:
    """It has all the parts that are known, so only a name tells it."""
    with pytest.raises(ModelError, match=r"'model\.safetensors' is Stable Diffusion 2 for depth"):
        po.load(told(tmp_path / "model.safetensors", "depth_model.model.pretrained.cls_token"))
