"""LoadImage, SaveImage, PreviewImage and SaveAnimatedWEBP for graphs that run without ComfyUI: same names and files.

IMAGE is [B, H, W, C] float32 from 0 to 1; MASK is [B, H, W], 1 where the picture is transparent.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from offload_core._picture_files import Writer, write_files
from offload_core.errors import InputError

from .results import NodeResult
from .schema import Input, NodeSchema, Output

LOAD_IMAGE = NodeSchema(
    id="LoadImage",
    display_name="Load Image",
    description="Reads a picture from the input folder.",
    category="image",
    inputs=(Input("image", "COMBO", "The file, inside the input folder.", options="images"),),
    outputs=(Output("IMAGE", "IMAGE", "The picture."), Output("MASK", "MASK", "1 where it is transparent.")),
)
SAVE_IMAGE = NodeSchema(
    id="SaveImage",
    display_name="Save Image",
    description="Writes PNG files into the output folder.",
    category="image",
    inputs=(
        Input("images", "IMAGE", "The pictures to save."),
        Input("filename_prefix", "STRING", "How the names begin; a / makes a subfolder.", default="ComfyUI"),
    ),
    outputs=(),
    is_output=True,
)
PREVIEW_IMAGE = NodeSchema(
    id="PreviewImage",
    display_name="Preview Image",
    description="Writes PNG files into the preview folder.",
    category="image",
    inputs=(Input("images", "IMAGE", "The pictures to show."),),
    outputs=(),
    is_output=True,
)
WEBP_METHODS = {"default": 4, "fastest": 0, "slowest": 6}
SAVE_ANIMATED_WEBP = NodeSchema(
    id="SaveAnimatedWEBP",
    display_name="Save Animated WEBP",
    description="Writes the frames of a video as one WEBP file into the output folder.",
    category="image",
    inputs=(
        Input("images", "IMAGE", "The frames to save."),
        Input("filename_prefix", "STRING", "How the name begins; a / makes a subfolder.", default="ComfyUI"),
        Input("fps", "FLOAT", "Frames per second.", default=6.0, min=0.01, max=1000.0, step=0.01),
        Input("lossless", "BOOLEAN", "Whether every bit is kept.", default=True),
        Input("quality", "INT", "Of a file that isn't lossless.", default=80, min=0, max=100),
        Input("method", "COMBO", "How much time to take for a smaller file.", options=tuple(WEBP_METHODS)),
    ),
    outputs=(),
    is_output=True,
)
IMAGE_NODES = {node.id: node for node in (LOAD_IMAGE, SAVE_IMAGE, PREVIEW_IMAGE, SAVE_ANIMATED_WEBP)}


@dataclass(frozen=True)
class ImageFolders:
    """Where pictures come from and go to."""

    input: Path
    output: Path
    preview: Path


def image_bodies(folders: ImageFolders, prompt: Mapping[str, Any]) -> dict[str, Callable[..., NodeResult]]:
    """The bodies of these nodes. prompt: the running graph, which goes into the PNG's metadata."""
    return {
        LOAD_IMAGE.id: lambda image: load_image(folders.input, image),
        SAVE_IMAGE.id: lambda images, filename_prefix: save_images(
            folders.output, images, filename_prefix, prompt, kind="output"
        ),
        SAVE_ANIMATED_WEBP.id: lambda **inputs: save_animated_webp(folders.output, **inputs),
        PREVIEW_IMAGE.id: lambda images: save_images(folders.preview, images, "preview", prompt, kind="temp"),
    }


def load_image(folder: Path, name: str) -> NodeResult:
    """IMAGE and MASK of one file. Further frames of an animation join the batch if they have the same size."""
    import numpy as np
    from PIL import Image, ImageOps, ImageSequence

    images: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    with Image.open(_file_inside(folder, name)) as opened:
        for raw in ImageSequence.Iterator(opened):
            frame = ImageOps.exif_transpose(raw)
            if "transparency" in frame.info:
                frame = frame.convert("RGBA")
            pixels = torch.from_numpy(np.array(frame.convert("RGB")).astype(np.float32) / 255)
            if images and pixels.shape != images[0].shape:
                continue
            if "A" in frame.getbands():
                mask = 1 - torch.from_numpy(np.array(frame.getchannel("A")).astype(np.float32) / 255)
            else:
                mask = torch.zeros(64, 64)
            images.append(pixels)
            masks.append(mask)
    return NodeResult((torch.stack(images), torch.stack(masks)))


