"""A linear map from latents to small images, fitted while data is encoded: previews that cost next to nothing.

At every place of a latent let f = (latent, 1), and y the image averaged down to the latents' size. Least squares asks
for two sums over a sample of the training images, which pieces of it can make one by one:

    A = sum f f^T  [C + 1, C + 1],    B = sum f y^T  [C + 1, channels],    map = A^-1 B.           (1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.autoencoders import to_unit
from .space import PreviewMap

DIGITS = 6  # kept of a map: far more than a pixel shows, far fewer than differ between two machines
WEAKEST = 1e-9  # share of the strongest direction's variance below which a direction of the latents says nothing


def shrunk(images: Tensor, latents: Tensor) -> Tensor:
    """Images uint8 [N, channels, S, S] averaged down to the size of their latents [N, C, H, W], in [-1, 1]."""
    height, width = latents.shape[-2:]
    return F.adaptive_avg_pool2d(to_unit(images), (height, width))


def color_sums(latents: Tensor, small: Tensor) -> dict[str, Any]:
    """A and B of equation (1), and the number of places, for some latents [N, C, H, W] and their images, shrunk."""
    values, colors = (part.double().transpose(0, 1).flatten(1) for part in (latents, small))  # [C, places]
    f = torch.cat([values, torch.ones_like(values[:1])])
    return {"places": f.shape[1], "A": (f @ f.T).tolist(), "B": (f @ colors.T).tolist()}


def fitted(sums: Sequence[dict[str, Any]], mean: Sequence[float], std: Sequence[float]) -> PreviewMap | None:
    """The map for latents normalized by mean and std; None where there was nothing to fit it on."""
    places = sum(part["places"] for part in sums)
    if not places:
        return None
    a, b = (np.sum([part[name] for part in sums], axis=0) / places for name in ("A", "B"))
    # (z, 1) = to_normalized f: the map of normalized latents solves (T A T^T) map = T B
    to_normalized = np.diag([*(1.0 / np.asarray(std)), 1.0])
    to_normalized[:-1, -1] = -np.asarray(mean) / np.asarray(std)
    solved = np.linalg.lstsq(to_normalized @ a @ to_normalized.T, to_normalized @ b, rcond=WEAKEST)[0].round(DIGITS)
    return PreviewMap(weights=tuple(map(tuple, solved[:-1].T.tolist())), bias=tuple(solved[-1].tolist()))
