"""DDO's staged recipe, as its page writes it: prompt pass, denoise pass, decode pass, each with its own weights only.

The pipelines of the passes are built by diffusers' own `from_pretrained` with text encoders and VAE set to None; the
pictures equal those of the whole pipeline, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from offload_core import (
    DynamicOffloadSettings,
    config_only,
    enable_offload,
    enable_pipeline_offload,
    from_pretrained_with_dynamic_offload,
    maybe_purge_windows_standby_cache,
)
from offload_core.demo import MODEL
from offload_core.errors import ColdWeightError, InputError
from offload_core.streaming import is_streamed
from offload_core.tiny_models import VARIANTS
from offload_core.tiny_models.running import align
from staging import FAMILIES, one_shot, tiny_model

SEED = 3


@dataclass(frozen=True)
class Recipe:
    """What the recipe leaves to the reader for one family.

    encode: from (pipeline, call) to arguments of the denoise pass. unscale: from (pipeline, VAE, latents, call) to what
    the VAE decodes. denoisers: the components that are loaded before the pipeline, with their classes.
    """

    encode: Callable[[Any, dict[str, Any]], dict[str, Any]]
    unscale: Callable[[Any, Any, Any, dict[str, Any]], Any]
    denoisers: dict[str, str]
    vae: str = "AutoencoderKL"
    video: bool = False


def flux_encode(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    length = call["max_sequence_length"]
    embeds, pooled, _ = pipe.encode_prompt(call["prompt"], None, device="cpu", max_sequence_length=length)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def flux_unscale(pipe: Any, vae: Any, latents: Any, call: dict[str, Any]) -> Any:
    latents = pipe._unpack_latents(latents, call["height"], call["width"], pipe.vae_scale_factor)
    return latents / vae.config.scaling_factor + vae.config.shift_factor


def sdxl_encode(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    found = pipe.encode_prompt(
        call["prompt"], None, "cpu", 1, do_classifier_free_guidance=True, negative_prompt=call["negative_prompt"]
    )
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return dict(zip(names, found, strict=True))


def two_embeds(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    embeds, negative = pipe.encode_prompt(
        prompt=call["prompt"],
        negative_prompt=call["negative_prompt"],
        do_classifier_free_guidance=True,
        max_sequence_length=call["max_sequence_length"],
        device="cpu",
    )
    return {"prompt_embeds": embeds, "negative_prompt_embeds": negative}


def wan_unscale(pipe: Any, vae: Any, latents: Any, call: dict[str, Any]) -> Any:
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)
    return latents / (1.0 / torch.tensor(vae.config.latents_std).view(shape)) + mean


FLUX = Recipe(flux_encode, flux_unscale, {"transformer": "FluxTransformer2DModel"})
SDXL = Recipe(sdxl_encode, lambda _, vae, z, __: z / vae.config.scaling_factor, {"unet": "UNet2DConditionModel"})
Z_IMAGE = Recipe(
    two_embeds,
    lambda _, vae, z, __: z.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor,
    {"transformer": "ZImageTransformer2DModel"},
)
WAN = Recipe(two_embeds, wan_unscale, {"transformer": "WanTransformer3DModel"}, "AutoencoderKLWan", video=True)
WAN_TWO = Recipe(
    two_embeds,
    wan_unscale,
    dict.fromkeys(("transformer", "transformer_2"), "WanTransformer3DModel"),
    "AutoencoderKLWan",
    video=True,
)
RECIPES = {"sdxl": SDXL, "flux": FLUX, "z_image": Z_IMAGE, "wan22_a14b": WAN_TWO, "wan22_5b": WAN}

# So little that everything but the smallest weights is streamed.
ENVIRON = {"DDO_SMALL_TENSOR_THRESHOLD_KB": "1", "DDO_RESIDENT_MODULE_BUDGET_GB": "0.000001"}


def text_encoders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("text_encoder"))


def staged(
    folder: Path,
    recipe: Recipe,
    call: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    cls: Any = None,
    **way: Any,
) -> tuple[torch.Tensor, int, list[Any]]:
    """The three passes, the denoisers sent their `way`. Returns the picture, the bytes that the denoisers read from
    their files, and the visits of what the pipeline was built without."""
    cls = cls or diffusers.DiffusionPipeline
    encoders, nothing = text_encoders(folder), dict.fromkeys(recipe.denoisers)
    settings = DynamicOffloadSettings.from_env(
        execution_device="cpu", offload_device="cpu", default_preset="auto", environ=ENVIRON
    )

    # 1. prompt
    pipe = cls.from_pretrained(folder, dtype=dtype, vae=None, **nothing)
    results = [enable_offload(getattr(pipe, name), settings=settings, component=name) for name in encoders]
    with torch.no_grad():
        embeds = recipe.encode(pipe, call)
    del results, pipe
    gc.collect()
    maybe_purge_windows_standby_cache(settings, "after_text_encoder")

    # 2. denoise
    denoisers = {
        name: from_pretrained_with_dynamic_offload(
            folder,
            model_loader=getattr(diffusers, loader),
            subfolder=name,
            torch_dtype=dtype,
            apply_dynamic=False,
            device_map="cpu",
        ).module
        for name, loader in recipe.denoisers.items()
    }
    without = dict.fromkeys([*encoders, *(name.replace("text_encoder", "tokenizer") for name in encoders)])
    pipe = cls.from_pretrained(folder, dtype=dtype, **without, vae=None, **denoisers)
    pipe.set_progress_bar_config(disable=True)
    for denoiser in denoisers.values() if way else ():
        align(denoiser)  # not the engine's to do
    results = [
        enable_offload(getattr(pipe, name), settings=settings, component=name, **way) for name in recipe.denoisers
    ]
    maybe_purge_windows_standby_cache(settings, "before_transformer")
    rest = {key: value for key, value in call.items() if key not in ("prompt", "negative_prompt")}
    generator = torch.Generator("cpu").manual_seed(SEED)
    latents = pipe(**rest, **embeds, output_type="latent", generator=generator)[0]
    read = sum(report.read_bytes for result in results if (report := result.report()) is not None)
    visits = [visit for result in results for visit in result.visits]
    del results, denoisers, pipe
    gc.collect()

    # 3. decode
    vae = getattr(diffusers, recipe.vae).from_pretrained(folder, subfolder="vae", dtype=dtype)
    pipe = cls.from_pretrained(folder, dtype=dtype, **without, vae=vae, **nothing)
    with enable_offload(vae, settings=settings, component="vae"), torch.no_grad():
        decoded = vae.decode(recipe.unscale(pipe, vae, latents, call), return_dict=False)[0]
    if recipe.video:
        return pipe.video_processor.postprocess_video(decoded, output_type="pt").float(), read, visits
    return pipe.image_processor.postprocess(decoded, output_type="pt").float(), read, visits


@pytest.mark.parametrize(
    "name", [name if name == "wan22_5b" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_the_staged_recipe_equals_the_whole_pipeline(name: str):
    folder, recipe = tiny_model(name), RECIPES[name]
    call = dict(FAMILIES[name].call if name == "flux" else FAMILIES[name].guided_call)
    twin, _ = one_shot(folder, dtype=torch.float32, seed=SEED, **call)
    picture, read, visits = staged(folder, recipe, call)
    assert torch.equal(picture, twin) and not visits
    assert read > 0  # `device_map="cpu"` leaves the weights in their files


def test_the_staged_recipe_equals_the_whole_demo_model():
    call = {"prompt": "a red circle", "height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 48}
    twin, _ = one_shot(MODEL, dtype=torch.bfloat16, seed=SEED, **call)
    picture, read, _ = staged(MODEL, FLUX, call, torch.bfloat16)
    assert torch.equal(picture, twin) and read > 0


# Recipes of calls that start from a picture, which the VAE encodes in the denoise pass, and the denoisers' way there.
PICTURE_RECIPES: dict[str, Recipe] = {
    "sdxl_img2img": SDXL,
    "flux_img2img": FLUX,
    "flux_kontext": FLUX,
    "wan22_5b_i2v": WAN,
    "wan22_i2v_a14b": WAN_TWO,
}
GROUP: dict[str, Any] = {"route": "diffusers_group_offload"}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param("sdxl_img2img", {}, id="sdxl_img2img"),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.slow) for name in list(PICTURE_RECIPES)[1:]),
        *(pytest.param(name, GROUP, id=f"{name}-group", marks=pytest.mark.slow) for name in PICTURE_RECIPES),
    ],
)
def test_a_staged_pipeline_that_starts_from_a_picture_brings_its_vae_by_itself(name: str, way: dict[str, Any]):
    """Its denoise pass is built with `vae=None`, as any other. The page of the original asks its reader to know."""
    if name in VARIANTS:
        variant = VARIANTS[name]
        folder, cls, call = tiny_model(variant.family), variant.pipeline_class, {"negative_prompt": "blurry"}
        call |= variant.call
    else:
        folder, cls, call = tiny_model(name), diffusers.DiffusionPipeline, dict(FAMILIES[name].guided_call)
    twin, _ = one_shot(folder, dtype=torch.float32, seed=SEED, cls=cls, **call)
    picture, _, visits = staged(folder, PICTURE_RECIPES[name], call, cls=cls, **way)
    assert torch.equal(picture, twin)
    assert {(visit.component, visit.method) for visit in visits} == {("vae", "encode")}


@pytest.mark.parametrize(
    "name",
    [name if name == "flux" else pytest.param(name, marks=pytest.mark.slow) for name in (*RECIPES, "qwen_image")],
)
def test_a_whole_pipeline_in_one_budget_equals_the_resident_one(name: str):
    call = FAMILIES[name].guided_call
    twin, _ = one_shot(tiny_model(name), dtype=torch.float32, seed=SEED, **call)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_model(name))
    pipe.set_progress_bar_config(disable=True)
    results = enable_pipeline_offload(pipe, preset="plain", execution_device="cpu", environ=ENVIRON)
    generator = torch.Generator("cpu").manual_seed(SEED)
    assert torch.equal(torch.as_tensor(pipe(**call, output_type="pt", generator=generator)[0]).float(), twin)
    assert all(result.report().read_bytes for result in results.values())
    for result in results.values():
        result.release()


# ----------------------------------------------------------------------------------------------- the trap


def build(name: str, **parts: Any) -> Any:
    """A pipeline of a tiny model without encoders, and without a VAE unless it is among `parts`."""
    folder = tiny_model(name)
    cls = getattr(diffusers, diffusers.DiffusionPipeline.load_config(folder)["_class_name"])
    without = dict.fromkeys([*text_encoders(folder), "tokenizer"])
    return cls.from_pretrained(folder, **(without | {"vae": None} | parts))


def load(name: str, **options: Any) -> Any:
    return from_pretrained_with_dynamic_offload(
        tiny_model(name), model_loader=diffusers.WanTransformer3DModel, subfolder="transformer", **options
    )


def test_a_pipeline_without_its_vae_learns_the_latent_grid_when_its_denoiser_is_attached():
    pipe = build("wan22_5b")
    assert pipe.vae_scale_factor_spatial == 8  # a guess
    scheduler, transformer = pipe.scheduler, pipe.transformer
    with enable_offload(transformer, preset="plain", execution_device="cpu", environ={}):
        assert pipe.vae_scale_factor_spatial == 16
        assert pipe.video_processor.config.vae_scale_factor == 16
        assert pipe.scheduler is scheduler and pipe.transformer is transformer
        assert pipe.config.expand_timesteps is True and pipe.text_encoder is None
        with pytest.raises(ColdWeightError, match="vae"):
            pipe.vae.decoder.conv_in.weight + 1
    assert not transformer._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_makes_the_whole_pipelines_latents_without_its_vae(name: str):
    def latents(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module) and not any(map(is_streamed, component.parameters())):
                align(component)
        generator = torch.Generator("cpu").manual_seed(SEED)
        return torch.as_tensor(pipe(**FAMILIES[name].guided_call, output_type="latent", generator=generator)[0])

    folder = tiny_model(name)
    twin = latents(diffusers.DiffusionPipeline.from_pretrained(folder))
    # HunyuanVideo 1.5's constructor fails without a VAE
    vae = config_only(folder, "vae", device="cpu") if name == "hunyuan_video15" else None
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, vae=vae)
    for part in ("transformer", "transformer_2", "unet"):
        if getattr(pipe, part, None) is not None:
            enable_offload(getattr(pipe, part), component=part, preset="plain", execution_device="cpu", environ={})
    assert torch.equal(latents(pipe), twin)


def test_a_pipeline_built_after_its_denoiser_was_attached_says_so_once_and_is_right_then():
    loaded = load("wan22_5b", apply_dynamic=True)
    pipe = build("wan22_5b", transformer=loaded.module)
    pipe.set_progress_bar_config(disable=True)
    dim = pipe.transformer.config.text_dim
    call: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 1, "guidance_scale": 1.0}
    call |= {"prompt_embeds": torch.zeros(1, 4, dim), "output_type": "latent"}
    with pytest.raises(InputError, match="vae_scale_factor_spatial 8, it is 16"):
        pipe(**call)
    assert pipe(**call)[0].shape[-2:] == (4, 6)
    loaded.release()


def test_a_pipeline_that_is_given_the_config_alone_needs_no_guess():
    vae = config_only(tiny_model("wan22_5b"), "vae", device="cpu")
    pipe = build("wan22_5b", vae=vae)
    assert pipe.vae_scale_factor_spatial == 16 and pipe.vae is vae
    results = enable_pipeline_offload(pipe, preset="plain", execution_device="cpu", environ={})
    assert pipe.vae is vae and results["transformer"].plan.whole
    for result in results.values():
        result.release()
    with pytest.raises(InputError, match="no component 'audio_vae'"):
        config_only(tiny_model("wan22_5b"), "audio_vae")


def test_the_folder_is_found_in_the_hubs_cache_and_where_it_is_not_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import huggingface_hub

    pipe = build("wan22_5b")
    for part in (pipe, pipe.transformer):
        part.register_to_config(_name_or_path="somebody/some-model")
    with enable_offload(pipe.transformer, preset="plain", execution_device="cpu", environ={}):
        assert pipe.vae is None
    assert "WanPipeline was built without vae" in caplog.text

    def cached(name: str, local_files_only: bool) -> str:
        assert (name, local_files_only) == ("somebody/some-model", True)
        return str(tiny_model("wan22_5b"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    with enable_offload(pipe.transformer, preset="plain", execution_device="cpu", environ={}):
        assert pipe.vae_scale_factor_spatial == 16 and pipe.config._name_or_path == "somebody/some-model"


def test_load_only_attaches_nothing_and_load_and_attach_attaches():
    """The config of the original stood for its defaults; here what it doesn't say keeps the engine's."""
    plain = load("wan22_5b")
    assert plain.hook is None and plain.should_move_to_execution_device and plain.metrics_snapshot() is None
    with pytest.raises(InputError, match="isn't under offload yet"):
        plain.profile_run()
    attached = load("wan22_5b", apply_dynamic=True, profile_name="mine")
    assert attached.hook is not None and not attached.should_move_to_execution_device
    assert attached.release() == 0
