"""Named sizes: S, B, L and XL as DiT has them, and 3B, each at patch 1, 2, 4 or 8 (`xl/2`)."""

from __future__ import annotations

from typing import Any

from .dit import DiTConfig

PATCHES = (1, 2, 4, 8)
SIZES: dict[str, dict[str, Any]] = {
    "s": {"width": 384, "depth": 12, "heads": 6},
    "b": {"width": 768, "depth": 12, "heads": 12},
    "l": {"width": 1024, "depth": 24, "heads": 16},
    "xl": {"width": 1152, "depth": 28, "heads": 16},
    "3b": {"width": 2560, "depth": 30, "heads": 20},
}


def preset(name: str, **fields: Any) -> DiTConfig:
    """The architecture called `name`, with more `fields` of a DiTConfig: latent, condition, ..."""
    return DiTConfig(**shape(name), **fields)


def shape(name: str) -> dict[str, Any]:
    """`xl/2` -> patch, width, depth and heads."""
    size, slash, patch = name.lower().partition("/")
    if size not in SIZES or not slash or patch not in map(str, PATCHES):
        raise ValueError(
            f"unknown architecture {name!r}; use a size of {', '.join(SIZES)} and a patch of 1, 2, 4 or 8, such as xl/2"
        )
    return {"patch": int(patch), **SIZES[size]}


def heads_for(width: int) -> int | None:
    """Heads of the named size with this width: official checkpoints do not store them."""
    return next((size["heads"] for size in SIZES.values() if size["width"] == width), None)
