"""What a training needs of a card, and the execution that makes the best of one.

Memory is counted: float32 weights and gradients, the moments and the average as they are stored, the copy of the
weights that bfloat16 computes with, the activations of one micro-batch, what the largest kernels need on the side, and
what the allocator loses between blocks.

Time is a roofline over three things: matrix products at shares of the card's rate; all between them, which moves a
constant number of bytes per value of the residual stream, at its bandwidth; and the weights, which every micro-batch
reads to accumulate gradients and every step to update. A network so small that the host cannot start its kernels in
that time waits for the host instead, unless the step is a replayed graph. benchmarks/train_step.py compares both with
an H200.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ..models.accounting import BFLOAT16, FLOAT32, Cost
from .execution import Execution
from .machines import GIB, MEASURED_SHARE, Machine

USABLE = 0.9  # of a card's memory; the rest is the driver's, the display's and the allocator's
RESERVE = 0.5 * GIB  # workspaces of libraries
KEPT_SHARE = 0.8  # of the activations an eager pass keeps, that a compiled one does
SCATTERED = 1.1  # memory taken over memory used, where micro-batches or recomputed blocks take turns in it
EIGHT_BIT = 1.0 + 4.0 / 256.0  # bytes per value: a code, and a scale for every 256
MATRIX_SHARE = 0.9  # of the rate of a large product that the network's linear maps reach on average
ATTENTION_SHARE = 0.19  # and attention, whose products are small and whose softmax is none
ATTENTION_PASSES = 3.5  # its backward pass makes the weights again: two and a half forward passes
STREAM_BYTES = 165.0  # moved per value of the residual stream and block, forward and backward, outside products
ACCUMULATED_BYTES = 26.0  # moved per weight and micro-batch: narrow copies, gradients written, cast and added
UPDATED_BYTES = 50.0  # moved per weight and step: norm, moments, weights, average
GAP_SECONDS = 0.12e-3  # per block and micro-batch: some sixty kernels, each begun after the one before has ended
HOST_SECONDS = 1.0e-3  # per block and micro-batch: the host starting them, where they are not a graph
EIGHT_BIT_SHARE = 0.98  # of the speed that is left with moments in eight bits
HOST_ACTIVATIONS = 0.5 * GIB  # of a micro-batch on a CPU, which takes no less time for more
CORE_SHARE = 0.6  # of a core's rate at products its cache holds, that a step in eager mode reaches (two Xeon cores)
CORE_SECONDS = 2.5e-3  # per block and micro-batch, whatever its size
APPLE_SHARE = 0.3  # of an Apple GPU's rate in eager mode; a guess


@dataclass(frozen=True)
class Fit:
    """How one architecture trains on one machine under one execution, as predicted."""

    execution: Execution
    memory_gib: float
    images_per_s: float

    @staticmethod
    def of(cost: Cost, machine: Machine, execution: Execution, batch: int, samples: int = 0) -> Fit:
        memory, speed = footprint(cost, execution, batch, samples), images_per_s(cost, machine, execution, batch)
        return Fit(execution, round(memory, 2), round(speed, 2))

    def sentence(self, memory: float, images: int) -> str:
        """One line for people: what was chosen, GiB of GiB, images/s, hours."""
        hours = images / self.images_per_s / 3600
        return (
            f"{self.execution.in_words}: about {self.memory_gib:.1f} of {memory:.1f} GiB, "
            f"{self.images_per_s:,.0f} images/s, {hours:,.1f} hours"
        )


def footprint(cost: Cost, execution: Execution, batch: int, samples: int = 0) -> float:
    """GiB of device memory that training takes; `samples` is the bytes of its data, wherever they lie."""
    narrow = execution.precision != "float32"
    moments = 2 * (FLOAT32 if execution.moments == "float32" else EIGHT_BIT)
    per_weight = 3 * FLOAT32 + moments
    per_weight += BFLOAT16 if narrow else 0
    value_bytes = BFLOAT16 if narrow else FLOAT32
    micro_batch = execution.micro_batch or batch
    kept = cost.activation_bytes(micro_batch, recomputed_blocks=execution.recomputed_blocks, value_bytes=value_bytes)
    aside = micro_batch * value_bytes * cost.block_values / 2  # gradients on their way through one block
    share = KEPT_SHARE if execution.device.startswith("cuda") else 1.0
    used = per_weight * cost.parameters + share * (kept + aside) + RESERVE
    used += samples if execution.samples == "device" else 0
    in_turns = micro_batch < batch or execution.recomputed_blocks > 0
    return used * (SCATTERED if in_turns else 1.0) / GIB


def images_per_s(cost: Cost, machine: Machine, execution: Execution, batch: int) -> float:
    """Predicted images per second; on a CPU of one core."""
    micro_batch = execution.micro_batch or batch
    passes = -(-batch // micro_batch)
    if machine.kind != "cuda":
        share, begun = (CORE_SHARE, CORE_SECONDS) if machine.kind == "cpu" else (APPLE_SHARE, HOST_SECONDS)
        eager = batch * cost.flops_training / (machine.tflops * share * 1e12) + begun * cost.depth * passes
        return batch / eager
    bandwidth = machine.bandwidth * MEASURED_SHARE[1] * 1e9
    again = execution.recomputed_blocks / cost.depth / 3  # a third forward pass for those
    rate = machine.tflops * MEASURED_SHARE[0] * 1e12
    linear = 3 * (cost.flops_forward - cost.flops_attention) / (rate * MATRIX_SHARE)
    arithmetic = linear + ATTENTION_PASSES * cost.flops_attention / (rate * ATTENTION_SHARE)
    moved = cost.block_input_values * cost.depth * STREAM_BYTES / bandwidth
    moved *= 2.0 if execution.precision == "float32" else 1.0
    device = batch * (arithmetic + moved) * (1.0 + again) + GAP_SECONDS * cost.depth * passes
    device += cost.parameters * (passes * ACCUMULATED_BYTES + UPDATED_BYTES) / bandwidth
    host = 0.0 if execution.compiling == "graph" else HOST_SECONDS * cost.depth * passes
    share = EIGHT_BIT_SHARE if execution.moments == "8-bit" else 1.0
    return share * batch / max(device, host)


def plain_execution(cost: Cost, batch: int, device: str, activations: float = HOST_ACTIVATIONS) -> Execution:
    """How a network trains where there is no CUDA card: by itself and its batch alone, so that equal orders give equal
    experts. A batch is cut where it would take more than so many bytes of activations, and no less time.
    """
    values = cost.activation_bytes(1, value_bytes=FLOAT32)
    parts = next((size for size in divisors(batch) if size * values <= activations), 1)
    return Execution(device=device, micro_batch=None if parts == batch else parts)


def options(
    cost: Cost, machine: Machine, batch: int, device: str, eight_bit: bool, insisted: Mapping[str, Any]
) -> Iterator[Execution]:
    """Every execution worth a thought on a machine, that has the settings which are `insisted` on."""
    if machine.kind != "cuda":
        yield Execution.model_validate({**plain_execution(cost, batch, machine.kind).model_dump(), **insisted})
        return
    worth: dict[str, Sequence[Any]] = {
        "micro_batch": divisors(batch),
        "recomputed_blocks": sorted({round(cost.depth * eighths / 8) for eighths in range(9)}),
        "moments": ("float32", "8-bit") if eight_bit else ("float32",),
    }
    worth |= {name: (value,) for name, value in insisted.items() if name in worth}
    for choice in itertools.product(*worth.values()):
        settings = dict(zip(worth, choice, strict=True))
        yield Execution.model_validate(
            {
                "device": device,
                "precision": "bfloat16" if machine.bfloat16 else "float32",
                "compiling": "graph",
                **settings,
                **insisted,
            }
        )


def fits(
    cost: Cost,
    machine: Machine,
    batch: int,
    *,
    device: str = "cuda",
    samples: int = 0,
    eight_bit: bool | None = None,
    insisted: Mapping[str, Any] = MappingProxyType({}),
) -> list[Fit]:
    """All executions that fit, the best first.

    `samples` bytes of data lie there too if a tenth of the card is enough, unless nothing fits beside them.
    `eight_bit`: whether moments may be stored so; None: if torchao is installed here.
    `insisted`: settings of an execution that are not to be chosen.
    """
    eight_bit = find_spec("torchao") is not None if eight_bit is None else eight_bit
    if 0 < samples <= 0.1 * machine.memory * GIB and "samples" not in insisted and machine.kind == "cuda":
        beside = {**insisted, "samples": "device"}
        found = fits(cost, machine, batch, device=device, samples=samples, eight_bit=eight_bit, insisted=beside)
        if found:
            return found
    found = []
    for execution in options(cost, machine, batch, device, eight_bit, insisted):
        memory = footprint(cost, execution, batch, samples)
        if memory <= USABLE * machine.memory:
            found.append(Fit.of(cost, machine, execution, batch, samples))
    return sorted(found, key=lambda fit: (-preference(fit), fit.memory_gib))


def preference(fit: Fit) -> float:
    """Predicted speed; where it is all the same, plain storage."""
    return fit.images_per_s * (1.005 if fit.execution.moments == "float32" else 1.0)


def divisors(batch: int) -> list[int]:
    """Divisors of a batch, largest first: every micro-batch counts the same."""
    return [size for size in range(batch, 0, -1) if batch % size == 0]
