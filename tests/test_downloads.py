"""Models from the Hub: what would be fetched, the download with its progress, and a sentence for everything else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offload_core as po
from hub_stand_in import COMMIT, Hub, running_hub
from offload_core.cli import main
from offload_core.downloads import download, plan_download
from offload_core.errors import ModelError
from offload_core.session import Session
from staging import tiny_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an empty cache on this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        folder = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "remote"))
        (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
        (folder / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"x" * 100)
        (folder / "unet" / "modeling.py").write_text("raise SystemExit")
        (folder / "whole.safetensors").write_bytes(b"y" * 100)
        hub.models["someone/tiny"] = folder
        yield hub


class Watch:
    """An observer that keeps what it is told, and stops after so many reports."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.seen: list[Any] = []
        self.stop_after = stop_after

    def progress(self, progress: Any) -> None:
        self.seen.append(progress)

    def check_interrupt(self) -> None:
        if len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt

    def status(self, text: str) -> None:
        pass


def test_plan_names_what_loading_needs_and_no_more(hub: Hub) -> None:
    plan = plan_download("someone/tiny", endpoint=hub.address)
    names = {file.name for file in plan.files}
    assert {"model_index.json", "unet/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer_config.json"} <= names
    assert not any(name.endswith((".bin", ".py")) or "fp16" in name or name.startswith("whole") for name in names)
    assert "unet/diffusion_pytorch_model.bin" in plan.left_out
    root = hub.models["someone/tiny"]
    assert plan.total_bytes == sum((root / name).stat().st_size for name in names)
    assert plan.revision == COMMIT
    assert hub.fetched.keys() == {"model_index.json"}


def test_variant_is_taken_where_a_component_has_it(hub: Hub) -> None:
    plan = plan_download("someone/tiny", variant="fp16", endpoint=hub.address)
    names = {file.name for file in plan.files}
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in names
    assert "unet/diffusion_pytorch_model.safetensors" not in names
    assert "vae/diffusion_pytorch_model.safetensors" in names


def test_download_makes_a_model_that_loads_by_its_id(hub: Hub) -> None:
    watch = Watch()
    plan = plan_download("someone/tiny", endpoint=hub.address)
    folder = download(plan, session=Session(observer=watch))
    assert po.load(str(folder)).pipeline == "StableDiffusionPipeline"
    assert [p.done for p in watch.seen] == sorted(p.done for p in watch.seen)
    assert watch.seen[-1].done == watch.seen[-1].total == plan.total_bytes
    again = plan_download("someone/tiny", endpoint=hub.address)
    assert again.missing_bytes == 0 and all(file.is_here for file in again.files)
    assert po.load("someone/tiny").fingerprint == po.load(str(folder)).fingerprint


def test_folder_is_whole_or_absent(hub: Hub, tmp_path: Path) -> None:
    into = tmp_path / "models" / "tiny"
    plan = plan_download("someone/tiny", into=into, endpoint=hub.address)
    with pytest.raises(KeyboardInterrupt):
        download(plan, session=Session(observer=Watch(stop_after=4)))
    assert not into.exists()
    sent = sum(hub.fetched.values())
    download(plan)
    assert po.load(into).pipeline == "StableDiffusionPipeline"
    assert [path.name for path in into.parent.iterdir()] == ["tiny"]
    assert sum(hub.fetched.values()) < sent + plan.total_bytes  # what had arrived wasn't sent again
    with pytest.raises(ModelError, match="There is a tiny in models already"):
        plan_download("someone/tiny", into=into, endpoint=hub.address)


def test_full_disk_is_said_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_core.downloads._free_bytes", lambda folder: 1000)
    plan = plan_download("someone/tiny", endpoint=hub.address)
    before = dict(hub.fetched)
    with pytest.raises(ModelError, match="1000 B free|free. Make room"):
        download(plan)
    assert hub.fetched == before


