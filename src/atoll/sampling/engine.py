"""The sampling engine: any number of requests at once, each with its own solver, steps, guidance, condition and seeds.

In each round the engine collects the velocities that the running requests need, stacks their rows with one time per
row, runs router and experts once, and returns the velocities to the solvers. `generate` and `stream` are one request
after another; a service admits requests between rounds.

Image i depends on its seed, its condition and its settings only, and not on what else is running: the noise is drawn
per image, and models that compute padded rows (`runtime`) give equal bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..diffusion import Condition, Denoiser, per_sample, wide_dtype
from .protocols import ImageRoute, Residents, Routed, as_routed
from .requests import Request, Running, Stack, Step
from .settings import Sampling

Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)


class Engine:
    """Runs requests: `admit` at any time, `round` until they are done.

    shape        of a latent, [C, H, W]
    max_images   in one round; the others wait their turn. Guidance doubles the rows
    """

    def __init__(
        self,
        model: Routed | Denoiser,
        shape: Sequence[int],
        *,
        max_images: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_images < 1:
            raise ValueError(f"max_images must be at least 1, got {max_images}")
        self.model, self.shape, self.device, self.max_images = as_routed(model), shape, torch.device(device), max_images
        self.running: list[Running] = []
        self.table: Condition | None = None  # conditions of all that runs
        self.stacked: tuple[object, Condition | None, Tensor | None] = (None, None, None)

    def __len__(self) -> int:
        """Images that are not done."""
        return sum(running.count for running in self.running)

    @property
    def takes_turns(self) -> bool:
        """Whether experts are copied in and out of memory, so that images advance independently."""
        return self.model.residents is not None

    def admit(self, requests: Sequence[Request]) -> None:
        """Start some requests. Those with equal settings and route share a generator, and so each operation of it."""
        groups: dict[object, list[tuple[Request, slice]]] = {}
        for request in requests:
            everything = slice(0, len(request.seeds))
            own = request.solver, request.times, request.noise
            alone = isinstance(request.route or self.model.route, ImageRoute) or own != (None, None, None)
            key = request if alone else (request.sampling, request.route, request.condition is None)
            groups.setdefault(key, []).append((request, everything))
        parts = list(groups.values())
        if self.takes_turns:  # images are a request each
            parts = [[(r, slice(i, i + 1))] for group in parts for r, rows in group for i in range(rows.stop)]
        started = [Running(part, self.model, self.shape, self.device) for part in parts]
        self._hold([*self.running, *started])

    def cancel(self, request: Request) -> None:
        """Drop a request. Its rows are computed on where it shares a generator with others."""
        request.cancelled = True
        self._hold([r for r in self.running if not all(each.cancelled for each, _ in r.parts)])

    @torch.no_grad()
    def round(self) -> list[Step]:
        """Run the networks once; the steps that ended with it. A request is done when its `latents` are there."""
        if not self.running:
            return []
        steps = self._lockstep() if self.model.residents is None else self._turn(self.model.residents)
        if any(running.done for running in self.running):
            self._hold([running for running in self.running if not running.done])
        return steps

    def _hold(self, running: list[Running]) -> None:
        """Run these: their conditions become one table."""
        self.running, self.stacked = running, (None, None, None)
        places = accumulate((2 * r.count for r in running), initial=0)
        for r, place in zip(running, places, strict=False):
            r.place = place
        conditions = [r.condition for r in running if r.condition is not None]
        self.table = None
        if conditions:
            if len(conditions) < len(running):
                raise ValueError("requests with and without a condition cannot run together")
            self.table = conditions[0] if len(conditions) == 1 else Condition.cat(conditions)

    def rows(self, stack: Stack) -> tuple[Tensor, Tensor, Condition | None]:
        """x [rows, ...], t [rows] and the condition [rows], which is kept while the rows stay the same."""
        x = stack.cat(lambda running: running.x)
        if self.stacked[0] != stack.key:
            places = torch.tensor(stack.places()).to(self.device)
            scales = [r.sampling.guidance for r in stack.guided for _ in range(r.count)]
            condition = None if self.table is None else self.table[places]
            self.stacked = stack.key, condition, torch.tensor(scales, dtype=torch.float32).to(self.device)
        return x, stack.times(x), self.stacked[1]

    def _lockstep(self) -> list[Step]:
        """All experts, for as many requests as `max_images` allows; those left out come first in the next round."""
        counts = accumulate(running.count for running in self.running)
        size = max(1, sum(count <= self.max_images for count in counts))
        now, later = self.running[:size], self.running[size:]
        stack = Stack(now)
        x, t, condition = self.rows(stack)
        velocity = self.model.velocity(x, t, condition, self.weights(stack, x, t, condition))
        self.running = [*later, *now]
        return self.send(stack, velocity)

    def weights(self, stack: Stack, x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """After the route [rows, K]; the router runs once, for the rows where it is due."""
        due = [
            (r, branch, rows)
            for r, branch, rows in stack.branches()
            if (branch == 0 or r.sampling.guidance_weights == "own") and r.needs_router(branch)
        ]
        if due:
            counts = [rows.stop - rows.start for *_, rows in due]
            if sum(counts) == len(x):
                routed = self.model.routed(x, t, condition)
            else:
                which = torch.cat([torch.arange(rows.start, rows.stop) for *_, rows in due]).to(x.device)
                routed = self.model.routed(x[which], t[which], None if condition is None else condition[which])
            for (r, branch, _), weights in zip(due, routed.split(counts), strict=True):
                r.weights[branch] = weights
        chosen = []
        for r, branch, rows in stack.branches():
            if branch == 0 or r.sampling.guidance_weights == "own":
                weights = r.weights[branch]
                assert weights is not None
                chosen.append(r.route(weights, t[rows]))
            else:
                assert r.chosen is not None
                chosen.append(r.chosen)
            if branch == 0:
                r.chosen = chosen[-1]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def send(self, stack: Stack, velocity: Tensor) -> list[Step]:
        """Guidance, u + scale (c - u), then each solver its rows."""
        if stack.twice:
            scales = {r.sampling.guidance for r in stack.guided}
            conditional, unconditional = velocity[: stack.twice], velocity[stack.images :]
            scale = self.stacked[2]
            assert scale is not None
            one = scales.pop() if len(scales) == 1 else per_sample(scale.to(velocity.dtype), conditional)
            guided = torch.lerp(unconditional, conditional, one)
            plain = velocity[stack.twice : stack.images]
            velocity = torch.cat([guided, plain]) if len(plain) else guided
        parts = zip(stack.order, velocity.split(stack.counts), strict=True)
        return [step for running, part in parts for step in running.take(part)]

    def _turn(self, residents: Residents) -> list[Step]:
        """One expert that is in memory, for the images that wait for it, while the next one is copied there.

        At top-1 an image hardly ever changes its expert, so it takes many steps per copy; in lockstep nearly all are
        needed at every step.
        """
        fresh = [running for running in self.running if running.owed is None]
        for first in range(0, len(fresh), self.max_images):
            stack = Stack(fresh[first : first + self.max_images])
            weights = self.weights(stack, *self.rows(stack)).tolist()
            for running, branch, rows in stack.branches():
                owed = {(branch, k): w for k, w in enumerate(weights[rows.start]) if w != 0.0}
                running.owed = owed if branch == 0 else {**(running.owed or {}), **owed}
        waiting: dict[int, list[tuple[Running, int]]] = {}
        for running in self.running:
            for branch, k in running.owed or ():
                waiting.setdefault(k, []).append((running, branch))
        k = residents.next({k: len(rows) for k, rows in waiting.items()})
        served = waiting[k][: self.max_images]
        for (running, branch), part in zip(served, self._part(served, k), strict=True):
            assert running.owed is not None
            del running.owed[branch, k]
            running.had[branch, k] = part
        answered = [running for running in dict.fromkeys(running for running, _ in served) if not running.owed]
        if not answered:
            return []
        stack = Stack(answered)
        scales = [running.sampling.guidance for running in stack.guided]
        self.stacked = None, None, torch.tensor(scales, dtype=torch.float32).to(self.device)
        sums = [sum_of_parts(running, branch) for running, branch, _ in stack.branches()]
        for running in answered:
            running.owed, running.had = None, {}
        return self.send(stack, torch.cat(sums))

    def _part(self, served: Sequence[tuple[Running, int]], k: int) -> Sequence[Tensor]:
        """Expert k's weighted velocity of some (image, branch), each [1, ...]."""
        x = torch.cat([running.x for running, _ in served])
        t = torch.tensor([running.t for running, _ in served], dtype=wide_dtype(x.device)).to(x.device)
        places = torch.tensor([running.place + branch for running, branch in served]).to(x.device)
        condition = None if self.table is None else self.table[places]
        chosen = served[0][0].chosen
        assert chosen is not None
        weights = torch.zeros(len(served), chosen.shape[1], dtype=chosen.dtype)
        weights[:, k] = torch.tensor([running.owed[branch, k] for running, branch in served])  # type: ignore[index]
        velocity = self.model.velocity(x, t, condition, weights.to(x.device))
        return list(velocity.split(1))


