"""From seeds to latents: noise, grid, guidance and solver put together, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..process import Condition, Denoiser, PerImageDenoiser
from .guidance import Guided
from .noise import initial_noise, step_noise
from .settings import Sampling
from .solvers import Step, parse_solver

Progress = Callable[[int, int], None]  # (image-steps done, image-steps in all)
Watch = Callable[[slice, Step], None]  # (rows of the call that are in this batch, the step)


def stream(
    denoiser: Denoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None,
    sampling: Sampling,
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[slice, Step]]:
    """Paint step by step: every step of the first batch, then of the next, each with the batch's rows of the call.

    The last step of a batch holds its latents in `after`: float32 on `device`, the state at t = 0 of the denoiser's
    path. A step is computed when it is asked for.

    Image i depends on seeds[i] and row i of `condition` only, up to the rounding of the network's sums in another
    batch; its noise is the same bit for bit. A denoiser with `bind` is told which images each batch holds.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if condition is not None and len(condition) != len(seeds):
        raise ValueError(f"{len(seeds)} seeds need a condition of {len(seeds)} rows, got {len(condition)}")
    times = sampling.times(denoiser.schedule)
    start = float(denoiser.schedule.sigma(times[:1]))
    solver = parse_solver(sampling.solver)

    @torch.no_grad()  # while a step is computed, not while its reader looks at it
    def walk() -> Iterator[tuple[slice, Step]]:
        for first in range(0, len(seeds), batch):
            rows = slice(first, min(first + batch, len(seeds)))
            own_seeds = seeds[rows]
            bound = denoiser.bind(rows, own_seeds) if isinstance(denoiser, PerImageDenoiser) else denoiser
            steps = solver.walk(
                Guided(bound, sampling.guidance, sampling.guidance_interval),
                start * initial_noise(own_seeds, shape).to(device),
                times,
                None if condition is None else condition[rows].to(device),
                partial(step_noise, own_seeds, shape),
            )
            for step in steps:
                yield rows, step

    return walk()


def generate(
    denoiser: Denoiser,
    shape: Sequence[int],
    seeds: Sequence[int],
    condition: Condition | None = None,
    *,
    steps: int = 50,
    solver: str = "heun",
    grid: str = "uniform",
    guidance: float = 1.0,
    guidance_interval: tuple[float, float] | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """The latents [len(seeds), *shape] at the end of `stream`, in one call."""
    sampling = Sampling(steps=steps, solver=solver, grid=grid, guidance=guidance, guidance_interval=guidance_interval)
    latents = torch.empty(len(seeds), *shape, device=device)
    for rows, step in stream(denoiser, shape, seeds, condition, sampling, batch=batch, device=device):
        if watch is not None:
            watch(rows, step)
        if progress is not None:
            progress(rows.start * steps + (step.index + 1) * (rows.stop - rows.start), len(seeds) * steps)
        latents[rows] = step.after
    return latents
