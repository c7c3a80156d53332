"""Models made of files: the same pictures as from a diffusers folder, nothing converted, and sentences for the rest."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload_core as po
from offload_core.checkpoint import read_header
from offload_core.errors import ModelError
from offload_core.single_files import SplitFiles, resolve_files
from offload_core.single_files.layouts import LAYOUTS
from offload_core.single_files.rules import convert
from offload_core.stored_weight import read_stored
from original_layout import (
    FULL_SIZE,
    TINY,
    Weights,
    backwards,
    checkpoint_parts,
    component_weights,
    full_size_file,
    layout_rules,
    original_weights,
    split_files,
    wan_names,
    write_file,
)
from staging import job, one_shot, staged, tiny_model, words

TIGHT = po.OffloadSettings(device_memory="300kB", resident_below=0, activation_memory=0)
ROOMIER = {"z_image": replace(TIGHT, device_memory="1200kB")}  # its largest operator needs more


def converted(path: Path, layout_name: str, prefix: str = "") -> Weights:
    """What the streaming engine would read: every weight of a part, made from the file."""
    (layout,) = [layout for layout in LAYOUTS if layout.name == layout_name]
    header = read_header(path)
    names = [name for name in header.tensors if name.startswith(prefix)]
    shapes = {name.removeprefix(prefix): header.tensors[name].shape for name in names}
    found = convert(path, header, prefix, layout.rules(shapes))
    assert not found.unknown
    return {name: read_stored(stored) for name, stored in found.stored.items()}


def assert_same(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(tensor.shape), tensor), name


def refusal(files: SplitFiles | Path | str) -> str:
    with pytest.raises(ModelError) as refused:
        po.load(files)
    message = str(refused.value)
    assert message.endswith((".", ")."))
    return message


# --------------------------------------------------------------------------- conversion, beside diffusers' own


def test_unet_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    original = original_weights("sdxl", "unet")
    file = write_file(tmp_path / "unet.safetensors", {"": original})
    config = {"layers_per_block": 1, "addition_embed_type": "text_time"}
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    assert_same(converted(file, "unet"), convert_ldm_unet_checkpoint(prefixed, config))


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_vae_is_converted_as_diffusers_does(family: str, tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    original = original_weights(family, "vae")
    for name in list(original):  # attention was made of 1 x 1 convolutions
        if ".attn_1." in name and original[name].dim() == 2:
            original[name] = original[name][:, :, None, None].contiguous()
    file = write_file(tmp_path / "vae.safetensors", {"vae.": original})
    config = {"down_block_types": [""] * 3, "up_block_types": [""] * 3}
    assert_same(converted(file, "kl", "vae."), convert_ldm_vae_checkpoint(dict(original), config))


def test_open_clip_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    original = original_weights("sdxl", "text_encoder_2")
    file = write_file(tmp_path / "clip_g.safetensors", {"": original})
    assert_same(converted(file, "open_clip"), convert_open_clip_checkpoint(None, dict(original), prefix=""))


def widened(weights: Weights) -> Weights:
    """diffusers' converters of FLUX.1 and Chroma know one width only, 3072: so that many rows, of two numbers each."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape[0] // 32 * 3072, *[2] * (tensor.dim() - 1), generator=generator)
        if tensor.shape[0] % 32 == 0
        else tensor
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize(
    ("family", "component", "converter", "prepare"),
    [
        ("flux", "transformer", "convert_flux_transformer_checkpoint_to_diffusers", widened),
        ("chroma", "transformer", "convert_chroma_transformer_checkpoint_to_diffusers", widened),
        ("sd3", "transformer", "convert_sd3_transformer_checkpoint_to_diffusers", dict),
        ("flux2_klein", "transformer", "convert_flux2_transformer_checkpoint_to_diffusers", dict),
        ("z_image", "transformer", "convert_z_image_transformer_checkpoint_to_diffusers", dict),
        ("wan22_a14b", "transformer", "convert_wan_transformer_to_diffusers", dict),
    ],
)
def test_transformer_is_converted_as_diffusers_does(
    family: str, component: str, converter: str, prepare: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    from diffusers.loaders import single_file_utils

    original = prepare(original_weights(family, component))
    file = write_file(tmp_path / "transformer.safetensors", {"": original})
    theirs = getattr(single_file_utils, converter)(dict(original))
    assert_same(converted(file, TINY[family][component][1]), theirs)


def test_wan_vae_is_converted_as_diffusers_does(tmp_path: Path) -> None:
    """Of the published number of blocks: the tiny one has fewer, which diffusers' converter takes for others."""
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    vae: Any = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=2)
    rules = layout_rules("wan vae", wan_names(15, (3, 7, 11)))
    original = backwards(rules, dict(vae.state_dict()))
    file = write_file(tmp_path / "vae.safetensors", {"": original})
    assert_same(converted(file, "wan vae"), convert_wan_vae_to_diffusers(dict(original)))


