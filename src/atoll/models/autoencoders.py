"""Autoencoders: the one place where uint8 images become latents and latents become images again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Autoencoder(Protocol):
    """Images uint8 [B, C, H, W] to latents float32 [B, c, h, w] and back; `id` names it in every manifest.

    Latents here are the autoencoder's own; `LatentSpace` holds the per-channel mean and std that normalise them.
    """

    @property
    def id(self) -> str: ...
    def latent_shape(self, channels: int, size: int) -> tuple[int, int, int]: ...
    def encode(self, images: Tensor) -> Tensor: ...
    def decode(self, latents: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Pixels:
    """No autoencoder: the latent is the image in [-1, 1]."""

    @property
    def id(self) -> str:
        return "pixels"

    def latent_shape(self, channels: int, size: int) -> tuple[int, int, int]:
        return channels, size, size

    def encode(self, images: Tensor) -> Tensor:
        return images.to(torch.float32) / 127.5 - 1.0

    def decode(self, latents: Tensor) -> Tensor:
        return ((latents.to(torch.float32) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def load_autoencoder(name: str) -> Autoencoder:
    """The autoencoder of this name; ValueError for one that is not known."""
    if name == "pixels":
        return Pixels()
    raise ValueError(f"unknown autoencoder {name!r}; use pixels")
