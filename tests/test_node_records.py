"""Nodes that save and load embeds and latents: the same picture as without the file, and sentences for bad files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from node_graphs import Prompt, SpokenHost, call, graph_of, leave_out_plans, node, results_of
from offload_core.errors import InputError, OffloadError, RecordError
from phase_offload_nodes.graph import GraphError
from phase_offload_nodes.graph_runner import GraphRunner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> GraphRunner:
    """Shared, with an input and an output folder that tests add files to."""
    root = tmp_path_factory.mktemp("records")
    (root / "in").mkdir()
    return GraphRunner(SpokenHost(root / "models", "sd15", "flux"), output_dir=root / "out", input_dir=root / "in")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_plans(monkeypatch)


@pytest.fixture(scope="module")
def made(runner: GraphRunner) -> dict[str, Any]:
    """What the nodes of a run gave that saved both records, by node. The files: "embeds", "latents"."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_plans(patch)
        return {name: result.values for name, result in results_of(runner, saving()).items()}


def saving() -> Prompt:
    return graph_of("sd15", steps=1) | {
        "embeds": node("PhaseOffloadSaveEmbeds", embeds=["encode", 0], filename_prefix="embeds/fox"),
        "latents": node("PhaseOffloadSaveLatents", latent=["denoise", 0], filename_prefix="fox %width%"),
    }


def path_of(runner: GraphRunner, name: str) -> Path:
    return runner.folders.output / name.removesuffix(" [output]")


def test_a_picture_from_saved_files_is_the_same(runner: GraphRunner, made: dict[str, Any]) -> None:
    assert made["embeds"] == ("embeds/fox_00001_.embeds.safetensors [output]",)
    assert made["latents"] == ("fox 64_00001_.latents.safetensors [output]",)
    load = node("PhaseOffloadLoadEmbeds", file=made["embeds"][0])
    graph = graph_of("sd15", steps=1) | {"encode": load}
    assert torch.equal(results_of(runner, graph)["decode"].values[0], made["decode"][0])
    shutil.copy(path_of(runner, made["latents"][0]), runner.folders.input / "mine.latents.safetensors")
    for file in (made["latents"][0], "mine.latents.safetensors"):
        graph["denoise"] = node("PhaseOffloadLoadLatents", file=file)
        assert torch.equal(results_of(runner, graph)["decode"].values[0], made["decode"][0])


def test_a_load_node_takes_the_name_that_a_save_node_gives(runner: GraphRunner) -> None:
    graph = saving()
    graph["back"] = node("PhaseOffloadLoadLatents", file=["latents", 0])
    graph["decode"]["inputs"]["latent"] = ["back", 0]
    graph["latents"]["inputs"]["filename_prefix"] = "another"
    assert "back" in runner.run(graph).executed


def test_files_count_on_and_are_shown(runner: GraphRunner, made: dict[str, Any]) -> None:
    (first,) = call(runner, "PhaseOffloadSaveEmbeds", embeds=made["encode"][0], filename_prefix="count")
    (second,) = call(runner, "PhaseOffloadSaveEmbeds", embeds=made["encode"][0], filename_prefix="count")
    assert [first, second] == [f"count_0000{i}_.embeds.safetensors [output]" for i in (1, 2)]
    assert {first, second} <= set(runner.state.choices("embeds"))
    assert not any(name.endswith(".latents.safetensors") for name in runner.state.choices("embeds"))


def test_a_changed_latent_is_saved_as_it_is_now(runner: GraphRunner, made: dict[str, Any]) -> None:
    flipped = made["denoise"][0] | {"samples": made["denoise"][0]["samples"].flip(-1)}
    (name,) = call(runner, "PhaseOffloadSaveLatents", latent=flipped, filename_prefix="flipped")
    (back,) = call(runner, "PhaseOffloadLoadLatents", file=name)
    assert torch.equal(back["samples"], flipped["samples"])


def test_a_file_that_is_written_again_makes_its_load_node_run_again(runner: GraphRunner, made: dict[str, Any]) -> None:
    graph = graph_of("sd15") | {"encode": node("PhaseOffloadLoadEmbeds", file=made["embeds"][0])}
    before = runner._cache_keys(runner.check(graph))
    assert runner._cache_keys(runner.check(graph)) == before
    os.utime(path_of(runner, made["embeds"][0]), ns=(1, 1))
    assert runner._cache_keys(runner.check(graph))["encode"] != before["encode"]


