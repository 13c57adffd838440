"""Requests for images, and where their images stand on the way from noise to data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..diffusion import Condition
from .noise import initial_noise, step_noise
from .protocols import Route, Routed
from .settings import Sampling
from .solvers import SOLVERS, GridPath, Solver


@dataclass(eq=False)
class Request:
    """Images that advance together: seeds [N], their condition [N] or None, and how. `first` is the place of image 0.

    The engine sets `latents`, float32 [N, ...] at t = 0 of the model's path, at the end. Branch 0 of guidance is the
    conditional one, branch 1 the unconditional one.
    """

    seeds: Sequence[int]
    condition: Condition | None
    sampling: Sampling
    route: Route | None = None  # None: the model's own
    solver: Solver | None = None  # None: that of `sampling`
    times: Tensor | None = None  # of the grid; None: those of `sampling`
    noise: Tensor | None = None  # standard normal [N, ...]; None: drawn from the seeds
    first: int = 0
    latents: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.condition is not None and len(self.condition) != len(self.seeds):
            raise ValueError(f"{len(self.seeds)} seeds need as many conditions, got {len(self.condition)}")
        if self.condition is None and self.sampling.guidance != 1.0:
            raise ValueError(f"guidance {self.sampling.guidance} needs a condition; use guidance 1 without one")

    def __len__(self) -> int:
        return len(self.seeds)

    def split(self, size: int) -> Iterator[Request]:
        """Requests of at most so many images each."""
        for first in range(0, len(self), size):
            rows = slice(first, first + size)
            condition = None if self.condition is None else self.condition[rows]
            yield replace(self, seeds=self.seeds[rows], condition=condition, first=self.first + first)

    def start(self, model: Routed, shape: Sequence[int], device: torch.device) -> None:
        """Draw the noise and ask the solver for its first question."""
        here = None if self.condition is None else self.condition.to(device)
        self.conditions = [] if here is None else [here, here.null()]
        self.path = GridPath(model.schedule, self.sampling.times(model.schedule) if self.times is None else self.times)
        self.routing = self.route or model.route
        self.once = getattr(self.routing, "once", False)
        self.routed: list[Tensor | None] = [None, None]  # the router's weights [N, K], by branch
        self.chosen: Tensor | None = None  # after the route, in the conditional branch
        self.owed: dict[tuple[int, int], float] = {}  # (branch, expert): weight, while experts take turns
        self.terms: dict[tuple[int, int], Tensor] = {}  # of the experts that ran since
        self.step = 0
        noise = initial_noise(self.seeds, shape) if self.noise is None else self.noise
        solver = self.solver or SOLVERS[self.sampling.solver]
        self._walk = solver(self.path.sigma[0] * noise.to(device), self.path, partial(step_noise, self.seeds, shape))
        self.x, self.t = next(self._walk)

    @property
    def branches(self) -> range:
        """Those that are needed at its time."""
        return range(2 if self.sampling.guides_at(self.t) else 1)

    def needs_router(self, branch: int) -> bool:
        """Whether the router is due; in a branch that never ran it is due at any time."""
        if branch == 1 and (self.once or self.sampling.guidance_weights == "conditional"):
            return False
        return self.routed[branch] is None or (not self.once and self.step % self.sampling.route_every == 0)

    def choose(self, branch: int, t: Tensor) -> Tensor:
        """Weights of the experts to run [N, K], at times t [N]."""
        weights = self.routed[branch]
        if self.chosen is not None and (self.once or weights is None):
            return self.chosen
        assert weights is not None
        chosen = self.routing(weights, t, self.seeds)
        if branch == 0:
            self.chosen = chosen
        return chosen

    def take(self, velocity: Tensor) -> list[Step]:
        """Send a velocity to the solver; a step, if it was the last one at a time of the grid."""
        assert self.routed[0] is not None
        assert self.chosen is not None
        step = Step(self, self.step, self.t, self.routed[0], self.chosen, self.x, velocity)
        try:
            self.x, self.t = self._walk.send(velocity.to(self.x.dtype))
        except StopIteration as end:
            self.latents = end.value
        else:
            if self.t > self.path.t[self.step + 1]:
                return []
            self.step += 1
        return [step]


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step of a request: the velocity was computed at (x, time)."""

    request: Request
    index: int
    time: float
    weights: Tensor  # of the router in the conditional branch [N, K]
    chosen: Tensor  # after the route [N, K]
    x: Tensor
    velocity: Tensor

    @property
    def latents(self) -> Tensor | None:
        """[N, ...], at the last step."""
        last = self.index == self.request.path.steps - 1
        return self.request.latents if last else None

    @property
    def x0(self) -> Tensor:
        """The clean latents as estimated at `time`, [N, ...]."""
        return self.request.path.x0(self.index, self.x, self.velocity)

    @property
    def images(self) -> slice:
        """Places of the images in the call."""
        return slice(self.request.first, self.request.first + len(self.request))
