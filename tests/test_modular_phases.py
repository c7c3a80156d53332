"""Models that are made of blocks, in phases: the bits of the whole modular pipeline, and sentences for what can't."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AnimaAutoBlocks, ModularPipelineBlocks, SequentialPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from PIL import Image

import offload_core as po
from lora_files import make_lora
from modular_models import SEED, as_blocks, tiny_anima, tiny_helios, whole
from offload_core import cli
from offload_core.errors import BudgetError, InputError, ModelError, RecordError
from offload_core.model_source import list_models
from offload_core.session import Progress
from offload_core.tiny_models import FAMILIES
from offload_core.tiny_models.pictures import picture as image
from phase_offload_nodes.graph_runner import GraphRunner
from phase_offload_nodes.local_host import LocalHost
from staging import one_shot, tiny_model

# Everything but the smallest weights is streamed.
STREAMED = po.OffloadSettings(execution_device="cpu", resident_memory=0, resident_below=1024)
WORDS = {"prompt": "a red fox", "negative_prompt": "blurry"}
JOB = {"height": 48, "width": 64, "num_inference_steps": 2}


class Watcher:
    """An observer that keeps what it is told, and stops the run at a step."""

    wants_preview = True

    def __init__(self, stop_at: int = 0) -> None:
        self.events: list[Progress] = []
        self.stop_at = stop_at

    def progress(self, event: Progress) -> None:
        self.events.append(event)

    def check_interrupt(self) -> None:
        if self.stop_at and any(event.stage == "step" and event.done == self.stop_at for event in self.events):
            raise InterruptedError("stopped")

    def make_room(self) -> bool:
        return False

    @property
    def steps(self) -> list[Progress]:
        return [event for event in self.events if event.stage == "step"]


@dataclass(frozen=True)
class Made:
    """One job of the tiny Anima in phases, streamed, and its pictures by the whole pipeline."""

    handle: po.Handle
    embeds: po.Embeds
    latents: po.Latents
    pictures: torch.Tensor
    expected: torch.Tensor
    watcher: Watcher
    session: po.Session


@pytest.fixture(scope="module")
def made() -> Made:
    watcher = Watcher()
    session = po.Session(watcher)
    handle = po.load(tiny_anima(), device="cpu", settings=STREAMED)
    embeds = po.encode(handle, **WORDS, session=session)
    latents = po.denoise(handle, embeds, seed=SEED, session=session, guidance_scale=3.0, **JOB)
    pictures = po.decode(handle, latents, "pt", session=session)
    return Made(handle, embeds, latents, pictures, whole(tiny_anima(), {**WORDS, **JOB}, 3.0), watcher, session)


def in_phases(model: Path, words: dict[str, Any], job: dict[str, Any], **load: Any) -> torch.Tensor:
    handle = po.load(model, device="cpu", **{"settings": STREAMED, **load})
    latents = po.denoise(handle, po.encode(handle, **words), seed=SEED, **job)
    return torch.as_tensor(po.decode(handle, latents, "pt")).float()


# ------------------------------------------------------------------------------------------ a family of blocks only


def test_streamed_phases_of_a_family_of_blocks_equal_the_whole_modular_pipeline(made: Made) -> None:
    assert made.expected.shape == (1, 3, 48, 64) and made.expected.std() > 0.01
    assert torch.equal(made.pictures, made.expected)
    encode, denoise, decode = made.session.report.phases
    assert encode.forwards == {"text_encoder": 2}
    assert denoise.forwards == {"text_conditioner": 2, "transformer": 4}
    assert decode.forwards == {"vae": 1}
    for phase in made.session.report.phases:
        assert phase.streamed_bytes > 0 and phase.leaked_bytes == 0


def test_blocks_say_each_step_and_show_a_preview_of_it(made: Made) -> None:
    assert [(event.done, event.total) for event in made.watcher.steps] == [(1, 2), (2, 2)]
    assert all(isinstance(event.preview, Image.Image) for event in made.watcher.steps)


def test_a_handle_of_blocks_knows_their_arguments_and_the_scale_of_their_guider(made: Made) -> None:
    assert made.handle.pipeline == "AnimaModularPipeline"
    assert made.handle.guidance_name == "guidance_scale" and made.handle.defaults["guidance_scale"] == 4.0
    assert made.handle.images_name == "num_images_per_prompt" and not made.handle.makes_video
    with pytest.raises(InputError, match="takes no argument 'heigth'. Did you mean height"):
        po.check_denoise(made.handle, heigth=64)
    with pytest.raises(InputError, match="height is 50, and this model needs a multiple of 8: use 48 or 56"):
        po.check_denoise(made.handle, height=50)
    with pytest.raises(InputError, match="latents is set by the phases"):
        po.denoise(made.handle, made.embeds, latents=torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, None])
def test_embeds_serve_any_guidance_and_number_of_pictures(made: Made, scale: float | None) -> None:
    job = {**JOB, "num_images_per_prompt": 2}
    pipe_scale = 4.0 if scale is None else scale
    latents = po.denoise(made.handle, made.embeds, seed=SEED, **job, **({} if scale is None else {"guidance_scale": 1}))
    assert torch.equal(po.decode(made.handle, latents, "pt"), whole(tiny_anima(), {**WORDS, **job}, pipe_scale))


def test_latents_of_blocks_keep_what_the_last_blocks_read_in_a_file(made: Made, tmp_path: Path) -> None:
    saved = po.Latents.load(made.latents.save(tmp_path / "latents.safetensors"))
    assert saved.rest is not None and saved.rest.key() == made.latents.rest.key()
    assert np.array_equal(np.asarray(po.decode(made.handle, saved, "pil")[0]), pixels(made.expected))


def pixels(pictures: torch.Tensor) -> Any:
    return (pictures[0].movedim(0, -1).numpy() * 255).round().astype("uint8")


def test_changed_and_bare_samples_are_decoded_as_the_vae_would(made: Made) -> None:
    changed = made.latents.samples * 0.5
    assert made.latents.is_stale(changed) and not made.latents.is_stale(made.latents.samples)
    stale = po.decode(made.handle, made.latents.with_samples(changed), "pt")
    bare = po.decode(made.handle, po.latents_from_samples(made.handle, changed), "pt")
    assert torch.equal(stale, bare) and not torch.equal(stale, made.pictures)


def test_a_stop_in_mid_denoise_gives_everything_back_and_is_no_failure_of_a_block(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    session = po.Session(Watcher(stop_at=1))
    gc.collect()
    before = living_weights()
    with caplog.at_level(logging.INFO), pytest.raises(InterruptedError):
        po.denoise(made.handle, made.embeds, seed=SEED, session=session, **JOB)
    assert "Error in block" not in caplog.text
    (report,) = session.report.phases
    assert report.leaked_bytes == 0 and report.weight_bytes > 0
    gc.collect()
    assert living_weights() == before


def living_weights() -> int:
    """Weights with memory that anything still holds. (A cold or streamed weight has a type of its own.)"""
    return sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects())


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works(made: Made) -> None:
    tight = po.OffloadSettings(execution_device="cpu", device_memory=4_000)
    with pytest.raises(BudgetError, match="Raise device_memory by"):
        po.denoise(po.load(tiny_anima(), device="cpu", settings=tight), made.embeds, **JOB)


@pytest.mark.slow
def test_a_video_that_is_decoded_in_pieces_is_whole_and_its_latents_cannot_be_changed() -> None:
    pieces = {"num_frames": 9, "num_latent_frames_per_chunk": 1, "history_sizes": [2, 1, 1]}
    job, session = {**JOB, **pieces}, po.Session()
    handle = po.load(tiny_helios(), device="cpu", settings=STREAMED)
    assert handle.makes_video
    latents = po.denoise(handle, po.encode(handle, **WORDS), seed=SEED, guidance_scale=3.0, **job)
    video = po.decode(handle, latents, "pt", session=session)
    assert session.report.phases[0].forwards == {"vae": 9}
    assert torch.equal(torch.as_tensor(video).float(), whole(tiny_helios(), {**WORDS, **job}, 3.0))
    with pytest.raises(RecordError, match="several pieces"):
        po.decode(handle, latents.with_samples(latents.samples), "pt")


@pytest.mark.slow
def test_a_job_of_blocks_is_foreseen_and_followed(made: Made) -> None:
    options = {**JOB, "guidance_scale": 3.0}
    found = po.foresee_job(tiny_anima(), *WORDS.values(), settings=STREAMED, **options)
    session = po.Session()
    embeds = po.encode(made.handle, **WORDS, session=session, plan=found.plan)
    latents = po.denoise(made.handle, embeds, seed=SEED, session=session, plan=found.plan, **options)
    assert torch.equal(po.decode(made.handle, latents, "pt", session=session, plan=found.plan), made.expected)
    assert [phase.name for phase in found.plan.phases] == ["encode", "denoise", "decode"]
    calls: Counter[str] = Counter()
    for call in found.traces[1].calls:
        calls[call.component] += call.times
    assert calls == {"text_conditioner": 2, "transformer": 4}


# ------------------------------------------------------------------------------------ families that have both routes


def test_phases_from_the_blocks_of_flux_equal_its_classic_pipeline(tmp_path: Path) -> None:
    check_against_classic("flux", tmp_path, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan22_a14b", "qwen_image"])
def test_guided_phases_from_blocks_equal_the_classic_pipeline(name: str, tmp_path: Path) -> None:
    check_against_classic(name, tmp_path, FAMILIES[name].guidance)


def check_against_classic(name: str, folder: Path, guidance: Any) -> None:
    call = {**FAMILIES[name].call, **guidance}
    expected, _ = one_shot(tiny_model(name), dtype=torch.float32, seed=SEED, **call)
    scale = {"guidance_scale": call.pop("true_cfg_scale")} if "true_cfg_scale" in call else {}
    words = {key: call.pop(key) for key in list(call) if key.endswith("prompt") or key == "max_sequence_length"}
    model = as_blocks(name, folder / "model")
    handle = po.load(model)
    assert handle.pipeline.endswith("ModularPipeline") and handle.makes_video == FAMILIES[name].makes_video
    assert torch.equal(in_phases(model, words, {**call, **scale}), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), [("sdxl", 5.0), ("sdxl_fp16_force_upcast", 5.0), ("sd3", 4.0)])
def test_guided_phases_from_blocks_equal_the_whole_modular_pipeline(name: str, scale: float, tmp_path: Path) -> None:
    model = as_blocks(name, tmp_path / "model")
    call = {**FAMILIES[name].guided_call}
    call.pop("guidance_scale")
    words = {key: call.pop(key) for key in list(call) if key.endswith("prompt")}
    found = in_phases(model, words, {**call, "guidance_scale": scale})
    assert torch.equal(found, whole(model, {**words, **call}, scale))


@pytest.mark.slow
def test_a_picture_to_start_from_is_encoded_in_encode(tmp_path: Path) -> None:
    model = as_blocks("flux", tmp_path / "model")
    call = {**FAMILIES["flux"].call, "image": image("fox"), "strength": 0.9}
    words = {key: call.pop(key) for key in ("prompt", "image", "height", "width", "max_sequence_length")}
    handle = po.load(model, device="cpu", settings=STREAMED)
    session = po.Session()
    embeds = po.encode(handle, **words, session=session)
    latents = po.denoise(handle, embeds, seed=SEED, session=session, **call)
    assert [phase.name for phase in session.report.phases] == ["encode", "denoise"]
    assert torch.equal(po.decode(handle, latents, "pt"), whole(model, {**words, **call}, None))


@pytest.mark.slow
def test_a_lora_on_blocks_equals_the_classic_pipeline_with_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = make_lora("flux", "transformer", tmp_path / "lora.safetensors", ["to_q", "to_v"], alpha=16)
    call = dict(FAMILIES["flux"].call)
    words = {key: call.pop(key) for key in ("prompt", "max_sequence_length")}
    found = in_phases(as_blocks("flux", tmp_path / "model"), words, call, loras=[(file, 0.5)])
    assert torch.equal(found, in_phases(tiny_model("flux"), words, call, loras=[(file, 0.5)]))
    assert not torch.equal(found, in_phases(tiny_model("flux"), words, call))


def test_a_folder_with_both_indexes_is_the_classic_pipeline(tmp_path: Path) -> None:
    model = as_blocks("flux", tmp_path / "model")
    shutil.copy(tiny_model("flux") / "model_index.json", model)
    assert po.load(model).pipeline == "FluxPipeline"


# ---------------------------------------------------------------------------------- a VAE in the middle of denoising


class _Look(ModularPipelineBlocks):
    """Looks at the picture so far, and goes on from what it saw."""

    model_name = "anima"

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("vae", diffusers.AutoencoderKLQwenImage)]

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("latents", required=True)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents")]

    def __call__(self, components: Any, state: Any) -> Any:
        latents = self.get_block_state(state).latents
        picture = components.vae.decode(latents, return_dict=False)[0]
        state.set("latents", latents + components.vae.encode(picture).latent_dist.mode())
        return components, state


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anima's denoise block looks, too."""
    blocks = [*AnimaAutoBlocks.block_classes]
    blocks[2] = SequentialPipelineBlocks.from_blocks_dict({"loop": blocks[2](), "look": _Look()})
    monkeypatch.setattr(AnimaAutoBlocks, "block_classes", blocks)


