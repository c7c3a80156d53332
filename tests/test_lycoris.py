"""LoHa and LoKr in phases, beside twins whose weights were changed by hand."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import offload_core as po
from lora_files import make_lora
from offload_core.foresight import foresee_denoise
from offload_core.lycoris import difference, scale_of
from offload_core.phases._differences import Place, find_differences
from offload_core.phases._loras import _converted_alone
from offload_core.plan import Rates
from offload_core.trace_blocks import _Blocks
from staging import job, staged, tiny_model, words

# One product more, summed in another order: a few float32 roundings, over the steps of a picture in [0, 1].
TOLERANCE = 1e-4
RATES = Rates({"float32": 1e9}, 1e9, 1e-6, disk_bytes_per_s=1e6, cached_bytes_per_s=1e7)
Layer = dict[str, torch.Tensor]
UNET_BLOCK = "mid_block.attentions.0.transformer_blocks.0"
UNET_BLOCK_2 = "mid_block.attentions.0.transformer_blocks.1"
CLIP_LAYER = "encoder.layers.0"


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(math.prod, shapes)))
    return [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]


def loha(out: int, width: int, alpha: float = 1.0, rank: int = 2) -> Layer:
    a, b, c, d = drawn((out, rank), (rank, width), (out, rank), (rank, width))
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d, "alpha": torch.tensor(alpha)}


def lokr(out: int, width: int, alpha: float | None = 1.0, rank: int = 2, factor: int = 4) -> Layer:
    """Of a whole first side, and a second side that is whole too without an alpha."""
    if alpha is None:
        w1, w2 = drawn((factor, factor), (out // factor, width // factor))
        return {"lokr_w1": w1, "lokr_w2": w2}
    w1, a, b = drawn((factor, factor), (out // factor, rank), (rank, width // factor))
    return {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": torch.tensor(alpha)}


def by_hand(layer: Layer) -> torch.Tensor:
    """alpha / rank times the product, entry by entry as the papers write it."""
    if "hada_w1_a" in layer:
        first, second = (layer[f"hada_w{i}_a"] @ layer[f"hada_w{i}_b"] for i in (1, 2))
        return first * second * (layer["alpha"] / len(layer["hada_w1_b"]))
    w1 = layer["lokr_w1"]
    w2 = layer["lokr_w2"] if "lokr_w2" in layer else layer["lokr_w2_a"] @ layer["lokr_w2_b"]
    scale = layer["alpha"] / len(layer["lokr_w2_b"]) if "lokr_w2_b" in layer else 1.0
    return torch.cat([torch.cat([entry * w2 for entry in row], dim=1) for row in w1]) * scale


def written(file: Path, layers: dict[str, Layer]) -> Path:
    save_file({f"{name}.{what}": tensor for name, layer in layers.items() for what, tensor in layer.items()}, file)
    return file


def size(name: str, component: str, path: str) -> tuple[int, int]:
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    weight = getattr(pipeline, component).get_submodule(path).weight
    return weight.shape[0], weight[0].numel()


def twin(name: str, changes: dict[tuple[str, str], torch.Tensor]) -> torch.Tensor:
    """The picture of the whole pipeline whose weights were changed."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_model(name))
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        for (component, path), change in changes.items():
            weight = getattr(pipeline, component).get_submodule(path).weight
            weight += change.reshape(weight.shape)
    generator = torch.Generator("cpu").manual_seed(3)
    call = words(name) | job(name, guided=True)
    return torch.as_tensor(pipeline(**call, output_type="pt", generator=generator)[0]).float()


def pictures(name: str, *files: tuple[Path, float], **load: Any) -> tuple[torch.Tensor, po.Session]:
    call = job(name, guided=True)
    return staged(tiny_model(name), words(name), call, dtype="auto", seed=3, loras=list(files), **load)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) < TOLERANCE


