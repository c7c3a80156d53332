"""Model folders: the good ones resolve from headers alone, each defect is one ModelError that names the culprit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload_core.errors import ModelError
from offload_core.model_source import (
    ModelSource,
    choose_model,
    component_class,
    list_models,
    no_models_sentence,
    pipeline_class,
    resolve_model,
)

UNET = "diffusion_pytorch_model.safetensors"
PARTS = ("diffusion_pytorch_model-00001-of-00002.safetensors", "diffusion_pytorch_model-00002-of-00002.safetensors")
INDEX = "diffusion_pytorch_model.safetensors.index.json"
SECRET = "secret words"


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def make_model(root: Path) -> Path:
    """A folder in the shape of Stable Diffusion 1.5, with a few numbers for weights."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None],
        "requires_safety_checker": True,
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_json(root / "model_index.json", index)
    write_json(root / "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"})
    write_json(root / "tokenizer/tokenizer_config.json", {"model_max_length": 77})
    write_json(root / "tokenizer/vocab.json", {"a": 0})
    (root / "tokenizer/merges.txt").write_text("")
    write_json(root / "text_encoder/config.json", {"architectures": ["CLIPTextModel"]})
    write_json(root / "safety_checker/config.json", {"architectures": ["StableDiffusionSafetyChecker"]})
    write_json(root / "unet/config.json", {"_class_name": "UNet2DConditionModel", "sample_size": 8})
    write_json(root / "vae/config.json", {"_class_name": "AutoencoderKL"})
    save_file({"text.weight": torch.zeros(4, 4)}, root / "text_encoder/model.safetensors")
    save_file({"check.weight": torch.zeros(2)}, root / "safety_checker/model.safetensors")
    big, small = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(1)
    save_file({"x.weight": big, "x.bias": small}, root / "unet" / UNET)
    save_file({"y.weight": torch.zeros(8)}, root / "vae" / UNET)
    return root


def split_unet(root: Path) -> Path:
    """The same model with its unet in two files and an index."""
    (root / "unet" / UNET).unlink()
    save_file({"x.weight": torch.zeros(64, dtype=torch.bfloat16)}, root / "unet" / PARTS[0])
    save_file({"x.bias": torch.zeros(1)}, root / "unet" / PARTS[1])
    weight_map = {"x.weight": PARTS[0], "x.bias": PARTS[1]}
    write_json(root / "unet" / INDEX, {"metadata": {"total_size": 132}, "weight_map": weight_map})
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    assert message.endswith((".", "?"))
    assert SECRET not in message
    assert caught.value.exit_code == 4
    return message