def image_fingerprint(folder: Path, name: str) -> str:
    """Changes with the content of the file."""
    return hashlib.sha256(_file_inside(folder, name).read_bytes()).hexdigest()


def save_images(folder: Path, images: torch.Tensor, prefix: str, prompt: Mapping[str, Any], *, kind: str) -> NodeResult:
    """Writes `PREFIX_00001_.png` and so on, counting on from what is there. 8 bits, rounded down as ComfyUI does."""
    import numpy as np
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    target, stem, subfolder = output_target(folder, prefix, width=images.shape[2], height=images.shape[1])
    counter = next_number(target, stem)
    metadata = PngInfo()
    metadata.add_text("prompt", json.dumps(prompt))
    names = [f"{stem.replace('%batch_num%', str(i))}_{counter + i:05}_.png" for i in range(len(images))]

    def writer(image: torch.Tensor) -> Writer:
        pixels = np.clip(255 * image.cpu().numpy(), 0, 255).astype(np.uint8)
        return lambda file: Image.fromarray(pixels).save(file, format="PNG", pnginfo=metadata, compress_level=4)

    write_files([(target / name, writer(image)) for name, image in zip(names, images, strict=True)])
    return NodeResult((), ui={"images": [{"filename": name, "subfolder": subfolder, "type": kind} for name in names]})


def save_animated_webp(
    folder: Path,
    images: torch.Tensor,
    filename_prefix: str,
    fps: float,
    lossless: bool,
    quality: int,
    method: str,
) -> NodeResult:
    """Writes `PREFIX_00001_.webp`, counting on from what is there. 8 bits, rounded down as ComfyUI does."""
    import numpy as np
    from PIL import Image

    target, stem, subfolder = output_target(folder, filename_prefix, width=images.shape[2], height=images.shape[1])
    name = f"{stem}_{next_number(target, stem):05}_.webp"
    pixels = np.clip(255 * images.cpu().numpy(), 0, 255).astype(np.uint8)
    first, *others = [Image.fromarray(frame) for frame in pixels]
    options = {"duration": int(1000 / fps), "lossless": lossless, "quality": quality, "method": WEBP_METHODS[method]}

    def write(file: BinaryIO) -> None:
        first.save(file, format="WEBP", save_all=True, append_images=others, **options)

    write_files([(target / name, write)])
    return NodeResult((), ui={"images": [{"filename": name, "subfolder": subfolder, "type": "output"}]})


def _file_inside(folder: Path, name: str) -> Path:
    """The file `name` in `folder`. Raises InputError if it isn't there or lies outside."""
    name = re.sub(r" \[(input|output|temp)\]$", "", name)
    root = folder.resolve()
    path = root if "\0" in name else (root / name).resolve()
    if not path.is_relative_to(root):
        raise InputError(f"The picture {name!r} is refused: it lies outside the input folder.")
    if not path.is_file():
        raise InputError(f"There is no picture {name!r} in the input folder {folder}.")
    return path


def output_target(folder: Path, prefix: str, *, width: int, height: int) -> tuple[Path, str, str]:
    """Folder, start of the file name, and subfolder for a prefix. Raises InputError if it leads out of `folder`."""
    now = time.localtime()
    values = {
        "width": str(width),
        "height": str(height),
        "year": str(now.tm_year),
        "month": f"{now.tm_mon:02}",
        "day": f"{now.tm_mday:02}",
        "hour": f"{now.tm_hour:02}",
        "minute": f"{now.tm_min:02}",
        "second": f"{now.tm_sec:02}",
    }
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", value)
    root = folder.resolve()
    path = root if "\0" in prefix else (root / prefix).resolve()
    if not prefix.strip("/\\ .") or path == root or not path.is_relative_to(root):
        raise InputError(f"The file name prefix {prefix!r} is refused: it must stay inside the output folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    subfolder = path.parent.relative_to(root).as_posix()
    return path.parent, path.name, "" if subfolder == "." else subfolder


def next_number(folder: Path, stem: str) -> int:
    """The number of the next file whose name begins so: one more than the highest there."""
    pattern = re.compile(re.escape(stem) + r"_(\d+)_?\.", re.IGNORECASE)
    numbers = [int(match[1]) for file in folder.iterdir() if (match := pattern.match(file.name))]
    return max(numbers, default=0) + 1
