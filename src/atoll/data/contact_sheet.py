"""Many small images as one picture."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw

COLUMNS = 8
TITLE = 18  # pixels of a line of text
TILE = 48  # pixels a side, at least; small images are enlarged by a whole factor


def contact_sheet(images: np.ndarray) -> Image.Image:
    """Images uint8 [N, C, S, S] in rows of eight, with a line of background between."""
    count, channels, side, _ = images.shape
    factor = max(1, -(-TILE // side))
    tile, rows = side * factor, -(-count // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (tile + 2) + 2, rows * (tile + 2) + 2), (255, 255, 255))
    for place, image in enumerate(images):
        pixels = image[0] if channels == 1 else image.transpose(1, 2, 0)
        picture = Image.fromarray(pixels).resize((tile, tile), Image.Resampling.NEAREST)
        row, column = divmod(place, COLUMNS)
        sheet.paste(picture, (2 + column * (tile + 2), 2 + row * (tile + 2)))
    return sheet


def titled_sheet(parts: Mapping[str, np.ndarray]) -> Image.Image:
    """Contact sheets one below the other, each under a line of text that says what it shows."""
    sheets = {title: contact_sheet(images) for title, images in parts.items()}
    drawn = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    width = max(*(s.width for s in sheets.values()), *(int(drawn.textlength(title)) + 8 for title in sheets))
    whole = Image.new("RGB", (width, sum(TITLE + s.height + 6 for s in sheets.values())), (255, 255, 255))
    pen, top = ImageDraw.Draw(whole), 0
    for title, sheet in sheets.items():
        pen.text((4, top + 4), title, fill=(0, 0, 0))
        whole.paste(sheet, (0, top + TITLE))
        top += TITLE + sheet.height + 6
    return whole