_watched: list[list[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in ("open", "compile", "exec", "import"):
        _watched[-1].append(f"{event} {arguments[:2]}"[:500])


@pytest.fixture(scope="session")
def audited() -> Callable[[], list[str]]:
    """Starts a fresh record of everything this process opens, compiles and imports. A hook can't be taken out again."""
    import diffusers
    import transformers

    diffusers.StableDiffusionPipeline, transformers.CLIPTextModel  # noqa: B018 - so that the record has our own opens only
    sys.addaudithook(_watch)

    def record() -> list[str]:
        _watched.append([])
        return _watched[-1]

    return record


@pytest.fixture
def opened(audited: Callable[[], list[str]]) -> Iterator[list[str]]:
    yield audited()
    _watched.clear()


# --- good folders ---


def test_good_folder_resolves_with_all_its_facts(model: Path) -> None:
    source = resolve_model(model)
    assert source.root == model.resolve()
    assert source.pipeline_class == "StableDiffusionPipeline"
    assert list(source.components) == ["safety_checker", "scheduler", "text_encoder", "tokenizer", "unet", "vae"]
    assert source.options == {"requires_safety_checker": True}
    assert (source.defaults, source.notes) == ({}, ())
    unet = source.components["unet"]
    assert (unet.library, unet.class_name, unet.directory.name) == ("diffusers", "UNet2DConditionModel", "unet")
    assert unet.config == {"_class_name": "UNet2DConditionModel", "sample_size": 8}
    assert [file.name for file in unet.weight_files] == [UNET]
    assert (unet.weight_bytes, unet.tensors, unet.dtype, unet.variant) == (132, 2, "bfloat16", None)
    assert unet.has_weights
    assert not source.components["tokenizer"].has_weights
    assert source.components["scheduler"].config == {"_class_name": "DDIMScheduler"}
    assert source.weight_bytes == 132 + 64 + 8 + 32


def test_sharded_component_resolves_to_all_its_files(model: Path) -> None:
    whole = resolve_model(model).components["unet"]
    parts = resolve_model(split_unet(model)).components["unet"]
    assert [file.name for file in parts.weight_files] == list(PARTS)
    assert (parts.weight_bytes, parts.tensors, parts.dtype) == (whole.weight_bytes, whole.tensors, whole.dtype)


def test_shard_names_may_have_either_slash_and_any_letters(model: Path) -> None:
    split_unet(model)
    (model / "unet/teile").mkdir()
    (model / "unet" / PARTS[0]).rename(model / "unet/teile/größe.safetensors")
    (model / "unet" / PARTS[1]).rename(model / "unet/teile/b.safetensors")
    weight_map = {"x.weight": "teile/größe.safetensors", "x.bias": "teile\\b.safetensors"}
    write_json(model / "unet" / INDEX, {"weight_map": weight_map})
    files = resolve_model(model).components["unet"].weight_files
    assert sorted(file.name for file in files) == ["b.safetensors", "größe.safetensors"]


def test_classes_come_from_the_installed_libraries(model: Path) -> None:
    import diffusers
    import transformers

    source = resolve_model(model)
    assert pipeline_class(source) is diffusers.StableDiffusionPipeline
    assert component_class(source.components["vae"]) is diffusers.AutoencoderKL
    assert component_class(source.components["text_encoder"]) is transformers.CLIPTextModel
    checker = component_class(source.components["safety_checker"])
    assert checker.__module__.startswith("diffusers.pipelines.stable_diffusion")


def test_old_class_name_of_a_renamed_processor_still_resolves(model: Path) -> None:
    edit_json(model / "model_index.json", feature_extractor=["transformers", "CLIPFeatureExtractor"])
    write_json(model / "feature_extractor/preprocessor_config.json", {"size": 224})
    extractor = resolve_model(model).components["feature_extractor"]
    assert not extractor.has_weights
    assert component_class(extractor).__name__.startswith("CLIPImageProcessor")


def test_only_variant_is_used_and_named(model: Path) -> None:
    (model / "unet" / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    source = resolve_model(model)
    assert source.components["unet"].variant == "fp16"
    assert source.notes == ()


def test_sharded_variant_is_found_with_its_index(model: Path) -> None:
    split_unet(model)
    names = [name.replace("model-", "model.fp16-") for name in PARTS]
    for old, new in zip(PARTS, names, strict=True):
        (model / "unet" / old).rename(model / "unet" / new)
    (model / "unet" / INDEX).unlink()
    weight_map = {"x.weight": names[0], "x.bias": names[1]}
    write_json(model / "unet/diffusion_pytorch_model.safetensors.index.fp16.json", {"weight_map": weight_map})
    unet = resolve_model(model).components["unet"]
    assert ([file.name for file in unet.weight_files], unet.variant) == (names, "fp16")


def test_plain_file_is_preferred_to_a_variant_with_a_note(model: Path) -> None:
    shutil.copy(model / "unet" / UNET, model / "unet/diffusion_pytorch_model.fp16.safetensors")
    source = resolve_model(model)
    assert [file.name for file in source.components["unet"].weight_files] == [UNET]
    (note,) = source.notes
    assert "unet/diffusion_pytorch_model.fp16.safetensors is not used" in note


def test_defaults_are_any_json_object_even_with_a_byte_order_mark(model: Path) -> None:
    (model / "phase_offload.json").write_text('{"num_inference_steps": 4, "mine": [1]}', encoding="utf-8-sig")
    assert resolve_model(model).defaults == {"num_inference_steps": 4, "mine": [1]}


def test_pickles_python_files_and_pictures_beside_the_weights_are_no_matter(model: Path, opened: list[str]) -> None:
    (model / "unet/diffusion_pytorch_model.bin").write_bytes(b"\x80\x04.")
    (model / "pipeline.py").write_text("raise SystemExit")
    (model / "unet/helper.py").write_text("raise SystemExit")
    (model / "picture.png").write_bytes(b"")
    opened.clear()
    resolve_model(model)
    assert not [line for line in opened if ".py" in line and str(model) in line]
    assert not [line for line in opened if ".bin" in line]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sparse files")
def test_hundred_gigabytes_of_weights_resolve_because_none_is_read(model: Path) -> None:
    header = json.dumps({"y.weight": {"dtype": "U8", "shape": [1 << 37], "data_offsets": [0, 1 << 37]}}).encode()
    with (model / "vae" / UNET).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 37))
    tracemalloc.start()
    try:
        source = resolve_model(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.components["vae"].weight_bytes == 1 << 37
    assert peak < 4 << 20


def test_source_is_hashable_and_survives_pickling(model: Path) -> None:
    source = resolve_model(model)
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert len({copy, source}) == 1
    assert len(repr(source)) < 400


# --- fingerprint and later changes ---


def test_fingerprint_is_stable_and_follows_every_part(model: Path) -> None:
    first = resolve_model(model).fingerprint
    assert len(first) == 64
    assert resolve_model(str(model)).fingerprint == first
    seen = {first}
    for path in ("model_index.json", "unet/config.json", "tokenizer/vocab.json"):
        edit_json(model / path, _extra="value")
        seen.add(resolve_model(model).fingerprint)
    save_file({"y.weight": torch.ones(8)}, model / "vae" / UNET)
    os.utime(model / "vae" / UNET, ns=(1, 1))
    seen.add(resolve_model(model).fingerprint)
    write_json(model / "phase_offload.json", {"guidance_scale": 3})
    seen.add(resolve_model(model).fingerprint)
    assert len(seen) == 6


@pytest.mark.parametrize("change", ["rewrite", "truncate", "replace", "delete", "config"])
def test_later_change_is_noticed_by_name(change: str, model: Path) -> None:
    source = resolve_model(model)
    source.check_unchanged()
    path = model / "vae" / UNET
    if change == "rewrite":
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    elif change == "truncate":
        os.truncate(path, path.stat().st_size - 1)
    elif change == "replace":
        save_file({"other.weight": torch.zeros(9)}, model / "new")
        (model / "new").replace(path)
    elif change == "delete":
        path.unlink()
    else:
        path = model / "unet/config.json"
        edit_json(path, sample_size=16)
    with pytest.raises(ModelError) as caught:
        source.check_unchanged()
    message = str(caught.value)
    assert f"{path.parent.name}/{path.name}" in message
    assert "Load the model again" in message


# --- defects: what is done to a good folder, and what the message must say ---

Defect = tuple[Callable[[Path], object], tuple[str, ...]]


def index_entry(**changes: object) -> Callable[[Path], None]:
    return lambda root: edit_json(root / "model_index.json", **changes)


def shard_named(name: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        split_unet(root)
        write_json(root / "unet" / INDEX, {"weight_map": {"x.weight": PARTS[0], "x.bias": name}})

    return change


def config(component: str, **changes: object) -> Callable[[Path], None]:
    return lambda root: edit_json(root / component / "config.json", **changes)


def text(path: str, content: str) -> Callable[[Path], object]:
    return lambda root: (root / path).write_text(content)


def split_then(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: change(split_unet(root))


def remove(path: str) -> Callable[[Path], object]:
    return lambda root: shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def resave(path: str, *keys: str) -> Callable[[Path], object]:
    return lambda root: save_file({key: torch.zeros(1) for key in keys}, root / path)


def copy(path: str, to: str) -> Callable[[Path], object]:
    return lambda root: shutil.copy(root / path, root / to)


def rename(path: str, to: str) -> Callable[[Path], object]:
    return lambda root: (root / path).rename(root / to)


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: [change(root) for change in changes]


DEFECTS: dict[str, Defect] = {
    # model_index.json
    "index not JSON": (text("model_index.json", "{'a': 1}"), ("model_index.json", "not valid JSON", "line 1")),
    "index empty": (text("model_index.json", ""), ("model_index.json", "not valid JSON")),
    "index a list": (text("model_index.json", "[]"), ("model_index.json", "JSON list instead of an object")),
    "index nested": (text("model_index.json", '{"a":' + "[" * 99_999), ("model_index.json", "nested too deeply")),
    "index a pointer": (text("model_index.json", "version https://git-lfs.github.com/spec/v1"), ("Git-LFS pointer",)),
    "index a web page": (text("model_index.json", "<!DOCTYPE html>"), ("model_index.json", "saved web page")),
    "index says two things": (
        text("model_index.json", '{"_class_name": "FluxPipeline", "_class_name": "SanaPipeline"}'),
        ("model_index.json", "two things", "'_class_name' appears twice"),
    ),
    "no pipeline class": (index_entry(_class_name=None), ("model_index.json", "_class_name")),
    "unknown pipeline": (
        index_entry(_class_name="FluxNinePipeline", _diffusers_version="9.9.9"),
        ("'FluxNinePipeline'", "installed diffusers 0.", "saved by diffusers 9.9.9", "code", "not run"),
    ),
    "pipeline is a model": (index_entry(_class_name="AutoencoderKL"), ("'AutoencoderKL' as its pipeline",)),
    "pipeline is a module": (index_entry(_class_name="pipelines"), ("'pipelines'",)),
    "custom pipeline": (index_entry(_class_name=["pipeline", "Mine"]), ("model_index.json", "Code", "not run here")),
    "no components": (text("model_index.json", '{"_class_name": "FluxPipeline"}'), ("names no component",)),
    "library of its own": (index_entry(unet=["my_unet", "Net"]), ("'unet' from 'my_unet'", "not run here")),
    "library of Python": (index_entry(unet=["os", "system"]), ("'unet' from 'os'", "not run here")),
    "module of diffusers": (index_entry(unet=["pipeline_utils", "DiffusionPipeline"]), ("from 'pipeline_utils'",)),
    "library with dots": (index_entry(unet=["diffusers.models", "AutoencoderKL"]), ("from 'diffusers.models'",)),
    "library that climbs": (index_entry(unet=["../evil", "Net"]), ("from '../evil'", "not run here")),
    "half a class": (index_entry(unet=["diffusers", None]), ("incomplete class", "unet")),
    "unknown component class": (index_entry(tokenizer=["transformers", "NoWords"]), ("'tokenizer'", "'NoWords'")),
    "class of no use": (index_entry(tokenizer=["transformers", "is_torch_available"]), ("'tokenizer'",)),
    "component that climbs": (index_entry(**{"../vae": ["diffusers", "AutoencoderKL"]}), ("'../vae'", "no plain")),
    "component in a path": (index_entry(**{"vae/x": ["diffusers", "AutoencoderKL"]}), ("'vae/x'", "no plain")),
    "component absolute": (index_entry(**{"/etc": ["diffusers", "AutoencoderKL"]}), ("'/etc'", "no plain")),
    "component with drive": (index_entry(**{"C:vae": ["diffusers", "AutoencoderKL"]}), ("'C:vae'", "no plain")),
    # folders and configs
    "component missing": (remove("vae"), ("'vae'", "folder is missing")),
    "component empty": (both(remove("vae"), lambda root: (root / "vae").mkdir()), ("vae", "empty folder")),
    "tokenizer missing": (remove("tokenizer"), ("'tokenizer'", "folder is missing")),
    "config missing": (remove("unet/config.json"), ("unet", "no config.json")),
    "config damaged": (text("unet/config.json", "{"), ("unet/config.json", "not valid JSON")),
    "config a pointer": (text("vae/config.json", "version https://git-lfs"), ("vae/config.json", "Git-LFS pointer")),
    "config of another class": (
        config("unet", _class_name="FluxTransformer2DModel"),
        ("unet/config.json", "'FluxTransformer2DModel'", "'UNet2DConditionModel'"),
    ),
    "scheduler config missing": (
        rename("scheduler/scheduler_config.json", "scheduler/config.json"),
        ("scheduler", "scheduler_config.json"),
    ),
    "vocabulary a pointer": (
        text("tokenizer/vocab.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer/vocab.json", "Git-LFS pointer"),
    ),
    "vocabulary empty": (text("tokenizer/vocab.json", ""), ("tokenizer/vocab.json", "empty")),
    "defaults a list": (text("phase_offload.json", "[1]"), ("phase_offload.json", "JSON list instead of an object")),
    "defaults damaged": (text("phase_offload.json", "{,}"), ("phase_offload.json", "not valid JSON")),
    # code
    "auto_map": (config("text_encoder", auto_map={"AutoModel": "code.Mine"}), ("text_encoder/config.json", "auto_map")),
    "auto_map inside": (config("unet", sub=[{"auto_map": {"A": "b.C"}}]), ("unet/config.json", "auto_map")),
    "auto_map of a tokenizer": (
        text("tokenizer/tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["code.Mine", null]}}'),
        ("tokenizer/tokenizer_config.json", "auto_map"),
    ),
    "kernel from the Hub": (
        config("text_encoder", attn_implementation="someone/kernel"),
        ("text_encoder/config.json", "'someone/kernel'"),
    ),
    "library in disguise": (text("unet/diffusers.py", "raise SystemExit"), ("unet/diffusers.py", "not run here")),
    "adapter": (text("text_encoder/adapter_config.json", "{}"), ("text_encoder/adapter_config.json", "adapter")),
    # weights
    "weights missing": (remove("unet/" + UNET), ("unet", "no safetensors weights")),
    "download unfinished": (
        rename("unet/" + UNET, f"unet/{UNET}.incomplete"),
        ("unet", "no safetensors weights", ".incomplete"),
    ),
    "pickle only": (
        rename("unet/" + UNET, "unet/diffusion_pytorch_model.bin"),
        ("unet", "only as pickle", "'diffusion_pytorch_model.bin'", "convert"),
    ),
    "weights under another name": (rename("unet/" + UNET, "unet/my.safetensors"), ("unet", "only 'my.safetensors'")),
    "weight file empty": (text("unet/" + UNET, ""), (f"unet/{UNET}", "empty")),
    "weight file of no tensors": (resave("unet/" + UNET), (f"unet/{UNET}", "no tensor")),
    "weight file a pointer": (text("unet/" + UNET, "version https://git-lfs"), (f"unet/{UNET}", "Git-LFS pointer")),
    "weight file cut": (
        lambda root: os.truncate(root / "unet" / UNET, (root / "unet" / UNET).stat().st_size - 1),
        (f"unet/{UNET}", "cut short"),
    ),
    "weights named by the config": (
        config("text_encoder", transformers_weights="../other.safetensors"),
        ("text_encoder/config.json", "transformers_weights"),
    ),
    "two variants": (
        both(
            copy("unet/" + UNET, "unet/diffusion_pytorch_model.bf16.safetensors"),
            rename("unet/" + UNET, "unet/diffusion_pytorch_model.fp16.safetensors"),
        ),
        ("bf16", "fp16", "2 sets of weights"),
    ),
    "whole and in parts": (
        split_then(resave("unet/" + UNET, "x.weight", "x.bias")),
        (f"unet/{UNET}", INDEX, "Remove one"),
    ),
    # shards
    "shard missing": (split_then(remove("unet/" + PARTS[1])), (f"unet/{INDEX}", f"missing: 'unet/{PARTS[1]}'")),
    "shard empty": (split_then(text("unet/" + PARTS[1], "")), (f"unet/{PARTS[1]}", "empty")),
    "shard cut": (
        split_then(lambda root: os.truncate(root / "unet" / PARTS[1], 40)),
        (f"unet/{PARTS[1]}", "cut short", "has 40"),
    ),
    "index missing": (split_then(remove("unet/" + INDEX)), (f"unet/{PARTS[0]}", INDEX, "missing")),
    "index without map": (split_then(text("unet/" + INDEX, "{}")), (f"unet/{INDEX}", "weight_map")),
    "index map a list": (split_then(text("unet/" + INDEX, '{"weight_map": [1]}')), (f"unet/{INDEX}", "weight_map")),
    "index of numbers": (shard_named(7), (f"unet/{INDEX}", "names 7", "'x.bias'")),
    "shard index says two things": (
        split_then(text("unet/" + INDEX, '{"weight_map": {"x": "a", "x": "b"}}')),
        (f"unet/{INDEX}", "'x' appears twice"),
    ),
    "shard left over": (
        split_then(copy("unet/" + PARTS[1], "unet/diffusion_pytorch_model-00003-of-00003.safetensors")),
        (f"unet/{INDEX}", "00003-of-00003", "left from another download"),
    ),
    "tensor missing": (split_then(resave("unet/" + PARTS[1], "other")), (f"unet/{PARTS[1]}", "lacks 'x.bias'")),
    "tensor twice": (
        split_then(resave("unet/" + PARTS[1], "x.bias", "x.weight")),
        (f"unet/{PARTS[1]}", "'x.weight'", PARTS[0], "too"),
    ),
    "tensor left over": (
        split_then(resave("unet/" + PARTS[1], "x.bias", *(f"lora.{n}" for n in range(9)))),
        (f"unet/{PARTS[1]}", "'lora.0', 'lora.1', 'lora.2' and 6 more", "index doesn't name"),
    ),
    "shard a pickle": (shard_named("part.bin"), (f"unet/{INDEX}", "'part.bin'", "no safetensors")),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_refused_with_the_name_of_the_culprit(defect: str, model: Path) -> None:
    change, fragments = DEFECTS[defect]
    change(model)
    message = refusal(model)
    for fragment in fragments:
        assert fragment in message


# --- names and links that leave the folder, code that would run ---

HOSTILE_NAMES = [
    "../secret.safetensors",
    "..\\secret.safetensors",
    "unet/../../secret.safetensors",
    "./../../secret.safetensors",
    "ABSOLUTE",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\server\\share\\secret.safetensors",
    "//server/secret.safetensors",
    "secret\0.safetensors",
    "a//secret.safetensors",
    "secret.safetensors:stream",
    "",
    ".",
    "link.safetensors",
    "folder-link/secret.safetensors",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_shard_name_that_leads_out_is_refused_before_anything_outside_is_opened(
    name: str, model: Path, opened: list[str]
) -> None:
    for outside in (model.parent / "secret.safetensors", model / "secret.safetensors"):
        outside.write_text(SECRET)
    outside = model.parent / "secret.safetensors"
    if "link" in name:
        try:
            (model / "unet/link.safetensors").symlink_to(outside)
            (model / "unet/folder-link").symlink_to(model.parent)
        except OSError:
            pytest.skip("no links here")
    shard_named(str(outside) if name == "ABSOLUTE" else name)(model)
    opened.clear()
    message = refusal(model)
    assert "no plain name" in message or "leads out of the model folder" in message
    assert "unet/" in message
    assert not [line for line in opened if "secret" in line]


@pytest.mark.parametrize("path", ["vae", "unet/config.json", "tokenizer/vocab.json", f"vae/{UNET}", "model_index.json"])
def test_link_that_leads_out_is_refused_before_its_target_is_opened(path: str, model: Path, opened: list[str]) -> None:
    outside = model.parent / "elsewhere"
    (model / path).rename(outside)
    try:
        (model / path).symlink_to(outside)
    except OSError:
        pytest.skip("no links here")
    opened.clear()
    message = refusal(model)
    assert path in message
    assert "leads out of the model folder" in message
    assert "elsewhere" not in message
    assert not [line for line in opened if "elsewhere" in line or line.startswith(f"open ('{model / path}'")]


def test_links_of_a_hub_cache_may_end_in_the_blobs_of_the_same_model_only(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub/models--org--name"
    snapshot = make_model(cache / "snapshots/0123abc")
    blobs = cache / "blobs"
    blobs.mkdir()
    try:
        for number, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
            path.rename(blobs / f"{number:040x}")
            path.symlink_to(os.path.relpath(blobs / f"{number:040x}", path.parent))
    except OSError:
        pytest.skip("no links here")
    source = resolve_model(snapshot)
    assert source.components["unet"].weight_bytes == 132
    source.check_unchanged()
    assert list(list_models([tmp_path / "hub"])) == ["models--org--name/snapshots/0123abc"]

    victim = snapshot / "vae" / UNET
    for target in (model / "vae" / UNET, cache.parent / "models--org--other/blobs/0", cache / "refs/main"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        victim.unlink()
        victim.symlink_to(target)
        message = refusal(snapshot)
        assert "leads out" in message
        assert "'org/name'" in message


def test_dead_link_of_an_unfinished_download_counts_as_missing(model: Path) -> None:
    (model / "unet" / UNET).unlink()
    try:
        (model / "unet" / UNET).symlink_to(model / "unet/not-there")
    except OSError:
        pytest.skip("no links here")
    assert "no safetensors weights" in refusal(model)


def test_model_folder_that_is_itself_a_link_is_fine(model: Path) -> None:
    try:
        (model.parent / "alias").symlink_to(model)
    except OSError:
        pytest.skip("no links here")
    assert resolve_model(model.parent / "alias") == resolve_model(model)


CODE: dict[str, Callable[[Path], object]] = {
    "pipeline": index_entry(_class_name=["evil", "Evil"]),
    "pipeline by name": index_entry(_class_name="Evil"),
    "component": index_entry(unet=["evil", "Evil"]),
    "auto_map": config("unet", auto_map={"AutoModel": "evil.Evil"}),
    "beside a library class": rename("unet/evil.py", "unet/diffusers.py"),
}


@pytest.mark.parametrize("way", CODE)
def test_code_in_the_folder_is_refused_and_never_opened_compiled_or_imported(
    way: str, model: Path, opened: list[str]
) -> None:
    marker = model.parent / "marker"
    for place in (model, model / "unet"):
        (place / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    CODE[way](model)
    opened.clear()
    assert "not run here" in refusal(model)
    assert not marker.exists()
    assert not [line for line in opened if "evil" in line or "unet/diffusers.py" in line]


def test_importing_the_module_needs_neither_torch_nor_diffusers() -> None:
    code = "import sys, offload_core.model_source as m; print({'torch', 'diffusers', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_missing_package_of_a_class_is_named(model: Path) -> None:
    edit_json(model / "model_index.json", vae=["diffusers", "OnnxRuntimeModel"])
    edit_json(model / "vae/config.json", _class_name="OnnxRuntimeModel")
    message = refusal(model)
    assert "OnnxRuntimeModel" in message
    assert "onnx" in message


# --- what was given instead of a model folder ---


def test_no_such_folder_suggests_near_names(model: Path) -> None:
    make_model(model.parent / "flux-schnell")
    message = refusal(model.parent / "flux-schnel")
    assert "no model folder" in message
    assert "Did you mean 'flux-schnell'" in message


def test_hub_id_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("black-forest-labs/FLUX.1-dev")
    assert "phase-offload models add black-forest-labs/FLUX.1-dev" in message


@pytest.mark.parametrize("name", ["", "  ", "a\0b", "~no-such-user/x", "x" * 5000])
def test_impossible_path_is_refused(name: str) -> None:
    refusal(name)


def test_other_things_than_a_model_folder_are_called_what_they_are(model: Path, tmp_path: Path) -> None:
    assert "holds no part" in refusal(model / "vae" / UNET)
    assert "Give the folder" in refusal(model / "model_index.json")
    assert "one component" in refusal(model / "unet")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty folder" in refusal(empty)
    write_json(empty / "modular_model_index.json", {})
    assert "modular_model_index.json" in refusal(empty)
    single = tmp_path / "single"
    single.mkdir()
    (single / "sd15.safetensors").touch()
    assert "'sd15.safetensors'" in refusal(single)
    assert "'model'" in refusal(tmp_path)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "cat.png").touch()
    assert "'pictures' is no diffusers model folder" in refusal(pictures)


# --- the list of models ---


def index_only(path: Path) -> Path:
    write_json(path / "model_index.json", {})
    return path


def test_models_are_listed_by_their_path_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "diffusers"
    for name in ("flux", "org/name", "org/deep/er/model", "größe"):
        index_only(root / name)
    index_only(root / "flux/inside/another")  # a model isn't searched for models
    index_only(root / ".cache/hidden")
    (root / "plain").mkdir()
    assert list_models([root]) == {name: root / name for name in ("flux", "größe", "org/deep/er/model", "org/name")}


def test_first_root_wins_and_missing_roots_are_skipped(tmp_path: Path) -> None:
    for root in ("a", "b"):
        index_only(tmp_path / root / "flux")
    index_only(tmp_path / "b/sana")
    models = list_models([tmp_path / "none", tmp_path / "a", str(tmp_path / "b")])
    assert models == {"flux": tmp_path / "a/flux", "sana": tmp_path / "b/sana"}


def test_root_that_is_a_model_goes_by_its_own_name(tmp_path: Path) -> None:
    index_only(tmp_path / "flux")
    assert list_models([tmp_path / "flux"]) == {"flux": tmp_path / "flux"}


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    root, store = tmp_path / "diffusers", tmp_path / "store"
    index_only(root / "org/name")
    index_only(store / "far")
    try:
        (root / "a-loop").symlink_to(root)
        (root / "org/up").symlink_to(root / "org")
        (root / "linked-store").symlink_to(store)
        (root / "another name").symlink_to(root / "org/name")
        (root / "dead").symlink_to(root / "nothing")
    except OSError:
        pytest.skip("no links here")
    assert list(list_models([root])) == ["another name", "linked-store/far", "org/name"]


def test_very_full_and_very_deep_folders_are_left_alone(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    for number in range(2_001):
        (full / f"{number}.png").touch()
    index_only(full / "model")
    index_only(tmp_path / "1/2/3/4/5/6/7/8/9/model")
    index_only(tmp_path / "good")
    assert list(list_models([tmp_path])) == ["good"]


def test_model_is_chosen_by_its_listed_name_with_either_slash(tmp_path: Path) -> None:
    path = index_only(tmp_path / "org/näme")
    for name in ("org/näme", "org\\näme", "org/näme/", "org/na\u0308me"):
        assert choose_model(name, [tmp_path]) == path


@pytest.mark.parametrize("name", ["../model", "..\\model", "/etc", "C:\\model", "a/../b", "", ".", "\0", "//server/x"])
def test_chosen_name_that_leaves_the_roots_is_refused(name: str, tmp_path: Path) -> None:
    index_only(tmp_path / "model")
    (tmp_path / "roots").mkdir()
    with pytest.raises(ModelError, match="no model name"):
        choose_model(name, [tmp_path / "roots"])


def test_folder_that_exists_but_is_not_listed_cannot_be_chosen(tmp_path: Path) -> None:
    index_only(tmp_path / "flux/inner")
    index_only(tmp_path / "flux")
    with pytest.raises(ModelError, match="no model called 'flux/inner'"):
        choose_model("flux/inner", [tmp_path])


def test_wrong_name_gets_up_to_three_near_ones(tmp_path: Path) -> None:
    for name in ("flux-dev", "flux-schnell", "flux-fill", "flux-kontext", "org/sana"):
        index_only(tmp_path / name)
    with pytest.raises(ModelError) as caught:
        choose_model("flux", [tmp_path])
    assert str(caught.value).count("'flux-") == 3
    with pytest.raises(ModelError, match="Did you mean 'org/sana'"):
        choose_model("Sana", [tmp_path])
    with pytest.raises(ModelError, match="Choose one from the list"):
        choose_model("qqqq", [tmp_path])


def test_empty_list_says_where_to_put_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Put a diffusers model folder.*models/diffusers"):
        choose_model("flux", ["models/diffusers"])
    assert "'a' or 'b'" in no_models_sentence(["a", "b"])
    assert "No folder for models is set" in no_models_sentence([])


def test_all_tiny_families_resolve(tmp_path: Path) -> None:
    tiny = pytest.importorskip("offload_core.tiny_models")
    for name in ("sd15_safety", "flux", "wan22_5b"):
        source = resolve_model(tiny.save_tiny(name, tmp_path / name, torch.float16))
        assert isinstance(source, ModelSource)
        assert source.weight_bytes > 0
        assert {component.dtype for component in source.components.values()} == {None, "float16"}
