"""Lists of many files: what is read for them, now and after a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from offload_core.single_files import listing
from offload_core.single_files.listing import ModelFiles
from original_layout import full_size_file

FILES = 500


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the published sizes (their data is a hole), each under a name of its own."""
    folder = tmp_path_factory.mktemp("many")
    files = [full_size_file(folder / f"{family}.safetensors", family) for family in ("sd1.5", "flux.1-dev")]
    for number in range(FILES - len(files)):
        os.link(files[number % 2], folder / f"{number}.safetensors")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were read of each header, in order."""
    found: list[int] = []
    read = listing._raw_header

    def counted(path: Path) -> bytes:
        raw = read(path)
        found.append(len(raw))
        return raw

    monkeypatch.setattr(listing, "_raw_header", counted)
    return found


def test_first_list_reads_each_header_once_and_a_list_after_that_none(many: Path, reads: list[int]) -> None:
    files = ModelFiles()
    found = files.list([many])
    assert len(found) == len(reads) == FILES
    assert {file.families for file in found.values()} == {("sd1.5",), ("flux.1-dev",)}
    assert max(reads) < 1_000_000
    assert files.list([many]) == found and len(reads) == FILES


def test_after_a_restart_only_new_and_changed_files_are_read(many: Path, reads: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "model_files.json"
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("sd1.5", "flux.1-dev"):
        os.link(many / f"{name}.safetensors", folder / f"{name}.safetensors")
    first = ModelFiles(kept).list([folder])
    assert len(reads) == 2
    assert ModelFiles(kept).list([folder]) == first and len(reads) == 2
    os.link(many / "sd1.5.safetensors", folder / "new.safetensors")
    (folder / "flux.1-dev.safetensors").unlink()
    (folder / "flux.1-dev.safetensors").write_bytes(b"not a header")
    again = ModelFiles(kept).list([folder])
    assert len(reads) == 4
    assert again["new.safetensors"].is_whole and again["flux.1-dev.safetensors"].roles == ()
    (folder / "new.safetensors").unlink()
    os.link(many / "sd1.5.safetensors", folder / "newer.safetensors")
    ModelFiles(kept).list([folder])
    assert {Path(path).name for path in json.loads(kept.read_text())["files"]} == {
        "sd1.5.safetensors",
        "flux.1-dev.safetensors",
        "newer.safetensors",
    }


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"made_by": "other rules", "files": {}}',
        {"files": 3},
        {"files": {"PATH": 7}},
        {"files": {"PATH": [1, 2, {"roles": []}]}},
        {"files": {"PATH": [1, 2, {"unheard": 1}]}},
    ],
)
def test_damage_to_what_is_kept_does_no_harm(damage: Any, many: Path, reads: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "model_files.json"
    folder = tmp_path / "files"
    folder.mkdir()
    os.link(many / "sd1.5.safetensors", folder / "a.safetensors")
    first = ModelFiles(kept).list([folder])
    whole = json.loads(kept.read_text())
    if isinstance(damage, bytes):
        kept.write_bytes(damage)
    else:
        text = json.dumps({**whole, **damage}).replace("PATH", str(folder / "a.safetensors"))
        kept.write_text(text)
    assert ModelFiles(kept).list([folder]) == first and len(reads) == 2
    assert json.loads(kept.read_text()) == whole


def test_several_programs_keep_their_files_beside_each_other(many: Path, reads: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "model_files.json"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        os.link(many / "sd1.5.safetensors", tmp_path / name / "a.safetensors")
        ModelFiles(kept).list([tmp_path / name])
    for name in ("one", "two"):
        ModelFiles(kept).list([tmp_path / name])
    assert len(reads) == 2


def test_list_goes_on_where_nothing_can_be_kept(many: Path, tmp_path: Path) -> None:
    (tmp_path / "no folder").write_text("but a file")
    (tmp_path / "files").mkdir()
    os.link(many / "sd1.5.safetensors", tmp_path / "files" / "a.safetensors")
    assert len(ModelFiles(tmp_path / "no folder" / "model_files.json").list([tmp_path / "files"])) == 1
