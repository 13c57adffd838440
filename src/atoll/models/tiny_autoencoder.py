"""The tiny autoencoders of the TAESD family: 8x smaller images in a few residual convolutions.

`pooled` is TAEF2's addition: the three blocks at latent resolution on either side first look at the whole
image through a group norm. Names and shapes of the weights are those of diffusers' `AutoencoderTiny`, so its
folders load as they are; stock `AutoencoderTiny` itself drops TAEF2's extra weights and is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

REDUCTION = 8
SQUASH = 3.0  # the decoder's input is squashed smoothly into (-3, 3)


class TinyAutoencoder(nn.Module):
    """Images [B, 3, H, W] in [-1, 1] <-> latents [B, C, H/8, W/8]; H and W multiples of 8."""

    def __init__(self, latent_channels: int, *, width: int = 64, pooled: bool = False) -> None:
        super().__init__()
        self.latent_channels, self.pooled = latent_channels, pooled

        def blocks(count: int, pooled: bool = False) -> list[nn.Module]:
            return [ResidualBlock(width, pooled) for _ in range(count)]

        def halve() -> nn.Module:
            return nn.Conv2d(width, width, 3, padding=1, stride=2, bias=False)

        def double() -> list[nn.Module]:
            return [nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1, bias=False)]

        self.encoder = _Layers(
            nn.Conv2d(3, width, 3, padding=1),
            *blocks(1),
            *(halve(), *blocks(3)),
            *(halve(), *blocks(3)),
            *(halve(), *blocks(3, pooled)),
            nn.Conv2d(width, latent_channels, 3, padding=1),
        )
        self.decoder = _Layers(
            nn.Conv2d(latent_channels, width, 3, padding=1),
            nn.ReLU(),
            *(*blocks(3, pooled), *double()),
            *(*blocks(3), *double()),
            *(*blocks(3), *double()),
            *blocks(1),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def encode(self, images: Tensor) -> Tensor:
        latents: Tensor = self.encoder((images + 1.0) / 2.0)
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        images: Tensor = self.decoder(SQUASH * torch.tanh(latents / SQUASH))
        return 2.0 * images - 1.0


class _Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class ResidualBlock(nn.Module):
    """relu(x + three convolutions of x); pooled blocks first add what the whole image says."""

    def __init__(self, width: int, pooled: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.pool = None
        if pooled:
            self.pool = nn.Sequential(
                nn.Conv2d(width, 4 * width, 1, bias=False),
                nn.GroupNorm(4, 4 * width),
                nn.ReLU(),
                nn.Conv2d(4 * width, width, 1, bias=False),
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(x + self.conv(x))
