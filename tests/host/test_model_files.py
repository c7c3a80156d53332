"""Models made of files inside real ComfyUI servers: its folders, its tokenizers, and the pictures of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from node_graphs import graph_of, node
from original_layout import full_size_file, split_files
from staging import tiny_model

if TYPE_CHECKING:
    from host.comfy_server import Graph, Server

pytestmark = [pytest.mark.host, pytest.mark.slow, pytest.mark.timeout(900)]


def offered(server: Server, class_type: str, name: str) -> list[str]:
    kind, options = server.get(f"/object_info/{class_type}")[class_type]["input"]["required"][name]
    return kind if isinstance(kind, list) else options["options"]


def folder(server: Server, kind: str) -> Path:
    path = server.diffusers_folder.parent / kind
    path.mkdir(exist_ok=True)
    return path


def test_published_checkpoint_is_listed_and_loads_with_the_hosts_tokenizers(server: Server) -> None:
    """It has the names and shapes of Stable Diffusion 1.5, and a hole for data: headers are all that is read."""
    file = full_size_file(folder(server, "checkpoints") / "sd15.safetensors", "sd1.5")
    name = "checkpoints/sd15.safetensors"
    try:
        assert name in offered(server, "PhaseOffloadLoad", "model")
        assert name in offered(server, "PhaseOffloadLoadFiles", "denoiser")
        graph: Graph = {
            "load": node("PhaseOffloadLoad", model=name, dtype="auto", device="cpu"),
            "end": node("PhaseOffloadPurgeCache", anything=["load", 0]),
        }
        run = server.run(graph)
        assert run.outcome == "execution_success", run.error
    finally:
        file.unlink()


def test_split_files_give_the_picture_of_their_folder(server: Server, tmp_path: Path) -> None:
    files = split_files("sd15", tmp_path)
    assert files.denoiser and files.vae
    names: dict[str, str] = {}
    for kind, path in (("unet", files.denoiser), ("clip", next(iter(files.encoders))), ("vae", files.vae)):
        names[kind] = Path(path).name
        Path(path).rename(folder(server, kind) / names[kind])
    (server.diffusers_folder / "tiny").symlink_to(tiny_model("sd15"), target_is_directory=True)
    graph: dict[str, Any] = graph_of("tiny", steps=2)
    (of_folder,) = server.run(graph).pictures
    encoders = {"encoder_1": names["clip"], "encoder_2": "none", "encoder_3": "none"}
    how = {"family": "auto", "dtype": "auto", "device": "cpu", "configs": "tiny"}
    graph["load"] = node("PhaseOffloadLoadFiles", denoiser=names["unet"], **encoders, vae=names["vae"], **how)
    run = server.run(graph)
    assert run.outcome == "execution_success", run.error
    assert "load" in run.ran
    (of_files,) = run.pictures
    np.testing.assert_array_equal(np.asarray(of_files), np.asarray(of_folder))
