"""Named sizes: S, B, L and XL as DiT has them, and 3B, each at patch 1, 2, 4 or 8 (`xl/2`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .dit import DiTConfig

PATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int


SIZES = {
    "s": Size(384, 12, 6),
    "b": Size(768, 12, 12),
    "l": Size(1024, 24, 16),
    "xl": Size(1152, 28, 16),
    "3b": Size(2560, 30, 20),
}


def preset(
    name: str,
    *,
    latent: tuple[int, int, int],
    variant: Literal["adaln", "adaln-single"] = "adaln-single",
    condition: Literal["none", "labels", "words", "pooled", "tokens"] = "none",
    classes: int | None = None,
    vocabulary: int | None = None,
    text_width: int | None = None,
    text_length: int | None = None,
    out_channels: int | None = None,
) -> DiTConfig:
    """The architecture called `name`, such as xl/2, for latents of shape C, H, W."""
    size, patch = parse(name)
    return DiTConfig(
        latent=latent,
        patch=patch,
        width=size.width,
        depth=size.depth,
        heads=size.heads,
        variant=variant,
        condition=condition,
        classes=classes,
        vocabulary=vocabulary,
        text_width=text_width,
        text_length=text_length,
        out_channels=out_channels,
    )


def parse(name: str) -> tuple[Size, int]:
    """`xl/2` -> (the size XL, patch 2)."""
    size, slash, patch = name.lower().partition("/")
    if size not in SIZES or not slash or patch not in map(str, PATCHES):
        raise ValueError(
            f"unknown architecture {name!r}; use a size of {', '.join(SIZES)} and a patch of 1, 2, 4 or 8, such as xl/2"
        )
    return SIZES[size], int(patch)


def heads_for(width: int) -> int | None:
    """Heads of the named size with this width: official checkpoints do not store them."""
    return next((size.heads for size in SIZES.values() if size.width == width), None)