# Bad files


def test_files_of_another_model_are_a_sentence(runner: GraphRunner, made: dict[str, Any]) -> None:
    (flux,) = call(runner, "PhaseOffloadLoad", model="flux", dtype="auto", device="cpu")
    (embeds,) = call(runner, "PhaseOffloadLoadEmbeds", file=made["embeds"][0])
    job = {"seed": 1, "steps": 1, "guidance": 1.0, "width": 64, "height": 48, "batch": 1}
    with pytest.raises(RecordError, match="field encoders doesn't match this model"):
        call(runner, "PhaseOffloadDenoise", model=flux, embeds=embeds, **job)
    (latent,) = call(runner, "PhaseOffloadLoadLatents", file=made["latents"][0])
    with pytest.raises(RecordError, match="field vae doesn't match"):
        call(runner, "PhaseOffloadVAEDecode", model=flux, latent=latent, tiling="auto")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def another_kind(file: Path) -> None:
    save_file({"weight": torch.ones(2)}, file)


def pickled(file: Path) -> None:
    torch.save({"weight": torch.ones(2)}, file)


def edited(change: Any) -> Any:
    """Changes a value of the file's metadata, and nothing else."""

    def edit(file: Path) -> None:
        with safe_open(file, "pt") as opened:
            metadata = dict(opened.metadata())
        tensors = load_file(file)
        change(metadata)
        save_file(tensors, file, metadata)

    return edit


def no_such_tensor(metadata: dict[str, str]) -> None:
    values = {name: [json.loads(json.dumps(s).replace('"tensor": 0', '"tensor": 99')), strides]
              for name, (s, strides) in json.loads(metadata["values"]).items()}  # fmt: skip
    metadata["values"] = json.dumps(values)


@pytest.mark.parametrize("kind", ["embeds", "latents"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "is damaged and can't be read as"),
        (pickled, "is damaged and can't be read as"),
        (another_kind, "doesn't hold .* of this version .*no format"),
        (edited(lambda meta: meta.update(format="phase-offload-embeds-99")), "doesn't hold .*phase-offload-embeds-99"),
        (edited(lambda meta: meta.update(values="{}")), "lacks the field"),
        (edited(lambda meta: meta.update(meta="[]")), "lacks the field pipeline"),
        (edited(no_such_tensor), "is damaged and can't be read as"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_sentence(
    runner: GraphRunner, made: dict[str, Any], kind: str, damage: Any, sentence: str
) -> None:
    node_id = {"embeds": "PhaseOffloadLoadEmbeds", "latents": "PhaseOffloadLoadLatents"}[kind]
    file = runner.folders.input / f"bad.{kind}.safetensors"
    shutil.copy(path_of(runner, made[kind][0]), file)
    damage(file)
    with pytest.raises(RecordError, match=sentence):
        call(runner, node_id, file=file.name)


def test_what_is_no_record_is_not_saved(runner: GraphRunner) -> None:
    with pytest.raises(InputError, match="This LATENT has no record of Denoise Phase"):
        call(runner, "PhaseOffloadSaveLatents", latent={"samples": torch.zeros(1, 4, 2, 2)}, filename_prefix="x")
    with pytest.raises(InputError, match="Save Embeds needs what Encode Prompt Phase made, not str"):
        call(runner, "PhaseOffloadSaveEmbeds", embeds="words", filename_prefix="x")


@pytest.mark.parametrize("prefix", ["../x", "/etc/x", "", "a/../../x"])
def test_nothing_is_written_outside_the_output_folder(runner: GraphRunner, made: dict[str, Any], prefix: str) -> None:
    with pytest.raises(InputError, match="is refused: it must stay inside the output folder"):
        call(runner, "PhaseOffloadSaveEmbeds", embeds=made["encode"][0], filename_prefix=prefix)


@pytest.mark.parametrize("name", ["../out/x.embeds.safetensors", "/etc/passwd", "gone.embeds.safetensors", ""])
def test_only_files_of_the_list_are_read(runner: GraphRunner, made: dict[str, Any], name: str) -> None:
    with pytest.raises(OffloadError, match="There is no file of saved embeds"):
        call(runner, "PhaseOffloadLoadEmbeds", file=name)
    with pytest.raises(GraphError, match="isn't in the list"):
        runner.check(graph_of("sd15") | {"encode": node("PhaseOffloadLoadEmbeds", file=name)})