def test_what_cant_be_fetched_is_said_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    root = hub.models["someone/tiny"]
    hub.models["someone/gated"] = root
    hub.gated.add("someone/gated")
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"x")
    hub.models["someone/files"] = files
    pickles = Path(shutil.copytree(root, tmp_path / "pickles"))
    (pickles / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (pickles / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    hub.models["someone/pickles"] = pickles
    odd = Path(shutil.copytree(root, tmp_path / "odd"))
    (odd / "model_index.json").write_text('{"_class_name": "X", "../../up": ["diffusers", "UNet2DConditionModel"]}')
    hub.models["someone/odd"] = odd
    for model_id, revision, says in (
        ("someone/nothing", None, "has no model someone/nothing"),
        ("someone/tiny", "nothing", "no such revision"),
        ("someone/gated", None, "is gated. Accept"),
        ("someone/files", None, "is no diffusers model: it has files of weights"),
        ("someone/pickles", None, "unet of someone/pickles has pickles only"),
        ("someone/odd", None, "names a component '../../up'"),
        ("../someone", None, "is no Hub id"),
        ("C:/models", None, "is no Hub id"),
    ):
        with pytest.raises(ModelError, match=says) as refused:
            plan_download(model_id, revision=revision, endpoint=hub.address)
        assert str(refused.value).endswith("."), model_id


# ------------------------------------------------------------------------------------------------ the command


def test_models_are_added_listed_and_checked(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "someone/tiny"]) != 0
    assert "add --yes" in capsys.readouterr().err
    assert main(["models", "add", "someone/tiny", "--yes"]) == 0
    said = capsys.readouterr().out
    assert "To fetch:" in said and "Use it as: --model someone/tiny" in said
    assert main(["models", "list", str(tmp_path / "remote")]) == 0
    assert "someone/tiny" in capsys.readouterr().out
    assert main(["models", "check", "someone/tiny"]) == 0
    assert "StableDiffusion: " in capsys.readouterr().out
    broken = Path(shutil.copytree(tiny_model("sd15"), tmp_path / "broken"))
    weights = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert main(["models", "check", str(broken)]) != 0
    assert "is cut short" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- the node


def graph(**inputs: Any) -> dict[str, Any]:
    given = {"model_id": "someone/tiny", "place": "hub cache", "download": False, "dtype": "auto", "device": "cpu"}
    encode = {"model": ["1", 0], "prompt": "a", "negative_prompt": ""}
    return {
        "1": {"class_type": "PhaseOffloadDownloadModel", "inputs": given | inputs},
        "2": {"class_type": "PhaseOffloadEncodePrompt", "inputs": encode},
    }


def test_node_shows_what_it_would_fetch_and_fetches_only_when_it_is_allowed_twice(hub: Hub, tmp_path: Path) -> None:
    from phase_offload_nodes.graph_runner import GraphRunner
    from phase_offload_nodes.local_host import LocalHost

    roots = tmp_path / "models"
    roots.mkdir()
    runner = GraphRunner(LocalHost([roots]), output_dir=tmp_path / "out", input_dir=tmp_path)
    only_node = {"1": graph()["1"]}
    shown = runner.run(only_node).ui["1"]["text"][0]
    assert "To fetch:" in shown and "Switch download on" in shown
    with pytest.raises(Exception, match="because a graph that was shared could start them"):
        runner.run(graph(download=True))
    assert hub.fetched.keys() == {"model_index.json"}
    runner.state.defaults = replace(runner.state.defaults, downloads=True)
    for place in ("hub cache", "models/diffusers"):
        result = runner.run(graph(download=True, place=place))
        assert "fetched" in result.ui["1"]["text"][0]
    assert (roots / "someone" / "tiny" / "model_index.json").is_file()
    sent = dict(hub.fetched)
    again = runner.run(graph(download=True, place="models/diffusers"))
    assert again.ui["1"]["text"] == ["someone/tiny: on this machine"] and hub.fetched == sent
    for model_id in ("../up", "x/..", "someone/tiny/more"):
        with pytest.raises(Exception, match="is no Hub id"):
            runner.run(graph(model_id=model_id, place="models/diffusers"))
    with pytest.raises(Exception, match="A variant needs a folder of its own"):
        runner.run(graph(variant="fp16"))


def test_file_whose_bytes_are_others_than_the_hub_says_is_refused(hub: Hub) -> None:
    plan = plan_download("someone/tiny", endpoint=hub.address)
    files = tuple(replace(f, sha256="0" * 64) if f.name.startswith("vae/diff") else f for f in plan.files)
    with pytest.raises(ModelError, match="vae/diffusion_pytorch_model.safetensors of someone/tiny arrived damaged"):
        download(replace(plan, files=files))
    again = {file.name: file.is_here for file in plan_download("someone/tiny", endpoint=hub.address).files}
    assert again["unet/config.json"] and not again["vae/diffusion_pytorch_model.safetensors"]
    assert po.load(str(download(plan))).pipeline == "StableDiffusionPipeline"
