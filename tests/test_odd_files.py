"""Files that are no model, or not the one that they seem: one outcome on every route, and a sentence that says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import offload_core as po
from node_graphs import SpokenHost, call
from offload_core import cli
from offload_core.errors import ModelError, OffloadError
from offload_core.single_files import SplitFiles
from original_layout import checkpoint_parts, write_file
from phase_offload_nodes.graph_runner import GraphRunner
from staging import tiny_model

KINDS = ("checkpoints", "diffusion_models", "text_encoders", "vae")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, of a size that isn't known."""
    return write_file(tmp_path_factory.mktemp("good") / "good.safetensors", checkpoint_parts("sd15"))


@dataclass(frozen=True)
class Odd:
    """make: writes the file, from a good one. says: what every sentence about it has in it. but: what the sentence of
    a host's list has instead, for what can't be in such a list."""

    name: str
    make: Callable[[Path, Path], object]
    says: str
    but: str = ""


def weights(**names: int) -> bytes:
    return save({name.replace("__", "."): torch.zeros(size) for name, size in names.items()})


ODD = (
    Odd("empty.safetensors", lambda file, good: file.write_bytes(b""), "is empty"),
    Odd("page.safetensors", lambda file, good: file.write_bytes(b"<!DOCTYPE html><html>"), "page.safetensors"),
    Odd("longer.safetensors", lambda file, good: file.write_bytes(good.read_bytes() + b"x"), "too many"),
    Odd("shorter.safetensors", lambda file, good: file.write_bytes(good.read_bytes()[:-1]), "cut short"),
    Odd("half.safetensors", lambda file, good: file.write_bytes(good.read_bytes()[:5000]), "half.safetensors"),
    Odd("m-00001-of-00002.safetensors", lambda file, good: file.write_bytes(good.read_bytes()), "several shards"),
    Odd("lora.safetensors", lambda file, good: file.write_bytes(weights(a__lora_A__weight=2)), "is a LoRA"),
    Odd("control.safetensors", lambda file, good: file.write_bytes(weights(control_model__x=2)), "ControlNet"),
    Odd("nothing.safetensors", lambda file, good: file.write_bytes(weights()), "no"),
    Odd("other.safetensors", lambda file, good: file.write_bytes(weights(some__thing=2)), "holds no part of a model"),
    Odd("sizes.safetensors", lambda file, good: file.write_bytes(good.read_bytes()), "near to what is known"),
    Odd("folder.safetensors", lambda file, good: file.mkdir(), "folder.safetensors", "There is no"),
    Odd("gone.safetensors", lambda file, good: None, "does not exist", "There is no"),
)


@pytest.fixture
def runner(tmp_path: Path) -> GraphRunner:
    folders = {kind: [tmp_path / kind] for kind in KINDS}
    for (folder,) in folders.values():
        folder.mkdir()
    return GraphRunner(SpokenHost(tmp_path / "diffusers", "sd15", folders=folders), output_dir=tmp_path / "out")


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(OffloadError) as error:
        act()
    return str(error.value)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_odd_file_has_one_outcome_on_every_route(
    odd: Odd, good: Path, runner: GraphRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, denoiser = tmp_path / "checkpoints" / odd.name, tmp_path / "diffusion_models" / odd.name
    for file in (checkpoint, denoiser):
        odd.make(file, good)
    chosen = {"dtype": "auto", "device": "cpu"}
    none = dict.fromkeys(("encoder_1", "encoder_2", "encoder_3", "vae"), "none")
    engine = {
        "load": refused(lambda: po.load(checkpoint)),
        "load as a checkpoint": refused(lambda: po.load(SplitFiles(checkpoint=checkpoint))),
        "load as a denoiser": refused(lambda: po.load(SplitFiles(denoiser=denoiser))),
    }
    for name, option, file in (("--model", "--model", checkpoint), ("--denoiser", "--denoiser", denoiser)):
        assert cli.main(["plan", option, str(file), "--prompt", "a fox", "--device", "cpu"]) == ModelError.exit_code
        engine[name] = capsys.readouterr().err.strip()
    lists = {
        "Load": refused(lambda: call(runner, "PhaseOffloadLoad", model=f"checkpoints/{odd.name}", **chosen)),
        "Load Split Files": refused(
            lambda: call(runner, "PhaseOffloadLoadFiles", denoiser=odd.name, family="auto", **none, **chosen)
        ),
        "Load Split Files, of a checkpoint": refused(
            lambda: call(
                runner, "PhaseOffloadLoadFiles", denoiser=f"checkpoints/{odd.name}", family="auto", **none, **chosen
            )
        ),
    }
    for route, message in (engine | lists).items():
        expect = odd.but if odd.but and route in lists else odd.says
        assert expect in message, f"{route}: {message}"
        assert message.endswith((".", ").")) and len(message) < 700, f"{route}: {message}"


def test_wrong_family_is_refused_alike_on_every_route(
    good: Path, runner: GraphRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "checkpoints" / "good.safetensors"
    file.write_bytes(good.read_bytes())
    given = ["--model", str(file), "--family", "flux.1-dev", "--prompt", "a fox", "--device", "cpu"]
    assert cli.main(["plan", *given]) == ModelError.exit_code
    node = {"denoiser": "checkpoints/good.safetensors", "family": "flux.1-dev", "dtype": "auto", "device": "cpu"}
    none = dict.fromkeys(("encoder_1", "encoder_2", "encoder_3", "vae"), "none")
    messages = (
        refused(lambda: po.load(SplitFiles(checkpoint=file, family="flux.1-dev"))),
        capsys.readouterr().err.strip(),
        refused(lambda: call(runner, "PhaseOffloadLoadFiles", **none, **node)),
    )
    for message in messages:
        assert "no denoiser of FLUX.1 [dev]" in message and message.endswith((".", ")."))


def test_any_name_and_any_link_is_the_same_model(good: Path, tmp_path: Path) -> None:
    """Also endings in capitals, and names of other models."""
    names = ("flux1-dev.safetensors", "MODEL.SAFETENSORS", "no ending", "model.sft", "ünï cödé.safetensors")
    sizes = set()
    for name in names:
        (tmp_path / name).symlink_to(good)
        handle = po.load(SplitFiles(checkpoint=tmp_path / name, configs=tiny_model("sd15")))
        sizes.add(sum(part.weight_bytes for part in handle.source().components.values()))
    assert len(sizes) == 1