# What a file says, and what the library's layers are: (name in the file, component, layer).
NAMES: dict[str, list[tuple[str, str, str]]] = {
    "sd15": [
        ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k", "unet", f"{UNET_BLOCK}.attn2.to_k"),
        ("lora_unet_mid_block_attentions_0_transformer_blocks_0_ff_net_2", "unet", f"{UNET_BLOCK}.ff.net.2"),
        ("lora_unet_mid_block_attentions_0_proj_in", "unet", "mid_block.attentions.0.proj_in"),  # a 1x1 convolution
        ("lora_unet_down_blocks_0_resnets_0_conv1", "unet", "down_blocks.0.resnets.0.conv1"),
        ("lora_te_text_model_encoder_layers_0_self_attn_q_proj", "text_encoder", f"{CLIP_LAYER}.self_attn.q_proj"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", "text_encoder", f"{CLIP_LAYER}.mlp.fc1"),
    ],
    "sdxl": [  # in the names of the model's first code
        ("lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k", "unet", f"{UNET_BLOCK}.attn2.to_k"),
        ("lora_unet_middle_block_1_transformer_blocks_1_ff_net_0_proj", "unet", f"{UNET_BLOCK_2}.ff.net.0.proj"),
        ("lora_unet_middle_block_0_in_layers_2", "unet", "mid_block.resnets.0.conv1"),
        ("lora_unet_time_embed_0", "unet", "time_embedding.linear_1"),
        ("lora_te1_text_model_encoder_layers_0_self_attn_v_proj", "text_encoder", f"{CLIP_LAYER}.self_attn.v_proj"),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc2", "text_encoder_2", f"text_model.{CLIP_LAYER}.mlp.fc2"),
    ],
    "flux": [
        ("transformer.transformer_blocks.0.attn.to_out.0", "transformer", "transformer_blocks.0.attn.to_out.0"),
        ("diffusion_model.double_blocks.0.img_mlp.0", "transformer", "transformer_blocks.0.ff.net.0.proj"),
        ("diffusion_model.double_blocks.1.img_mod.lin", "transformer", "transformer_blocks.1.norm1.linear"),
        ("diffusion_model.single_blocks.0.linear2", "transformer", "single_transformer_blocks.0.proj_out"),
    ],
}


def layers_of(name: str) -> tuple[dict[str, Layer], dict[tuple[str, str], torch.Tensor]]:
    """Every other layer a LoHa, the others LoKr with and without ranks; and the changes that these are."""
    layers, changes = {}, {}
    for index, (spelt, component, path) in enumerate(NAMES[name]):
        make = (loha, lokr, lambda *sizes: lokr(*sizes, alpha=None))[index % 3]
        layers[spelt] = make(*size(name, component, path))
        changes[component, path] = by_hand(layers[spelt])
    return layers, changes


@pytest.mark.parametrize("name", ["sd15", "flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_differences_equal_a_twin_with_changed_weights(name: str, tmp_path: Path) -> None:
    layers, changes = layers_of(name)
    expected = twin(name, {place: change * 0.7 for place, change in changes.items()})
    found, session = pictures(name, (written(tmp_path / "x.safetensors", layers), 0.7))
    assert not close(expected, twin(name, {}))
    assert close(found, expected)
    assert all(phase.leaked_bytes == 0 for phase in session.report.phases)
    assert not any("not used" in note for phase in session.report.phases for note in phase.notes)


def test_a_matrix_that_is_several_layers_here_is_taken_apart_by_its_rows(tmp_path: Path) -> None:
    width, block = 32, "transformer_blocks.0.attn"
    fused = {"image": loha(3 * width, width), "text": lokr(3 * width, width, factor=2)}  # rows cut through w1's
    spelt = {"image": "lora_unet_double_blocks_0_img_attn_qkv", "text": "lora_unet_double_blocks_0_txt_attn_qkv"}
    file = written(tmp_path / "x.safetensors", {spelt[of]: layer for of, layer in fused.items()})
    places = {"image": ("to_q", "to_k", "to_v"), "text": ("add_q_proj", "add_k_proj", "add_v_proj")}
    changes = {
        ("transformer", f"{block}.{part}"): rows
        for of, parts in places.items()
        for part, rows in zip(parts, by_hand(fused[of]).split(width), strict=True)
    }
    assert close(pictures("flux", (file, 1.0))[0], twin("flux", changes))


@pytest.mark.slow
def test_differences_in_a_budget_are_booked_and_give_the_same_bits(tmp_path: Path) -> None:
    layers, _ = layers_of("flux")
    plain = make_lora("flux", "transformer", tmp_path / "plain.safetensors", ["to_q", "to_out.0"])
    own = {key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): t for key, t in load_file(plain).items()}
    file = tmp_path / "both.safetensors"
    save_file(own | load_file(written(tmp_path / "x.safetensors", layers)), file)
    settings = po.OffloadSettings(device_memory=300 * 1024, resident_below=4096, activation_memory=0)
    whole, _ = pictures("flux", (file, 0.5))
    streamed, session = pictures("flux", (file, 0.5), settings=settings)
    denoise = session.report.phases[1]
    assert torch.equal(whole, streamed)
    assert not close(whole, pictures("flux", (tmp_path / "x.safetensors", 0.5))[0])  # the plain pairs work, too
    assert denoise.streamed_bytes > 0
    assert denoise.reserved_peak_bytes <= 300 * 1024
    assert denoise.leaked_bytes == 0


def test_a_plan_knows_what_differences_weigh_and_traces_blocks_that_are_alike_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    real = _Blocks._traced
    monkeypatch.setattr(_Blocks, "_traced", lambda self, *rest: traced.append(rest) or real(self, *rest))
    monkeypatch.setenv("PHASE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    layers = {f"lycoris_transformer_blocks_{i}_attn_to_q": loha(32, 32) for i in range(2)}
    file = written(tmp_path / "x.safetensors", layers)
    handle = po.load(tiny_model("flux"), device="cpu", loras=[(file, 0.7)])
    embeds, session = po.encode(handle, "a star"), po.Session()
    plan = foresee_denoise(handle, embeds, rates=RATES, **job("flux", guided=False)).plan.phases[0]
    assert [component.added_bytes for component in plan.components] == [2 * 4 * 32 * 2 * 4]  # four factors, float32
    assert len(traced) == 3  # of five blocks: two alike, and three whose first gets its inputs in two pieces
    po.denoise(handle, embeds, session=session, **job("flux", guided=False))
    assert session.report.phases[0].weight_bytes == plan.weight_bytes


def test_layers_that_the_model_lacks_are_named_and_those_of_other_sizes_refused(tmp_path: Path) -> None:
    layers, _ = layers_of("flux")
    some = dict(list(layers.items())[:1])
    _, session = pictures("flux", (written(tmp_path / "x.safetensors", some | {"lycoris_gone": loha(8, 8)}), 1.0))
    assert any("1 of its 2 weights were not used (lycoris_gone)" in note for note in session.report.phases[1].notes)
    with pytest.raises(po.ModelError, match=r"y\.safetensors doesn't fit transformer .* by a matrix of \(8, 8\)"):
        pictures("flux", (written(tmp_path / "y.safetensors", {next(iter(some)): loha(8, 8)}), 1.0))
    with pytest.raises(po.ModelError, match=r"z\.safetensors is for another kind of model"):
        pictures("flux", (written(tmp_path / "z.safetensors", {"lycoris_gone": loha(8, 8)}), 1.0))


def test_factors_of_a_convolution_in_tucker_form_are_multiplied_entry_by_entry() -> None:
    r, out, width, k = 2, 4, 3, 3
    t1, t2, a1, a2, b1, b2 = drawn((r, r, k, k), (r, r, k, k), (r, out), (r, out), (r, width), (r, width))

    def entry(t: torch.Tensor, a: torch.Tensor, b: torch.Tensor, o: int, w: int) -> torch.Tensor:
        return sum((t[i, j] * a[i, o] * b[j, w] for i in range(r) for j in range(r)), torch.zeros(k, k))

    names = ("hada_t1", "hada_t2", "hada_w1_a", "hada_w2_a", "hada_w1_b", "hada_w2_b")
    found = difference(dict(zip(names, (t1, t2, a1, a2, b1, b2), strict=True))).reshape(out, width, k, k)
    for o in range(out):
        for w in range(width):
            assert torch.allclose(found[o, w], entry(t1, a1, b1, o, w) * entry(t2, a2, b2, o, w), atol=1e-6)
    (w1,) = drawn((2, 3))
    found = difference({"lokr_w1": w1, "lokr_t2": t2, "lokr_w2_a": a2, "lokr_w2_b": b2})
    found = found.reshape(2 * out, 3 * width, k, k)
    for o in range(2 * out):
        for w in range(3 * width):
            expected = w1[o // out, w // width] * entry(t2, a2, b2, o % out, w % width)
            assert torch.allclose(found[o, w], expected, atol=1e-6)


def test_products_of_small_half_numbers_do_not_vanish() -> None:
    small = {name: torch.full((1, 1), 2**-10, dtype=torch.float16) for name in loha(1, 1, rank=1) if name != "alpha"}
    assert float(difference(small)) == 2.0**-40


@pytest.mark.parametrize(
    ("layer", "alpha", "scale"),
    [
        (loha(4, 8), 1.0, 0.5),
        (loha(4, 8), None, 1.0),
        (lokr(8, 8), 8.0, 4.0),
        (lokr(8, 8, alpha=None), 9999.0, 1.0),
    ],
)
def test_the_scale_is_alpha_over_rank_where_there_is_a_rank(layer: Layer, alpha: float | None, scale: float) -> None:
    shapes = {what: tuple(tensor.shape) for what, tensor in layer.items() if what != "alpha"}
    assert scale_of(shapes, alpha) == scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spelt", "first"),
    [
        ("flux2_klein", "diffusion_model.double_blocks.0.img_attn.qkv", "transformer_blocks.0.attn.to_q"),
        ("z_image", "lora_unet_layers_0_attention_qkv", "layers.0.attention.to_q"),
        ("ideogram4", "diffusion_model.layers.0.attention.qkv", "layers.0.attention.to_q"),
        ("krea2", "diffusion_model.blocks.0.attn.wq", "transformer_blocks.0.attn.to_q"),
        ("wan22_5b", "diffusion_model.blocks.0.cross_attn.k", "blocks.0.attn2.to_k"),
        ("qwen_image", "lora_unet_transformer_blocks_0_attn_to_q", "transformer_blocks.0.attn.to_q"),
    ],
)
def test_other_families_names_of_differences_are_understood(name: str, spelt: str, first: str) -> None:
    pipeline: Any = DiffusionPipeline.from_pretrained(tiny_model(name))
    modules = {key: part for key, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    out, width = size(name, "transformer", first)
    count = 3 if spelt.endswith("qkv") else 1
    convert = functools.partial(_converted_alone, pipeline)
    found, lost = find_differences({spelt: loha(count * out, width)}, modules, convert, Path("x.safetensors"))
    assert (len(found), lost) == (count, ())
    assert found[0].place == Place("transformer", first, ((0, out),) if count > 1 else ())
