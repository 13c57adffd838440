"""What fits on a machine, and how long it takes.

Memory is counted: weights, gradients, Adam's moments and the average in float32, the copy of the weights that
bfloat16 computes with, the activations of one micro-batch, and a reserve for what the driver and the allocator keep.
For PixArt-XL/2 at batch 32 it says 20.6 GiB without the average; measured, compiled, on an H200: 19.9.

Time is the larger of two: arithmetic at a share of the maker's rate, and a floor per block for starting kernels,
which is what small networks wait for (24M weights, batch 128, H200: 24 ms a step, 2 ms a block).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..models.accounting import BFLOAT16, FLOAT32, account
from ..models.dit import DiTConfig
from .islands import Gpu

RESERVE_GIB = 1.0
UTILISATION = 0.35  # of the maker's rate; compiled code on an H200 reaches 0.53 of the measured one
SECONDS_PER_BLOCK = 2e-3
GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """How one architecture trains on one machine."""

    micro_batch: int
    memory_gib: float
    images_per_s: float


def fit(architecture: DiTConfig, machine: Gpu, batch: int) -> Fit | None:
    """The largest micro-batch that fits, with its memory and speed; None if not even one image does."""
    cost = account(architecture)
    value_bytes = BFLOAT16 if machine.bfloat16 else FLOAT32
    fixed = cost.fixed_bytes + (BFLOAT16 * cost.parameters if machine.bfloat16 else 0)
    for micro_batch in micro_batches(batch):
        memory = (fixed + cost.activation_bytes(micro_batch, value_bytes=value_bytes)) / GIB + RESERVE_GIB
        if memory <= machine.memory:
            arithmetic = cost.flops_training * batch / (UTILISATION * machine.tflops * 1e12)
            starting = SECONDS_PER_BLOCK * cost.depth * (batch // micro_batch)
            return Fit(micro_batch, round(memory, 2), round(batch / max(arithmetic, starting), 2))
    return None


def micro_batches(batch: int) -> list[int]:
    """Divisors of the batch, largest first: every micro-batch counts the same."""
    return [size for size in range(batch, 0, -1) if batch % size == 0]
