"""Feature extractors: what makes two images similar when the data is cut into clusters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from ..artifacts import UserError

PIXEL_GRID = 16  # raw pixels are averaged down to this many a side: more would only be slower


class FeatureExtractor(Protocol):
    """Images uint8 [B, C, S, S] to features float32 [B, D]; `id` names it in the manifest."""

    @property
    def id(self) -> str: ...
    def extract(self, images: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PixelFeatures:
    """The image itself in [0, 1], averaged down to 16x16 where it is larger: a baseline, and enough for digits."""

    @property
    def id(self) -> str:
        return "pixels"

    def extract(self, images: Tensor) -> Tensor:
        side = min(images.shape[-1], PIXEL_GRID)
        return F.adaptive_avg_pool2d(images.float() / 255.0, side).flatten(1)


@lru_cache(maxsize=2)
def load_extractor(name: str, device: str) -> FeatureExtractor:
    """The extractor a user names with --features."""
    if name == "pixels":
        return PixelFeatures()
    raise UserError(f"--features {name}: not known; use pixels")
