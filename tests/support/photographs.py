"""Generated photographs: a folder of pictures such as people have, without anybody's pictures."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

CLASSES = ("barn", "fishing_boat", "lemon", "rowing_boat")  # the tutorial's
MORE_CLASSES = (*CLASSES, "kite", "leaf", "moon", "wall")


def write_photographs(
    folder: Path, classes: Sequence[str] = CLASSES, per_class: int = 100, size: int = 32, captions: bool = False
) -> None:
    """`per_class` JPEGs of `size` px in a folder per class; with `captions`, a .txt beside each.

    A class has a hue, a shape and a background of its own; place, size, light and grain differ from picture to picture.
    """
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            numbers = np.random.default_rng([number, i])
            picture, is_large = photograph(number, len(classes), size, numbers)
            picture.save(folder / name / f"{i:04d}.jpg", quality=92)
            if captions:
                text = f"a photo of a {'large' if is_large else 'small'} {name.replace('_', ' ')}\n"
                (folder / name / f"{i:04d}.txt").write_text(text)


def photograph(number: int, classes: int, size: int, numbers: np.random.Generator) -> tuple[Image.Image, bool]:
    """One picture of class `number`, and whether its thing is large."""
    wide = 4 * size  # drawn large, then averaged down
    hue = number / classes
    light = numbers.uniform(0.75, 1.0)
    picture = Image.new("RGB", (wide, wide), color(hue + 0.5, 0.35, 0.55 * light))
    draw = ImageDraw.Draw(picture)
    horizon = wide * numbers.uniform(0.55, 0.7)
    draw.rectangle((0, horizon, wide, wide), fill=color(hue + 0.4, 0.3, 0.35 * light))
    is_large = bool(numbers.random() < 0.5)
    radius = wide * (0.3 if is_large else 0.2) * numbers.uniform(0.9, 1.1)
    x, y = wide * numbers.uniform(0.35, 0.65), wide * numbers.uniform(0.4, 0.6)
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = color(hue + numbers.normal(0, 0.01), 0.85, light)
    if number % 3 == 0:
        draw.rectangle(box, fill=fill)
    elif number % 3 == 1:
        draw.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill=fill)
    else:
        draw.ellipse(box, fill=fill)
    small = picture.filter(ImageFilter.GaussianBlur(2)).resize((size, size), Image.Resampling.BOX)
    grain = numbers.normal(0, 4, (size, size, 1))
    return Image.fromarray((np.asarray(small) + grain).clip(0, 255).astype(np.uint8)), is_large


def color(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)