@pytest.mark.usefixtures("looking")
def test_a_vae_that_the_denoise_block_calls_takes_part_in_denoise(made: Made) -> None:
    session = po.Session()
    latents = po.denoise(made.handle, made.embeds, seed=SEED, session=session, guidance_scale=3.0, **JOB)
    (report,) = session.report.phases
    assert report.forwards["vae"] == 2 and report.leaked_bytes == 0
    found = po.decode(made.handle, latents, "pt")
    assert torch.equal(found, whole(tiny_anima(), {**WORDS, **JOB}, 3.0))
    assert not torch.equal(found, made.expected)


@pytest.mark.slow
@pytest.mark.usefixtures("looking")
def test_a_vae_in_the_denoise_block_is_foreseen_there() -> None:
    found = po.foresee_job(tiny_anima(), *WORDS.values(), settings=STREAMED, **JOB)
    denoise = found.plan.phases[1]
    assert [part.name for part in denoise.components] == ["text_conditioner", "transformer", "vae"]


# -------------------------------------------------------------------------------------------------- lists, doors


def test_models_of_blocks_are_in_the_list(tmp_path: Path) -> None:
    shutil.copytree(tiny_anima(), tmp_path / "somebody" / "anima")
    assert list(list_models([tmp_path])) == ["somebody/anima"]


