"""LoRA files with whole differences of weights and biases: the bits of a model whose weights were changed by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload_core as po
import vgpu
from lora_files import make_lora
from offload_core.foresight import foresee_denoise
from offload_core.phases._differences import Difference, Place, wear_difference
from offload_core.phases._loras import _converted_alone
from offload_core.phases._whole_differences import WholeDifference, find_whole, split_whole, wear_whole
from offload_core.plan import Rates
from offload_core.tiny_models.running import align, load_tiny
from staging import job, tiny_model, words
from vgpu.runner import run_on_vgpu

RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
Changes = dict[tuple[str, str, str], torch.Tensor]  # by component, layer, and "weight" or "bias"

TIGHT = po.OffloadSettings(device_memory=300 * 1024, resident_below=4096, activation_memory=0)
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
# A linear layer, one with a bias, a convolution, a group norm and a layer norm; in the text encoder a layer and a norm.
UNET = (f"{BLOCK}.attn1.to_q", f"{BLOCK}.ff.net.0.proj", "conv_in", "down_blocks.0.resnets.0.norm1", f"{BLOCK}.norm2")
CLIP = ("encoder.layers.0.self_attn.q_proj", "encoder.layers.0.layer_norm1")


def drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def changes_of(name: str, layers: dict[str, tuple[str, ...]]) -> Changes:
    """A change for the weight and the bias of each of these layers."""
    pipeline = load_tiny(tiny_model(name), dtype=torch.float32)
    found: Changes = {}
    for component, paths in layers.items():
        for path in paths:
            layer = getattr(pipeline, component).get_submodule(path)
            for part in ("weight", "bias"):
                if getattr(layer, part, None) is not None:
                    found[component, path, part] = drawn(getattr(layer, part), len(found))
    return found


def spelt(component: str, path: str, part: str, *, norms: bool = False) -> str:
    start = "lora_te_text_model_" if component == "text_encoder" else "lora_unet_"
    ending = {"weight": "w_norm", "bias": "b_norm"} if norms else {"weight": "diff", "bias": "diff_b"}
    return f"{start}{path.replace('.', '_')}.{ending[part]}"


def written(file: Path, changes: Changes, more: dict[str, torch.Tensor] | None = None) -> Path:
    named = {spelt(*place, norms="norm" in place[1]): change for place, change in changes.items()}
    save_file(named | (more or {}), file)
    return file


def twin(name: str, changes: Changes, strength: float, plain: Path | None = None) -> torch.Tensor:
    """The picture of the whole pipeline whose weights were changed. plain: a LoRA of pairs, loaded by diffusers."""
    pipeline: Any = load_tiny(tiny_model(name), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        for (component, path, part), change in changes.items():
            weight = getattr(getattr(pipeline, component).get_submodule(path), part)
            weight += change.reshape(weight.shape) * strength
    if plain is not None:
        pipeline.load_lora_weights(plain.parent, weight_name=plain.name, adapter_name="plain")
        pipeline.set_adapters(["plain"], [strength])
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    call = words(name) | job(name, guided=True)
    return torch.as_tensor(pipeline(**call, output_type="pt", generator=torch.Generator().manual_seed(3))[0]).float()


def pictures(
    name: str, *files: tuple[Path, float], device: str = "cpu", **load: Any
) -> tuple[torch.Tensor, po.Session]:
    session = po.Session()
    handle = po.load(tiny_model(name), device=device, dtype="float32", loras=list(files), **load)
    embeds = po.encode(handle, **words(name), session=session)
    latents = po.denoise(handle, embeds, seed=3, session=session, **job(name, guided=True))
    return torch.as_tensor(po.decode(handle, latents, "pt", session=session)).float(), session


def notes(session: po.Session) -> str:
    return " ".join(note for phase in session.report.phases for note in phase.notes)


@pytest.mark.parametrize("settings", [TIGHT, pytest.param(None, marks=pytest.mark.slow)], ids=["streamed", "resident"])
def test_whole_differences_have_the_bits_of_changed_weights(settings: Any, tmp_path: Path) -> None:
    changes = changes_of("sd15", {"unet": UNET, "text_encoder": CLIP})
    found, session = pictures("sd15", (written(tmp_path / "x.safetensors", changes), 0.7), settings=settings)
    assert torch.equal(found, twin("sd15", changes, 0.7))
    assert "not used" not in notes(session)
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)
    denoise = session.report.phases[1]
    assert (denoise.streamed_bytes > 0) is (settings is not None)
    assert denoise.reserved_peak_bytes <= denoise.device_budget_bytes


@pytest.mark.slow
def test_a_bias_beside_a_pair_has_the_bits_of_the_pair_on_a_changed_bias(tmp_path: Path) -> None:
    """As ComfyUI's extracted LoRAs: a pair for the weight, a whole difference for the bias."""
    layer = f"{BLOCK}.ff.net.0.proj"
    changes = {place: change for place, change in changes_of("sd15", {"unet": (layer,)}).items() if "bias" in place}
    plain = make_lora("sd15", "unet", tmp_path / "plain.safetensors", [layer])
    own = {key.replace("unet.", "lora_unet_").partition(".lora_")[0].replace(".", "_"): key for key in load_file(plain)}
    pairs = {}
    for start, key in own.items():
        state, layer_name = load_file(plain), key.partition(".lora_")[0]
        pairs[f"{start}.lora_down.weight"] = state[f"{layer_name}.lora_A.weight"]
        pairs[f"{start}.lora_up.weight"] = state[f"{layer_name}.lora_B.weight"]
        pairs[f"{start}.alpha"] = torch.tensor(2.0)
    kohya = tmp_path / "kohya.safetensors"
    save_file(pairs, kohya)
    both = written(tmp_path / "both.safetensors", changes, pairs)
    expected = twin("sd15", changes, 0.5, plain=kohya)
    found, session = pictures("sd15", (both, 0.5))
    assert torch.equal(found, expected)
    assert "not used" not in notes(session)


