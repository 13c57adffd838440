"""Who answers which rows: a batch cut into one group per expert, with one word from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..process import Condition, Denoiser


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of a batch that one expert is asked about; `rows` None: all of them, as they stand."""

    expert: int
    rows: Tensor | None  # int64 [n], on the batch's device
    count: int
    x: Tensor
    t: Tensor
    condition: Condition | None

    def gathered(self) -> tuple[Tensor, Tensor, Condition | None]:
        """The rows themselves."""
        if self.rows is None:
            return self.x, self.t, self.condition
        condition = None if self.condition is None else self.condition[self.rows]
        return self.x[self.rows], self.t[self.rows], condition


class Engine(Protocol):
    """Something that answers for several experts, and is better asked about all of them at once.

    Its experts have numbers of its own. Not all of them need to be there.
    """

    def answers(self, groups: Sequence[Group]) -> list[Tensor]:
        """The velocity of every group's rows, in the groups' order."""
        ...

    @property
    def all_there(self) -> bool:
        """Whether every expert is on a device, and stays."""
        ...

    def holds(self, number: int) -> bool:
        """Whether this expert is on a device now, or about to be."""
        ...

    def prepare(self, number: int, coming: Sequence[int]) -> None:
        """This expert is asked next; of those `coming` later, have the first that is nowhere fetched meanwhile."""
        ...


@runtime_checkable
class Together(Protocol):
    """A denoiser that is one of an engine's experts."""

    @property
    def engine(self) -> Engine: ...
    @property
    def number(self) -> int: ...


@dataclass(frozen=True)
class Residents:
    """Which experts of a mixture are there, by their places in it."""

    engine: Engine
    numbers: Mapping[int, int]

    def holds(self, k: int) -> bool:
        return k not in self.numbers or self.engine.holds(self.numbers[k])

    def prepare(self, k: int, coming: Sequence[int]) -> None:
        if k in self.numbers:
            self.engine.prepare(self.numbers[k], [self.numbers[j] for j in coming if j in self.numbers])


def grouped(weights: Tensor, x: Tensor, t: Tensor, condition: Condition | None) -> list[Group]:
    """One group for each expert with any weight [B, K]; rows in their order.

    The host waits for the device once: it must know how many rows each expert has.
    """
    used = weights.T != 0  # [K, B]; NaN is asked about, not passed over
    counts = used.sum(dim=1)
    # places of the used entries, expert by expert: what nonzero() gives, without waiting for its length
    places = torch.argsort(used.flatten().to(torch.uint8), descending=True, stable=True)
    numbers: list[int] = counts.tolist()
    rows = places[: sum(numbers)] % len(x)
    groups = []
    for expert, (count, part) in enumerate(zip(numbers, torch.split(rows, numbers), strict=True)):
        if count:
            whole = count == len(x)
            groups.append(Group(expert, None if whole else part, count, x, t, condition))
    return groups


def asked(denoisers: Sequence[Denoiser], groups: Sequence[Group]) -> list[Tensor]:
    """The velocity of every group's rows: from an engine for all of its experts at once, from others one by one."""
    found: dict[int, Tensor] = {}
    engines: dict[Engine, dict[int, Group]] = {}
    for i, group in enumerate(groups):
        denoiser = denoisers[group.expert]
        if isinstance(denoiser, Together):
            engines.setdefault(denoiser.engine, {})[i] = replace(group, expert=denoiser.number)
        else:
            found[i] = denoiser(*group.gathered()).value
    for engine, parts in engines.items():
        found |= zip(parts, engine.answers(list(parts.values())), strict=True)
    return [found[i] for i in range(len(groups))]
