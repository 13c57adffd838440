"""One velocity field from many experts.

The velocity of a data set is the weighted sum of its clusters' velocities, with the condition c inside:

    v(x, t | c) = sum_k p(k | x, t, c) v_k(x, t | c).                                      (1)

The router gives p, the route decides which terms are worth computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from ..process import Condition, Denoiser, Kind, Prediction, Schedule, guide, per_sample
from ..process import GuidanceWeights as GuidanceWeights  # others know it from here
from .asking import PerImageRouter, Router
from .groups import asked, grouped
from .routes import Full, PerImageRoute, Route
from .turns import Turns, residents_of


@dataclass(frozen=True)
class Mixture:
    """Experts behind bridges, mixed by a router: a velocity denoiser on their common schedule.

    An expert is run once per call, on the rows that give it weight and on no others, so top-1 costs about one
    expert however many there are. `guidance_weights` says how `guided` mixes the unconditional branch: "own" with
    p(k | x, t), which is exact and needs a router trained with condition dropout, "conditional" with the weights
    of the conditional branch, which saves the router's second half and often the second expert of a row.
    """

    denoisers: Sequence[Denoiser]
    router: Router
    route: Route = Full()
    guidance_weights: GuidanceWeights = "own"

    def __post_init__(self) -> None:
        if not self.denoisers:
            raise ValueError("a mixture needs at least one expert")
        _check_guidance_weights(self.guidance_weights)
        for k, denoiser in enumerate(self.denoisers):
            if denoiser.kind is not Kind.VELOCITY or denoiser.schedule != self.schedule:
                raise ValueError(
                    f"expert {k} gives {denoiser.kind} on {denoiser.schedule}, a mixture needs velocity on "
                    f"{self.schedule}: put it behind a Bridge"
                )

    @property
    def schedule(self) -> Schedule:
        return self.denoisers[0].schedule

    @property
    def kind(self) -> Kind:
        return Kind.VELOCITY

    def bind(self, rows: slice, seeds: Sequence[int]) -> Mixture:
        """The mixture for a batch that holds `rows` of the images of a call, whose seeds are `seeds`."""
        route = self.route.bind(rows, seeds) if isinstance(self.route, PerImageRoute) else self.route
        router = self.router.bind(rows, seeds) if isinstance(self.router, PerImageRouter) else self.router
        if route is self.route and router is self.router:
            return self
        return replace(self, route=route, router=router)

    def weights(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """What each expert counts [B, K], after the route; zero: it is not run."""
        return self.route(self._routed(x, t, condition), t)

    def __call__(self, x: Tensor, t: Tensor, condition: Condition | None) -> Prediction:
        return Prediction(Kind.VELOCITY, self._mix(x, t, condition, self.weights(x, t, condition)))

    def guided(
        self, x: Tensor, t: Tensor, condition: Condition, scale: float, weights: GuidanceWeights | None = None
    ) -> Prediction:
        """Classifier-free guidance; the two halves of a row that use the same expert go through it in one call.

        Router and route see the conditional half first: what they keep of it is `fixed`'s choice for both.
        """
        weights = weights or self.guidance_weights
        _check_guidance_weights(weights)
        if scale == 1.0:
            return self(x, t, condition)
        x2, t2, condition2 = torch.cat([x, x]), torch.cat([t, t]), Condition.cat([condition, condition.null()])
        if weights == "own":
            halves = self._routed(x2, t2, condition2).chunk(2)
            weights2 = torch.cat([self.route(half, t) for half in halves])
        else:
            weights2 = self.weights(x, t, condition).repeat(2, 1)
        conditional, unconditional = self._mix(x2, t2, condition2, weights2).chunk(2)
        return Prediction(Kind.VELOCITY, guide(conditional, unconditional, scale))

    @property
    def takes_turns(self) -> bool:
        """Whether its experts are not all there at the same time."""
        return residents_of(self) is not None

    def converse(self, seeds: Sequence[int], condition: Condition | None, scale: float, batch: int) -> Turns:
        """For images that do not go in step, because not all experts are there at the same time."""
        return Turns(self, seeds, condition, scale, batch)

    def _routed(self, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        weights = self.router(x, t, condition)
        if weights.shape != (len(x), len(self.denoisers)):
            raise ValueError(
                f"the router gave weights of shape {list(weights.shape)}, "
                f"{len(x)} rows and {len(self.denoisers)} experts need {[len(x), len(self.denoisers)]}"
            )
        return weights

    def _mix(self, x: Tensor, t: Tensor, condition: Condition | None, weights: Tensor) -> Tensor:
        """Equation (1), each expert on the rows it has weight for, summed in float32 or wider."""
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        weights = weights.to(total.dtype)
        groups = grouped(weights, x, t, condition)
        for group, value in zip(groups, asked(self.denoisers, groups), strict=True):
            share = weights[:, group.expert]
            if group.rows is None:
                total += per_sample(share, x) * value
            else:
                total.index_add_(0, group.rows, per_sample(share[group.rows], value) * value.to(total.dtype))
        return total


def _check_guidance_weights(weights: str) -> None:
    if weights not in get_args(GuidanceWeights):
        raise ValueError(f"guidance weights must be one of {', '.join(get_args(GuidanceWeights))}, got {weights!r}")
