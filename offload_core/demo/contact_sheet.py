"""One picture that shows captions beside the pictures they became."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 2
SCALE = 4
MARGIN = 32
GAP = 20
CAPTION_WIDTH = 230
CAPTION_POINTS = 22
TITLE_POINTS = 16

PAPER = (252, 252, 250)
INK = (28, 28, 30)
FAINT = (128, 128, 132)
FRAME = (205, 205, 205)


def draw(captions: Sequence[str], pictures: Sequence[Image.Image], title: str = "") -> Image.Image:
    """Two columns of pictures, four times as large as they are, each with its caption at its right."""
    font, small = ImageFont.load_default(CAPTION_POINTS), ImageFont.load_default(TITLE_POINTS)
    width, height = (side * SCALE for side in pictures[0].size)
    columns = min(COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    cell_width, cell_height = width + GAP + CAPTION_WIDTH + MARGIN, height + GAP
    top = MARGIN + (TITLE_POINTS + GAP if title else 0)

    sheet = Image.new("RGB", (MARGIN + columns * cell_width, top + rows * cell_height + MARGIN - GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN - 4), title, font=small, fill=FAINT)
    for i, (caption, picture) in enumerate(zip(captions, pictures, strict=True)):
        x, y = MARGIN + i % columns * cell_width, top + i // columns * cell_height
        sheet.paste(picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC), (x, y))
        pen.rectangle((x - 1, y - 1, x + width, y + height), outline=FRAME)
        text = "\n".join(wrap(caption, font, CAPTION_WIDTH))
        pen.text((x + width + GAP, y + height / 2), text, font=font, fill=INK, anchor="lm", spacing=8)
    return sheet


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines of whole words, each at most `width` pixels wide unless it is a single word."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
