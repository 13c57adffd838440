"""What a training needs of a device, and the settings that make the best of one.

Memory is counted: weights, gradients, average and moments as they are stored, the copy of the weights that bfloat16
computes with, and the activations of one micro-batch. Speed is the network's FLOPs at one utilization of the device.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from ..models.accounting import BFLOAT16, FLOAT32, Cost
from .compute import ComputeConfig

GIB = 2**30
USABLE = 0.9  # of a GPU's memory; the rest is the driver's, the display's and the allocator's
RESERVE = 0.5 * GIB  # workspaces of libraries
EIGHT_BIT = 1.0 + 4.0 / 256.0  # bytes per value: a code, and a scale for every 256
UTILIZATION = 0.4  # of a device's matrix rate that training reaches (0.42 on an H200 with 607M weights)
PASS_IMAGES = 4  # images that take as long as what a micro-batch costs in itself: all weights are read, and gradients
PASS_SECONDS = 1e-3  # that a micro-batch takes at least, however small the network
HOST_ACTIVATIONS = 0.5 * GIB  # of a micro-batch on a CPU, which takes no less time for more


@dataclass(frozen=True)
class Machine:
    """Memory in GiB and matrix rate in TFLOP/s (dense, bfloat16 if it has that), of one core if it is a CPU.

    `kind` is the device as torch names it. An order trains on one core of a CPU, so `cores` orders train side by side.
    """

    memory: float
    tflops: float
    bfloat16: bool = True
    kind: str = "cuda"
    cores: int = 1


_SHEETS = {  # GiB and TFLOP/s, by the makers' data sheets
    **{"H200": (139, 989), "H100": (80, 989), "A100-80GB": (80, 312), "A100-40GB": (40, 312), "L40S": (48, 362)},
    **{"A6000": (48, 155), "A10": (24, 125), "L4": (24, 121), "RTX 5090": (32, 209), "RTX 4090": (24, 165)},
    **{"RTX 4080": (16, 97), "RTX 4070": (12, 58), "RTX 3090": (24, 71), "RTX 3080": (10, 59), "RTX 3060": (12, 25)},
}
_OLDER = {"V100": (16, 15.7), "T4": (16, 8.1)}  # in float32
GPUS = {name: Machine(*row) for name, row in _SHEETS.items()}
GPUS |= {name: Machine(*row, bfloat16=False) for name, row in _OLDER.items()}
CPU_TFLOPS, APPLE_TFLOPS = 0.08, 2.6
OTHERS = {
    "Apple": Machine(8, APPLE_TFLOPS, bfloat16=False, kind="mps"),  # the smallest M1
    "CPU": Machine(8, CPU_TFLOPS, bfloat16=False, kind="cpu", cores=4),  # `CPU 16 cores`
}
MACHINES = GPUS | OTHERS


def machine_named(text: str) -> Machine:
    """A machine of the table, however it is spaced: `RTX 4090`, `rtx4090`, `4090`; of a CPU, `CPU 16 cores`."""
    name, _, cores = re.fullmatch(r"(.*?)(\s+(\d+)\s*cores?)?\s*", text).groups()  # type: ignore[union-attr]
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {re.sub(r"[^a-z0-9]", "", each.lower()): each for each in MACHINES}
    found = known.get(plain) or known.get(f"rtx{plain}")
    if found is None:
        near = [known[each] for each in difflib.get_close_matches(plain, known, n=3, cutoff=0.6)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(MACHINES)};"
        raise ValueError(f"machine {text!r} is not known; {hint} or give memory (GiB) and tflops")
    machine = MACHINES[found]
    if cores is None:
        return machine
    if machine.kind != "cpu":
        raise ValueError(f"{text!r}: cores count for a CPU only; leave them out")
    return replace(machine, cores=int(cores))


def this_machine(device: str, limit: float | None = None) -> Machine:
    """The device as it is now, with at most `limit` GiB: free memory, and on CUDA the measured rate."""
    kind = torch.device(device).type
    if kind == "mps":
        memory = torch.mps.recommended_max_memory() / GIB
        return Machine(memory, APPLE_TFLOPS, bfloat16=False, kind="mps")
    if kind != "cuda":
        return Machine(free_memory_gib(), CPU_TFLOPS, bfloat16=False, kind="cpu", cores=usable_cores())
    gpu = torch.device(device)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    rate = product_rate(gpu, torch.bfloat16 if bfloat16 else torch.float32)
    return Machine(min(limit or math.inf, reachable(gpu)), rate / 1e12, bfloat16)


def product_rate(device: torch.device, dtype: torch.dtype, size: int = 4096, times: int = 10) -> float:
    """FLOP per second of a large matrix product on a CUDA device."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    for counted in (0, times):  # the first are slow
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(counted or 3):
            a @ a
        torch.cuda.synchronize(device)
    return 2 * size**3 * times / (time.perf_counter() - began)


