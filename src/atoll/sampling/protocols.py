"""What the engine samples: a velocity field that is a routed sum, or a plain denoiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..diffusion import Bridge, Condition, Denoiser, Kind, Schedule

# Router weights [B, K], times t [B] and the seeds of the B images -> weights of the experts to run [B, K], rows summing
# to one. A route with an attribute `once = True` is taken at an image's first step, and holds for both branches.
Route = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


@runtime_checkable
class Routed(Protocol):
    """A velocity field that is a weighted sum over K experts.

    `next_expert` gives the expert to run now, of those for which some rows wait: {expert: rows}. It is None where all
    experts are in memory and run in one round.
    """

    @property
    def schedule(self) -> Schedule: ...
    @property
    def route(self) -> Route: ...
    @property
    def next_expert(self) -> Callable[[Mapping[int, int]], int] | None: ...
    def routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """The router's weights [B, K]."""
        ...

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        """sum_k weights[:, k] v_k(x, t | condition), [B, ...] in float32 or wider; experts of weight 0 do not run."""
        ...


@dataclass(frozen=True)
class Unrouted:
    """A denoiser as a sum of one expert."""

    denoiser: Denoiser
    next_expert: None = None

    @property
    def schedule(self) -> Schedule:
        return self.denoiser.schedule

    def route(self, weights: Tensor, t: Tensor, seeds: Sequence[int]) -> Tensor:
        return weights

    def routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return x.new_ones(len(x), 1)

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        denoiser = self.denoiser
        if denoiser.kind is not Kind.VELOCITY:  # epsilon at t = 1 and x0 at t = 0 hold no velocity: a bridge keeps away
            denoiser = Bridge(denoiser, onto=denoiser.schedule)
        return denoiser(x, t, condition).value
