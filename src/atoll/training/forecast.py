"""What training a network would take on a machine that nobody has at hand, by the model that `train` chooses with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..models.accounting import Cost
from .execution import Execution
from .machines import Machine
from .memory import Fit, fits


@dataclass(frozen=True)
class Alternative:
    """What one setting other than the chosen one would cost: `change` as `train --set` takes it."""

    change: str
    fit: Fit


@dataclass(frozen=True)
class Forecast:
    """One network on one machine, without samples on the device."""

    gpu: str
    machine: Machine
    unlimited: Fit  # what the same card would choose with any amount of memory
    least: Fit  # what needs least memory, however slow
    chosen: Fit | None  # None: nothing fits
    alternatives: tuple[Alternative, ...]

    @property
    def speed_kept(self) -> float | None:
        """Of the speed with any amount of memory."""
        return None if self.chosen is None else self.chosen.images_per_s / self.unlimited.images_per_s


def forecast(cost: Cost, gpu: str, machine: Machine, batch: int, *, eight_bit: bool) -> Forecast:
    """What would be chosen for a batch, and what other settings would cost."""
    anything = fits(cost, replace(machine, memory=math.inf), batch, eight_bit=eight_bit)
    found = fits(cost, machine, batch, eight_bit=eight_bit)
    chosen = found[0] if found else None
    others = () if chosen is None else tuple(alternatives(cost, machine, batch, chosen.execution, eight_bit))
    least = min(anything, key=lambda fit: (fit.memory_gib, -fit.images_per_s))
    return Forecast(gpu, machine, anything[0], least, chosen, others)


def alternatives(cost: Cost, machine: Machine, batch: int, chosen: Execution, eight_bit: bool) -> Iterator[Alternative]:
    """Each setting in turn changed by hand, the others as chosen.

    Not precision: what a card with bfloat16 reaches in float32 is in no table of ours.
    """
    micro_batch = chosen.micro_batch or batch
    settings: list[tuple[str, int | str]] = []
    if batch % (2 * micro_batch) == 0:
        settings.append(("micro_batch", 2 * micro_batch))
    if micro_batch % 2 == 0:
        settings.append(("micro_batch", micro_batch // 2))
    settings += [("recomputed_blocks", blocks) for blocks in (0, cost.depth // 2, cost.depth)]
    settings += [("moments", storage) for storage in (("float32", "8-bit") if eight_bit else ("float32",))]
    for name, value in settings:
        if getattr(chosen, name) == value:
            continue
        execution = chosen.model_copy(update={name: value})
        yield Alternative(f"{name}={value}", Fit.of(cost, machine, execution, batch))
