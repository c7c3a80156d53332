"""Models made of files in the nodes: what is listed, what may be chosen, and that pictures are those of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_core
from node_graphs import Prompt, SpokenHost, call, graph_of, leave_out_plans, node, results_of
from offload_core.errors import InputError, ModelError, TraceError
from offload_core.single_files import SplitFiles, listing, resolve
from offload_core.single_files.template import folder_template
from original_layout import checkpoint_parts, original_weights, split_files, write_file
from phase_offload_nodes.calls import fingerprint
from phase_offload_nodes.graph import GraphError
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.model_list import ModelList
from phase_offload_nodes.model_parts import ModelPartFiles
from staging import tiny_model

KINDS = ("checkpoints", "diffusion_models", "text_encoders", "clip_vision", "vae")


@pytest.fixture
def runner(tmp_path: Path) -> GraphRunner:
    """With an empty folder of each kind of files, and the tiny sd15 as a diffusers folder."""
    folders = {kind: [tmp_path / kind] for kind in KINDS}
    for (folder,) in folders.values():
        folder.mkdir()
    return GraphRunner(SpokenHost(tmp_path / "diffusers", "sd15", folders=folders), output_dir=tmp_path / "out")


def know_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tiny sd15 were among the models that are known by the sizes of their files."""
    template = folder_template(str(tiny_model("sd15")))
    monkeypatch.setattr(resolve, "known_templates", lambda family: [template])


def split_graph(denoiser: str, *encoders: str, vae: str = "none", **more: Any) -> Prompt:
    graph = graph_of("sd15", steps=1)
    names = dict(zip(("encoder_1", "encoder_2", "encoder_3"), (*encoders, *["none"] * 3), strict=False))
    given = {"denoiser": denoiser, **names, "vae": vae, "family": "auto", "dtype": "auto", "device": "cpu"}
    graph["load"] = node("PhaseOffloadLoadFiles", **given, **more)
    return graph


def picture(runner: GraphRunner, graph: Prompt) -> torch.Tensor:
    return results_of(runner, graph)["decode"].values[0]


def test_checkpoint_and_split_files_give_the_picture_of_their_folder(
    runner: GraphRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_plans(monkeypatch)
    know_the_tiny_model(monkeypatch)
    write_file(tmp_path / "checkpoints" / "tiny.safetensors", checkpoint_parts("sd15"))
    split_files("sd15", tmp_path / "vae")
    (tmp_path / "vae" / "unet.safetensors").rename(tmp_path / "diffusion_models" / "unet.safetensors")
    (tmp_path / "vae" / "text_encoder.safetensors").rename(tmp_path / "text_encoders" / "text_encoder.safetensors")
    of_folder = picture(runner, graph_of("sd15", steps=1))
    assert torch.equal(picture(runner, graph_of("checkpoints/tiny.safetensors", steps=1)), of_folder)
    assert runner.host.said["load"] == "checkpoints/tiny.safetensors: ready, nothing loaded yet"  # type: ignore[attr-defined]
    split = split_graph("unet.safetensors", "text_encoder.safetensors", vae="vae.safetensors")
    assert torch.equal(picture(runner, split), of_folder)
    assert (
        runner.host.said["load"]  # type: ignore[attr-defined]
        == "unet.safetensors, text_encoder.safetensors, vae.safetensors: ready, nothing loaded yet"
    )
    mixed = split_graph("checkpoints/tiny.safetensors", vae="vae.safetensors", configs="sd15")
    assert torch.equal(picture(runner, mixed), of_folder)


def test_whole_checkpoints_are_listed_after_the_folders(runner: GraphRunner, tmp_path: Path) -> None:
    parts = checkpoint_parts("sd15")
    below = tmp_path / "checkpoints"
    (below / "more").mkdir()
    write_file(below / "more" / "whole.safetensors", parts)
    write_file(below / "unet.safetensors", {"": original_weights("sd15", "unet")})
    (below / "broken.safetensors").write_bytes(b"\xff" * 20)
    (below / "pickle.ckpt").write_bytes(b"\x80\x02}q\x00.")
    (below / "folder.safetensors").mkdir()
    names = runner.state.choices("models")
    assert names == ["sd15", "phase-offload-demo", "checkpoints/more/whole.safetensors"]
    denoisers = runner.state.choices("denoisers")
    assert set(denoisers) == {f"checkpoints/{name}.safetensors" for name in ("broken", "more/whole", "unet")}
    assert runner.state.choices("encoders_or_none") == ["none"]


def test_encoders_that_see_are_listed_after_those_that_read(runner: GraphRunner, tmp_path: Path) -> None:
    """Under a name that says so, because the folders may hold files of one name."""
    for kind in ("clip_vision", "text_encoders"):
        (tmp_path / kind / "clip.safetensors").write_bytes(b"")
    assert set(runner.state.choices("encoders_or_none")) == {"none", "clip.safetensors", "clip_vision/clip.safetensors"}


def test_folder_goes_before_a_file_of_the_same_name(tmp_path: Path) -> None:
    """So that a graph that was saved with the folder goes on meaning it."""
    folder = tmp_path / "diffusers" / "checkpoints" / "x.safetensors"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tiny_model("sd15"), target_is_directory=True)
    (tmp_path / "checkpoints").mkdir()
    write_file(tmp_path / "checkpoints" / "x.safetensors", checkpoint_parts("sd15"))
    models = ModelList(lambda: [tmp_path / "diffusers"], lambda: [tmp_path / "checkpoints"])
    assert models.names() == ["checkpoints/x.safetensors", "phase-offload-demo"]
    assert models.checkpoint("checkpoints/x.safetensors") is None
    assert models.folder("checkpoints/x.safetensors") == folder


