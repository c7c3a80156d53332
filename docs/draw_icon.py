"""Draws the pack's icon and banner for the Comfy registry: python docs/draw_icon.py

Three phases one after another, each with its weights under one limit of memory.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

IMAGES = Path(__file__).parent / "images"
ICON_PIXELS = 400  # the most the registry takes
BANNER_PIXELS = (1680, 720)  # 21:9
FINER = 4  # drawn larger and made smaller, for smooth edges
BACKGROUND, LIMIT, TEXT = "#1d2129", "#e6e9ef", "#f4f6fa"
PHASES = (("#4c8dd6", 0.45), ("#e08a3c", 0.86), ("#57a65b", 0.30))  # colour, share of the limit


def icon(pixels: int, rounded: bool = True) -> Image.Image:
    """The icon as a square of that many pixels."""
    side = pixels * FINER
    picture = Image.new("RGBA", (side, side))
    draw = ImageDraw.Draw(picture)
    draw.rounded_rectangle((0, 0, side - 1, side - 1), side * 0.18 if rounded else 0, fill=BACKGROUND)
    left, right, floor, limit = side * 0.17, side * 0.83, side * 0.80, side * 0.24
    width, gap = (right - left) * 0.28, (right - left) * 0.08
    for index, (colour, share) in enumerate(PHASES):
        start = left + index * (width + gap)
        top = floor - (floor - limit) * share
        draw.rounded_rectangle((start, top, start + width, floor), side * 0.03, fill=colour)
    dash = (right - left) / 11
    for index in range(0, 11, 2):
        start = left + index * dash
        draw.rounded_rectangle(
            (start, limit - side * 0.012, start + dash, limit + side * 0.012), side * 0.01, fill=LIMIT
        )
    return picture.resize((pixels, pixels), Image.Resampling.LANCZOS)


def banner() -> Image.Image:
    """The icon with the pack's name and what it does."""
    height = BANNER_PIXELS[1]
    picture = Image.new("RGB", BANNER_PIXELS, BACKGROUND)
    drawn = icon(height * 3 // 4, rounded=False)
    picture.paste(drawn, (height // 10, height // 8), drawn)
    draw = ImageDraw.Draw(picture)
    left = height // 10 + drawn.width + height // 12
    draw.text((left, height * 0.36), "Phase Offload", TEXT, _font("DejaVuSans-Bold.ttf", height // 7))
    draw.text((left, height * 0.56), "encode, denoise, decode:", TEXT, _font("DejaVuSans.ttf", height // 16))
    draw.text((left, height * 0.65), "one at a time, in a budget of bytes", TEXT, _font("DejaVuSans.ttf", height // 16))
    return picture


def _font(name: str, pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", name), pixels)


if __name__ == "__main__":
    icon(ICON_PIXELS).save(IMAGES / "icon.png", optimize=True)
    banner().save(IMAGES / "banner.png", optimize=True)
