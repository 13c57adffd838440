"""The machines islands run on: what their makers say, and what this one does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GIB = 2**30
BESIDE = 1.0  # GiB of a card that are CUDA's own and its libraries', in no allocator's count


@dataclass(frozen=True)
class Gpu:
    """Memory in GiB, matrix rate in TFLOP/s (dense, bfloat16 if it has that), memory bandwidth in GB/s."""

    memory: float
    tflops: float
    bandwidth: float
    bfloat16: bool = True


# by the makers' data sheets; what is reached of them is memory.py's business
GPUS = {
    "H200": Gpu(139, 989, 4800),
    "H100": Gpu(80, 989, 3350),
    "A100-80GB": Gpu(80, 312, 2039),
    "A100-40GB": Gpu(40, 312, 1555),
    "L40S": Gpu(48, 362, 864),
    "A40": Gpu(48, 150, 696),
    "A10": Gpu(24, 125, 600),
    "L4": Gpu(24, 121, 300),
    "RTX 5090": Gpu(32, 209, 1792),
    "RTX 4090": Gpu(24, 165, 1008),
    "RTX 3090": Gpu(24, 71, 936),
    "RTX 4070": Gpu(12, 58, 504),
    "RTX 3060": Gpu(12, 25, 360),
    "V100": Gpu(16, 15.7, 900, bfloat16=False),
    "T4": Gpu(16, 8.1, 320, bfloat16=False),
}
MEASURED_SHARE = 0.8, 0.9  # of the stated matrix rate and bandwidth that a large product and a large copy reach (H200)


def bandwidth_for(tflops: float) -> float:
    """GB/s of a card of which only the matrix rate is known: cards have about six bytes for a thousand operations."""
    return 6.0 * tflops


def this_gpu(device: torch.device, memory: float | None = None) -> Gpu:
    """A CUDA device as it is now: free memory (at most `memory`, GiB) and rates, measured in a tenth of a second.

    Rates are stated as a data sheet would, so that the same shares apply to both.
    """
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    gpu = Gpu(
        memory=min(memory or math.inf, (free + held) / GIB),
        tflops=product_rate(device, torch.bfloat16 if bfloat16 else torch.float32) / MEASURED_SHARE[0] / 1e12,
        bandwidth=copy_rate(device) / MEASURED_SHARE[1] / 1e9,
        bfloat16=bfloat16,
    )
    torch.cuda.empty_cache()
    return gpu


def reachable(device: torch.device) -> float:
    """GiB of a CUDA device that are free or already this process's."""
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / GIB


def stay_within(device: torch.device, memory: float | None) -> None:
    """Hold what this process allocates on a CUDA card to `memory` GiB less what CUDA takes beside it; None: free again.

    What is asked for beyond that fails as on a smaller card. Memory is taken page by page and not in pieces for each
    size: trainings that go through micro-batches and recompute blocks left a third of the pieces unused.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    share = 1.0 if memory is None else max(0.0, memory - BESIDE) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def product_rate(device: torch.device, dtype: torch.dtype, size: int = 4096) -> float:
    """Operations per second of a large matrix product of random numbers."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / timed(lambda: a @ a, device)


def copy_rate(device: torch.device, size: int = 2**28) -> float:
    """Bytes per second read and written by a large copy."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)


def timed(work: Callable[[], Tensor], device: torch.device, times: int = 10) -> float:
    """Seconds a piece of device work takes, the mean of ten after three."""
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / times
