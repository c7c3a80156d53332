"""A range in a file is given to a tensor only if its bytes are the tensor's, whatever its name."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextModel, MixtralConfig, MixtralForCausalLM, T5EncoderModel

from offload_core.errors import ModelError
from offload_core.file_backing import FileMapping, Span, _parse, find_file_ranges, read_mappings
from offload_core.file_reader import FileRange
from offload_core.inventory import Inventory, Item, take_inventory
from offload_core.tiny_models import load_tiny, save_tiny

on_linux = pytest.mark.skipif(read_mappings() is None, reason="this system has no list of mapped files")
# How the place of a mapping is learnt: from the system's list, or without one.
both_routes = pytest.mark.parametrize("mappings", [pytest.param(read_mappings, marks=on_linux), lambda: None])
transformers_maps = pytest.mark.skipif(sys.platform == "win32", reason="transformers reads files whole on Windows")
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root, number = tmp_path_factory.mktemp("tiny"), itertools.count()
    return functools.cache(lambda name, dtype=torch.float32: save_tiny(name, root / str(next(number)), dtype))


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def memory_of(tensor: torch.Tensor, nbytes: int) -> bytes:
    flat = torch.as_strided(tensor.detach(), (nbytes // tensor.itemsize,), (1,), tensor.storage_offset())
    return flat.clone().view(torch.uint8).numpy().tobytes()


def bytes_at(where: FileRange) -> bytes:
    with where.path.open("rb") as file:
        file.seek(where.offset)
        return file.read(where.nbytes)


def by_name(inventory: Inventory) -> dict[str, Item]:
    return {name: item for item in inventory.items for name in item.names}


def assert_ranges_are_right(inventory: Inventory, files: Sequence[Path]) -> None:
    for item in inventory.items:
        for where in item.ranges:
            assert where.path in files
            assert where.nbytes == item.nbytes
            assert bytes_at(where) == memory_of(item.tensor, item.nbytes), item.names


def assert_all_parameters_are_in_files(inventory: Inventory, files: Sequence[Path]) -> None:
    assert_ranges_are_right(inventory, files)
    assert not [item.names for item in inventory.items if item.kind == "parameter" and not item.ranges]


class Mapped(nn.Module):
    """A module whose parameters are cut from a mapped file, as a loader does it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        for name, tensor in load_file(file).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(40, 60, generator=generator) for name in ("first", "second", "third")}
    save_file({**tensors, "wide": torch.randn(300, 500, generator=generator)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@transformers_maps
@both_routes
@pytest.mark.parametrize("name", ["sd15", "flux", "wan22_a14b", "qwen_image", "krea2", "ltx2"])
def test_all_parameters_of_a_family_in_its_stored_dtype_are_in_its_files(
    name: str, mappings: Any, folder: Folder
) -> None:
    pipeline = load_tiny(folder(name), dtype=torch.float32, aligned=False)
    for key, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            files = files_in(folder(name) / key)
            assert_all_parameters_are_in_files(take_inventory(component, files, mappings=mappings), files)


@transformers_maps
@both_routes
def test_half_precision_files_are_mapped_too(mappings: Any, folder: Folder) -> None:
    where = folder("flux", torch.bfloat16)
    pipeline = load_tiny(where, dtype=torch.bfloat16, aligned=False)
    for key in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        files = files_in(where / key)
        assert_all_parameters_are_in_files(take_inventory(pipeline.components[key], files, mappings=mappings), files)


@both_routes
def test_what_a_loader_casts_to_float32_is_in_no_file_and_the_rest_is(mappings: Any, folder: Folder) -> None:
    where = folder("wan22_a14b", torch.bfloat16)
    transformer = load_tiny(where, dtype=torch.bfloat16, aligned=False).transformer
    items = by_name(take_inventory(transformer, files_in(where / "transformer"), mappings=mappings))
    assert items["blocks.0.scale_shift_table"].ranges == ()
    assert items["blocks.0.attn1.to_q.weight"].ranges != ()


@both_routes
def test_a_load_in_another_dtype_is_in_no_file(mappings: Any, folder: Folder) -> None:
    directory = folder("flux") / "transformer"
    model = FluxTransformer2DModel.from_pretrained(directory, dtype=torch.bfloat16)
    assert not any(item.ranges for item in take_inventory(model, files_in(directory), mappings=mappings).items)


@transformers_maps
@both_routes
def test_a_hub_style_clip_file_matches_no_name_and_every_range(mappings: Any, folder: Folder, tmp_path: Path) -> None:
    source = folder("flux") / "text_encoder"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = CLIPTextModel.from_pretrained(tmp_path, dtype=torch.float32)
    inventory = take_inventory(model, files_in(tmp_path), mappings=mappings)
    assert not by_name(inventory).keys() & tensors.keys()
    assert_all_parameters_are_in_files(inventory, files_in(tmp_path))


@both_routes
def test_keys_that_diffusers_renames_keep_their_ranges(mappings: Any, folder: Folder, tmp_path: Path) -> None:
    source = folder("sd15") / "vae"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    new = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for part, old in new.items():
        tensors = {name.replace(f"attentions.0.{part}.", f"attentions.0.{old}."): t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    model = AutoencoderKL.from_pretrained(tmp_path, dtype=torch.float32)
    inventory = take_inventory(model, files_in(tmp_path), mappings=mappings)
    assert by_name(inventory).keys() - tensors.keys()
    assert_all_parameters_are_in_files(inventory, files_in(tmp_path))


@transformers_maps
@both_routes
def test_experts_that_a_loader_merges_are_in_no_file(mappings: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 16}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    assert any("experts.1.w1" in name for name in load_file(tmp_path / "model.safetensors"))
    model = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    inventory = take_inventory(model, files_in(tmp_path), mappings=mappings)
    assert_ranges_are_right(inventory, files_in(tmp_path))
    without = {
        item.names[0].rpartition(".")[2] for item in inventory.items if not item.ranges and item.kind != "buffer"
    }
    assert without == {"gate_up_proj", "down_proj"}


@both_routes
def test_each_tensor_of_a_sharded_set_is_in_its_own_shard(mappings: Any, folder: Folder, tmp_path: Path) -> None:
    model = FluxTransformer2DModel.from_pretrained(folder("flux") / "transformer", dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    model = FluxTransformer2DModel.from_pretrained(tmp_path, dtype=torch.float32)
    inventory = take_inventory(model, files_in(tmp_path), mappings=mappings)
    assert_all_parameters_are_in_files(inventory, files_in(tmp_path))
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert {item.names[0]: item.ranges[0].path.name for item in inventory.items} == index


@both_routes
def test_a_symbolic_link_as_in_the_hub_cache_is_the_file_it_leads_to(mappings: Any, file: Path, tmp_path: Path) -> None:
    link = tmp_path / "snapshot.safetensors"
    try:
        link.symlink_to(file)
    except OSError:
        pytest.skip("symbolic links aren't allowed here")
    inventory = take_inventory(Mapped(link), [link], mappings=mappings)
    assert all(item.ranges[0].path == link for item in inventory.items)
    assert_all_parameters_are_in_files(inventory, [link])


@both_routes
def test_two_loads_of_one_file_are_both_in_it(mappings: Any, file: Path) -> None:
    both = nn.ModuleList([Mapped(file), Mapped(file)])
    assert_all_parameters_are_in_files(take_inventory(both, [file], mappings=mappings), [file])


@both_routes
def test_the_range_of_a_transposed_view_covers_its_bytes(mappings: Any, file: Path) -> None:
    module = Mapped(file)
    module.wide = nn.Parameter(module.wide.t(), requires_grad=False)
    item = by_name(take_inventory(module, [file], mappings=mappings))["wide"]
    assert item.stride == (1, 500)
    assert item.dense
    assert bytes_at(item.ranges[0]) == memory_of(module.wide.t(), item.nbytes)


@on_linux
def test_a_part_of_a_mapped_tensor_has_the_range_from_its_first_to_its_last_element(file: Path) -> None:
    module = Mapped(file)
    module.wide = nn.Parameter(module.wide[7:9, 11:13], requires_grad=False)
    item = by_name(take_inventory(module, [file]))["wide"]
    assert not item.dense
    assert item.nbytes == item.ranges[0].nbytes == (500 + 2) * 4
    first, last = bytes_at(item.ranges[0])[:4], bytes_at(item.ranges[0])[-4:]
    assert first == module.wide[0, 0].numpy().tobytes()
    assert last == module.wide[1, 1].numpy().tobytes()


def test_a_component_without_files_has_no_ranges(file: Path) -> None:
    assert not any(item.ranges for item in take_inventory(Mapped(file)).items)


@both_routes
def test_a_tensor_edited_in_place_is_in_no_file_and_its_neighbours_are(mappings: Any, file: Path) -> None:
    module = Mapped(file)
    module.second[0, 3] += 1
    inventory = take_inventory(module, [file], mappings=mappings)
    assert_ranges_are_right(inventory, [file])
    assert [item.names[0] for item in inventory.items if not item.ranges] == ["second"]


@on_linux
def test_one_changed_byte_in_the_middle_of_a_large_tensor_is_found(file: Path) -> None:
    module = Mapped(file)
    module.wide.view(torch.uint8)[123, 1001] ^= 1
    assert by_name(take_inventory(module, [file]))["wide"].ranges == ()


@on_linux
def test_one_changed_value_in_a_tensor_that_was_written_anew_is_found(file: Path) -> None:
    module = Mapped(file)
    kept = module.wide.clone()
    kept[0, 0] += 1
    module.wide.copy_(kept)
    assert by_name(take_inventory(module, [file]))["wide"].ranges == ()


@on_linux
def test_an_edit_that_is_taken_back_leaves_the_tensor_in_the_file(file: Path) -> None:
    module = Mapped(file)
    kept = module.wide.clone()
    module.wide.zero_()
    module.wide.copy_(kept)
    assert_all_parameters_are_in_files(take_inventory(module, [file]), [file])


@on_linux
def test_where_the_kernel_hides_which_pages_changed_everything_is_compared(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mapped(file)
    module.wide[200, 300] += 1

    def closed(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == Path("/proc/self/pagemap"):
            raise PermissionError
        return real(self, *args, **kwargs)

    real = Path.open
    monkeypatch.setattr(Path, "open", closed)
    mappings = [replace(mapping, changed=True) for mapping in read_mappings() or []]
    inventory = take_inventory(module, [file], mappings=lambda: mappings)
    assert [item.names[0] for item in inventory.items if not item.ranges] == ["wide"]


@on_linux
def test_a_clean_mapping_costs_no_read_of_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mapped(file)
    monkeypatch.setattr("offload_core.file_backing._equals_file", lambda *_: pytest.fail("read the file"))
    assert all(item.ranges for item in take_inventory(module, [file]).items)


@on_linux
def test_a_file_put_in_the_place_of_the_mapped_one_backs_nothing(file: Path, tmp_path: Path) -> None:
    module = Mapped(file)
    (tmp_path / "other").write_bytes(file.read_bytes())
    os.replace(tmp_path / "other", file)
    assert not any(item.ranges for item in take_inventory(module, [file]).items)


@on_linux
def test_a_deleted_file_backs_nothing(file: Path) -> None:
    module = Mapped(file)
    file.unlink()
    assert not any(item.ranges for item in take_inventory(module, [file]).items)


@on_linux
def test_a_file_that_was_moved_is_found_where_it_is_now(file: Path) -> None:
    module = Mapped(file)
    moved = file.rename(file.with_name("moved.safetensors"))
    assert_all_parameters_are_in_files(take_inventory(module, [moved]), [moved])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to cut a mapped file")
@both_routes
def test_a_mapped_file_that_was_cut_short_is_an_error(mappings: Any, file: Path) -> None:
    module = Mapped(file)
    os.truncate(file, 8192)
    with pytest.raises(ModelError, match="cut short"):
        take_inventory(module, [file], mappings=mappings)


SMAPS = """\
7f0000000000-7f0000010000 rw-p 00001000 fe:01 42                         /models/a b\\012c.safetensors
Rss:                  64 kB
Private_Dirty:         8 kB
Anonymous:             {anonymous} kB
Swap:                  {swap} kB
VmFlags: rd wr mr mw me
7f0000010000-7f0000020000 rw-s 00000000 fe:01 43                         /models/d (deleted)
Anonymous:             4 kB
Swap:                  0 kB
7f0000020000-7f0000030000 rw-p 00000000 00:00 0                          [heap]
Anonymous:             4 kB
"""


@on_linux
@pytest.mark.parametrize(("anonymous", "swap", "changed"), [(0, 0, False), (4, 0, True), (0, 4, True)])
def test_the_systems_list_is_read_with_its_counts_of_changed_pages(anonymous: int, swap: int, changed: bool) -> None:
    kept, deleted = _parse(SMAPS.format(anonymous=anonymous, swap=swap))
    assert (kept.start, kept.end, kept.offset, kept.inode) == (0x7F0000000000, 0x7F0000010000, 0x1000, 42)
    assert kept.path == "/models/a b\nc.safetensors"
    assert kept.changed is changed
    assert deleted.path is None
    assert deleted.changed is False, "a shared mapping writes to the file"


@on_linux
def test_a_list_without_counts_makes_every_private_mapping_suspect() -> None:
    lines = [line for line in SMAPS.splitlines() if line.startswith("7f")]
    assert [mapping.changed for mapping in _parse("\n".join(lines))] == [True, False]


def test_a_system_without_a_list_answers_none(tmp_path: Path) -> None:
    assert read_mappings(tmp_path) is None


@pytest.mark.parametrize(
    ("second_start", "second_offset", "found"), [(4096, 4096, True), (4096, 8192, False), (8192, 4096, False)]
)
def test_a_tensor_may_go_on_in_the_next_mapping_only_if_the_file_does(
    second_start: int, second_offset: int, found: bool, file: Path
) -> None:
    status = file.stat()
    first = FileMapping(1 << 30, (1 << 30) + 4096, 0, status.st_dev, status.st_ino, str(file), False)
    begin = (1 << 30) + second_start
    second = replace(first, start=begin, end=begin + 4096, offset=second_offset)
    span = Span((1 << 30) + 4000, 200, torch.uint8, torch.empty(0))
    ranges = find_file_ranges([span], [file], lambda: [second, first])
    assert ranges == [FileRange(file, 4000, 200) if found else None]


def test_a_path_counts_where_the_list_has_another_device_than_stat(file: Path) -> None:
    mapping = FileMapping(1 << 30, (1 << 30) + 4096, 0, 1, 1, os.path.realpath(file), False)
    span = Span((1 << 30) + 8, 16, torch.uint8, torch.empty(0))
    assert find_file_ranges([span], [file], lambda: [mapping]) == [FileRange(file, 8, 16)]
    assert find_file_ranges([span], [file], lambda: [replace(mapping, path=None)]) == [None]


@both_routes
def test_the_tied_embedding_of_t5_is_one_item_with_two_names(mappings: Any, folder: Folder) -> None:
    directory = folder("flux") / "text_encoder_2"
    model = T5EncoderModel.from_pretrained(directory, dtype=torch.float32)
    inventory = take_inventory(model, files_in(directory), mappings=mappings)
    (tied,) = [item for item in inventory.items if len(item.names) > 1]
    assert tied.names == ("shared.weight", "encoder.embed_tokens.weight")
    assert tied.places == ((model.shared, "weight"), (model.encoder.embed_tokens, "weight"))
    assert not tied.shares_storage
