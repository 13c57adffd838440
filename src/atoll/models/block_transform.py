"""A fixed transform in place of a pretrained autoencoder: each block of an image as its low frequencies.

Cut an RGB image into blocks of S x S, turn colors into brightness and two differences, and each block into the
coefficients of the cosine transform (DCT-II). All three steps are orthonormal, and together nearly the principal
components of photographs, so channels hardly depend on each other and the first few hold most of an image. Kept are
the frequencies i + j < S of brightness and i + j < S/2 of the differences, as eyes (and JPEG) would have it.

Why it helps: latents are normalized channel by channel. In plain pixels a small network's error is spread over all
frequencies alike, and shows as noise and edges between patches. Here most of the error falls on channels that mean
little, and the decoder makes it as small as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDES = (2, 4, 8, 16)
COLORS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (-1.0, 2.0, -1.0))  # brightness, red - blue, green - magenta


class BlockTransform(nn.Module):
    """Images [B, 3, H, W] in [-1, 1] <-> latents [B, C, H/S, W/S]; H and W multiples of S.

    The weights [C, 3, S, S] are orthonormal and fixed: encoding is a convolution by them with stride S, decoding its
    transpose, which gives the nearest image of those that have no other frequencies.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.weights = nn.Parameter(block_basis(side), requires_grad=False)

    def encode(self, images: Tensor) -> Tensor:
        return F.conv2d(images, self.weights, stride=self.side)

    def decode(self, latents: Tensor) -> Tensor:
        return F.conv_transpose2d(latents, self.weights, stride=self.side)


def block_basis(side: int) -> Tensor:
    """float32 [C, 3, S, S]: color by color, in each from low to high frequency."""
    colors = torch.tensor(COLORS, dtype=torch.float64)
    colors = colors / colors.norm(dim=1, keepdim=True)
    cosines = cosine_rows(side)
    every = sorted(((i, j) for i in range(side) for j in range(side)), key=lambda at: (sum(at), at))
    found = [
        torch.einsum("c,h,w->chw", color, cosines[i], cosines[j])
        for color, end in zip(colors, (side, side / 2, side / 2), strict=True)
        for i, j in every
        if i + j < end
    ]
    return torch.stack(found).float()


def cosine_rows(side: int) -> Tensor:
    """DCT-II, orthonormal, float64 [S, S]: row k is sqrt(2 / S) cos(pi k (n + 1/2) / S), the first over sqrt(2)."""
    k, n = torch.arange(side, dtype=torch.float64)[:, None], torch.arange(side, dtype=torch.float64)
    rows = math.sqrt(2.0 / side) * torch.cos(math.pi * k * (n + 0.5) / side)
    rows[0] /= math.sqrt(2.0)
    return rows