# ------------------------------------------------------------------------------------------------- pictures


def pictures_of(family: str, files: SplitFiles, *, settings: Any = TIGHT, dtype: str = "auto") -> torch.Tensor:
    pictures, session = staged(files, words(family), job(family, guided=True), dtype=dtype, seed=3, settings=settings)  # type: ignore[arg-type]
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)
    return pictures


def expected(family: str) -> torch.Tensor:
    call = {**words(family), **job(family, guided=True)}
    return one_shot(tiny_model(family), dtype=torch.float32, seed=3, **call)[0]


def test_checkpoint_gives_the_picture_of_its_folder_while_its_weights_are_streamed(tmp_path: Path) -> None:
    """SDXL: UNet, VAE, CLIP, and OpenCLIP with fused q, k, v and a transposed projection, all from one file."""
    folder = tiny_model("sdxl")
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sdxl"))
    assert torch.equal(pictures_of("sdxl", SplitFiles(checkpoint=file, configs=folder)), expected("sdxl"))


def test_split_files_give_the_picture_of_their_folder(tmp_path: Path) -> None:
    """FLUX.1: fused rows, halves that change places, T5 with a tied table; everything resident this time."""
    files = split_files("flux", tmp_path)
    assert torch.equal(pictures_of("flux", files, settings=None), expected("flux"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TIGHT, None], ids=["streamed", "resident"])
@pytest.mark.parametrize("family", [family for family, parts in TINY.items() if parts["vae"][0]])
def test_every_family_gives_the_picture_of_its_folder_from_one_file(family: str, settings: Any, tmp_path: Path) -> None:
    folder = tiny_model(family)
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts(family))
    files = SplitFiles(checkpoint=file, configs=folder)
    settings = settings and ROOMIER.get(family, settings)
    assert torch.equal(pictures_of(family, files, settings=settings), expected(family))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TIGHT, None], ids=["streamed", "resident"])
def test_two_denoisers_come_from_two_files(settings: Any, tmp_path: Path) -> None:
    files = split_files("wan22_a14b", tmp_path)
    assert torch.equal(pictures_of("wan22_a14b", files, settings=settings), expected("wan22_a14b"))


