"""`phase-offload run`: a graph in, pictures and a report out, and one sentence for what can't be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fake_engine
from offload_core.errors import InsufficientMemoryError
from offload_core.settings import OffloadSettings
from offload_core.single_files import SplitFiles
from phase_offload_nodes.command import main


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake_engine.Engine:
    return fake_engine.install(monkeypatch)


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A graph file, in a folder to work in that has models/diffusers/tiny."""
    monkeypatch.chdir(tmp_path)
    fake_engine.model_folder(tmp_path / "models" / "diffusers", "tiny")
    denoise = {"seed": 1, "steps": 0, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    nodes = {
        "1": node("PhaseOffloadLoad", model="tiny", dtype="auto", device="auto"),
        "2": node("PhaseOffloadEncodePrompt", model=["1", 0], prompt="a fox", negative_prompt=""),
        "3": node("PhaseOffloadDenoise", model=["1", 0], embeds=["2", 0], **denoise),
        "4": node("PhaseOffloadPurgeCache", anything=["3", 0]),
        "5": node("PhaseOffloadVAEDecode", model=["1", 0], latent=["4", 0], tiling="auto"),
        "6": node("SaveImage", images=["5", 0], filename_prefix="a/b"),
    }
    (tmp_path / "graph.json").write_text(json.dumps(nodes))
    return tmp_path / "graph.json"


def change(graph: Path, node_id: str, **inputs: Any) -> None:
    nodes = json.loads(graph.read_text())
    nodes[node_id]["inputs"].update(inputs)
    graph.write_text(json.dumps(nodes))


def test_a_graph_becomes_a_picture_and_a_report(
    graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "graph.json", "--output-dir", "out", "--report", "report.json"]) == 0
    assert Path("out/a/b_00001_.png").is_file()
    assert [phase["name"] for phase in json.loads(Path("report.json").read_text())["phases"]] == [
        "encode",
        "denoise",
        "decode",
    ]
    said = capsys.readouterr().out
    assert "Node 4: Freed 1 MiB." in said
    assert f"Wrote {Path('out/a/b_00001_.png')}" in said


def test_models_are_found_in_the_folders_given(graph: Path, engine: fake_engine.Engine, tmp_path: Path) -> None:
    fake_engine.model_folder(tmp_path / "elsewhere", "sub/other")
    change(graph, "1", model="sub/other")
    assert main(["run", str(graph), "--output-dir", "out"]) == 2
    arguments = ["run", str(graph), "--output-dir", "out", "--models-dir", "models", "--models-dir", "elsewhere"]
    assert main(arguments) == 0
    assert engine.calls[0][1]["model"] == str(tmp_path / "elsewhere" / "sub" / "other")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone.json"], "gone.json can't be read: No such file or directory."),
        (["graph.json", "--models-dir", "gone"], "The models folder gone isn't there"),
        (["graph.json", "--output-dir", "graph.json"], "The output folder graph.json is a file"),
        (["graph.json", "--device-memory", "much"], "device_memory='much' isn't a usable memory budget"),
        (["graph.json", "--host-memory", "120%"], "host_memory='120%' isn't a usable memory budget"),
    ],
)
def test_what_cant_be_run_is_a_sentence(
    graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["run", "--output-dir", "out", *arguments]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown
    assert engine.calls == []
    assert not Path("out").exists()


BUDGETS = ["--device-memory", "6GiB", "--host-memory", "leave 2GiB"]


@pytest.mark.parametrize(
    ("inputs", "options", "used"),
    [
        ({}, [], ("auto", "auto")),
        ({}, BUDGETS, ("6GiB", "leave 2GiB")),
        ({"device_memory": "auto", "host_memory": " Auto"}, BUDGETS, ("6GiB", "leave 2GiB")),
        ({"device_memory": "4GiB"}, BUDGETS, ("4GiB", "leave 2GiB")),
        ({"device_memory": "4GiB", "host_memory": "50%"}, [], ("4GiB", "50%")),
    ],
)
def test_budgets_of_the_command_stand_for_auto_in_the_graph_and_for_nothing_else(
    graph: Path, engine: fake_engine.Engine, inputs: dict[str, str], options: list[str], used: tuple[str, str]
) -> None:
    change(graph, "1", **inputs)
    assert main(["run", str(graph), "--output-dir", "out", *options]) == 0
    assert engine.calls[0][1]["settings"] == OffloadSettings(device_memory=used[0], host_memory=used[1])


def test_loras_are_found_in_the_folders_given(
    graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = json.loads(graph.read_text())
    nodes["7"] = node("PhaseOffloadLora", model=["1", 0], lora="nope.safetensors", strength=1.0)
    nodes["8"] = node("PhaseOffloadPurgeCache", anything=["7", 0])
    graph.write_text(json.dumps(nodes))
    for folder, name in (("models/loras", "usual"), ("mine", "given")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.safetensors").touch()
    assert main(["run", "graph.json", "--output-dir", "out"]) == 2
    assert "'nope.safetensors' isn't in the list: 'usual.safetensors'." in capsys.readouterr().err
    assert main(["run", "graph.json", "--output-dir", "out", "--loras", "mine"]) == 2
    assert "isn't in the list: 'given.safetensors'." in capsys.readouterr().err
    assert main(["run", "graph.json", "--output-dir", "out", "--loras", "gone"]) == 2
    assert "The loras folder gone isn't there" in capsys.readouterr().err


def test_files_of_models_and_tokenizers_are_found_where_comfyui_has_them(
    graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder, name in (("models/unet", "usual"), ("mine/diffusion_models", "given")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.safetensors").touch()
    (tmp_path / "comfy").mkdir()
    nodes = json.loads(graph.read_text())
    files = {"denoiser": "usual.safetensors", "vae": "none"} | {f"encoder_{number}": "none" for number in (1, 2, 3)}
    nodes["1"] = node("PhaseOffloadLoadFiles", **files, family="auto", dtype="auto", device="cpu")
    graph.write_text(json.dumps(nodes))
    assert main(["run", "graph.json", "--output-dir", "out", "--files-dir", "mine"]) == 2
    assert "'usual.safetensors' isn't in the list: 'given.safetensors'." in capsys.readouterr().err
    assert main(["run", "graph.json", "--output-dir", "out", "--tokenizers", "gone"]) == 2
    assert "The tokenizers folder gone isn't there" in capsys.readouterr().err
    assert main(["run", "graph.json", "--output-dir", "out"]) == 0
    models = tmp_path / "models"
    tokenizers = (tmp_path / "comfy", models / "diffusers" / "tiny")
    used = SplitFiles(denoiser=models / "unet" / "usual.safetensors", tokenizers=tokenizers)
    assert engine.calls[0][1]["model"] == str(used)


def test_help_says_how_budgets_and_graph_combine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "a node that says anything else keeps its own budget" in capsys.readouterr().out


def test_a_wrong_input_names_its_node(
    graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    change(graph, "3", steps=-1)
    assert main(["run", str(graph), "--output-dir", "out"]) == 2
    assert "Node 3 (PhaseOffloadDenoise), input 'steps': -1 is smaller than the least, 0." in capsys.readouterr().err


def test_errors_of_a_node_keep_their_exit_code(graph: Path, engine: fake_engine.Engine) -> None:
    engine.fails["denoise"] = InsufficientMemoryError("Too big.")
    assert main(["run", str(graph), "--output-dir", "out"]) == 3


def test_ctrl_c_is_130(graph: Path, engine: fake_engine.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.fails["decode"] = KeyboardInterrupt()
    assert main(["run", str(graph), "--output-dir", "out"]) == 130
    assert "Traceback" not in capsys.readouterr().err
