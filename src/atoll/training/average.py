"""The exponential moving average of the weights: what is kept of a training run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .packing import pinned_bytes, unpin

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


class WeightAverage:
    """average <- average + (1 - d) (weights - average), with d = 2^(-batch / half_life), all in images.

    The half-life grows with the images seen, up to its full length, so that early averages forget the random
    start: half_life = min(full, ramp * images).
    """

    def __init__(self, module: nn.Module, half_life_images: int, ramp: float = 0.1) -> None:
        self.half_life = half_life_images
        self.ramp = ramp
        self._module = module
        self._weights = one_buffer(module)
        self._average = self._store(self._weights)

    def _store(self, weights: Tensor) -> Tensor:
        return weights.clone()

    def forgetting(self, images_seen: int, batch: int) -> float:
        """1 - d for a step of `batch` images that ended at `images_seen`."""
        half_life = min(self.half_life, self.ramp * images_seen)
        return float(1.0 - 0.5 ** (batch / max(half_life, 1e-9)))

    @torch.no_grad()
    def update(self, forgetting: Tensor) -> None:
        """Take in the weights; `forgetting` is a scalar on their device, zero for a step that was left out."""
        self._average.lerp_(self._weights, forgetting)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name: views of where it lies."""
        offset, found = 0, {}
        for name, parameter in self._module.named_parameters():
            found[name] = self._average[offset : offset + parameter.numel()].view(parameter.shape)
            offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        return found

    @contextmanager
    def lent(self) -> Iterator[None]:
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

    def settle(self) -> None:
        """Wait until every update so far is in the average."""

    def close(self) -> None:
        """Nothing to end here."""


class HostAverage(WeightAverage):
    """The same average in the host's memory, for a card that has no room for it.

    After each step the weights are copied out beside the next step's work, and a thread takes them in. The copy must
    end before the next update of the weights, so `before_update` makes the device, not the host, wait for it.
    """

    def __init__(self, module: nn.Module, half_life_images: int, ramp: float = 0.1) -> None:
        super().__init__(module, half_life_images, ramp)
        cuda = self._weights.device.type == "cuda"
        self._landing = pinned_bytes(self._average.nbytes, self._weights.device).view(torch.float32)
        self._stream = torch.cuda.Stream(self._weights.device) if cuda else None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None

    def _store(self, weights: Tensor) -> Tensor:
        return weights.to("cpu", copy=True)

    @torch.no_grad()
    def update(self, forgetting: Tensor) -> None:
        self.settle()
        weight = torch.empty_like(forgetting, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            weight.copy_(forgetting)
            self._landing.copy_(self._weights)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                weight.copy_(forgetting, non_blocking=True)
                self._landing.copy_(self._weights, non_blocking=True)
                forgetting.record_stream(self._stream)
                self._copied = self._stream.record_event()
        self._thread = threading.Thread(target=self._take_in, args=(weight,), name="atoll-average")
        self._thread.start()

    def before_update(self) -> None:
        """The device's next update of the weights waits until they were copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.settle()
        unpin(self._landing)

    def _take_in(self, weight: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._average.lerp_(self._landing, weight)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The weights move to the host meanwhile, and the average into their place."""
        self.settle()
        own = self._weights.to("cpu", copy=True)
        self._weights.copy_(self._average)
        try:
            yield
        finally:
            self._weights.copy_(own)
