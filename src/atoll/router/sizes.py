"""How large a router may be beside experts of a given size."""

from __future__ import annotations

from dataclasses import replace

from ..models.accounting import flops_forward
from ..models.dit import DiTConfig

# DDM's and HDDM's router is a DiT-B (the first of these) at patch 2: a fifth of an XL/2, for every step of every image
SIZES = (
    *((768, 12, 12), (512, 10, 8), (384, 12, 6), (384, 6, 6), (256, 8, 4)),
    *((256, 4, 4), (192, 6, 3), (128, 6, 2), (128, 3, 2), (64, 2, 1)),
)  # width, depth, heads
PATCHES = (1, 2, 4, 8, 16)
SHARE = 0.08  # of an expert's operations, that a call of the router may cost
FEWEST_TOKENS = 16  # an image is still seen in four by four places


def router_network(expert: DiTConfig, share: float = SHARE) -> DiTConfig:
    """The trunk of a router beside experts like this one: of those that cost at most `share` of it, the one with the
    largest blocks, and of those the one with the smallest patches. Which cluster an image is of shows in few, large
    patches; to tell clusters apart takes weights.
    """
    shapes = [
        replace(expert, width=width, depth=depth, heads=heads, patch=patch, out_channels=None, qk_norm=False)
        for width, depth, heads in SIZES
        for patch in PATCHES
        if divides(patch, expert) and fits_tokens(patch, expert)
    ]
    most = share * flops_forward(expert)
    affordable = [shape for shape in shapes if flops_forward(shape) <= most]
    if not affordable:  # an expert so small that nothing is
        return min(shapes, key=flops_forward)
    return max(affordable, key=lambda shape: (shape.width**2 * shape.depth, flops_forward(shape)))


def divides(patch: int, expert: DiTConfig) -> bool:
    return not any(side % patch for side in expert.latent[1:])


def fits_tokens(patch: int, expert: DiTConfig) -> bool:
    """Whether patches of this size leave enough tokens; of small latents, as many as there can be."""
    _, height, width = expert.latent
    return (height // patch) * (width // patch) >= min(FEWEST_TOKENS, height * width)


def blinded(trunk: DiTConfig) -> DiTConfig:
    """The same network without a condition."""
    return replace(trunk, condition="none", classes=None, vocabulary=None, text_width=None, text_length=None)
