"""Experts as velocity fields, wherever their weights are: run together, each on its own rows and its own stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artifacts import UserError
from ..diffusion import Condition, Kind, Prediction, Schedule
from ..mixture.mixture import NextExpert, Rows
from .residency import Residency


@dataclass(frozen=True, eq=False)
class ExpertPool:
    """The experts of an ensemble on the sampling path. `numbers` maps a cluster to its expert's number in `residency`.

    A cluster without an expert has no number; running it is an error.
    """

    residency: Residency
    schedule: Schedule
    clusters: int
    numbers: Mapping[int, int]

    def __len__(self) -> int:
        return self.clusters

    def __getitem__(self, cluster: int) -> PoolExpert:
        return PoolExpert(self, cluster)

    @property
    def next_expert(self) -> NextExpert | None:
        """None where every expert is in memory, and stays."""
        return None if self.residency.resident else self._next

    def _next(self, waiting: Mapping[int, int]) -> int:
        """The expert of the last call while rows wait for it, then the next in a fixed order, copied meanwhile.

        A fixed order needs fewer copies than the longest queue (benchmarks/engine.py).
        """
        order = sorted(waiting, key=lambda k: (k - self.residency.current) % self.clusters)
        self.residency.current = order[0]
        numbers = [self._number(k) for k in order]
        self.residency.expect_first_of(numbers[1:], busy=self.residency.enter(numbers[0]))
        return order[0]

    def velocities(self, x: Tensor, t: Tensor, condition: Condition | None, rows: Sequence[Rows]) -> list[Tensor]:
        """Velocities of each entry's rows, float32 or wider. Experts in memory run first, while the next one is copied.

        On CUDA they run on their slots' streams. What is computed later on the current stream waits for all of them,
        and they for what was computed there before: no tensor is read too early or freed too soon.
        """
        residency = self.residency
        numbers = [self._number(k) for k, *_ in rows]
        order = sorted(range(len(rows)), key=lambda i: (residency.find(numbers[i]) is None, -rows[i][2]))
        wide = torch.promote_types(x.dtype, torch.float32)
        found = [x.new_empty(count, *x.shape[1:], dtype=wide) for _, _, count in rows]  # on the stream that reads it
        used: set[torch.cuda.Stream] = set()
        for place, i in enumerate(order):
            slot = residency.enter(numbers[i])
            if not residency.resident:
                residency.expect_first_of([numbers[j] for j in order[place + 1 :]], busy=slot)
            if slot.stream is not None:
                used.add(slot.stream)
                slot.stream.wait_stream(torch.cuda.current_stream(slot.device))
            with torch.cuda.stream(slot.stream) if slot.stream is not None else nullcontext():
                runner = slot.runner(residency.experts[numbers[i]], self.schedule)
                runner(x, t, condition, rows[i][1], found[i])
            residency.leave(slot)
        for stream in used:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        return found

    def _number(self, cluster: int) -> int:
        if cluster not in self.numbers:
            raise UserError(f"cluster {cluster}: has no expert, and this route runs it; use another route")
        return self.numbers[cluster]


@dataclass(frozen=True)
class PoolExpert:
    """One expert of a pool as a denoiser."""

    pool: ExpertPool
    cluster: int
    kind: Kind = Kind.VELOCITY

    @property
    def schedule(self) -> Schedule:
        return self.pool.schedule

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        (value,) = self.pool.velocities(x, t, condition, [(self.cluster, None, len(x))])
        return Prediction(Kind.VELOCITY, value)
