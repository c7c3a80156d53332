"""Tiny models in the layouts in which they are published: the tables of `single_files` read backwards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from offload_core.single_files import SplitFiles
from offload_core.single_files.layouts import LAYOUTS
from offload_core.single_files.rules import Rule, fill_in
from staging import tiny_model

_FIELD = re.compile(r"\{(\w+)\}")
_FIELDS = {"n": r"\d+", "m": r"\d+", "p": "weight|bias", "rest": ".+"}
Weights = dict[str, torch.Tensor]


def component_weights(folder: Path) -> Weights:
    """The weights of a component's folder, under the names that it saves them by."""
    (file,) = sorted(folder.glob("*.safetensors"))
    return load_file(file)


def backwards(rules: Iterable[Rule], weights: Mapping[str, torch.Tensor]) -> Weights:
    """The tensors from which `rules` make these weights. Every weight must come from one."""
    found: Weights = {}
    left = dict(weights)
    for rule in rules:
        if not rule.targets:
            continue
        for name in list(left):
            match = _pattern(rule.targets[0]).fullmatch(name)
            if match is None or name not in left:
                continue
            parts = [left.pop(fill_in(target, match.groupdict())) for target in rule.targets]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            if rule.how == "swapped":
                whole = torch.cat(list(reversed(whole.chunk(2))))
            if rule.how == "transposed":
                whole = whole.t()
            found[fill_in(rule.source, match.groupdict())] = whole.contiguous()
    assert not left, f"no rule makes {sorted(left)[:5]}"
    return found


