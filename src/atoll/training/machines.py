"""The machines islands run on: what their makers say, and what this one does."""

from __future__ import annotations

import difflib
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
BESIDE = 1.0  # GiB of a card that are CUDA's own and its libraries', in no allocator's count


@dataclass(frozen=True)
class Machine:
    """Memory in GiB, matrix rate in TFLOP/s (dense, bfloat16 if it has that), memory bandwidth in GB/s.

    `kind` is the device as torch calls it. An order trains on one core of a CPU by default, so there rate and bandwidth
    are a core's, and `cores` orders train side by side.
    """

    memory: float
    tflops: float
    bandwidth: float
    bfloat16: bool = True
    kind: str = "cuda"
    cores: int = 1


# by the makers' data sheets; what is reached of them is memory.py's business
GPUS = {
    "H200": Machine(139, 989, 4800),
    "H100": Machine(80, 989, 3350),
    "A100-80GB": Machine(80, 312, 2039),
    "A100-40GB": Machine(40, 312, 1555),
    "L40S": Machine(48, 362, 864),
    "RTX 6000 Ada": Machine(48, 364, 960),
    "A6000": Machine(48, 155, 768),
    "A40": Machine(48, 150, 696),
    "A10": Machine(24, 125, 600),
    "L4": Machine(24, 121, 300),
    "RTX 5090": Machine(32, 209, 1792),
    "RTX 5080": Machine(16, 113, 960),
    "RTX 4090": Machine(24, 165, 1008),
    "RTX 4080": Machine(16, 97, 717),
    "RTX 4070": Machine(12, 58, 504),
    "RTX 4060": Machine(8, 30, 272),
    "RTX 3090": Machine(24, 71, 936),
    "RTX 3080": Machine(10, 59, 760),
    "RTX 3070": Machine(8, 41, 448),
    "RTX 3060": Machine(12, 25, 360),
    "V100": Machine(16, 15.7, 900, bfloat16=False),
    "T4": Machine(16, 8.1, 320, bfloat16=False),
}
# float32, as training computes there; memory is shared with everything else, and the smallest that is sold
APPLE = {
    f"M{generation}{model}": Machine(memory, tflops, bandwidth, bfloat16=False, kind="mps")
    for generation, rows in {
        1: {"": (8, 2.6, 68), " Pro": (16, 5.2, 200), " Max": (32, 10.4, 400), " Ultra": (64, 20.8, 800)},
        2: {"": (8, 3.6, 100), " Pro": (16, 6.8, 200), " Max": (32, 13.6, 400), " Ultra": (64, 27.2, 800)},
        3: {"": (8, 4.1, 100), " Pro": (18, 7.4, 150), " Max": (36, 16.4, 400), " Ultra": (96, 32.8, 819)},
        4: {"": (16, 4.3, 120), " Pro": (24, 9.2, 273), " Max": (36, 18.4, 546)},
    }.items()
    for model, (memory, tflops, bandwidth) in rows.items()
}
CPUS = {"CPU": Machine(8, 0.08, 10, bfloat16=False, kind="cpu", cores=4)}  # `CPU 16 cores`
MACHINES = GPUS | APPLE | CPUS
# a Ti or Super is at least its plain namesake
MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|apple|amd|intel|sxm\d?|pcie|nvl|laptop|gpu|(?<=\d)\s*ti\b|super")