@pytest.mark.slow
def test_generate_makes_the_picture_of_a_model_of_blocks(made: Made, tmp_path: Path) -> None:
    words = ["--prompt", "a red fox", "--negative-prompt", "blurry", "--guidance-scale", "3", "--seed", str(SEED)]
    size = ["--height", "48", "--width", "64", "--steps", "2", "--device", "cpu", "--output", str(tmp_path / "fox.png")]
    assert cli.main(["generate", "--model", str(tiny_anima()), *words, *size]) == 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "fox.png")), pixels(made.expected))
    assert cli.main(["plan", "--model", str(tiny_anima()), "--height", "48", "--width", "64", "--steps", "2"]) == 0


@pytest.mark.slow
def test_the_nodes_make_the_picture_of_a_model_of_blocks(made: Made, tmp_path: Path) -> None:
    host = LocalHost([tiny_anima().parent], say=lambda *_: None)
    name = tiny_anima().name
    model = {"model": ["load", 0]}
    job = {"steps": 2, "guidance": 3.0, "width": 64, "height": 48, "batch": 1}
    graph = {
        "load": ("PhaseOffloadLoad", {"model": name, "dtype": "auto", "device": "cpu"}),
        "encode": ("PhaseOffloadEncodePrompt", {**model, **WORDS}),
        "denoise": ("PhaseOffloadDenoise", {**model, "embeds": ["encode", 0], "seed": SEED, **job}),
        "decode": ("PhaseOffloadVAEDecode", {**model, "latent": ["denoise", 0], "tiling": "auto"}),
        "plan": ("PhaseOffloadPlanPreview", {**model, "prompt": "a red fox", **job}),
        "save": ("SaveImage", {"images": ["decode", 0], "filename_prefix": "fox"}),
    }
    nodes = {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in graph.items()}
    GraphRunner(host, output_dir=tmp_path).run(nodes)
    (written,) = tmp_path.glob("fox*.png")
    cut_off = (made.expected[0].movedim(0, -1).numpy() * 255).astype("uint8")  # as ComfyUI's own node does
    assert np.array_equal(np.asarray(Image.open(written)), cut_off)