def test_part_given_by_itself_goes_before_the_checkpoints(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    parts = checkpoint_parts("sd15")
    file = write_file(tmp_path / "model.safetensors", parts)
    vae = write_file(tmp_path / "other_vae.safetensors", {"": parts["first_stage_model."]})
    source = resolve_files(SplitFiles(checkpoint=file, vae=vae, configs=folder))
    assert source.components["vae"].weight_files == (vae,)
    assert source.components["unet"].weight_files == (file,)


# ------------------------------------------------------------------------------------------------- handles


def test_handle_of_files_is_plain_data_and_notices_a_changed_file(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sd15"))
    vae = write_file(tmp_path / "vae.safetensors", {"": original_weights("sd15", "vae")})
    handle = po.load(SplitFiles(checkpoint=file, vae=vae, configs=folder))
    again = pickle.loads(pickle.dumps(handle))
    assert again == handle and hash(again) == hash(handle)
    source = handle.source()
    source.check_unchanged()
    write_file(vae, {"": {name: tensor + 1 for name, tensor in original_weights("sd15", "vae").items()}})
    with pytest.raises(ModelError, match=r"vae.safetensors has changed"):
        source.check_unchanged()
    with pytest.raises(ModelError, match="changed on disk"):
        handle.source()


def test_weights_of_a_file_are_neither_read_nor_copied_when_it_is_loaded(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sd15"))
    header = read_header(file)
    with file.open("r+b") as data:  # weights that would show in a picture, were they read before
        data.seek(header.data_start)
        data.write(b"\xff" * (header.file_bytes - header.data_start))
    unet = resolve_files(SplitFiles(checkpoint=file, configs=folder)).components["unet"]
    assert unet.stored is not None and unet.weight_bytes == sum(
        tensor.nbytes for tensor in component_weights(folder / "unet").values()
    )
    assert list(tmp_path.iterdir()) == [file]


# ------------------------------------------------------------------------------------- what can't be used


def test_missing_part_is_named_with_how_to_give_it(tmp_path: Path) -> None:
    folder = tiny_model("flux")
    file = write_file(tmp_path / "flux1-dev.safetensors", {"": original_weights("flux", "transformer")})
    assert "as encoder" in refusal(SplitFiles(denoiser=file, configs=folder))
    clip = write_file(tmp_path / "clip_l.safetensors", {"": original_weights("flux", "text_encoder")})
    assert "T5EncoderModel (text_encoder_2)" in refusal(SplitFiles(denoiser=file, encoders=(clip,), configs=folder))


def test_file_that_the_model_has_no_use_for_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sd15"))
    t5 = write_file(tmp_path / "t5.safetensors", {"": component_weights(tiny_model("flux") / "text_encoder_2")})
    assert "no use for" in refusal(SplitFiles(checkpoint=file, encoders=(t5,), configs=folder))
    assert "Give it as what it is" in refusal(SplitFiles(checkpoint=file, vae=t5, configs=folder))


def test_family_that_is_asked_for_must_be_that_of_the_files(tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("flux"))
    assert "no denoiser of Stable Diffusion XL" in refusal(SplitFiles(checkpoint=file, family="sdxl"))
    assert "Use auto, or one of sd1.5, sdxl" in refusal(SplitFiles(checkpoint=file, family="sd9"))


def test_model_whose_sizes_are_not_known_is_a_near_miss(tmp_path: Path) -> None:
    file = write_file(tmp_path / "tiny.safetensors", checkpoint_parts("sd15"))
    message = refusal(file)
    assert "tiny.safetensors' is near to what is known" in message and "instead of [320, 4, 3, 3]" in message


def test_part_that_no_layout_is_known_for_is_not_taken_from_the_folder_of_configs(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    shutil.copytree(tiny_model("sd15"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"text_encoder": ["transformers", "GPT2Model"]}))
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sd15"))
    assert "text_encoder, a 'GPT2Model'" in refusal(SplitFiles(checkpoint=file, configs=folder))


def test_file_that_lacks_a_weight_is_refused_before_any_phase_begins(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    parts = checkpoint_parts("sd15")
    del parts["first_stage_model."]["decoder.mid.attn_1.k.bias"]
    parts["model.diffusion_model."]["out.2.bias"] = torch.zeros(9)
    file = write_file(tmp_path / "model.safetensors", parts)
    handle = po.load(SplitFiles(checkpoint=file, configs=folder))
    with pytest.raises(ModelError, match=r"'conv_out.bias' of its unet has the shape \[9\] where .* needs \[4\]"):
        po.encode(handle, "a fox")
    parts["model.diffusion_model."]["out.2.bias"] = torch.zeros(4)
    write_file(file, parts)
    handle = po.load(SplitFiles(checkpoint=file, configs=folder))
    with pytest.raises(ModelError, match=r"lacks 'decoder.mid_block.attentions.0.to_k.bias' of its vae"):
        po.encode(handle, "a fox")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("lora_unet_down.lora_down.weight",), "is a LoRA"),
        (("control_model.input_hint_block.0.weight",), "ControlNet"),
        (("depth_model.model.pretrained.x", "model.diffusion_model.x"), "is Stable Diffusion 2 for depth"),
        (("noise_augmentor.betas", "model.diffusion_model.x"), "is Stable unCLIP"),
        (("something.else",), "holds no part of a model"),
    ],
)
def test_other_files_are_called_what_they_are(names: tuple[str, ...], says: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "x.safetensors")
    assert says in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("dtype", "says"), [(torch.int8, "whole numbers (I8)"), (torch.float8_e4m3fnuz, "fnuz")])
def test_weights_of_other_formats_are_refused_by_what_they_are(dtype: Any, says: str, tmp_path: Path) -> None:
    parts = checkpoint_parts("sd15")
    unet = {name: tensor.to(dtype) for name, tensor in parts["model.diffusion_model."].items()}
    file = write_file(tmp_path / "packed.safetensors", {**parts, "model.diffusion_model.": unet})
    message = refusal(SplitFiles(checkpoint=file, configs=tiny_model("sd15")))
    assert says in message and "can't be unpacked" in message


