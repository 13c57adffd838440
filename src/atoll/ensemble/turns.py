"""Experts that take turns: every image waits for its own, and an expert that is there serves all who wait for it.

Where a card has room for some of the experts only, a batch that goes in step needs nearly all of them at every step.
Images that need not go in step do not: at top-1 an image hardly ever changes its expert, so it goes on with that one
while it is loaded, and the expert most of the others wait for is copied meanwhile.

Nothing of this changes what is computed for an image, only when, and in whose company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..process import Condition, guide, per_sample, widen
from .asking import AskedEvery
from .groups import Group, Residents, Together, asked
from .record import WatchedRoute
from .routes import Fixed, PerImageRoute, Route

if TYPE_CHECKING:
    from .mixture import Mixture


class Turns:
    """The images of one call: their states, the experts each still waits for, and the sum of those who answered.

    Row i of the tables is image i's conditional half, row N + i its unconditional one.
    """

    def __init__(
        self, mixture: Mixture, seeds: Sequence[int], condition: Condition | None, scale: float, batch: int
    ) -> None:
        self._mixture, self._seeds, self._scale, self._batch = mixture, seeds, scale, batch
        self._condition = condition
        if condition is not None:
            self._condition = Condition.cat([condition, condition.null()])
        self._routing = _Routing(mixture, seeds)
        self._residents = residents_of(mixture)
        self._tables: _Tables | None = None
        self._queues: dict[int, dict[int, list[int]]] = {k: {} for k in range(len(mixture.denoisers))}  # image: rows
        self._missing = [0] * len(seeds)  # answers an image waits for
        self._asked = [0] * len(seeds)
        self._guided = [False] * len(seeds)
        self._current: int | None = None

    def ask(self, images: Sequence[int], x: Tensor, t: Tensor, guided: bool) -> None:
        if self._tables is None:
            self._tables = _Tables(2 * len(self._seeds), x, len(self._mixture.denoisers))
        for first in range(0, len(images), self._batch):
            part = slice(first, min(first + self._batch, len(images)))
            self._ask(list(images[part]), x[part], t[part], guided)

    def _ask(self, images: list[int], x: Tensor, t: Tensor, guided: bool) -> None:
        assert self._tables is not None
        assert not any(self._missing[i] for i in images), "an image was asked about before it was answered"
        rows = [*images, *(i + len(self._seeds) for i in images)] if guided else images
        twice = 2 if guided else 1
        x, t = torch.cat([x] * twice), torch.cat([t] * twice)
        places = torch.tensor(rows).to(x.device)
        condition = None if self._condition is None else self._condition[places]
        own = guided and self._mixture.guidance_weights == "own"
        weights = self._routing(images, rows if own else images, x, t, condition)
        if len(weights) < len(rows):
            weights = weights.repeat(2, 1)
        self._tables.put(places, x, widen(t, x.device), weights.to(x.device))
        for row, i, experts in zip(rows, images * twice, weights.tolist(), strict=True):
            for k, weight in enumerate(experts):
                if weight != 0.0:
                    self._queues[k].setdefault(i, []).append(row)
                    self._missing[i] += 1
        for i in images:
            self._asked[i], self._guided[i] = self._missing[i], guided

    def answers(self) -> tuple[list[int], Tensor]:
        done: list[int] = []
        while not done:
            done = self._serve(self._next_expert())
        assert self._tables is not None
        plain, guided = [i for i in done if not self._guided[i]], [i for i in done if self._guided[i]]
        parts = [self._tables.sums(plain)] if plain else []
        if guided:
            halves = self._tables.sums([*guided, *(i + len(self._seeds) for i in guided)]).chunk(2)
            parts.append(guide(halves[0], halves[1], self._scale))
        return [*plain, *guided], torch.cat(parts)

    def _next_expert(self) -> int:
        """Who is there and is waited for: the one of before, else the one most wait for; if nobody is, who comes next.

        While it works, the next one is copied to where nobody is needed; not while images have half of their answers,
        since the other half will want those who are there again.
        """
        waiting = sorted((k for k, queue in self._queues.items() if queue), key=lambda k: -len(self._queues[k]))
        assert waiting, "answers were wanted, and nobody has asked"
        there = [k for k in waiting if self._residents is None or self._residents.holds(k)]
        if self._current not in there:
            self._current = there[0] if there else waiting[0]
        if self._residents is not None:
            others = [k for k in waiting if k != self._current]
            halfway = any(0 < missing < self._asked[i] for i, missing in enumerate(self._missing))
            self._residents.prepare(self._current, [] if halfway else others)
        return self._current

    def _serve(self, k: int) -> list[int]:
        """Answer for expert k, for at most a batch of the images that wait for it; gives those that wait no more."""
        assert self._tables is not None
        queue = self._queues[k]
        images = list(queue)[: self._batch]
        rows = sorted(row for i in images for row in queue[i])
        places = torch.tensor(rows).to(self._tables.device)
        x, t = self._tables.x[places], self._tables.t[places]
        condition = None if self._condition is None else self._condition[places]
        (value,) = asked(self._mixture.denoisers, [Group(k, None, len(rows), x, t, condition)])
        self._tables.add(places, k, value)
        for i in images:
            self._missing[i] -= len(queue.pop(i))
        return [i for i in images if not self._missing[i]]


class _Tables:
    """For every row: its state, time and weights, and the weighted sum of the answers so far."""

    def __init__(self, rows: int, like: Tensor, experts: int) -> None:
        self.device = like.device
        wide = torch.promote_types(like.dtype, torch.float32)
        self.x = like.new_zeros(rows, *like.shape[1:])
        self.t = widen(torch.zeros(rows), self.device)
        self._weights = like.new_zeros(rows, experts, dtype=wide)
        self._sum = like.new_zeros(rows, *like.shape[1:], dtype=wide)

    def put(self, places: Tensor, x: Tensor, t: Tensor, weights: Tensor) -> None:
        self.x[places], self.t[places], self._weights[places] = x, t, weights.to(self._weights.dtype)
        self._sum[places] = 0.0

    def add(self, places: Tensor, expert: int, value: Tensor) -> None:
        share = per_sample(self._weights[places, expert], value)
        self._sum.index_add_(0, places, share * value.to(self._sum.dtype))

    def sums(self, rows: Sequence[int]) -> Tensor:
        return self._sum[torch.tensor(list(rows)).to(self.device)]


class _Routing:
    """A mixture's router and route for images that are not in step: what these keep of an image is kept here.

    Weights are on the CPU: who is asked is decided there.
    """

    def __init__(self, mixture: Mixture, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._every = mixture.router if isinstance(mixture.router, AskedEvery) else None
        self._router = mixture.router if self._every is None else self._every.router
        self._watchers = []
        self._route: Route = mixture.route
        while isinstance(self._route, WatchedRoute):
            self._watchers.append(self._route.watch)
            self._route = self._route.route
        self._said: dict[int, Tensor] = {}  # the router's last word on a row [K]
        self._fixed: dict[int, Tensor] = {}  # an image's expert [K], where it is chosen once

    def __call__(
        self, images: Sequence[int], rows: Sequence[int], x: Tensor, t: Tensor, condition: Condition | None
    ) -> Tensor:
        """Weights after the route [len(rows), K]; the conditional halves of all images first."""
        x, t = x[: len(rows)], t[: len(rows)]
        condition = None if condition is None else condition[: len(rows)]
        weights = self._router_weights(rows, x, t, condition)
        parts = zip(weights.split(len(images)), t.split(len(images)), strict=True)
        chosen = [self._chosen(images, half, time) for half, time in parts]
        return torch.cat(chosen)

    def _router_weights(self, rows: Sequence[int], x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        if isinstance(self._route, Fixed) and all(row in self._said for row in rows):
            return torch.stack([self._said[row] for row in rows])
        due = [True] * len(rows) if self._every is None else self._every.due(t).tolist()
        if all(row in self._said for row in rows) and not any(due):
            return torch.stack([self._said[row] for row in rows])
        weights = self._router(x, widen(t, x.device), condition).cpu()  # the one time that the host waits
        for n, row in enumerate(rows):
            if due[n] or row not in self._said:
                self._said[row] = weights[n]
        return torch.stack([self._said[row] for row in rows])

    def _chosen(self, images: Sequence[int], weights: Tensor, t: Tensor) -> Tensor:
        route, places = self._route, torch.tensor(list(images))
        if isinstance(route, PerImageRoute):
            route = route.bind(places, [self._seeds[i] for i in images])
        chosen = route(weights, t)
        if isinstance(self._route, Fixed):
            for n, i in enumerate(images):
                self._fixed.setdefault(i, chosen[n])
            chosen = torch.stack([self._fixed[i] for i in images])
        for time in t.unique().tolist():
            now = t == time
            for watch in self._watchers:
                watch(places[now], t[now], weights[now], chosen[now])
        return chosen


def residents_of(mixture: Mixture) -> Residents | None:
    """Who is there, if not all experts always are."""
    engines = {denoiser.engine for denoiser in mixture.denoisers if isinstance(denoiser, Together)}
    assert len(engines) <= 1, "experts of one mixture take turns in one engine"
    for engine in engines:
        numbers = {k: d.number for k, d in enumerate(mixture.denoisers) if isinstance(d, Together)}
        return None if engine.all_there else Residents(engine, numbers)
    return None
