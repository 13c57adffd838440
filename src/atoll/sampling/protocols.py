"""What the engine samples: a velocity field that is a routed sum, or a plain denoiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..diffusion import Bridge, Condition, Denoiser, Kind, Schedule


class Route(Protocol):
    def __call__(self, weights: Tensor, t: Tensor) -> Tensor:
        """Router weights [B, K] at times t [B] -> weights of the experts to run [B, K], rows summing to one."""
        ...


@runtime_checkable
class ImageRoute(Route, Protocol):
    """A route that depends on which images the rows are, or keeps something of them."""

    def bind(self, images: slice, seeds: Sequence[int]) -> Route:
        """The route for some images of a call, whose seeds are `seeds`."""
        ...


class Residents(Protocol):
    def next(self, waiting: Mapping[int, int]) -> int:
        """The expert to run now, given how many rows wait for each; the one after it is copied meanwhile."""
        ...


@runtime_checkable
class Routed(Protocol):
    """A velocity field that is a weighted sum over K parts."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def route(self) -> Route: ...
    @property
    def residents(self) -> Residents | None:
        """None: all parts are in memory and run in the same round."""
        ...

    def routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """The router's weights [B, K]."""
        ...

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        """sum_k weights[:, k] v_k(x, t | condition), [B, ...] in float32 or wider; parts of weight 0 do not run."""
        ...


@dataclass(frozen=True)
class Unrouted:
    """One denoiser as a sum of one part."""

    denoiser: Denoiser
    residents: None = None

    @property
    def schedule(self) -> Schedule:
        return self.denoiser.schedule

    @property
    def route(self) -> Route:
        return lambda weights, t: weights

    def routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return x.new_ones(len(x), 1)

    def velocity(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        denoiser = self.denoiser
        if denoiser.kind is not Kind.VELOCITY:
            # keeps the evaluation inside the schedule's range: epsilon at t = 1 and x0 at t = 0 hold no velocity
            denoiser = Bridge(denoiser, onto=denoiser.schedule)
        return denoiser(x, t, condition).value


def as_routed(model: Routed | Denoiser) -> Routed:
    return model if isinstance(model, Routed) else Unrouted(model)
