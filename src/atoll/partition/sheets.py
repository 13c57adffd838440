"""Contact sheets: what a cluster looks like, from its latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.contact_sheet import contact_sheet
from ..data.space import LatentConfig
from ..models.autoencoders import Autoencoder


def images_of(latents: Tensor, space: LatentConfig, autoencoder: Autoencoder) -> np.ndarray:
    """Normalized latents [N, C, H, W] as images uint8 [N, C, S, S]."""
    with torch.inference_mode():
        # a few at a time: what a core's cache holds
        parts = [autoencoder.decode(space.denormalize(part)) for part in torch.split(latents, 8)]
    return torch.cat(parts).numpy()


def write_sheet(path: Path, images: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(images).save(path)