def reachable(device: torch.device) -> float:
    """GiB of a CUDA device that are free or already this process's."""
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / GIB


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_gib() -> float:
    """Memory of this machine that programs can still have; 8 where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8.0
    return kib / 2**20


@dataclass(frozen=True)
class Fit:
    """How one network trains on one machine under some settings, as predicted."""

    compute: ComputeConfig
    memory_gib: float
    images_per_s: float

    @staticmethod
    def of(cost: Cost, machine: Machine, compute: ComputeConfig, batch: int) -> Fit:
        memory, speed = footprint(cost, compute, batch), images_per_s(cost, machine, compute, batch)
        return Fit(compute, round(memory, 2), round(speed, 2))

    def sentence(self, memory: float, images: int) -> str:
        """One line: settings, GiB of GiB, images/s, hours."""
        hours = images / self.images_per_s / 3600
        return (
            f"{self.compute.in_words}: about {self.memory_gib:.1f} of {memory:.1f} GiB, "
            f"{self.images_per_s:,.0f} images/s, {hours:,.1f} hours"
        )


def footprint(cost: Cost, compute: ComputeConfig, batch: int) -> float:
    """GiB of device memory that training takes."""
    value_bytes = FLOAT32 if compute.precision == "float32" else BFLOAT16
    moments = 2 * (FLOAT32 if compute.moments == "float32" else EIGHT_BIT)
    per_weight = 3 * FLOAT32 + moments + (0 if compute.precision == "float32" else BFLOAT16)
    activations = cost.activation_bytes(
        compute.micro_batch or batch, recomputed_blocks=compute.checkpointed_blocks, value_bytes=value_bytes
    )
    return (per_weight * cost.parameters + activations + RESERVE) / GIB


def images_per_s(cost: Cost, machine: Machine, compute: ComputeConfig, batch: int) -> float:
    """Predicted images per second; on a CPU of one core."""
    again = compute.checkpointed_blocks / cost.depth / 3  # a third forward pass for those
    slower = (1.0 + again) * (1.0 + PASS_IMAGES / (compute.micro_batch or batch))
    slower *= 1.02 if compute.moments == "8-bit" else 1.0
    rate = UTILIZATION * machine.tflops * 1e12 / (cost.flops_training * slower)
    return min(rate, (compute.micro_batch or batch) / PASS_SECONDS)


def host_compute(cost: Cost, batch: int, device: str) -> ComputeConfig:
    """How a network trains without a CUDA device: by network and batch alone, so that equal orders give equal experts.

    A batch is cut where its activations would take more than HOST_ACTIVATIONS, which takes no more time.
    """
    values = cost.activation_bytes(1, value_bytes=FLOAT32)
    parts = next((size for size in divisors(batch) if size * values <= HOST_ACTIVATIONS), 1)
    return ComputeConfig(device=device, micro_batch=None if parts == batch else parts)


def fits(
    cost: Cost,
    machine: Machine,
    batch: int,
    *,
    device: str = "cuda",
    eight_bit: bool | None = None,
    insisted: Mapping[str, Any] = MappingProxyType({}),
) -> list[Fit]:
    """All settings worth trying that fit on a machine, the fastest first.

    `eight_bit`: whether moments may be stored so; None: if torchao is installed. `insisted`: settings not to choose.
    """
    if machine.kind != "cuda":
        chosen = host_compute(cost, batch, machine.kind).model_dump()
        found = [Fit.of(cost, machine, ComputeConfig.model_validate({**chosen, **insisted}), batch)]
        return [fit for fit in found if fit.memory_gib <= USABLE * machine.memory]
    eight_bit = find_spec("torchao") is not None if eight_bit is None else eight_bit
    worth: dict[str, Any] = {
        "micro_batch": divisors(batch),
        "checkpointed_blocks": [0, cost.depth // 2, cost.depth],
        "moments": ["float32", "8-bit"] if eight_bit else ["float32"],
    }
    worth |= {name: [value] for name, value in insisted.items() if name in worth}
    precision = "bfloat16" if machine.bfloat16 else "float32"
    fixed = {"device": device, "precision": precision, "compile": "cuda-graph", **insisted}
    found = []
    for values in itertools.product(*worth.values()):
        compute = ComputeConfig.model_validate({**fixed, **dict(zip(worth, values, strict=True))})
        if compute.moments == "8-bit" and "compile" not in insisted:  # the host has a part in such a step
            compute = compute.model_copy(update={"compile": "blocks"})
        fit = Fit.of(cost, machine, compute, batch)
        if fit.memory_gib <= USABLE * machine.memory:
            found.append(fit)
    return sorted(found, key=lambda fit: (-fit.images_per_s, fit.memory_gib))


def divisors(batch: int) -> list[int]:
    """Divisors of a batch, largest first: every micro-batch counts the same."""
    return [size for size in range(batch, 0, -1) if batch % size == 0]
