"""Files are checked before a run and written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from offload_core import _picture_files as files
from offload_core.errors import InputError


def pictures(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 6), (40 * i, 0, 255 - 40 * i)) for i in range(count)]


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.jpg", "a.jpeg", "a.webp"])
def test_one_picture_keeps_its_name(tmp_path: Path, name: str):
    written = files.write_files(files.picture_writers(tmp_path / name, pictures(1)))
    assert written == [tmp_path / name]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert Image.open(tmp_path / name).size == (8, 6)


def test_several_pictures_are_numbered(tmp_path: Path):
    files.write_files(files.picture_writers(tmp_path / "a.png", pictures(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0.png", "a-1.png", "a-2.png"]


@pytest.mark.parametrize("name", ["v.gif", "v.webp"])
def test_a_video_is_one_animation(tmp_path: Path, name: str):
    files.write_files(files.video_writers(tmp_path / name, [pictures(4)]))
    assert Image.open(tmp_path / name).n_frames == 4


def test_a_video_as_png_is_a_sequence(tmp_path: Path):
    files.write_files(files.video_writers(tmp_path / "v.png", [pictures(11)]))
    assert sorted(path.name for path in tmp_path.iterdir())[:2] == ["v-00.png", "v-01.png"]


@pytest.mark.parametrize(
    ("name", "video", "word"),
    [
        ("a.xyz", None, "'.xyz'"),
        ("a", None, "without an extension"),
        ("a.gif", False, "'.gif'"),
        ("a.jpg", True, "video"),
        ("missing/a.png", None, "doesn't exist"),
        ("folder.png", None, "is a folder"),
    ],
)
def test_a_bad_name_is_refused_before_anything_runs(tmp_path: Path, name: str, video: bool | None, word: str):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=word):
        files.check_picture_file(tmp_path / name, video=video)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_failure_in_the_last_file_leaves_old_files_as_they_were(tmp_path: Path):
    (tmp_path / "a.txt").write_text("old")

    def fail(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_files([(tmp_path / "a.txt", files.text_writer("new")), (tmp_path / "b.txt", fail)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}
