"""The sampling engine: any number of requests at once, each with its own solver, steps, guidance, condition and seeds.

In each round the engine collects the velocities that the running requests need, stacks their rows with one time per
row, runs router and experts once, and returns the velocities to the solvers. `generate` and `stream` are one request
after another; a service admits requests between rounds.

Image i depends on its seed, its condition and its settings only, and not on what else is running: the noise is drawn
per image, and models that compute padded rows (`runtime`) give equal bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..diffusion import Condition, Denoiser, wide_dtype
from .protocols import Routed, Unrouted
from .requests import Request, Step
from .settings import Sampling

Device = torch.device | str
Branch = tuple[Request, int]  # of guidance: 0 conditional, 1 unconditional


class Engine:
    """Runs requests: `admit` at any time, `round` until they are done.

    shape        of a latent, [C, H, W]
    max_images   in one round; the others wait their turn. Guidance doubles the rows
    """

    def __init__(
        self, model: Routed | Denoiser, shape: Sequence[int], *, max_images: int = 64, device: Device = "cpu"
    ) -> None:
        if max_images < 1:
            raise ValueError(f"max_images must be at least 1, got {max_images}")
        self.model: Routed = model if isinstance(model, Routed) else Unrouted(model)
        self.shape, self.device, self.max_images = shape, torch.device(device), max_images
        self.running: list[Request] = []
        self._stacked: tuple[Sequence[Branch], Condition | None] = ((), None)

    def __len__(self) -> int:
        """Images that are not done."""
        return sum(map(len, self.running))

    def admit(self, request: Request) -> None:
        """Start a request. Where experts take turns it is one image, so that each advances by itself."""
        if self.model.next_expert is not None and len(request) != 1:
            raise ValueError(f"experts take turns: a request is one image, got {len(request)}")
        if any((request.condition is None) != (other.condition is None) for other in self.running):
            raise ValueError("requests with and without a condition cannot run together")
        request.start(self.model, self.shape, self.device)
        self.running.append(request)

    def cancel(self, request: Request) -> None:
        self.running.remove(request)

    @torch.no_grad()
    def round(self) -> list[Step]:
        """Run the networks once; the steps that ended with it."""
        if not self.running:
            return []
        next_expert = self.model.next_expert
        velocities = self._all_experts() if next_expert is None else self._one_expert(next_expert)
        steps = []
        for (request, branch), velocity in velocities.items():
            if branch == 0:
                if (request, 1) in velocities:  # guidance: u + scale (c - u)
                    velocity = torch.lerp(velocities[request, 1], velocity, request.sampling.guidance)
                steps += request.take(velocity)
        self.running = [request for request in self.running if request.latents is None]
        return steps

    def _all_experts(self) -> dict[Branch, Tensor]:
        """Velocities of as many images as `max_images` allows; those left out come first in the next round."""
        size = max(1, sum(count <= self.max_images for count in accumulate(map(len, self.running))))
        now = self.running[:size]
        self.running = [*self.running[size:], *now]
        branches = branches_of(now)
        x, t, condition = self._rows(branches)
        velocity = self.model.velocity(x, t, condition, self._weights(branches, x, t, condition))
        return dict(zip(branches, velocity.split([len(request) for request, _ in branches]), strict=True))

    def _one_expert(self, next_expert: Callable[[Mapping[int, int]], int]) -> dict[Branch, Tensor]:
        """Run one expert; velocities of the images that need no other one.

        At top-1 an image hardly ever changes its expert, so it takes many steps per copy of an expert into memory; with
        all experts in every round nearly all would be copied at every step.
        """
        fresh = [request for request in self.running if not request.owed]
        for first in range(0, len(fresh), self.max_images):
            branches = branches_of(fresh[first : first + self.max_images])
            weights = self._weights(branches, *self._rows(branches)).tolist()
            for (request, branch), row in zip(branches, weights, strict=True):
                request.owed |= {(branch, k): w for k, w in enumerate(row) if w != 0.0}
        waiting: dict[int, list[Branch]] = {}
        for request in self.running:
            for branch, k in request.owed:
                waiting.setdefault(k, []).append((request, branch))
        k = next_expert({k: len(rows) for k, rows in waiting.items()})
        served = waiting[k][: self.max_images]
        x, t, condition = self._rows(served)
        chosen = served[0][0].chosen
        assert chosen is not None
        alone = chosen.new_zeros(len(served), chosen.shape[1])
        alone[:, k] = torch.tensor([request.owed.pop((branch, k)) for request, branch in served]).to(alone)
        velocities: dict[Branch, Tensor] = {}
        for (request, branch), term in zip(served, self.model.velocity(x, t, condition, alone).split(1), strict=True):
            request.terms[branch, k] = term
        for request in dict.fromkeys(request for request, _ in served):
            if not request.owed:
                for branch in request.branches:  # summed in the order of experts, as all of them at once are
                    terms = [request.terms[key] for key in sorted(request.terms) if key[0] == branch]
                    velocities[request, branch] = sum(terms[1:], start=terms[0])
                request.terms = {}
        return velocities

    def _rows(self, branches: Sequence[Branch]) -> tuple[Tensor, Tensor, Condition | None]:
        """x [rows, ...], t [rows] and the condition [rows], which is kept while the rows stay the same."""
        if branches != self._stacked[0]:
            given = [request.conditions[branch] for request, branch in branches if request.conditions]
            self._stacked = branches, Condition.cat(given) if given else None
        x = torch.cat([request.x for request, _ in branches])
        times = [request.t for request, _ in branches for _ in request.seeds]
        dtype = wide_dtype(x.device)
        if len(set(times)) == 1:  # no copy to the device
            return x, torch.full((len(x),), times[0], dtype=dtype, device=x.device), self._stacked[1]
        return x, torch.tensor(times, dtype=dtype).to(x.device), self._stacked[1]

    def _weights(self, branches: Sequence[Branch], x: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """After the route [rows, K]; the router runs once, for the rows where it is due."""
        rows = torch.arange(len(x)).split([len(request) for request, _ in branches])
        due = [i for i, (request, branch) in enumerate(branches) if request.needs_router(branch)]
        if due:
            if len(due) < len(branches):
                which = torch.cat([rows[i] for i in due]).to(x.device)
                condition = None if condition is None else condition[which]
                routed = self.model.routed(x[which], t[which], condition)
            else:
                routed = self.model.routed(x, t, condition)
            for i, weights in zip(due, routed.split([len(rows[i]) for i in due]), strict=True):
                request, branch = branches[i]
                request.routed[branch] = weights
        times = t.split([len(own) for own in rows])
        return torch.cat([request.choose(branch, times[i]) for i, (request, branch) in enumerate(branches)])


def branches_of(requests: Sequence[Request]) -> list[Branch]:
    """All conditional branches, then the unconditional ones of those that are guided now."""
    return [(request, branch) for branch in (0, 1) for request in requests if branch in request.branches]


def stream(
    model: Routed | Denoiser, shape: Sequence[int], request: Request, *, batch: int = 64, device: Device = "cpu"
) -> Iterator[Step]:
    """Sample step by step: every step of the first `batch` images, then of the next; each is computed when asked for.

    Where experts take turns, images advance independently.
    """
    engine = Engine(model, shape, max_images=batch, device=device)
    turns = engine.model.next_expert is not None
    parts = list(request.split(1 if turns else batch))
    for together in [parts] if turns else [[part] for part in parts]:
        for part in together:
            engine.admit(part)
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
    device: Device = "cpu",
) -> Tensor:
    """The latents [len(seeds), *shape] at the end of `stream`, float32 on `device`."""
    latents = torch.empty(len(seeds), *shape, device=device)
    for step in stream(model, shape, Request(seeds, condition, sampling), batch=batch, device=device):
        if step.latents is not None:
            latents[step.images] = step.latents
    return latents
