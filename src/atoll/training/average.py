"""The exponential moving average of the weights: what is kept of a training run."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WeightAverage:
    """average <- average + (1 - d) (weights - average), with d = 2^(-batch / half_life), all in images.

    The half-life grows with the images seen, up to its full length, so that early averages forget the random
    start: half_life = min(full, ramp * images).
    """

    def __init__(self, module: nn.Module, half_life_images: int, ramp: float = 0.1) -> None:
        self.half_life = half_life_images
        self.ramp = ramp
        self._live = dict(module.named_parameters())
        self.tensors: dict[str, Tensor] = {name: p.detach().float().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self, images_seen: int, batch: int) -> None:
        """Take in the weights after a step of `batch` images that ended at `images_seen`."""
        half_life = min(self.half_life, self.ramp * images_seen)
        keep = 0.5 ** (batch / max(half_life, 1e-9))
        torch._foreach_lerp_(list(self.tensors.values()), [p.detach().float() for p in self._live.values()], 1.0 - keep)

    def copy_into(self, module: nn.Module) -> None:
        """Put the averaged weights into a module of the same shape."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.tensors[name])