@pytest.mark.slow
def test_a_fused_weight_and_bias_are_taken_apart_by_their_rows(tmp_path: Path) -> None:
    block = "transformer_blocks.0.attn"
    changes = changes_of("flux", {"transformer": tuple(f"{block}.{part}" for part in ("to_q", "to_k", "to_v"))})
    fused = "diffusion_model.double_blocks.0.img_attn.qkv"
    state = {
        f"{fused}.{ending}": torch.cat([change for (_, _, part), change in changes.items() if part == of])
        for ending, of in (("diff", "weight"), ("diff_b", "bias"))
    }
    save_file(state, tmp_path / "x.safetensors")
    assert torch.equal(pictures("flux", (tmp_path / "x.safetensors", 1.0))[0], twin("flux", changes, 1.0))


def on_a_device(file: str) -> dict[str, Any]:
    device = vgpu.install()
    expected, _ = pictures("sd15", (Path(file), 0.7), device="cpu")
    found, session = pictures("sd15", (Path(file), 0.7), device="auto", settings=TIGHT)
    denoise = session.report.phases[1]
    return {
        "equal": torch.equal(found, expected),
        "on": denoise.device,
        "streamed": denoise.streamed_bytes > 0,
        "leaked": [phase.leaked_bytes for phase in session.report.phases],
        "held": device.current(),
    }


