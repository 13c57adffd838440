"""Grids of generated images: one row per prompt, each image framed in the color of the expert that did most of it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# one color per expert, told apart by people with any color vision (Okabe and Ito); beyond eight they repeat
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#8C564B")
INK, PAPER, RULE = "#1f2933", "#ffffff", "#d9dee3"
FRAME, GAP = 2, 3  # pixels around an image and between two
LONGEST_LABEL = 40  # characters


def expert_color(k: int) -> str:
    return PALETTE[k % len(PALETTE)]


def rows_by_prompt(prompts: Sequence[str], per_row: int) -> tuple[list[list[int]], list[str]]:
    """Places of the images in rows of one prompt each, `per_row` at most, and the label of each row.

    A prompt with more images than a row holds continues in the next, which has no label.
    """
    by_prompt: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(place)
    rows, labels = [], []
    for prompt, places in by_prompt.items():
        for first in range(0, len(places), per_row):
            rows.append(places[first : first + per_row])
            labels.append(prompt if first == 0 else "")
    return rows, labels


def sample_grid(
    images: Tensor | Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    experts: Sequence[int | None] | None,
    *,
    tile: int,
    labels: Sequence[str] = (),
    legend: bool = False,
) -> Image.Image:
    """Rows of images, as indices into uint8 [N, C, H, W], each framed in the color of its main expert.

    Images may differ in size if they come as a list. With `legend`, a line below says whose color is whose.
    """
    step, font = tile + 2 * FRAME + GAP, _font(tile)
    labels = [label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..." for label in labels]
    margin = 16 + max((int(font.getlength(text)) for text in labels), default=0) if any(labels) else 0
    shown = sorted({k for k in experts or () if k is not None}) if legend else []
    entry = 24 + int(font.getlength("expert 00"))
    width = max(margin + step * max(map(len, rows)), entry if shown else 0)
    across = max(1, width // entry)
    key_rows, key_height = -(-len(shown) // across), _height(tile) + 8
    sheet = Image.new("RGB", (width, step * len(rows) + key_height * key_rows), PAPER)
    draw = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        if margin:
            draw.text((margin - 8, r * step + step // 2), labels[r], INK, font, anchor="rm")
        for c, i in enumerate(row):
            left, top = margin + c * step, r * step
            main = None if experts is None else experts[i]
            color = RULE if main is None else expert_color(main)
            draw.rectangle((left, top, left + tile + 2 * FRAME - 1, top + tile + 2 * FRAME - 1), fill=color)
            sheet.paste(_tile(images[i], tile), (left + FRAME, top + FRAME))
    for place, k in enumerate(shown):
        left, middle = entry * (place % across), step * len(rows) + key_height * (place // across) + key_height // 2
        draw.rectangle((left + 2, middle - 6, left + 14, middle + 6), fill=expert_color(k))
        draw.text((left + 20, middle), f"expert {k}", INK, font, anchor="lm")
    return sheet


def _tile(image: Tensor, tile: int) -> Image.Image:
    """uint8 [1 or 3, H, W] as a picture of this side: small ones keep their pixels, large ones are averaged down."""
    pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    picture = Image.fromarray(pixels.numpy())
    how = Image.Resampling.NEAREST if picture.width <= tile else Image.Resampling.BOX
    return picture.resize((tile, tile), how)


def _height(tile: int) -> int:
    return max(12, min(16, tile // 3))


def _font(tile: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=_height(tile))
