"""Many tensors in one buffer of bytes, so that they travel in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

Batch = dict[str, Tensor]  # by name; the first dimension is the batch's, and scalars belong to the whole step
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in one buffer of bytes."""

    places: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]  # name, dtype, shape, first byte, end
    size: int

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        places, end = [], 0
        for name, value in tensors.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + value.numel() * value.element_size()
            places.append((name, value.dtype, tuple(value.shape), start, end))
        return Layout(tuple(places), end)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors as they lie in a buffer uint8 [size]."""
        return {name: buffer[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in self.places}


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Host memory uint8 [size] to copy from a device into, pinned for CUDA if the system lets us.

    Not by torch, which rounds up to a power of two: of gigabytes, that is too much. Pages of its own, since a page
    that something else on it has pinned already is refused.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    buffer = torch.frombuffer(mmap(-1, size), dtype=torch.uint8)
    if torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0) != torch.cuda.cudart().cudaError.success:
        forget_last_error(device)  # copies are slower, and as good
    return buffer


def forget_last_error(device: torch.device) -> None:
    """CUDA keeps an error that its caller has dealt with, for the next kernel's launch to fail of."""
    with suppress(RuntimeError):
        torch.zeros((), device=device)


def unpin(buffer: Tensor) -> None:
    if buffer.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