# ------------------------------------------------------------------------------------------------- what it refuses


def index_of(model: Path, **changes: Any) -> None:
    file = model / "modular_model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def anima(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_anima(), tmp_path / "anima")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"_class_name": "ModularPipeline", "_blocks_class_name": None}, "blocks of its own"),
        ({"_class_name": "ModularPipeline", "_blocks_class_name": "SequentialPipelineBlocks"}, "blocks of its own"),
        ({"_blocks_class_name": "MyBlocks"}, "needs the class 'MyBlocks', which the installed diffusers"),
        ({"_class_name": "FluxPipeline"}, "names 'FluxPipeline' as its pipeline, which is no pipeline"),
        (
            {"_class_name": "WanAnimate2ModularPipeline", "_blocks_class_name": "WanAnimate2Blocks"},
            "no VAE after its denoise block.*open_block",
        ),
        ({"vae": ["diffusers", "AutoencoderKLQwenImage", {"type_hint": ["os", "system"]}]}, "takes the class of 'vae'"),
    ],
)
def test_an_index_that_gives_no_phases_is_refused_with_the_reason(
    anima: Path, changes: dict[str, Any], sentence: str
) -> None:
    index_of(anima, **changes)
    with pytest.raises(ModelError, match=sentence):
        po.load(anima)


