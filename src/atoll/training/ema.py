"""The exponential moving average of the weights: what is kept of a training run, on the device of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ALIGNMENT = 128  # values: compiled kernels read aligned rows, and a copy would be made of others


def one_buffer(module: nn.Module) -> Tensor:
    """Move all parameters of a module into one float buffer, each a view of it; the buffer is returned.

    One kernel then reads all weights, where a loop over hundreds of tensors would start hundreds.
    """
    parameters = list(module.parameters())
    sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
    buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
    for parameter, room in zip(parameters, torch.split(buffer, sizes), strict=True):
        view = room[: parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
    return buffer


class EMA:
    """average <- average + (1 - d) (weights - average), with d = 2^(-batch / half_life), all in images.

    The half-life grows with the images seen, up to its full length, so that early averages forget the random
    start: half_life = min(full, ramp * images).
    """

    def __init__(self, module: nn.Module, half_life_images: int, ramp: float = 0.1) -> None:
        self.half_life = half_life_images
        self.ramp = ramp
        self._module = module
        self._weights = one_buffer(module)
        self._average = self._weights.clone()

    def rate(self, images_seen: int, batch: int) -> float:
        """1 - d for a step of `batch` images that ended at `images_seen`."""
        half_life = min(self.half_life, self.ramp * images_seen)
        return float(1.0 - 0.5 ** (batch / max(half_life, 1e-9)))

    @torch.no_grad()
    def update(self, rate: Tensor) -> None:
        """Move towards the weights; `rate` is a scalar on their device, zero for a skipped step."""
        self._average.lerp_(self._weights, rate)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name: views of where it lies."""
        offset, found = 0, {}
        for name, parameter in self._module.named_parameters():
            found[name] = self._average[offset : offset + parameter.numel()].view(parameter.shape)
            offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        return found

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While inside, the module has the averaged weights; no copy is made, and nothing may be trained."""
        parameters = dict(self._module.named_parameters())
        own = {name: parameter.data for name, parameter in parameters.items()}
        for name, value in self.tensors.items():
            parameters[name].data = value
        try:
            yield
        finally:
            for name, value in own.items():
                parameters[name].data = value