@pytest.mark.slow
def test_an_accelerator_gives_the_cpus_bits_and_gets_every_byte_back(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", changes_of("sd15", {"unet": UNET, "text_encoder": CLIP}))
    found = run_on_vgpu(on_a_device, str(file))
    assert found == {"equal": True, "on": "vgpu:0", "streamed": True, "leaked": [0, 0, 0], "held": 0}


@pytest.mark.slow
def test_packed_weights_can_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unpacked is added to, the same streamed as whole."""
    monkeypatch.setattr("offload_core.phases._weight_storage._LARGE", 512)
    layers = ("transformer_blocks.0.attn.to_q", "norm_out.linear")
    state = {
        f"transformer.{path}.{'diff' if part == 'weight' else 'diff_b'}": change
        for (_, path, part), change in changes_of("flux", {"transformer": layers}).items()
    }
    save_file(state, tmp_path / "x.safetensors")
    given = ((tmp_path / "x.safetensors", 0.7),)
    whole, _ = pictures("flux", *given, weight_storage="fp8")
    streamed, session = pictures("flux", *given, weight_storage="fp8", settings=TIGHT)
    assert session.report.phases[1].streamed_bytes > 0
    assert torch.equal(whole, streamed)
    assert not torch.equal(whole, pictures("flux", *given)[0])  # packing changes bits
    assert not torch.equal(whole, pictures("flux", weight_storage="fp8")[0])


@pytest.mark.slow
def test_a_plan_knows_what_whole_differences_weigh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    changes = changes_of("sd15", {"unet": UNET})
    handle = po.load(tiny_model("sd15"), device="cpu", loras=[(written(tmp_path / "x.safetensors", changes), 0.7)])
    embeds, session = po.encode(handle, "a star"), po.Session()
    (plan,) = foresee_denoise(handle, embeds, rates=RATES, **job("sd15", guided=False)).plan.phases
    assert [component.added_bytes for component in plan.components] == [sum(c.nbytes for c in changes.values())]
    po.denoise(handle, embeds, session=session, **job("sd15", guided=False))
    assert session.report.phases[0].weight_bytes == plan.weight_bytes


def test_what_has_no_place_is_named_and_what_has_another_size_is_refused() -> None:
    pipeline: Any = load_tiny(tiny_model("sd15"), dtype=torch.float32)
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    convert, file = functools.partial(_converted_alone, pipeline), Path("x.safetensors")

    def find(state: dict[str, torch.Tensor]) -> tuple[tuple[WholeDifference, ...], tuple[str, ...]]:
        return find_whole(split_whole(state, convert), modules, convert, file)

    known = {spelt(*place): change for place, change in changes_of("sd15", {"unet": UNET[:1]}).items()}
    lacking = {
        spelt("unet", UNET[0], "bias"): torch.ones(8),  # the layer has none
        "lora_unet_gone.diff": torch.ones(8, 8),
        "lora_te_text_model_embeddings_token_embedding.diff": torch.ones(8, 8),  # a table
    }
    found, lost = find(known | lacking)
    assert [one.place.layer for one in found] == [UNET[0]]
    assert set(lost) == set(lacking)
    for path, part, says in ((UNET[0], "weight", r"by a matrix of \(8, 3\)"), (UNET[1], "bias", "by 3 numbers")):
        wrong = torch.ones((8, 3) if part == "weight" else (3,))
        with pytest.raises(po.ModelError, match=rf"x\.safetensors doesn't fit unet .*{says}"):
            find({spelt("unet", path, part): wrong})


@pytest.mark.slow
def test_weights_that_were_not_used_are_named_in_the_report(tmp_path: Path) -> None:
    changes = changes_of("sd15", {"unet": UNET[:1]})
    more = {"lora_unet_gone.diff": torch.ones(8, 8), "lora_unet_conv_in.set_weight": torch.ones(8, 8)}
    _, session = pictures("sd15", (written(tmp_path / "x.safetensors", changes, more), 1.0))
    (note,) = [note for note in session.report.phases[1].notes if "not used" in note]
    assert "2 of its 3 weights were not used (lora_unet_gone.diff, lora_unet_conv_in.set_weight)" in note


def test_the_change_is_scaled_in_float32_and_added_in_the_dtype_of_the_weight() -> None:
    layer = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    change, x = drawn(layer.weight, 1), drawn(torch.empty(3, 8), 2).bfloat16()
    holder = torch.nn.ModuleDict({"layer": layer})
    wear_whole(holder, WholeDifference(Place("c", "layer"), change, None), 0.3, torch.bfloat16)
    weight = layer.weight + (change.bfloat16().float() * 0.3).bfloat16()
    assert torch.equal(holder["layer"](x), torch.nn.functional.linear(x, weight, layer.bias))


@pytest.mark.parametrize("order", [("whole", "loha", "whole"), ("loha", "whole", "loha")])
def test_differences_of_several_files_add_up_whatever_their_order(order: tuple[str, ...]) -> None:
    layer, x = torch.nn.Linear(8, 4), drawn(torch.empty(3, 8), 2)
    factors = {name: drawn(torch.empty(shape), 3) for name, shape in LOHA.items()}
    loha = factors["hada_w1_a"] @ factors["hada_w1_b"] * (factors["hada_w2_a"] @ factors["hada_w2_b"])
    whole, bias = drawn(layer.weight, 4), drawn(layer.bias, 5)
    weight, shift = layer.weight.clone(), layer.bias.clone()
    holder, place = torch.nn.ModuleDict({"layer": layer}), Place("c", "layer")
    for kind in order:
        if kind == "whole":
            wear_whole(holder, WholeDifference(place, whole, bias), 0.5, torch.float32)
            weight, shift = weight + 0.5 * whole, shift + 0.5 * bias
        else:
            wear_difference(holder, Difference(place, factors, 1.0), 0.5, torch.float32)
            weight = weight + 0.5 * loha
    assert torch.allclose(holder["layer"](x), torch.nn.functional.linear(x, weight, shift), atol=1e-6)


LOHA = {"hada_w1_a": (4, 2), "hada_w1_b": (2, 8), "hada_w2_a": (4, 2), "hada_w2_b": (2, 8)}


@pytest.mark.slow
def test_biases_that_diffusers_converts_are_left_to_it(tmp_path: Path) -> None:
    """Wan's: they become biases of plain LoRAs, and the result is that of the one-shot pipeline."""
    start = "diffusion_model.blocks.0.self_attn.q"
    generator = torch.Generator().manual_seed(0)
    pipeline: Any = load_tiny(tiny_model("wan22_5b"), dtype=torch.float32)
    width = pipeline.transformer.blocks[0].attn1.to_q.weight.shape[0]
    shapes = {"lora_down.weight": (2, width), "lora_up.weight": (width, 2), "diff_b": (width,)}
    state = {f"{start}.{end}": torch.randn(shape, generator=generator) * 0.2 for end, shape in shapes.items()}
    file = tmp_path / "x.safetensors"
    save_file(state, file)
    pipeline.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="x")
    pipeline.set_adapters(["x"], [0.5])
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            align(component)
    call = words("wan22_5b") | job("wan22_5b", guided=True)
    expected = pipeline(**call, output_type="pt", generator=torch.Generator().manual_seed(3))[0]
    found, session = pictures("wan22_5b", (file, 0.5))
    assert torch.equal(found, torch.as_tensor(expected).float())
    assert "not used" not in notes(session)
