"""Contact sheets: what a cluster looks like, from its latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.space import LatentSpace
from ..models.autoencoders import Autoencoder

COLUMNS = 8
TILE = 48  # pixels a side, at least; small images are enlarged by a whole factor


def images_of(latents: Tensor, space: LatentSpace, autoencoder: Autoencoder) -> np.ndarray:
    """Normalised latents [N, C, H, W] as images uint8 [N, C, S, S]."""
    with torch.inference_mode():
        # a few at a time: what a core's cache holds
        parts = [autoencoder.decode(space.restore(part)) for part in torch.split(latents, 8)]
    return torch.cat(parts).numpy()


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


def write_sheet(path: Path, images: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(images).save(path)