def test_headers_are_read_once_and_again_when_their_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look = listing._look_at
    monkeypatch.setattr(listing, "_look_at", lambda path: looked.append(path.name) or look(path))
    parts = checkpoint_parts("sd15")
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", parts)
    models = ModelList(list, lambda: [tmp_path])
    assert len(models.names()) == len(models.names()) == 3
    del parts["first_stage_model."]
    write_file(tmp_path / "new.safetensors", parts)  # the root changed, so the list is made anew
    write_file(tmp_path / "b.safetensors", parts)
    assert "checkpoints/b.safetensors" not in models.names()
    assert looked == ["a.safetensors", "b.safetensors", "b.safetensors", "new.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/../secret.safetensors",
        "checkpoints//secret.safetensors",
        "checkpoints/sub/../../secret.safetensors",
        "checkpoints/nul\0.safetensors",
        "checkpoints/",
        "checkpoints/part.safetensors",
        "../secret.safetensors",
        "/secret.safetensors",
    ],
)
def test_name_that_is_not_listed_is_refused_in_a_sentence(name: str, runner: GraphRunner, tmp_path: Path) -> None:
    write_file(tmp_path / "secret.safetensors", checkpoint_parts("sd15"))
    write_file(tmp_path / "checkpoints" / "part.safetensors", {"": original_weights("sd15", "unet")})
    with pytest.raises(ModelError, match=r"[^.]\. .*[Ll]ist"):
        call(runner, "PhaseOffloadLoad", model=name, dtype="auto", device="cpu")
    with pytest.raises(GraphError, match="isn't in the list"):
        runner.check(graph_of(name))
    if name != "checkpoints/part.safetensors":
        with pytest.raises(GraphError, match="isn't in the list"):
            runner.check(split_graph(name))


def test_gguf_files_are_listed_where_a_pack_for_gguf_keeps_them_too(tmp_path: Path) -> None:
    kinds = {"diffusion_models": ["a"], "unet_gguf": ["a", "b"], "text_encoders": ["c"], "clip_gguf": ["c", "d"]}
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.gguf").touch()
    folders = {kind: [tmp_path / name for name in names] for kind, names in kinds.items()}
    parts = ModelPartFiles(SpokenHost(tmp_path / "diffusers", "sd15", folders=folders))
    choices = parts.choices()
    assert choices["denoisers"]() == ["a.gguf", "b.gguf"]
    assert choices["encoders_or_none"]() == ["none", "c.gguf", "d.gguf"]
    with pytest.raises(InputError) as refused:
        parts.chosen("mine.gguf", "none", (), "none")
    assert str(refused.value).count(str(tmp_path / "a")) == 1  # a folder under two kinds is one place