def layout_rules(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    """The rules of a layout for a part that has tensors of these names."""
    (layout,) = [layout for layout in LAYOUTS if layout.name == name]
    return list(layout.rules(shapes))


def write_file(path: Path, parts: Mapping[str, Weights], extra: Mapping[str, torch.Tensor] | None = None) -> Path:
    """One file with several parts, each under its prefix."""
    tensors = {prefix + name: tensor for prefix, weights in parts.items() for name, tensor in weights.items()}
    save_file({**tensors, **(extra or {})}, path)
    return path


def _pattern(template: str) -> re.Pattern[str]:
    pieces = _FIELD.split(template)
    text = [re.escape(piece) if i % 2 == 0 else f"(?P<{piece}>{_FIELDS[piece]})" for i, piece in enumerate(pieces)]
    return re.compile("".join(text))


# ------------------------------------------------------------------------------------ whole models of the tiny table


def unet_names(inputs: int, outputs: int, downs: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Just enough names of a UNet in its original layout for its rules."""
    names = [f"input_blocks.{n}.0.op.weight" if n in downs else f"input_blocks.{n}.0.x" for n in range(inputs)]
    return dict.fromkeys([*names, *(f"output_blocks.{n}.0.x" for n in range(outputs))], ())


def wan_names(number: int, ups: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The same for the VAE of Wan 2.1."""
    names = [f"decoder.upsamples.{n}.{'resample.1.weight' if n in ups else 'x'}" for n in range(number)]
    return dict.fromkeys(names, ())


def ltx_names(encoder: str, decoder: str) -> dict[str, tuple[int, ...]]:
    """The same for a VAE of LTX by its blocks in order. r: a run of resnets, c: a resampling one, w: a widening one."""
    inner = {"r": "res_blocks.0.x", "c": "conv.conv.weight", "w": "conv1.conv.weight"}
    names = [f"encoder.down_blocks.{n}.{inner[kind]}" for n, kind in enumerate(encoder)]
    return dict.fromkeys([*names, *(f"decoder.up_blocks.{n}.{inner[kind]}" for n, kind in enumerate(decoder))], ())


def lumina_names(width: int, rows: int) -> dict[str, tuple[int, ...]]:
    """The shapes of Lumina 2 that tell how rows are dealt."""
    return {"layers.0.attention.qkv.weight": (rows, width), "layers.0.attention.out.weight": (width, width)}


def wan22_names(levels: int, last: int) -> dict[str, tuple[int, ...]]:
    """The same for the VAE of Wan 2.2 5B: in each level but the last, `last` is the number of what resamples."""
    halves = (("encoder", "downsamples", last), ("decoder", "upsamples", last + 1))
    return dict.fromkeys(
        (f"{half}.{name}.{level}.{name}.{number}.x" for half, name, number in halves for level in range(levels)), ()
    )


_LEVELS = {"decoder.up.2.x": ()}
#: By tiny family: the prefix and layout of each component, and names that the layout's rules ask for.
Layouts = dict[str, tuple[str, str, dict[str, tuple[int, ...]]]]
TINY: dict[str, Layouts] = {
    "sd15": {
        "unet": ("model.diffusion_model.", "unet", unet_names(4, 4, (2,))),
        "vae": ("first_stage_model.", "kl", _LEVELS),
        "text_encoder": ("cond_stage_model.transformer.", "clip", {}),
    },
    "sd21": {
        "unet": ("model.diffusion_model.", "unet", unet_names(4, 4, (2,))),
        "vae": ("first_stage_model.", "kl", _LEVELS),
        "text_encoder": ("cond_stage_model.model.", "open_clip", {}),
    },
    "sdxl": {
        "unet": ("model.diffusion_model.", "unet", unet_names(4, 4, (2,))),
        "vae": ("first_stage_model.", "kl", _LEVELS),
        "text_encoder": ("conditioner.embedders.0.transformer.", "clip", {}),
        "text_encoder_2": ("conditioner.embedders.1.model.", "open_clip", {}),
    },
    "flux": {
        "transformer": ("model.diffusion_model.", "flux", {}),
        "vae": ("vae.", "kl", _LEVELS),
        "text_encoder": ("text_encoders.clip_l.transformer.", "clip", {}),
        "text_encoder_2": ("text_encoders.t5xxl.transformer.", "t5", {}),
    },
    "sd3": {
        "transformer": ("model.diffusion_model.", "sd3", {"joint_blocks.2.x": ()}),
        "vae": ("first_stage_model.", "kl", _LEVELS),
        "text_encoder": ("text_encoders.clip_l.transformer.", "clip", {}),
        "text_encoder_2": ("text_encoders.clip_g.transformer.", "clip", {}),
        "text_encoder_3": ("text_encoders.t5xxl.transformer.", "t5", {}),
    },
    "chroma": {
        "transformer": ("model.diffusion_model.", "chroma", {}),
        "vae": ("vae.", "kl", _LEVELS),
        "text_encoder": ("text_encoders.t5xxl.transformer.", "t5", {}),
    },
    "flux2_klein": {
        "transformer": ("model.diffusion_model.", "flux2", {}),
        "vae": ("vae.", "kl, FLUX.2's", _LEVELS),
        "text_encoder": ("text_encoders.qwen3_4b.transformer.", "qwen3", {}),
    },
    "z_image": {
        "transformer": ("model.diffusion_model.", "z-image", {}),
        "vae": ("vae.", "kl", _LEVELS),
        "text_encoder": ("text_encoders.qwen3_4b.transformer.", "qwen3", {}),
    },
    "qwen_image": {
        "transformer": ("model.diffusion_model.", "qwen-image", {}),
        "vae": ("vae.", "wan vae", wan_names(8, (2, 5))),
        "text_encoder": ("text_encoders.qwen25_7b.transformer.", "qwen2.5-vl", {}),
    },
    "ltx": {
        "transformer": ("model.diffusion_model.", "ltx", {}),
        "vae": ("vae.", "ltx vae", ltx_names("rcwrcrrr", "rrrcrcr")),
        "text_encoder": ("text_encoders.t5xxl.transformer.", "t5", {}),
    },
    "ltx2": {
        "transformer": ("model.diffusion_model.", "ltx-2", {}),
        "connectors": ("", "ltx-2 connectors, below 'model.diffusion_model.'", {}),
        "vae": ("vae.", "ltx vae", ltx_names("rcr", "rcr")),
        "audio_vae": ("audio_vae.", "ltx-2 sound vae", {}),
        "vocoder": ("vocoder.", "ltx-2 vocoder", {}),
        "text_encoder": ("text_encoders.gemma3_12b.transformer.", "gemma3", {}),
    },
    "lumina2": {
        "transformer": ("model.diffusion_model.", "lumina-2", lumina_names(32, 64)),
        "vae": ("vae.", "kl", {"decoder.up.3.x": ()}),
        "text_encoder": ("text_encoders.gemma2_2b.transformer.", "gemma2", {}),
    },
    "hunyuan_video": {
        "transformer": ("model.diffusion_model.", "hunyuan-video", {}),
        "vae": ("vae.", "hunyuan-video vae", {}),
        "text_encoder": ("text_encoders.llama.transformer.", "llama", {}),
        "text_encoder_2": ("text_encoders.clip_l.transformer.", "clip", {}),
    },
    "wan22_5b": {
        "transformer": ("model.diffusion_model.", "wan", {}),
        "vae": ("vae.", "wan 2.2 vae", wan22_names(4, 1)),
        "text_encoder": ("text_encoders.umt5xxl.transformer.", "umt5", {}),
    },
    "wan22_i2v_a14b": {
        "transformer": ("", "wan", {}),
        "transformer_2": ("", "wan", {}),
        "vae": ("", "wan vae", wan_names(11, (2, 5, 8))),
        "text_encoder": ("", "umt5", {}),
    },
    "wan22_a14b": {
        "transformer": ("", "wan", {}),
        "transformer_2": ("", "wan", {}),
        "vae": ("", "wan vae", wan_names(11, (2, 5, 8))),
        "text_encoder": ("", "umt5", {}),
    },
}


def original_weights(family: str, component: str) -> Weights:
    """A component of a tiny model under the names of its original layout, without a prefix."""
    folder = tiny_model(family) / component
    _, layout, needed = TINY[family][component]
    if layout in ("gemma2", "llama"):
        return {f"model.{name}": tensor for name, tensor in component_weights(folder).items()}
    read = tiny_clip if "clip" in layout else tiny_gemma if "gemma3" in layout else component_weights
    return backwards(layout_rules(layout, needed), read(folder))


def tiny_clip(folder: Path) -> Weights:
    """A CLIP text encoder under the names that every file uses; transformers 5.6 saves it without the first part."""
    weights = component_weights(folder)
    return {name if name.startswith("text_") else f"text_model.{name}": tensor for name, tensor in weights.items()}


def tiny_gemma(folder: Path) -> Weights:
    """Gemma 3 under the names that transformers has in memory, from those that it saves."""
    weights = component_weights(folder)
    return {f"model.{name.replace('language_model.model.', 'language_model.')}": t for name, t in weights.items()}


def checkpoint_parts(family: str) -> dict[str, Weights]:
    """An all-in-one checkpoint of a tiny model: its parts by their prefix."""
    return {prefix: original_weights(family, name) for name, (prefix, _, _) in TINY[family].items()}


def split_files(family: str, folder: Path) -> SplitFiles:
    """A tiny model with each part in a file of its own."""
    files = {
        name: write_file(folder / f"{name}.safetensors", {"": original_weights(family, name)}) for name in TINY[family]
    }
    denoiser = files.get("unet") or files["transformer"]
    encoders = tuple(file for name, file in files.items() if name.startswith("text_encoder"))
    second = files.get("transformer_2")
    return SplitFiles(
        denoiser=str(denoiser),
        denoiser_2=str(second) if second else None,
        encoders=tuple(map(str, encoders)),
        vae=str(files["vae"]),
        configs=str(tiny_model(family)),
    )


# ------------------------------------------------------------------------------------- files of the published sizes

TINY["ltx_timestep"] = TINY["ltx"]

#: By known model: the prefix and layout of each component in one file, and names that the layout's rules ask for.
FULL_SIZE: dict[str, Layouts] = {
    "sd1.5": {
        "unet": ("model.diffusion_model.", "unet", unet_names(12, 12, (3, 6, 9))),
        "vae": ("first_stage_model.", "kl", {"decoder.up.3.x": ()}),
        "text_encoder": ("cond_stage_model.transformer.", "clip", {}),
    },
    "sdxl": {
        "unet": ("model.diffusion_model.", "unet", unet_names(9, 9, (3, 6))),
        "vae": ("first_stage_model.", "kl", {"decoder.up.3.x": ()}),
        "text_encoder": ("conditioner.embedders.0.transformer.", "clip", {}),
        "text_encoder_2": ("conditioner.embedders.1.model.", "open_clip", {}),
    },
    "flux.1-dev": {
        "transformer": ("model.diffusion_model.", "flux", {}),
        "vae": ("vae.", "kl", {"decoder.up.3.x": ()}),
        "text_encoder": ("text_encoders.clip_l.transformer.", "clip", {}),
        "text_encoder_2": ("text_encoders.t5xxl.transformer.", "t5", {}),
    },
}
FULL_SIZE["flux.1-schnell"] = FULL_SIZE["flux.1-dev"]
_VAE = {"vae": ("vae.", "kl", {"decoder.up.3.x": ()})}
_SD3 = {**TINY["sd3"], **_VAE}
FULL_SIZE["sd3.5-large"] = {**_SD3, "transformer": ("model.diffusion_model.", "sd3", {"joint_blocks.37.x": ()})}
FULL_SIZE["sd3.5-medium"] = {**_SD3, "transformer": ("model.diffusion_model.", "sd3", {"joint_blocks.23.x": ()})}
FULL_SIZE["chroma"] = {**TINY["chroma"], **_VAE}
FULL_SIZE["flux.2-klein-4b"] = {**TINY["flux2_klein"], "vae": ("vae.", "kl, FLUX.2's", {"decoder.up.3.x": ()})}
FULL_SIZE["flux.2-klein-9b"] = FULL_SIZE["flux.2-klein-4b"]
FULL_SIZE["z-image-turbo"] = {**TINY["z_image"], **_VAE}
FULL_SIZE["qwen-image"] = {**TINY["qwen_image"], "vae": ("vae.", "wan vae", wan_names(15, (3, 7, 11)))}
FULL_SIZE["ltx-video"] = {**TINY["ltx"], "vae": ("vae.", "ltx vae", ltx_names("rcwrcwrcrr", "rrcrwcrwcr"))}
FULL_SIZE["ltx-video-0.9.1"] = {**TINY["ltx"], "vae": ("vae.", "ltx vae", ltx_names("rcwrcwrcrr", "rcrcrcr"))}
FULL_SIZE["ltx-video-0.9.5"] = {**TINY["ltx"], "vae": ("vae.", "ltx vae", ltx_names("rcrcrcrcr", "rcrcrcr"))}
FULL_SIZE["ltx-video-0.9.7"] = FULL_SIZE["ltx-video-0.9.5"]
FULL_SIZE["ltx-2"] = {**TINY["ltx2"], "vae": FULL_SIZE["ltx-video-0.9.5"]["vae"]}
_WAN = {**TINY["wan22_5b"], "vae": ("vae.", "wan vae", wan_names(15, (3, 7, 11)))}
FULL_SIZE["wan2.1-t2v-1.3b"] = FULL_SIZE["wan2.1-t2v-14b"] = _WAN
FULL_SIZE["wan2.2-ti2v-5b"] = {**_WAN, "vae": ("vae.", "wan 2.2 vae", wan22_names(4, 2))}
FULL_SIZE["wan2.1-i2v-14b"] = {**_WAN, "image_encoder": ("", "clip vision", {})}
FULL_SIZE["wan2.1-flf2v-14b"] = FULL_SIZE["wan2.1-i2v-14b"]
FULL_SIZE["wan2.1-vace-1.3b"] = {**_WAN, "transformer": ("model.diffusion_model.", "wan vace", {})}
FULL_SIZE["wan2.1-vace-14b"] = FULL_SIZE["wan2.1-vace-1.3b"]
FULL_SIZE["lumina-2"] = {
    **TINY["lumina2"],
    **_VAE,
    "transformer": ("model.diffusion_model.", "lumina-2", lumina_names(2304, 3840)),
}
FULL_SIZE["auraflow"] = {
    **_VAE,
    "transformer": ("model.", "auraflow", {}),
    "text_encoder": ("text_encoders.pile_t5xl.transformer.", "umt5", {}),
}
FULL_SIZE["hunyuanvideo"] = TINY["hunyuan_video"]
FULL_SIZE["qwen-image-edit"] = FULL_SIZE["qwen-image-edit-2509"] = FULL_SIZE["qwen-image"]
FULL_SIZE["sdxl-refiner"] = {
    "unet": ("model.diffusion_model.", "unet", unet_names(12, 12, (3, 6, 9))),
    "vae": ("first_stage_model.", "kl", {"decoder.up.3.x": ()}),
    "text_encoder_2": ("conditioner.embedders.0.model.", "open_clip", {}),
}
for _like in ("sd1.5", "sdxl"):
    FULL_SIZE[f"{_like}-inpainting"] = FULL_SIZE[_like]
FULL_SIZE["sd2.1"] = {**FULL_SIZE["sd1.5"], "text_encoder": ("cond_stage_model.model.", "open_clip", {})}
FULL_SIZE["sd2.1-base"] = FULL_SIZE["sd2-inpainting"] = FULL_SIZE["sd2.1"]
FULL_SIZE["flux.1-fill-dev"] = FULL_SIZE["flux.1-control-dev"] = FULL_SIZE["flux.1-dev"]


def full_size_file(path: Path, family: str, *, apart: str = "") -> Path:
    """A checkpoint with the names and shapes of a published model, in float16. Its data is a hole in the file.

    Of all parts but the image encoder, which is never in it; or of the one part that is named.
    """
    import json

    from offload_core.known import known_model
    from offload_core.model_source import ComponentSource
    from offload_core.phases._components import _skeleton

    model = known_model(family)
    assert model is not None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (prefix, layout, needed) in FULL_SIZE[family].items():
        if name != apart if apart else name == "image_encoder":
            continue
        part = model.components[name]
        source = ComponentSource(name, part["library"], part["class"], path.parent, part["config"], described=True)
        module = _skeleton(source, torch.float16, torch.device("cpu"))
        weights = {key: tensor.to("meta") for key, tensor in module.state_dict().items()}
        if "CLIP" in part["class"]:
            inner = "vision_model" if "Vision" in part["class"] else "text_model"
            starts = (inner, "text_projection")
            weights = {key if key.startswith(starts) else f"{inner}.{key}": t for key, t in weights.items()}
        weights.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight
        weights = {_as_published(key, part["class"]): tensor for key, tensor in weights.items()}
        if part["config"].get("tie_word_embeddings"):
            weights.pop("lm_head.weight", None)
        original = backwards(layout_rules(layout, needed), weights)
        shapes |= {prefix + key: tuple(tensor.shape) for key, tensor in original.items()}
    header, position = {}, 0
    for key, shape in shapes.items():
        end = position + torch.Size(shape).numel() * 2
        header[key] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    return path


def _as_published(name: str, class_name: str) -> str:
    """The name in files, where transformers has another for the same weight by now."""
    if class_name in ("Qwen3Model", "Gemma2Model", "LlamaModel"):
        return f"model.{name}"
    if class_name == "Gemma3ForConditionalGeneration":
        return name
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