def machine_named(text: str) -> Machine:
    """A machine as people write it: `rtx4090`, `NVIDIA A100 40GB`, `T4 16 GB`, `M2 Max 64GB`, `CPU 16 cores`.

    Gigabytes behind the name are its memory, and tell apart those that are sold with more than one.
    """
    name = MAKERS.sub(" ", text.lower().replace("_", " "))
    said: dict[str, Any] = {}
    for what, pattern in (("memory", r"(\d+)\s*gi?b\b"), ("cores", r"(\d+)\s*(?:-\s*)?(?:cores?|threads?)\b")):
        if (found := re.search(pattern, name)) is not None:
            said[what] = int(found[1])
            name = name.replace(found[0], " ")
    plain = re.sub(r"[^a-z0-9]", "", name)
    alike = {known: machine for known, machine in MACHINES.items() if plain in ways_to_write(known)}
    if not alike:
        near = difflib.get_close_matches(plain, [squeezed(known) for known in MACHINES], n=3, cutoff=0.6)
        meant = [known for known in MACHINES if squeezed(known) in near]
        hint = f"did you mean {' or '.join(meant)}?" if meant else "`atoll plan --help` lists those known;"
        raise ValueError(f"machine {text!r} is not known; {hint} or give memory (GiB) and tflops")
    # of several sold under one name: the one with the memory that was said, or else the smallest
    machine = min(alike.values(), key=lambda one: (one.memory != said.get("memory", 0), one.memory))
    if "cores" in said and machine.kind != "cpu":
        raise ValueError(f"{text!r}: cores count for a CPU only; leave them out")
    return replace(machine, **said)


def squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def ways_to_write(known: str) -> set[str]:
    """A name of ours without spaces and capitals; without its memory, and without RTX or M... as it is on the box."""
    without_memory = squeezed(re.sub(r"-\d+GB$", "", known))
    short = without_memory.removeprefix("rtx")
    return {squeezed(known), without_memory, short, f"rtx{short}"} if not known.startswith("M") else {squeezed(known)}


MEASURED_SHARE = 0.8, 0.9  # of the stated matrix rate and bandwidth that a large product and a large copy reach (H200)


def bandwidth_for(tflops: float) -> float:
    """GB/s of a card of which only the matrix rate is known: cards have about six bytes for a thousand operations."""
    return 6.0 * tflops


def this_gpu(device: torch.device, memory: float | None = None) -> Machine:
    """A CUDA device as it is now: free memory (at most `memory`, GiB) and rates, measured in a tenth of a second.

    Rates are stated as a data sheet would, so that the same shares apply to both.
    """
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    gpu = Machine(
        memory=min(memory or math.inf, (free + held) / GIB),
        tflops=product_rate(device, torch.bfloat16 if bfloat16 else torch.float32) / MEASURED_SHARE[0] / 1e12,
        bandwidth=copy_rate(device) / MEASURED_SHARE[1] / 1e9,
        bfloat16=bfloat16,
    )
    torch.cuda.empty_cache()
    return gpu


def this_machine(device: str) -> Machine:
    """What is here: a CUDA card as it is now, Apple's GPU, or the CPU with what this process may use of it."""
    kind = torch.device(device).type
    if kind == "cuda":
        return this_gpu(torch.device(device))
    if kind == "mps":
        memory = torch.mps.recommended_max_memory() / GIB
        return Machine(memory, 5.0, 150, bfloat16=False, kind="mps")  # nobody's rate is known before it is measured
    cores = usable_cores()
    return Machine(free_memory_gib(), cpu_product_rate(cores) / 1e12, 10, bfloat16=False, kind="cpu", cores=cores)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_gib() -> float:
    """Memory that programs can still have here; where the system does not say, a modest guess."""
    try:
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8.0
    return kib / 2**20


def cpu_product_rate(cores: int, size: int = 256, lasting: float = 0.08, rounds: int = 4) -> float:
    """Operations per second of one core at a matrix product that its cache holds, as those of small networks are.

    Measured while all `cores` are at it, as islands side by side are: together each is slower than alone. A round has
    some turns of the system's scheduler, so that what other programs take for long is taken off; the best round counts,
    so that what they take for a moment is not.
    """

    def mean(_core: int) -> float:
        a = torch.randn(size, size)
        a @ a  # the first is slow
        began, times = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < lasting:
            a @ a
            times += 1
        return took / times

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(cores) as pool:
            seconds = min((list(pool.map(mean, range(cores))) for _ in range(rounds)), key=sum)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 * cores / sum(seconds)


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
    card = torch.cuda.current_device() if device.index is None else device.index  # a plain "cuda" is refused
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), card)


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
