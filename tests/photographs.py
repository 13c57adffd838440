"""Generated pictures in class folders: coloured shapes over soft backgrounds, with noise, as small photographs are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

# class -> (shape, hue of the thing, hue of the background), hues as shares of a turn
CLASSES = {
    "ball": ("circle", 0.02, 0.33),
    "box": ("square", 0.08, 0.60),
    "kite": ("diamond", 0.78, 0.55),
    "leaf": ("ellipse", 0.30, 0.10),
    "moon": ("circle", 0.15, 0.68),
    "roof": ("triangle", 0.98, 0.52),
    "sea": ("band", 0.55, 0.12),
    "wall": ("bricks", 0.05, 0.07),
}


def photograph(kind: str, number: int, size: int = 40) -> Image.Image:
    """One picture of a class; place, size, light and hues differ from picture to picture."""
    draw_from = np.random.default_rng([list(CLASSES).index(kind), number])
    shape, hue, behind = CLASSES[kind]

    def colour(base: float, light: float) -> tuple[int, int, int]:
        turn = int(255 * ((base + draw_from.normal(0, 0.02)) % 1.0))
        pixel = Image.new("HSV", (1, 1), (turn, int(150 + 80 * draw_from.random()), int(255 * light)))
        return pixel.convert("RGB").getpixel((0, 0))  # type: ignore[return-value]

    light = 0.55 + 0.35 * draw_from.random()
    top, bottom = np.array(colour(behind, light)), np.array(colour(behind, 0.6 * light))
    ramp = np.linspace(0, 1, size)[:, None, None]
    ground = (top * (1 - ramp) + bottom * ramp).repeat(size, 1)
    picture = Image.fromarray(ground.astype(np.uint8))
    pen, thing = ImageDraw.Draw(picture), colour(hue, min(1.0, light + 0.15))
    x, y = size * (0.35 + 0.3 * draw_from.random(2))
    r = size * (0.18 + 0.12 * draw_from.random())
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), thing)
    elif shape == "ellipse":
        pen.ellipse((x - 1.4 * r, y - 0.6 * r, x + 1.4 * r, y + 0.6 * r), thing)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), thing)
    elif shape == "diamond":
        pen.polygon([(x, y - 1.4 * r), (x + r, y), (x, y + 1.4 * r), (x - r, y)], thing)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x + 1.3 * r, y + r), (x - 1.3 * r, y + r)], thing)
    elif shape == "band":
        pen.rectangle((0, y, size, size), thing)
    else:
        for row in range(0, size, 8):
            for column in range(-8 + (row % 16), size, 16):
                pen.rectangle((column, row, column + 13, row + 5), colour(hue, light))
    picture = picture.filter(ImageFilter.GaussianBlur(0.6))
    noisy = np.asarray(picture, dtype=np.float64) + draw_from.normal(0, 4, (size, size, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def album(folder: Path, count: int, *, classes: int = len(CLASSES), size: int = 40, captions: bool = False) -> Path:
    """`count` photographs in class folders below `folder`, as JPEG; with `captions` a text beside each."""
    kinds = list(CLASSES)[:classes]
    for number in range(count):
        kind = kinds[number % len(kinds)]
        place = folder / kind / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        photograph(kind, number, size).save(place, quality=92)
        if captions:
            place.with_suffix(".txt").write_text(f"a photo of a {kind}\n")
    return folder


if __name__ == "__main__":
    import sys

    album(Path(sys.argv[1]), int(sys.argv[2]), size=int(sys.argv[3]) if len(sys.argv) > 3 else 40)
