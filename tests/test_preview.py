"""After each step there is a small picture of where the denoise is heading, for packed, plain and video latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import offload_core as po
from staging import job, tiny_model, words

DEMO = Path(po.__file__).parent / "demo" / "model"


class Viewer(po.SilentObserver):
    wants_preview = True

    def __init__(self) -> None:
        self.pictures: list[Image.Image | None] = []
        self.steps: list[tuple[int, int]] = []

    def progress(self, event: po.Progress) -> None:
        if event.stage == "step":
            self.pictures.append(event.preview)
            self.steps.append((event.done, event.total))


@pytest.mark.parametrize("name", ["sd15", "flux", "flux2_klein", "qwen_image", "z_image", "wan22_a14b"])
def test_every_step_has_a_preview_of_the_right_shape(name: str) -> None:
    viewer, handle, call = Viewer(), po.load(tiny_model(name), device="cpu"), job(name, guided=False)
    po.denoise(handle, po.encode(handle, **words(name)), session=po.Session(viewer), **call)
    steps = call["num_inference_steps"]
    assert viewer.steps == [(done, steps) for done in range(1, steps + 1)]
    for picture in viewer.pictures:
        assert picture is not None
        assert picture.width / picture.height == pytest.approx(call["width"] / call["height"])


def test_nobody_pays_for_previews_that_nobody_wants() -> None:
    viewer, handle = Viewer(), po.load(tiny_model("sd15"), device="cpu")
    viewer.wants_preview = False
    po.denoise(handle, po.encode(handle, "a star"), session=po.Session(viewer), **job("sd15", guided=False))
    assert viewer.pictures == [None, None]


def test_the_last_preview_looks_like_the_picture() -> None:
    viewer, handle = Viewer(), po.load(DEMO, device="cpu")
    latents = po.denoise(
        handle, po.encode(handle, "a large red circle on a blue background"), session=po.Session(viewer)
    )
    picture = po.decode(handle, latents)[0]
    preview = viewer.pictures[-1]
    assert preview is not None
    small = np.asarray(picture.resize(preview.size, Image.Resampling.BOX), dtype=float)
    assert np.abs(small - np.asarray(preview, dtype=float)).mean() < 40
