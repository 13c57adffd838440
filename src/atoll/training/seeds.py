"""Random numbers as a pure function of where one is, so that resuming needs no saved generator state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


def seed_from(*key: int | str) -> int:
    """A 63-bit seed from a key such as (seed, "noise", images seen); equal on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator for this key and no other."""
    return torch.Generator().manual_seed(seed_from(*key))


@dataclass(frozen=True)
class BatchNumbers:
    """Everything random about some rows of a batch, float64 [B] in [0, 1) but for the noise.

    caption  which of a sample's captions
    u        where in time, stratified: one in each of the batch's equal parts, which lowers the variance of the loss
    dropout  below the rate: the condition is dropped
    eps      float32 [B, C, H, W], normal
    """

    caption: Tensor
    u: Tensor
    dropout: Tensor
    eps: Tensor


def batch_numbers(seed: int, images: int, batch: int, shape: tuple[int, ...], part: slice) -> BatchNumbers:
    """The numbers of rows `part` of the batch of `batch` samples of `shape` that follows `images` seen."""
    numbers = generator(seed, "batch", images)
    caption, strata, dropout = torch.rand(3, batch, generator=numbers, dtype=torch.float64)
    u = (torch.randperm(batch, generator=numbers) + strata) / batch
    eps = torch.randn(batch, *shape, generator=numbers)
    return BatchNumbers(caption[part], u[part], dropout[part], eps[part])