def test_damaged_and_foreign_files_are_refused_alike_on_every_route(tmp_path: Path) -> None:
    folder = tiny_model("sd15")
    good = write_file(tmp_path / "good.safetensors", checkpoint_parts("sd15"))
    bad = {
        "empty.safetensors": b"",
        "longer.safetensors": good.read_bytes() + b"x",
        "shorter.safetensors": good.read_bytes()[:-1],
        "model.ckpt": b"\x80\x02}q\x00.",
        "packed.gguf": b"GGUF\x03\x00\x00\x00",
        "renamed.safetensors": b"GGUF\x03\x00\x00\x00",
        "model-00001-of-00002.safetensors": good.read_bytes(),
    }
    says = ("is empty", "bytes too many", "cut short", "can run code", "is cut short", "is a GGUF", "several shards")
    for (name, content), expect in zip(bad.items(), says, strict=True):
        file = tmp_path / name
        file.write_bytes(content)
        message = refusal(file)
        assert expect in message
        assert refusal(SplitFiles(checkpoint=good, vae=file, configs=folder)) == message
    assert "does not exist" in refusal(tmp_path / "gone.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "empty folder" in refusal(tmp_path / "folder.safetensors")
    assert "not a regular file" in refusal(SplitFiles(checkpoint=tmp_path / "folder.safetensors", configs=folder))


def test_other_names_of_a_file_mean_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model("sd15")
    file = write_file(tmp_path / "model.safetensors", checkpoint_parts("sd15"))
    link = tmp_path / "links" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(file)
    monkeypatch.chdir(tmp_path)
    names = (file, link, "model.safetensors", f"{link.parent}/../model.safetensors")
    handles = [po.load(SplitFiles(checkpoint=name, configs=folder)) for name in names]
    assert len({handle.fingerprint for handle in handles}) == 1
    monkeypatch.chdir(link.parent)  # a name that was relative goes on meaning its file
    assert {handle.source().root for handle in handles} == {file, link}


# ------------------------------------------------------------------- models that are described in this project


def host_tokenizers(folder: Path) -> Path:
    """Tokenizers where ComfyUI has its own."""
    from offload_core.known import _tokenizers

    _tokenizers.clip_tokenizer().save_pretrained(folder / "sd1_tokenizer")
    _tokenizers.t5_tokenizer().save_pretrained(folder / "text_encoders" / "t5_tokenizer")
    _tokenizers.qwen_tokenizer().save_pretrained(folder / "text_encoders" / "qwen25_tokenizer")
    _tokenizers.qwen_tokenizer().save_pretrained(folder / "qwen3_tokenizer")
    _tokenizers.gemma_tokenizer().save_pretrained(folder / "gemma2_tokenizer")
    (folder / "processor").mkdir()  # of a diffusers folder of Qwen-Image-Edit
    (folder / "processor" / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    gemma3 = _tokenizers.gemma_tokenizer()
    gemma3.add_special_tokens({"additional_special_tokens": ["<start_of_image>"]})
    gemma3.save_pretrained(folder / "gemma3_tokenizer")
    _tokenizers.llama_tokenizer().save_pretrained(folder / "text_encoders" / "llama_tokenizer")
    _tokenizers.llama_tokenizer().save_pretrained(folder / "text_encoders" / "t5_pile_tokenizer")
    return folder


def add_umt5_tokenizer(folder: Path) -> Path:
    """Which ComfyUI doesn't have. It is told from T5's by its size."""
    from offload_core.known import _tokenizers

    _tokenizers.t5_tokenizer().save_pretrained(folder / "umt5_tokenizer")
    with (folder / "umt5_tokenizer" / "tokenizer.json").open("a") as file:
        file.write(" " * 5_000_000)
    return folder


def _asked(family: str) -> str:
    """What a person has to say: nothing, where files tell."""
    from offload_core.single_files.template import ALIKE

    return family if family in ALIKE else "auto"


@pytest.mark.parametrize(
    "family",
    ["sd1.5", *(pytest.param(name, marks=pytest.mark.slow) for name in FULL_SIZE if name != "sd1.5")],
)
def test_published_checkpoint_needs_no_configs(family: str, tmp_path: Path) -> None:
    """The file has the published names and shapes, and a hole for data. Every weight of every class finds its place."""
    from offload_core.known import known_model
    from offload_core.phases._components import _skeleton
    from offload_core.phases._stored import bind_stored

    file = full_size_file(tmp_path / "model.safetensors", family)
    tokenizers = add_umt5_tokenizer(host_tokenizers(tmp_path / "comfy"))
    files = SplitFiles(checkpoint=file, family=_asked(family), tokenizers=tokenizers)
    if "image_encoder" in FULL_SIZE[family]:
        files = replace(files, encoders=full_size_file(tmp_path / "sees.safetensors", family, apart="image_encoder"))
    source = resolve_files(files)
    model = known_model(family)
    assert model is not None and source.notes == (f"Recognised as {model.title}.",)
    assert source.pipeline_class == model.pipeline
    for name, part in source.components.items():
        if part.has_weights:
            module = _skeleton(part, torch.float16, torch.device("cpu"))
            bind_stored(module, part)
            assert part.weight_bytes // 2 == model.components[name]["parameters"] + (
                model.components[name].get("stored_buffer_elements") or 0
            )


def test_tokenizers_come_from_a_folder_that_is_named_and_a_sentence_says_so(tmp_path: Path) -> None:
    from offload_core.single_files.tokenizers import find_tokenizer

    comfy = host_tokenizers(tmp_path / "ComfyUI" / "comfy")
    folders = [str(comfy)]
    assert find_tokenizer("tokenizer", "CLIPTokenizer", "CLIPTextModel", folders, "SDXL") == comfy / "sd1_tokenizer"
    assert (
        find_tokenizer("tokenizer_2", "T5TokenizerFast", "T5EncoderModel", folders, "FLUX")
        == comfy / "text_encoders/t5_tokenizer"
    )
    flux = [str(tiny_model("flux"))]
    assert find_tokenizer("tokenizer_3", "T5TokenizerFast", "T5EncoderModel", flux, "SD3").name == "tokenizer_2"
    with pytest.raises(ModelError, match=r"SDXL needs CLIP's tokenizer, .*\(tokenizers\)"):
        find_tokenizer("tokenizer", "CLIPTokenizer", "CLIPTextModel", [str(tmp_path / "nothing")], "SDXL")
    with pytest.raises(ModelError, match="umT5's tokenizer"):  # T5's has another vocabulary
        find_tokenizer("tokenizer", "T5TokenizerFast", "UMT5EncoderModel", folders, "Wan")


def test_options_of_a_described_tokenizer_are_the_models_own(tmp_path: Path) -> None:
    """SDXL's second encoder is padded with '!', whatever the folder says that the vocabulary is from."""
    from offload_core.model_source import ComponentSource
    from offload_core.phases._pipeline import _load_part

    folder = host_tokenizers(tmp_path) / "sd1_tokenizer"
    options = {"model_max_length": 77, "pad_token": "!"}
    part = ComponentSource("tokenizer_2", "transformers", "CLIPTokenizer", folder, options, described=True)
    assert _load_part(part).pad_token == "!"


# ------------------------------------------------------------------------------------------------- lists


def test_list_says_what_each_file_is_and_looks_at_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload_core.single_files import listing

    parts = checkpoint_parts("sd15")
    (tmp_path / "below").mkdir()
    write_file(tmp_path / "below" / "whole.safetensors", parts)
    write_file(tmp_path / "vae.safetensors", {"": parts["first_stage_model."]})
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    files = listing.ModelFiles()
    found = files.list([tmp_path, tmp_path / "nowhere"])
    assert list(found) == ["below/whole.safetensors", "broken.safetensors", "vae.safetensors"]
    assert found["below/whole.safetensors"].is_whole and not found["vae.safetensors"].is_whole
    assert found["vae.safetensors"].roles == ("vae",) and found["broken.safetensors"].roles == ()
    monkeypatch.setattr(listing, "_look_at", lambda path: pytest.fail(f"{path} was looked at again"))
    assert files.list([tmp_path]) == found


def test_list_tells_families_apart_by_sizes(tmp_path: Path) -> None:
    from offload_core.single_files import list_model_files

    full_size_file(tmp_path / "a.safetensors", "sd1.5")
    listed = list_model_files([tmp_path])["a.safetensors"]
    assert listed.families == ("sd1.5",) and not listed.packed


# ------------------------------------------------------------------------------------------ names of models


def test_command_line_names_files_part_by_part() -> None:
    import argparse

    from offload_core._model_options import add_file_arguments, chosen_model
    from offload_core.errors import InputError

    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    add_file_arguments(parser)
    given = "--denoiser d --encoder a --encoder b --vae v --tokenizers t".split()
    expect = SplitFiles(denoiser="d", encoders=("a", "b"), vae="v", tokenizers=("t",))
    assert chosen_model(parser.parse_args(given)) == expect
    assert chosen_model(parser.parse_args(["--model", "m.safetensors"])) == "m.safetensors"
    with pytest.raises(InputError, match="--vae goes with files"):
        chosen_model(parser.parse_args(["--model", str(Path.cwd()), "--vae", "v"]))
    with pytest.raises(InputError, match="Give a model"):
        chosen_model(parser.parse_args([]))


def test_hub_id_means_its_cached_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / "abc").symlink_to(tiny_model("sd15"), target_is_directory=True)
    assert po.load("someone/tiny").pipeline == "StableDiffusionPipeline"
    with pytest.raises(ModelError, match="models add someone/other"):
        po.load("someone/other")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_weights_are_cast_on_the_way_in_as_those_of_a_folder(dtype: str, tmp_path: Path) -> None:
    from offload_core.tiny_models.running import save_tiny

    folder = save_tiny("sdxl", tmp_path / "folder", torch.float16)
    parts = checkpoint_parts("sdxl")
    half = {prefix: {name: tensor.half() for name, tensor in part.items()} for prefix, part in parts.items()}
    file = write_file(tmp_path / "half.safetensors", half)
    of_folder, _ = staged(folder, words("sdxl"), job("sdxl", guided=True), dtype=dtype, seed=3, settings=TIGHT)
    of_file = pictures_of("sdxl", SplitFiles(checkpoint=str(file), configs=str(folder)), dtype=dtype)
    assert torch.equal(of_file, of_folder)


