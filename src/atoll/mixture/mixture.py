"""One velocity field from many experts.

The velocity of a data set is the weighted sum of its clusters' velocities, with the condition c inside:

    v(x, t | c) = sum_k p(k | x, t, c) v_k(x, t | c).                                      (1)

The router gives p, the route decides which terms are worth computing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..diffusion import Condition, Denoiser, Kind, Prediction, Schedule, per_sample
from ..sampling import Route
from .routes import Full

RouterFunction = Callable[[Tensor, Tensor, Condition | None], Tensor]  # (x, t, condition) -> weights [B, K]
NextExpert = Callable[[Mapping[int, int]], int]  # {expert: rows that wait for it} -> the one to run now
Rows = tuple[int, Tensor | None, int]  # an expert, its rows int64 [n] of a batch (None: all), and n


class Experts(Protocol):
    """K velocity fields on one schedule that run on parts of a batch. `next_expert` as in `sampling.Routed`."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def next_expert(self) -> NextExpert | None: ...
    def __len__(self) -> int: ...
    def velocities(self, x: Tensor, t: Tensor, condition: Condition | None, rows: Sequence[Rows]) -> list[Tensor]:
        """The velocity [n, ...] of each entry of `rows`, float32 or wider."""
        ...


@dataclass(frozen=True)
class Denoisers:
    """Denoisers as experts, run one after another."""

    denoisers: Sequence[Denoiser]
    next_expert: None = None

    def __post_init__(self) -> None:
        if not self.denoisers:
            raise ValueError("a mixture needs at least one expert")
        for k, denoiser in enumerate(self.denoisers):
            if denoiser.kind is not Kind.VELOCITY or denoiser.schedule != self.schedule:
                raise ValueError(
                    f"expert {k} gives {denoiser.kind} on {denoiser.schedule}, a mixture needs velocity on "
                    f"{self.schedule}: put it behind a Bridge"
                )

    @property
    def schedule(self) -> Schedule:
        return self.denoisers[0].schedule

    def __len__(self) -> int:
        return len(self.denoisers)

    def velocities(self, x: Tensor, t: Tensor, condition: Condition | None, rows: Sequence[Rows]) -> list[Tensor]:
        return [self.denoisers[k](*part_of(x, t, condition, which)).value for k, which, _ in rows]


def part_of(
    x: Tensor, t: Tensor, condition: Condition | None, rows: Tensor | None
) -> tuple[Tensor, Tensor, Condition | None]:
    """Some rows of a batch; None: all."""
    if rows is None:
        return x, t, condition
    return x[rows], t[rows], None if condition is None else condition[rows]


@dataclass(frozen=True)
class Mixture:
    """Experts mixed by a router: a velocity denoiser on their schedule, which the sampling path is.

    An expert runs once per call, on the rows that give it weight and on no others, so top-1 costs about one expert
    however many there are.
    """

    experts: Experts
    router: RouterFunction
    route: Route = field(default_factory=Full)

    @staticmethod
    def of(denoisers: Sequence[Denoiser], router: RouterFunction, route: Route | None = None) -> Mixture:
        return Mixture(Denoisers(denoisers), router, route or Full())

    @property
    def schedule(self) -> Schedule:
        return self.experts.schedule

    @property
    def kind(self) -> Kind:
        return Kind.VELOCITY

    @property
    def next_expert(self) -> NextExpert | None:
        return self.experts.next_expert

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        weights = self.route(self.routed(x, t, condition), t, ())
        return Prediction(Kind.VELOCITY, self.velocity(x, t, condition, weights))

    def routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """The router's weights [B, K]."""
        weights = self.router(x, t, condition)
        if weights.shape != (len(x), len(self.experts)):
            raise ValueError(
                f"the router gave weights of shape {list(weights.shape)}, "
                f"{len(x)} rows and {len(self.experts)} experts need {[len(x), len(self.experts)]}"
            )
        return weights

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        """Equation (1) with these weights [B, K], each expert on the rows it has weight for, in float32 or wider."""
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        weights = weights.to(total.dtype)
        rows = rows_by_expert(weights)
        for (k, which, _), value in zip(rows, self.experts.velocities(x, t, condition, rows), strict=True):
            if which is None:
                total += per_sample(weights[:, k], x) * value
            else:
                total.index_add_(0, which, per_sample(weights[which, k], value) * value.to(total.dtype))
        return total


def rows_by_expert(weights: Tensor) -> list[Rows]:
    """The rows of each expert that has any weight [B, K], in their order.

    The host waits for the device once: it must know how many rows each expert has.
    """
    used = weights.T != 0  # [K, B]; a row of NaN is computed, not left out
    counts: list[int] = used.sum(dim=1).tolist()
    # places of the used entries, expert by expert: what nonzero() gives, without waiting for its length
    places = torch.argsort(used.flatten().to(torch.uint8), descending=True, stable=True)
    rows = (places[: sum(counts)] % len(weights)).split(counts)
    return [
        (k, None if count == len(weights) else part, count)
        for k, (count, part) in enumerate(zip(counts, rows, strict=True))
        if count
    ]