def test_a_guider_in_the_folder_goes_before_that_of_the_blocks(anima: Path) -> None:
    diffusers.ClassifierFreeGuidance(guidance_scale=2.5, stop=0.5).save_pretrained(anima / "guider")
    kind = ["diffusers", "ClassifierFreeGuidance"]
    index_of(anima, guider=[*kind, {"type_hint": kind, "subfolder": "guider"}])
    handle = po.load(anima, device="cpu")
    assert handle.defaults["guidance_scale"] == 2.5
    with po.open_phase(handle) as phase:
        assert phase.pipeline.guider.config.stop == 0.5


def test_blocks_without_a_denoise_block_are_refused(anima: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnimaAutoBlocks, "block_names", ["text_encoder", "vae_encoder", "loop", "decode"])
    with pytest.raises(ModelError, match="none called denoise, so it has no phases.*open_block"):
        po.load(anima)


def test_blocks_whose_code_comes_with_the_model_are_refused(anima: Path) -> None:
    (anima / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.MyBlocks"}}))
    with pytest.raises(ModelError, match="asks for code of its own"):
        po.load(anima)


def test_a_component_that_lies_elsewhere_is_named_by_the_call_that_needs_it(anima: Path) -> None:
    shutil.rmtree(anima / "text_encoder")
    handle = po.load(anima)
    with pytest.raises(ModelError, match="needs the component text_encoder .* in somebody/some-model: put it into"):
        po.encode(handle, "a red fox")
