"""Weights made from pieces of files: the right bytes, whole, in chunks and by rows, on the CPU and on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload_core.checkpoint import read_header
from offload_core.errors import ModelError
from offload_core.file_reader import FileRange, ReadBuffer, WeightFile
from offload_core.stored_weight import StoredWeight, read_stored
from offload_core.streaming._masters import stored_master
from vgpu.runner import run_on_vgpu

ROWS, COLUMNS = 5, 3  # 6 bytes a row in bfloat16: nothing is aligned to anything


@pytest.fixture
def table(tmp_path: Path) -> tuple[torch.Tensor, Path, int]:
    """A matrix of two halves of five rows, its file, and where in the file it begins."""
    values = torch.arange(2 * ROWS * COLUMNS).view(2 * ROWS, COLUMNS).to(torch.bfloat16)
    file = tmp_path / "table.safetensors"
    save_file({"a": torch.zeros(1, dtype=torch.bfloat16), "table": values}, file)
    header = read_header(file)
    return values, file, header.data_start + header.tensors["table"].begin


def made(stored: StoredWeight) -> dict[str, Any]:
    """The weight by each way of reading it, and its rows 3, 9 and 3 again."""
    files: dict[Path, WeightFile] = {}
    buffer = ReadBuffer(8192)
    master = stored_master(stored, lambda path: files.setdefault(path, WeightFile(path)))
    whole = torch.empty(master.nbytes, dtype=torch.uint8)
    master.read_into(whole, buffer)
    pieces = torch.zeros(master.nbytes, dtype=torch.uint8)
    for position, chunk in master.chunks(buffer):
        assert position % master.dtype.itemsize == 0
        pieces[position : position + len(chunk)] = chunk
    row_bytes = stored.shape[1] * master.dtype.itemsize
    wanted = [row for row in (3, 9, 3) if row < stored.shape[0]]
    rows = torch.empty(len(wanted) * row_bytes, dtype=torch.uint8)
    master.rows(rows, row_bytes, wanted, buffer)
    for file in files.values():
        file.close()
    as_weight = lambda data: data.view(master.dtype).view(-1, stored.shape[1])  # noqa: E731
    return {"whole": as_weight(whole), "chunks": as_weight(pieces), "rows": as_weight(rows), "wanted": wanted}


def assert_makes(stored: StoredWeight, weight: torch.Tensor) -> None:
    found = made(stored)
    assert torch.equal(found["whole"], weight)
    assert torch.equal(found["chunks"], weight)
    assert torch.equal(found["rows"], weight[found["wanted"]])
    assert torch.equal(read_stored(stored), weight)
    assert stored.nbytes == weight.nbytes


def test_rows_of_a_fused_tensor_are_a_part_of_its_range(table: tuple[torch.Tensor, Path, int]) -> None:
    values, file, begin = table
    half = ROWS * COLUMNS * 2
    assert_makes(StoredWeight("bfloat16", (ROWS, COLUMNS), (FileRange(file, begin + half, half),)), values[ROWS:])


def test_halves_that_changed_places_are_two_ranges(table: tuple[torch.Tensor, Path, int]) -> None:
    values, file, begin = table
    half = ROWS * COLUMNS * 2
    pieces = (FileRange(file, begin + half, half), FileRange(file, begin, half))
    assert_makes(StoredWeight("bfloat16", (2 * ROWS, COLUMNS), pieces), torch.cat([values[ROWS:], values[:ROWS]]))


def test_matrix_that_is_multiplied_from_the_other_side_is_turned_around(table: tuple[torch.Tensor, Path, int]) -> None:
    values, file, begin = table
    stored = StoredWeight("bfloat16", (COLUMNS, 2 * ROWS), (FileRange(file, begin, values.nbytes),), "transposed")
    assert_makes(stored, values.t().contiguous())


def test_projection_that_no_file_holds_is_the_identity() -> None:
    assert_makes(StoredWeight("float16", (4, 4), (), "identity"), torch.eye(4, dtype=torch.float16))


def test_file_that_was_cut_short_is_said(table: tuple[torch.Tensor, Path, int]) -> None:
    values, file, begin = table
    stored = StoredWeight("bfloat16", (2 * ROWS, COLUMNS), (FileRange(file, begin, values.nbytes),))
    with file.open("r+b") as data:
        data.truncate(begin + 1)
    with pytest.raises(ModelError, match="was cut short"):
        read_stored(stored)


# ------------------------------------------------------------------------------------------- on a pretend device


def pictures_on_the_device(names: list[str]) -> dict[str, Any]:
    import tempfile

    import torch

    import offload_core as po
    import vgpu
    from original_layout import checkpoint_parts, write_file
    from staging import job, tiny_model, words

    vgpu.install()
    found = {}
    for name in names:
        file = write_file(Path(tempfile.mkdtemp()) / "model.safetensors", checkpoint_parts(name))
        settings = po.OffloadSettings(device_memory="2MB", resident_below=0, activation_memory=0)

        def run(model: Any, where: str, settings: Any, name: str = name) -> Any:
            handle = po.load(model, device=where, dtype="bfloat16", settings=settings)
            embeds = po.encode(handle, **words(name))
            latents = po.denoise(handle, embeds, seed=1, **job(name, guided=True))
            return torch.as_tensor(po.decode(handle, latents, "pt"))

        files = po.SplitFiles(checkpoint=str(file), configs=str(tiny_model(name)))
        expected = run(tiny_model(name), "cpu", None)
        found[name] = [torch.equal(run(files, "auto", budget), expected) for budget in (settings, None)]
    return found


@pytest.mark.slow
def test_files_are_streamed_to_an_accelerator_with_the_cpus_bits() -> None:
    """SDXL's transposed projection and FLUX.1's fused and swapped rows, cast on the device, streamed and resident."""
    assert run_on_vgpu(pictures_on_the_device, ["sdxl", "flux"]) == {"sdxl": [True, True], "flux": [True, True]}
