"""Requests for images, and where each of them stands on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..diffusion import Condition, wide_dtype
from .noise import initial_noise, step_noise
from .protocols import ImageRoute, Route, Routed
from .settings import Sampling
from .solvers import SOLVERS, GridPath, Solver, Walk

SAME_TIME = 1e-6


@dataclass(eq=False)
class Request:
    """Images to sample: seeds [N], their condition [N] or None, and how. `images` are their places in a call.

    The engine fills `latents`, float32 [N, ...] at t = 0 of the model's path; all are there when `missing` is 0.
    """

    seeds: Sequence[int]
    condition: Condition | None
    sampling: Sampling
    route: Route | None = None  # None: the model's own
    solver: Solver | None = None  # None: that of `sampling`
    times: Tensor | None = None  # of the grid; None: those of `sampling`
    noise: Tensor | None = None  # standard normal [N, ...]; None: drawn from the seeds
    images: slice = field(default_factory=lambda: slice(0, None), kw_only=True)
    latents: Tensor | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.condition is not None and len(self.condition) != len(self.seeds):
            raise ValueError(f"{len(self.seeds)} seeds need as many conditions, got {len(self.condition)}")
        if self.condition is None and self.sampling.guidance != 1.0:
            raise ValueError(f"guidance {self.sampling.guidance} needs a condition; use guidance 1 without one")
        self.missing = len(self.seeds)

    def __getitem__(self, rows: slice) -> Request:
        """Some of the images as a request of their own."""
        return replace(
            self,
            seeds=self.seeds[rows],
            condition=None if self.condition is None else self.condition[rows],
            noise=None if self.noise is None else self.noise[rows],
            images=slice(self.images.start + rows.start, self.images.start + rows.stop),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step of some images of a request (`rows`): the velocity was computed at (x, time)."""

    request: Request
    rows: slice
    index: int
    time: float
    weights: Tensor  # of the router in the conditional branch [n, K]
    chosen: Tensor  # after the route [n, K]
    latents: Tensor | None = field(repr=False)  # [n, ...], at the last step
    _x: Tensor = field(repr=False)
    _velocity: Tensor = field(repr=False)
    _path: GridPath = field(repr=False)

    @property
    def x0(self) -> Tensor:
        """The clean latents as estimated at `time`, [n, ...]."""
        return self._path.x0(self.index, self._x, self._velocity)

    @property
    def images(self) -> slice:
        """Places of the images in the call."""
        first = self.request.images.start
        return slice(first + self.rows.start, first + self.rows.stop)


class Running:
    """Images that advance together, with one generator. `parts` are their requests and the rows there.

    In the engine's condition table image i has row `place` + i for its conditional and `place` + n + i for its
    unconditional branch.
    """

    def __init__(
        self, parts: Sequence[tuple[Request, slice]], model: Routed, shape: Sequence[int], device: torch.device
    ) -> None:
        requests = [request[rows] for request, rows in parts]
        self.parts, self.sampling = parts, requests[0].sampling
        self.seeds = [seed for request in requests for seed in request.seeds]
        self.count = len(self.seeds)
        first = requests[0]
        times = self.sampling.times(model.schedule) if first.times is None else first.times
        self.path = GridPath(model.schedule, times)
        route = first.route or model.route
        self.route = route.bind(first.images, self.seeds) if isinstance(route, ImageRoute) else route
        conditions = [request.condition for request in requests if request.condition is not None]
        pairs = [*conditions, *(condition.null() for condition in conditions)]
        self.condition = Condition.cat(pairs).to(device) if pairs else None
        # a route that decides at the first step needs the router only there
        self.every = self.sampling.steps if getattr(self.route, "first_step_only", False) else self.sampling.route_every
        self.place = 0
        self.weights: list[Tensor | None] = [None, None]  # of the router, in the conditional and unconditional branch
        self.chosen: Tensor | None = None  # after the route, in the conditional branch
        self.owed: dict[tuple[int, int], float] | None = None  # (branch, expert): weight, while experts take turns
        self.had: dict[tuple[int, int], Tensor] = {}  # what experts gave of it
        self.step, self.done = 0, False
        noise = partial(step_noise, self.seeds, shape)
        start = initial_noise(self.seeds, shape) if first.noise is None else first.noise
        solver = first.solver or SOLVERS[self.sampling.solver]
        self._walk: Walk = solver(self.path.sigma[0] * start.to(device), self.path, noise)
        self.x, self.t = next(self._walk)

    @property
    def guided(self) -> bool:
        return self.sampling.guides_at(self.t)

    def needs_router(self, branch: int) -> bool:
        """Whether the router is due; a branch that never ran is due at any time."""
        return self.weights[branch] is None or self.step % self.every == 0

    def take(self, velocity: Tensor) -> list[Step]:
        """Send a velocity to the solver; a step of each request where it was the last one at its time."""
        x, t, index, latents = self.x, self.t, self.step, None
        try:
            self.x, self.t = self._walk.send(velocity.to(x.dtype))
        except StopIteration as end:
            latents = end.value
        else:
            if self.t > t - SAME_TIME:
                return []
            while self.path.t[self.step + 1] > self.t - SAME_TIME:
                self.step += 1
        self.done = latents is not None
        assert self.weights[0] is not None
        assert self.chosen is not None
        steps, first = [], 0
        for request, rows in self.parts:
            own = slice(first, first := first + rows.stop - rows.start)
            final = None if latents is None else latents[own]
            if final is not None:
                if request.latents is None:
                    request.latents = torch.empty(len(request.seeds), *final.shape[1:], device=final.device)
                request.latents[rows] = final
                request.missing -= len(final)
            routed = self.weights[0][own], self.chosen[own]
            steps.append(Step(request, rows, index, t, *routed, final, x[own], velocity[own], self.path))
        return steps


class Stack:
    """Rows of one round: guided conditional branches, plain requests, then the guided unconditional branches."""

    def __init__(self, running: Sequence[Running]) -> None:
        self.guided = [r for r in running if r.guided]
        self.order = [*self.guided, *(r for r in running if not r.guided)]
        self.counts = [r.count for r in self.order]
        self.images, self.twice = sum(self.counts), sum(r.count for r in self.guided)
        self.key = ([id(r) for r in self.order], self.twice)

    def cat(self, of: Callable[[Running], Tensor]) -> Tensor:
        parts = [of(r) for r in [*self.order, *self.guided]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def times(self, like: Tensor) -> Tensor:
        """[rows], in the widest float of the device."""
        dtype = wide_dtype(like.device)
        if len({r.t for r in self.order}) == 1:
            return torch.full((len(like),), self.order[0].t, dtype=dtype, device=like.device)
        t = [r.t for r in self.order for _ in range(r.count)]
        return torch.tensor(t + t[: self.twice], dtype=dtype).to(like.device)

    def places(self) -> list[int]:
        """Of the rows in the condition table."""
        first = [r.place + i for r in self.order for i in range(r.count)]
        return first + [r.place + r.count + i for r in self.guided for i in range(r.count)]

    def branches(self) -> Iterator[tuple[Running, int, slice]]:
        """(requests, branch, their rows): conditional branches first."""
        for branch, of in enumerate((self.order, self.guided)):
            ends = accumulate(r.count for r in of)
            for r, end in zip(of, ends, strict=True):
                yield r, branch, slice(branch * self.images + end - r.count, branch * self.images + end)