def stream(
    model: Routed | Denoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None = None,
    sampling: Sampling = Sampling(),
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
) -> Iterator[Step]:
    """Sample step by step: every step of the first `batch` images, then of the next.

    A step is computed when it is asked for. Where experts take turns, images advance independently.
    """
    engine = Engine(model, shape, max_images=batch, device=device)
    whole = Request(seeds, condition, sampling, images=slice(0, len(seeds)))
    size = max(1, len(seeds) if engine.takes_turns else batch)
    for first in range(0, len(seeds), size):
        engine.admit([whole[first : min(first + size, len(seeds))]])
        while len(engine):
            yield from engine.round()


def generate(
    model: Routed | Denoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None = None,
    sampling: Sampling = Sampling(),
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Tensor:
    """The latents [len(seeds), *shape] at the end of `stream`, float32 on `device`."""
    latents, done = torch.empty(len(seeds), *shape, device=device), 0
    for step in stream(model, shape, seeds, condition, sampling, batch=batch, device=device):
        if step.latents is not None:
            latents[step.images] = step.latents
        done += step.rows.stop - step.rows.start
        if progress is not None:
            progress(done, len(seeds) * sampling.steps)
    return latents


def sum_of_parts(running: Running, branch: int) -> Tensor:
    """The velocity of one image and branch, summed in the order of experts as in lockstep."""
    parts = [running.had[key] for key in sorted(running.had) if key[0] == branch]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
