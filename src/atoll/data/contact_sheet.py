"""Many small images as one picture."""

from __future__ import annotations

import numpy as np
from PIL import Image

COLUMNS = 8
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
