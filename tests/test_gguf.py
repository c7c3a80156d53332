"""GGUF files: headers that are checked, blocks that mean what diffusers says, and models that stream packed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import offload_core as po
from offload_core.errors import ModelError
from offload_core.gguf_file import read_gguf_header
from offload_core.packing import unpack
from offload_core.single_files import SplitFiles, list_model_files
from original_layout import Weights, original_weights, split_files, write_file
from staging import job, tiny_model, words

TIGHT = po.OffloadSettings(device_memory="150kB", resident_below=0, activation_memory=0)
BF16 = torch.bfloat16
PACKED = "Q2_K Q3_K Q4_K Q5_K Q6_K Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL IQ4_XS".split()
#: llama.cpp's names of tensors, by transformers' names within a block or without one.
LLAMA_CPP_NAMES = {
    "shared": "token_embd",
    "encoder.final_layer_norm": "enc.output_norm",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.layer_norm": "ffn_norm",
    **{f"layer.0.SelfAttention.{x}": f"attn_{x}" for x in "qkvo"},
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def write_gguf(
    path: Path, weights: Weights, kind: str = "Q8_0", architecture: str = "flux", **metadata: Any
) -> Weights:
    """A GGUF file, its matrices in blocks of `kind` where rows are whole blocks. Returns what its numbers are, as
    diffusers works them out, in float32."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in metadata.items():
        writer.add_array(name, value)
    meant: Weights = {}
    block_type = gguf.GGMLQuantizationType[kind]
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        if values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[block_type][0] == 0:
            data = gguf.quants.quantize(values, block_type)
            writer.add_tensor(name, data, raw_dtype=block_type)
            meant[name] = diffusers_numbers(kind, torch.from_numpy(data), values.shape)
        else:
            writer.add_tensor(name, values)
            meant[name] = tensor.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def diffusers_numbers(kind: str, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    parameter = GGUFParameter(data, quant_type=gguf.GGMLQuantizationType[kind])
    return dequantize_gguf_tensor(parameter).float().view(shape)


def files(family: str, folder: Path, kind: str) -> tuple[SplitFiles, SplitFiles]:
    """A tiny model whose denoiser is a GGUF file, and its twin with the same numbers in bfloat16."""
    paths = {name: folder / f"{name}.safetensors" for name in ("vae", "text_encoder", "text_encoder_2")}
    for name, path in paths.items():
        write_file(path, {"": {key: value.to(BF16) for key, value in original_weights(family, name).items()}})
    meant = write_gguf(folder / "denoiser.gguf", original_weights(family, "transformer"), kind)
    twin = write_file(folder / "twin.safetensors", {"": {name: value.to(BF16) for name, value in meant.items()}})
    encoders = (str(paths["text_encoder"]), str(paths["text_encoder_2"]))
    configs, vae = str(tiny_model(family)), str(paths["vae"])
    denoisers = (str(folder / "denoiser.gguf"), str(twin))
    return tuple(SplitFiles(denoiser=each, encoders=encoders, vae=vae, configs=configs) for each in denoisers)  # type: ignore[return-value]


def picture(model: SplitFiles, family: str, settings: Any = None, **load: Any) -> tuple[torch.Tensor, po.Session]:
    session = po.Session()
    handle = po.load(model, device="cpu", dtype="bfloat16", settings=settings, **load)
    embeds = po.encode(handle, **words(family), session=session)
    latents = po.denoise(handle, embeds, seed=1, session=session, **job(family, guided=True))
    return torch.as_tensor(po.decode(handle, latents, "pt", session=session)).float(), session


# ----------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_mean_what_diffusers_says(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    data = torch.from_numpy(generator.integers(0, 120, (6, 2 * size), dtype=np.uint8))
    expected = diffusers_numbers(kind, data, (6, 2 * block))
    for dtype in (BF16, torch.float32):
        found = unpack(kind, data, None, (6, 2 * block), dtype)
        assert torch.equal(found.nan_to_num(), expected.to(dtype).nan_to_num())  # random scales may be anything


def test_header_says_where_every_tensor_lies(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(4, 64), "a.bias": torch.randn(4), "b.weight": torch.randn(2, 3, 1, 1)}
    write_gguf(tmp_path / "x.gguf", weights, "Q4_0")
    header = read_gguf_header(tmp_path / "x.gguf")
    raw = (tmp_path / "x.gguf").read_bytes()
    for name, tensor in weights.items():
        entry = header.tensors[name]
        data = torch.frombuffer(bytearray(raw[header.data_start :][entry.begin : entry.end]), dtype=torch.uint8)
        assert entry.shape == tuple(tensor.shape)
        if entry.dtype == "Q4_0":
            assert torch.allclose(diffusers_numbers("Q4_0", data.view(4, -1), (4, 64)), tensor, atol=0.5)
        else:
            assert torch.equal(data.view(torch.float32).view(tensor.shape), tensor)


# ----------------------------------------------------------------------------------------------------------- models


def test_packed_denoiser_gives_the_picture_of_its_twin_whole_and_streamed(tmp_path: Path) -> None:
    """FLUX.1: fused rows of blocks are dealt, halves change places."""
    packed, twin = files("flux", tmp_path, "Q8_0")
    expected, whole = picture(twin, "flux")
    found, _ = picture(packed, "flux")
    assert torch.equal(found, expected)
    streamed, session = picture(packed, "flux", TIGHT)
    assert torch.equal(streamed, expected)
    phase, before = session.report.phases[1], whole.report.phases[1]
    assert phase.streamed_bytes > 0
    assert phase.weight_bytes < 0.7 * before.weight_bytes


def test_packed_denoiser_equals_diffusers_own_loader(tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    folder = tiny_model("flux") / "transformer"
    from safetensors.torch import load_file

    weights = load_file(next(folder.glob("*.safetensors")))
    write_gguf(tmp_path / "x.gguf", weights, "Q4_0")
    model = FluxTransformer2DModel.from_single_file(
        str(tmp_path / "x.gguf"),
        config=str(folder),
        quantization_config=GGUFQuantizationConfig(compute_dtype=BF16),
        torch_dtype=BF16,
    )
    header = read_gguf_header(tmp_path / "x.gguf")
    raw = (tmp_path / "x.gguf").read_bytes()
    inputs = torch.randn(3, 32, dtype=BF16)
    seen = 0
    for name, layer in model.named_modules():
        entry = header.tensors.get(f"{name}.weight")
        if entry is None or entry.dtype != "Q4_0" or entry.shape[1] != 32:
            continue
        data = torch.frombuffer(bytearray(raw[header.data_start :][entry.begin : entry.end]), dtype=torch.uint8)
        weight = unpack("Q4_0", data.view(entry.shape[0], -1), None, entry.shape, BF16)
        assert torch.equal(layer(inputs), torch.nn.functional.linear(inputs, weight, layer.bias))
        seen += 1
    assert seen > 10


def llama_cpp_names(weights: Weights) -> dict[str, str]:
    """llama.cpp's name of each tensor of a T5 or Qwen encoder; the eyes of Qwen2.5-VL have none."""
    names = {}
    for name in weights:
        stem, _, kind = name.rpartition(".")
        for start, block in (("encoder.block.", "enc.blk"), ("model.layers.", "blk")):
            if stem.startswith(start):
                number, _, inner = stem.removeprefix(start).partition(".")
                names[name] = f"{block}.{number}.{LLAMA_CPP_NAMES[inner]}.{kind}"
        if stem in LLAMA_CPP_NAMES:
            names[name] = f"{LLAMA_CPP_NAMES[stem]}.{kind}"
    return names


@pytest.mark.parametrize(
    ("family", "encoder"),
    [
        ("flux", "text_encoder_2"),
        pytest.param("z_image", "text_encoder", marks=pytest.mark.slow),
        pytest.param("qwen_image", "text_encoder", marks=pytest.mark.slow),
        pytest.param("wan22_a14b", "text_encoder", marks=pytest.mark.slow),
    ],
)
def test_encoder_under_llama_cpps_names_gives_the_picture_of_its_twin(
    family: str, encoder: str, tmp_path: Path
) -> None:
    given = split_files(family, tmp_path)
    weights = original_weights(family, encoder)
    names = llama_cpp_names(weights)
    meant = write_gguf(tmp_path / "packed.gguf", {new: weights[old] for old, new in names.items()}, "Q8_0")
    twin = {name: (meant[names[name]] if name in names else weights[name]).to(BF16) for name in weights}
    write_file(tmp_path / "twin.safetensors", {"": twin})
    pictures = []
    for file in ("twin.safetensors", "packed.gguf"):
        encoders = [str(tmp_path / file) if Path(old).stem == encoder else old for old in given.encoders]
        pictures.append(picture(replace(given, encoders=tuple(encoders)), family)[0])
    assert torch.equal(*pictures)


# --------------------------------------------------------------------------------------------------- what is refused


def damaged(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    write_gguf(tmp_path / "good.gguf", {"a.weight": torch.randn(4, 64)}, "Q8_0")
    good = (tmp_path / "good.gguf").read_bytes()
    (tmp_path / "good.gguf").unlink()
    tensors = struct.pack("<Q", 1)
    info = struct.pack("<QQI", 64, 4, 8)  # 64 columns, 4 rows, Q8_0
    return {
        "empty": (b"", "is empty"),
        "another file": (b"{}" * 40, "is no GGUF file"),
        "cut in its header": (good[:40], "is cut short"),
        "cut in its data": (good[:-40], "is cut short: 'a.weight' lies behind its end"),
        "of version 1": (good[:4] + struct.pack("<I", 1) + good[8:], "of version 1"),
        "with too many tensors": (
            good[:8] + struct.pack("<Q", 1 << 60) + good[16:],
            "claims 1,152,921",
        ),
        "with an endless array": (
            good[:8] + tensors + tensors + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 50) + good[24:],
            "is cut short",
        ),
        "with arrays in arrays without end": (
            good[:8] + tensors + tensors + struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000,
            "nested too deeply",
        ),
        "of an unknown type": (good.replace(info, struct.pack("<QQI", 64, 4, 99)), "type 99"),
        "with half a block": (
            good.replace(info, struct.pack("<QQI", 63, 4, 8)),
            "whole blocks",
        ),
    }


def test_damaged_files_are_refused_in_a_sentence_and_listed_without_a_role(tmp_path: Path) -> None:
    for name, (content, says) in damaged(tmp_path).items():
        file = tmp_path / "x.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelError, match=says) as refused:
            po.load(SplitFiles(denoiser=str(file)))
        assert str(refused.value).endswith("."), name
        assert list_model_files([tmp_path])["x.gguf"].roles == ()


@pytest.mark.parametrize("shape", [[-4, -64], [4.0, 64.0]], ids=["negative", "of floats"])
def test_shape_in_the_metadata_counts_only_if_it_is_one(shape: list[Any], tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", {"a.weight": torch.randn(4, 64)}, **{"comfy.gguf.orig_shape.a.weight": shape})
    assert read_gguf_header(tmp_path / "x.gguf").tensors["a.weight"].shape == (4, 64)


def test_shape_in_the_metadata_is_the_tensors_and_must_have_its_count(tmp_path: Path) -> None:
    weights, key = {"a.weight": torch.randn(4, 64)}, "comfy.gguf.orig_shape.a.weight"
    write_gguf(tmp_path / "x.gguf", weights, **{key: [4, 16, 2, 2]})
    assert read_gguf_header(tmp_path / "x.gguf").tensors["a.weight"].shape == (4, 16, 2, 2)
    write_gguf(tmp_path / "x.gguf", weights, **{key: [4, 16, 2, 3]})
    with pytest.raises(ModelError, match="has 256 numbers and the shape"):
        read_gguf_header(tmp_path / "x.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="is not a regular file"):
        read_gguf_header(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("file", "names", "says"),
    [
        ("x-00001-of-00002.gguf", ["double_blocks.0.img_attn.qkv.weight"], "one of several shards"),
        ("x.gguf", ["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"], "is a LoRA"),
        ("x.gguf", ["v.blk.0.attn_q.weight", "mm.0.weight"], "the eyes of a text encoder alone"),
        ("x.gguf", ["blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight"], "is Gemma as GGUF"),
    ],
)
def test_other_gguf_files_are_refused_by_what_they_are(file: str, names: list[str], says: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / file, {name: torch.zeros(2, 32) for name in names})
    with pytest.raises(ModelError, match=says):
        po.load(SplitFiles(denoiser=str(tmp_path / file)))


@pytest.mark.parametrize(
    ("mark", "own", "other"),
    [("blk.0.attn_q_norm.weight", "qwen3", "qwen3vl"), ("blk.0.attn_q.bias", "qwen2vl", "qwen2")],
)
def test_another_architecture_of_the_same_names_is_no_encoder(mark: str, own: str, other: str, tmp_path: Path) -> None:
    """Its sizes are the same too, so it would load, and give bad pictures."""
    names = ("token_embd.weight", "blk.0.ffn_gate.weight", mark)
    for architecture in (own, other):
        path = tmp_path / f"{architecture}.gguf"
        write_gguf(path, {name: torch.zeros(2, 32) for name in names}, architecture=architecture)
    listed = list_model_files([tmp_path])
    assert listed[f"{own}.gguf"].roles == ("encoder",) and listed[f"{other}.gguf"].roles == ()
    with pytest.raises(ModelError, match=f"a model of the architecture '{other}'"):
        po.load(SplitFiles(denoiser=str(tmp_path / f"{other}.gguf")))


def test_blocks_that_cant_be_unpacked_are_refused_by_name(tmp_path: Path) -> None:
    packed, _ = files("flux", tmp_path, "Q8_0")
    writer = gguf.GGUFWriter(str(tmp_path / "denoiser.gguf"), "flux")
    for name, tensor in original_weights("flux", "transformer").items():
        writer.add_tensor(name, tensor.float().numpy())
    ternary = gguf.GGMLQuantizationType.TQ1_0  # 256 numbers in 54 bytes
    writer.add_tensor("double_blocks.0.more.weight", np.zeros((4, 54), np.uint8), raw_dtype=ternary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="as GGUF blocks of the type TQ1_0, which can't be unpacked"):
        po.load(packed)


def test_text_part_alone_is_refused_for_a_model_that_shows_its_encoder_pictures(tmp_path: Path) -> None:
    given = split_files("qwen_image", tmp_path)
    configs = shutil.copytree(tiny_model("qwen_image"), tmp_path / "configs")
    index = json.loads((configs / "model_index.json").read_text())
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (configs / "model_index.json").write_text(json.dumps(index))
    shutil.copytree(configs / "tokenizer", configs / "processor")
    weights = original_weights("qwen_image", "text_encoder")
    names = llama_cpp_names(weights)
    write_gguf(tmp_path / "packed.gguf", {new: weights[old] for old, new in names.items()}, "Q8_0")
    blind = replace(given, encoders=(str(tmp_path / "packed.gguf"),), configs=str(configs))
    with pytest.raises(ModelError, match="shows it pictures"):
        po.load(blind)


def test_list_knows_a_gguf_denoiser(tmp_path: Path) -> None:
    files("flux", tmp_path, "Q8_0")
    listed = list_model_files([tmp_path])["denoiser.gguf"]
    assert listed.roles == ("denoiser",) and listed.packed