def test_choice_that_is_no_model_is_said_by_the_engine(runner: GraphRunner, tmp_path: Path) -> None:
    write_file(tmp_path / "diffusion_models" / "unet.safetensors", {"": original_weights("sd15", "unet")})
    write_file(tmp_path / "checkpoints" / "tiny.safetensors", checkpoint_parts("sd15"))
    given = split_graph("unet.safetensors", configs="sd15")["load"]["inputs"]
    with pytest.raises(ModelError, match=r"needs a CLIPTextModel \(text_encoder\), which none of the files holds"):
        call(runner, "PhaseOffloadLoadFiles", **given)
    with pytest.raises(ModelError, match="near to what is known"):
        call(runner, "PhaseOffloadLoad", model="checkpoints/tiny.safetensors", dtype="auto", device="cpu")
    with pytest.raises(InputError, match=r"There is no VAE yet: put a \*\.safetensors file into"):
        call(runner, "PhaseOffloadLoadFiles", **given | {"vae": "mine.safetensors"})
    with pytest.raises(ModelError, match="no model name"):
        call(runner, "PhaseOffloadLoadFiles", **given | {"configs": "../sd15"})


def test_fingerprint_of_a_model_of_files_changes_with_any_of_them(runner: GraphRunner, tmp_path: Path) -> None:
    checkpoint, vae = tmp_path / "checkpoints" / "tiny.safetensors", tmp_path / "vae" / "vae.safetensors"
    weights = original_weights("sd15", "vae")
    write_file(checkpoint, checkpoint_parts("sd15"))
    write_file(vae, {"": weights})
    graph = split_graph("checkpoints/tiny.safetensors", vae="vae.safetensors", configs="sd15")
    marks = [fingerprint("PhaseOffloadLoadFiles", runner.state, graph["load"]["inputs"]) for _ in range(2)]
    write_file(vae, {"": {name: tensor + 1 for name, tensor in weights.items()}})
    marks.append(fingerprint("PhaseOffloadLoadFiles", runner.state, graph["load"]["inputs"]))
    checkpoint.unlink()
    marks.append(fingerprint("PhaseOffloadLoadFiles", runner.state, graph["load"]["inputs"]))
    assert marks[0] == marks[1] and len(set(marks)) == 3
    assert marks[3].startswith("unusable: There is no denoiser")


def test_plan_preview_looks_at_all_files_of_the_model(
    runner: GraphRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokenizers and parts are no property of the checkpoint's path."""
    write_file(tmp_path / "checkpoints" / "tiny.safetensors", checkpoint_parts("sd15"))
    given = split_graph("checkpoints/tiny.safetensors", configs="sd15")["load"]["inputs"]
    (handle,) = call(runner, "PhaseOffloadLoadFiles", **given)
    asked: list[Any] = []

    def foresee_job(model: Any, *_: Any, **__: Any) -> None:
        asked.append(model)
        raise TraceError("this test needs no plan")

    monkeypatch.setitem(vars(offload_core), "foresee_job", foresee_job)
    job = {"prompt": "", "steps": 1, "guidance": -1.0, "width": 0, "height": 0, "batch": 1}
    with pytest.raises(TraceError, match="needs no plan"):
        call(runner, "PhaseOffloadPlanPreview", model=handle, **job)
    assert asked == [handle.files] and handle.files.configs == str(tmp_path / "diffusers" / "sd15")


def test_saved_graph_with_a_folder_below_one_called_checkpoints_is_understood_as_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "tiny").symlink_to(tiny_model("sd15"), target_is_directory=True)
    models = ModelList(lambda: [tmp_path])
    assert models.checkpoint("checkpoints/tiny/") is None
    assert models.folder("checkpoints/tiny/") == tmp_path / "checkpoints" / "tiny"


def test_checkpoint_that_was_saved_a_moment_ago_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    models = ModelList(list, lambda: [tmp_path])
    assert models.names() == ["phase-offload-demo"]
    file = write_file(tmp_path / "below" / "new.safetensors", checkpoint_parts("sd15"))
    assert models.checkpoint("checkpoints/below/new.safetensors") == file


def test_tokenizers_are_looked_for_at_the_host_and_in_diffusers_folders_but_the_demo(tmp_path: Path) -> None:
    """The demo model's tokenizers have CLIP's and T5's classes and a vocabulary of a few words."""
    host = SpokenHost(tmp_path / "diffusers", "sd15", folders={"checkpoints": [tmp_path]})
    host._tokenizers = (tmp_path / "comfy",)
    write_file(tmp_path / "whole.safetensors", checkpoint_parts("sd15"))
    model = GraphRunner(host, output_dir=tmp_path / "out").state.model("checkpoints/whole.safetensors")
    assert isinstance(model, SplitFiles)
    assert model.tokenizer_folders == (str(tmp_path / "comfy"), str(tmp_path / "diffusers" / "sd15"))
