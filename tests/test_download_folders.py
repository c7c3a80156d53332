"""A model that is fetched into a folder: what was planned and can be loaded, or nothing by that name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offload_core.downloads import download, plan_download
from offload_core.errors import ModelError
from offload_core.session import Session
from test_downloads import Hub, Watch, hub  # noqa: F401

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def test_damaged_model_doesnt_get_its_name_and_leaves_nothing(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    damaged = hub.models["someone/tiny"] / WEIGHTS
    damaged.write_bytes(b"\xff" * 8 + damaged.read_bytes()[8:])
    into = tmp_path / "models" / "tiny"
    with pytest.raises(ModelError, match="claims a header"):
        download(plan_download("someone/tiny", into=into, endpoint=hub.address))
    assert list(into.parent.iterdir()) == []


def test_what_a_stopped_try_for_another_variant_left_is_not_in_the_folder(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    remote = hub.models["someone/tiny"]
    variant = WEIGHTS.replace(".safetensors", ".fp16.safetensors")
    shutil.copy(remote / WEIGHTS, remote / variant)
    into = tmp_path / "models" / "tiny"

    class UntilWeightsAreThere(Watch):
        def check_interrupt(self) -> None:
            if (into.with_name(".tiny.download") / WEIGHTS).exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan = plan_download("someone/tiny", into=into, endpoint=hub.address)
        download(plan, session=Session(observer=UntilWeightsAreThere()))
    plan = plan_download("someone/tiny", variant="fp16", into=into, endpoint=hub.address)
    download(plan)
    there = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert there == {file.name for file in plan.files} and variant in there and WEIGHTS not in there


def test_refusal_for_want_of_disk_names_what_a_folder_takes(
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    download(plan_download("someone/tiny", endpoint=hub.address))
    monkeypatch.setattr("offload_core.downloads._free_bytes", lambda folder: 1000)
    plan = plan_download("someone/tiny", into=tmp_path / "tiny", endpoint=hub.address)
    assert plan.missing_bytes == 0 and plan.needed_bytes == plan.total_bytes
    with pytest.raises(ModelError, match=r"needs [1-9]"):
        download(plan)
