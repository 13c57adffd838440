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

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from ..models.accounting import BFLOAT16, FLOAT32, Cost
from .execution import Execution
from .machines import GIB, MEASURED_SHARE, Gpu

USABLE = 0.9  # of a card's memory; the rest is the driver's, the display's and the allocator's
RESERVE = 0.5 * GIB  # workspaces of libraries
KEPT_SHARE = 0.93  # of the activations an eager pass keeps, that a compiled one does
SCATTERED = 1.05  # memory taken over memory used, where micro-batches or recomputed blocks take turns in it
EIGHT_BIT = 1.0 + 4.0 / 256.0  # bytes per value: a code, and a scale for every 256
MATRIX_SHARE = 0.9  # of the rate of a large product that the network's linear maps reach on average
ATTENTION_SHARE = 0.19  # and attention, whose products are small and whose softmax is none
ATTENTION_PASSES = 3.5  # its backward pass makes the weights again: two and a half forward passes
STREAM_BYTES = 165.0  # moved per value of the residual stream and block, forward and backward, outside products
ACCUMULATED_BYTES = 26.0  # moved per weight and micro-batch: narrow copies, gradients written, cast and added
UPDATED_BYTES = 50.0  # moved per weight and step: norm, moments, weights, average
GAP_SECONDS = 0.12e-3  # per block and micro-batch: some sixty kernels, each begun after the one before has ended
HOST_SECONDS = 1.0e-3  # per block and micro-batch: the host starting them, where they are not a graph
EIGHT_BIT_SHARE = 0.98  # of the speed, and of our preference: float32 where it costs nothing
HOST_AVERAGE_SHARE = 0.9


@dataclass(frozen=True)
class Fit:
    """How one architecture trains on one machine under one execution, as predicted."""

    execution: Execution
    memory_gib: float
    images_per_s: float

    def sentence(self, memory: float, images: int) -> str:
        """One line for people: what was chosen, GiB of GiB, images/s, hours."""
        hours = images / self.images_per_s / 3600
        return (
            f"{self.execution.in_words}: about {self.memory_gib:.1f} of {memory:.1f} GiB, "
            f"{self.images_per_s:,.0f} images/s, {hours:,.1f} hours"
        )


def footprint(cost: Cost, execution: Execution, batch: int, samples: int = 0) -> float:
    """GiB of device memory that training takes; `samples` bytes of data lie there too."""
    narrow = execution.precision == "bfloat16"
    moments = 2 * (FLOAT32 if execution.moments == "float32" else EIGHT_BIT)
    per_weight = 2 * FLOAT32 + moments + (FLOAT32 if execution.average == "device" else 0)
    per_weight += BFLOAT16 if narrow else 0
    value_bytes = BFLOAT16 if narrow else FLOAT32
    micro_batch = execution.micro_batch or batch
    kept = cost.activation_bytes(micro_batch, recomputed_blocks=execution.recomputed_blocks, value_bytes=value_bytes)
    aside = micro_batch * value_bytes * cost.block_values / 2  # gradients on their way through one block
    used = per_weight * cost.parameters + KEPT_SHARE * (kept + aside) + samples + RESERVE
    in_turns = micro_batch < batch or execution.recomputed_blocks > 0
    return used * (SCATTERED if in_turns else 1.0) / GIB


def images_per_s(cost: Cost, machine: Gpu, execution: Execution, batch: int) -> float:
    """Predicted images per second."""
    micro_batch = execution.micro_batch or batch
    passes = -(-batch // micro_batch)
    bandwidth = machine.bandwidth * MEASURED_SHARE[1] * 1e9
    again = execution.recomputed_blocks / cost.depth / 3  # a third forward pass for those
    rate = machine.tflops * MEASURED_SHARE[0] * 1e12
    linear = 3 * (cost.flops_forward - cost.flops_attention) / (rate * MATRIX_SHARE)
    arithmetic = linear + ATTENTION_PASSES * cost.flops_attention / (rate * ATTENTION_SHARE)
    moved = cost.block_input_values * cost.depth * STREAM_BYTES / bandwidth
    moved *= 1.0 if execution.precision == "bfloat16" else 2.0
    device = batch * (arithmetic + moved) * (1.0 + again) + GAP_SECONDS * cost.depth * passes
    device += cost.parameters * (passes * ACCUMULATED_BYTES + UPDATED_BYTES) / bandwidth
    host = 0.0 if execution.compiling == "graph" else HOST_SECONDS * cost.depth * passes
    return batch / max(device, host)


def options(cost: Cost, machine: Gpu, batch: int, device: str, eight_bit: bool) -> Iterator[Execution]:
    """Every execution worth a thought on a CUDA card."""
    precision = "bfloat16" if machine.bfloat16 else "float32"
    quarters = sorted({round(cost.depth * quarter / 8) for quarter in range(9)})
    for micro_batch in divisors(batch):
        for recomputed in quarters:
            for moments in ("float32", "8-bit") if eight_bit else ("float32",):
                for average in ("device", "host"):
                    yield Execution.model_validate(
                        {
                            "device": device,
                            "precision": precision,
                            "micro_batch": micro_batch,
                            "recomputed_blocks": recomputed,
                            "moments": moments,
                            "average": average,
                            # an average on the host is taken in by a thread, which a graph cannot start
                            "compiling": "graph" if average == "device" else "blocks",
                        }
                    )


def fits(
    cost: Cost, machine: Gpu, batch: int, *, device: str = "cuda", samples: int = 0, eight_bit: bool | None = None
) -> list[Fit]:
    """All executions that fit, the best first.

    `samples` bytes of data lie there too if a tenth of the card is enough, unless nothing fits beside them.
    `eight_bit`: whether moments may be stored so; None: if torchao is installed here.
    """
    eight_bit = find_spec("torchao") is not None if eight_bit is None else eight_bit
    resident = 0 < samples <= 0.1 * machine.memory * GIB
    found = []
    for execution in options(cost, machine, batch, device, eight_bit):
        if resident:
            execution = execution.model_copy(update={"samples": "device"})
        memory = footprint(cost, execution, batch, samples if resident else 0)
        if memory <= USABLE * machine.memory:
            found.append(Fit(execution, round(memory, 2), round(images_per_s(cost, machine, execution, batch), 2)))
    if resident and not found:
        return fits(cost, machine, batch, device=device, eight_bit=eight_bit)
    return sorted(found, key=lambda fit: (-preference(fit), fit.memory_gib))


def preference(fit: Fit) -> float:
    """Predicted speed, less what a departure from plain storage is held to cost."""
    eight_bit = EIGHT_BIT_SHARE if fit.execution.moments == "8-bit" else 1.0
    return fit.images_per_s * eight_bit * (HOST_AVERAGE_SHARE if fit.execution.average == "host" else 1.0)


def next_smaller(cost: Cost, machine: Gpu, batch: int, now: Execution, samples: int = 0) -> Execution | None:
    """What to go on with after memory ran out under `now`: the best that is predicted to need a seventh less."""

    def needed(execution: Execution) -> float:
        return footprint(cost, execution, batch, samples if execution.samples == "device" else 0)

    kept = {"precision": now.precision, "threads": now.threads}
    for fit in fits(cost, machine, batch, device=now.device, samples=samples):
        smaller = fit.execution.model_copy(update=kept)
        if needed(smaller) <= needed(now) * 6 / 7:  # asked again: what is kept may need more than what was found
            return smaller
    return None


def divisors(batch: int) -> list[int]:
    """Divisors of a batch, largest first: every micro-batch counts the same."""
    return [size for size in range(batch, 0, -1) if batch % size == 0]