@pytest.mark.slow
def test_command_line_makes_a_picture_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from offload_core import cli

    files = split_files("sd15", tmp_path)
    output = tmp_path / "picture.png"
    words_of_it = ["--prompt", "a fox", "--width", "64", "--height", "48", "--steps", "2", "--device", "cpu"]
    given = ["--denoiser", files.denoiser, "--encoder", *files.encoders, "--vae", files.vae, "--configs", files.configs]
    assert cli.main(["generate", *map(str, given), *words_of_it, "--output", str(output)]) == 0
    assert output.stat().st_size > 100
    assert cli.main(["plan", *map(str, given), *words_of_it[:-2], "--device", "cpu"]) == 0
    assert "denoise" in capsys.readouterr().out


def test_qwen3_is_asked_in_its_own_words_whatever_folder_its_vocabulary_is_from(tmp_path: Path) -> None:
    from offload_core.known import _tokenizers
    from offload_core.model_source import ComponentSource
    from offload_core.phases._pipeline import _load_part
    from offload_core.single_files.tokenizers import find_tokenizer, tokenizer_options

    real = _tokenizers.qwen_tokenizer()
    messages = [{"role": "user", "content": "a fox"}]
    call: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    expect = real.apply_chat_template(messages, **call)
    real.chat_template = "another model's"
    real.save_pretrained(tmp_path / "qwen25_tokenizer")
    place = find_tokenizer("tokenizer", "Qwen2TokenizerFast", "Qwen3ForCausalLM", [str(tmp_path)], "Z-Image")
    options = tokenizer_options(place, "Qwen3ForCausalLM")
    part = ComponentSource("tokenizer", "transformers", "Qwen2TokenizerFast", place, options, described=True)
    assert _load_part(part).apply_chat_template(messages, **call) == expect
    assert tokenizer_options(place, "Qwen2_5_VLForConditionalGeneration") == {}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TIGHT, None], ids=["streamed", "resident"])
def test_lora_changes_a_model_of_files_as_it_does_its_folder(settings: Any, tmp_path: Path) -> None:
    from lora_files import make_lora

    lora = make_lora("flux", "transformer", tmp_path / "lora.safetensors", ["to_q", "to_k", "proj_mlp"])
    settings = settings and replace(settings, device_memory="600kB")
    call = {"dtype": "auto", "seed": 3, "settings": settings, "loras": [lora]}
    of_folder, _ = staged(tiny_model("flux"), words("flux"), job("flux", guided=True), **call)
    files = split_files("flux", tmp_path)
    of_file, _ = staged(files, words("flux"), job("flux", guided=True), **call)  # type: ignore[arg-type]
    assert torch.equal(of_file, of_folder)
    assert not torch.equal(of_file, expected("flux"))
