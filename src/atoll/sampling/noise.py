"""Noise that belongs to an image: a pure function of the image's own seed.

It is drawn on the CPU, one generator per image, in float32, so image i gets the same bits alone, in any batch,
at any place in the batch and on any device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor


def image_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """One seed per image: seed, seed + 1, ... from a number, or a list taken as it is. Numbers may be numpy's."""
    seeds = [int(seed) + i for i in range(count)] if isinstance(seed, Integral) else [int(s) for s in seed]  # type: ignore[union-attr]
    if len(seeds) != count:
        raise ValueError(f"{count} images need {count} seeds, got {len(seeds)}")
    if count and not -(2**63) <= min(seeds) <= max(seeds) < 2**64:
        raise ValueError(f"seeds must fit in 64 bits, got {min(seeds)} .. {max(seeds)}")
    return seeds


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal noise [len(seeds), *shape], float32 on the CPU; row i depends on seeds[i] only."""
    noise = torch.empty(len(seeds), *shape)
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(int(seed)))
    return noise


def step_noise(seeds: Sequence[int], shape: Sequence[int], step: int) -> Tensor:
    """Fresh noise for one step of a stochastic solver; independent of the initial noise and of other steps."""
    # a hash, so that image seed + 1 at step 0 does not repeat image seed at step 1
    hashes = [hashlib.sha256(f"{seed}/step/{step}".encode()).digest() for seed in seeds]
    return initial_noise([int.from_bytes(each[:8], "little") for each in hashes], shape)
